"""Block selections for benchmarks: "rand" independent per query, "corr" overlapping between neighbours as real ones do.

corr: every block's score is a stationary Gaussian walk along the queries, s' = r s + sqrt(1 - r^2) noise, and a query takes its
own block and the best scored earlier ones. `r` is set so that the union of the selections of 8 neighbouring queries has the
size published for a tile trial on an H200: 19.5 blocks at 32k and 22.5 at 128k (the model then also gives the 19.7 published
for 4 neighbours at 128k). 8k keeps the value of 32k, and 512k that of 128k.
"""

import math

import torch
from torch import Tensor

_QUERIES_PER_STEP = 512


def correlation(num_blocks: int) -> float:
    """Correlation of a block's score between neighbouring queries at a context of `num_blocks` blocks."""
    return 0.998 if num_blocks <= 256 else 0.9955


def corr_selection(positions: Tensor, num_heads: int, topk: int, page_size: int, seed: int = 0) -> Tensor:
    """Overlapping selection [num_heads, T, topk] int32 for consecutive `positions` [T], own block first, -1 at the tail."""
    device, num_tokens = positions.device, positions.shape[0]
    num_blocks = int(positions[-1]) // page_size + 1
    generator = torch.Generator(device).manual_seed(seed)
    r = correlation(num_blocks)
    fresh = math.sqrt(1 - r * r)
    score = torch.randn((num_heads, num_blocks), generator=generator, device=device)
    selection = torch.empty((num_heads, num_tokens, topk), dtype=torch.int32, device=device)
    for begin in range(0, num_tokens, _QUERIES_PER_STEP):
        end = min(begin + _QUERIES_PER_STEP, num_tokens)
        walk = torch.empty((num_heads, end - begin, num_blocks), device=device)
        for i in range(end - begin):
            walk[:, i] = score
            score = r * score + fresh * torch.randn(score.shape, generator=generator, device=device)
        selection[:, begin:end] = _best(walk, positions[begin:end], topk, page_size)
    return selection


def rand_selection(positions: Tensor, num_heads: int, topk: int, page_size: int, seed: int = 0) -> Tensor:
    """Independent selection [num_heads, T, topk] int32, own block first, -1 at the tail."""
    device, num_tokens = positions.device, positions.shape[0]
    num_blocks = int(positions[-1]) // page_size + 1
    generator = torch.Generator(device).manual_seed(seed)
    selection = torch.empty((num_heads, num_tokens, topk), dtype=torch.int32, device=device)
    for begin in range(0, num_tokens, _QUERIES_PER_STEP):
        end = min(begin + _QUERIES_PER_STEP, num_tokens)
        scores = torch.rand((num_heads, end - begin, num_blocks), generator=generator, device=device)
        selection[:, begin:end] = _best(scores, positions[begin:end], topk, page_size)
    return selection


def _best(scores: Tensor, positions: Tensor, topk: int, page_size: int) -> Tensor:
    """Own block, then the best scored earlier blocks, of `scores` [H, t, blocks]: [H, t, topk] int32."""
    own = (positions // page_size)[:, None]
    blocks = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill(blocks == own, math.inf).masked_fill(blocks > own, -math.inf)
    chosen = scores.topk(min(topk, scores.shape[-1]), dim=-1).indices
    chosen = torch.where(chosen <= own, chosen, -1).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[-1]), value=-1)


def mean_union(selection: Tensor, num_queries: int) -> float:
    """Mean number of different blocks that `num_queries` neighbouring queries of one head select together."""
    num_heads, num_tokens, topk = selection.shape
    usable = num_tokens // num_queries * num_queries
    ids = selection[:, :usable].reshape(num_heads, -1, num_queries * topk).sort(-1).values
    distinct = (ids[..., 1:] != ids[..., :-1]).sum(-1) + 1 - (ids[..., 0] < 0).int()
    return float(distinct.float().mean())
