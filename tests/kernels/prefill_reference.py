"""float64 references of the prefill kernels, written from the definitions and independent of the twins."""

import math

import torch
from torch import Tensor

from server.kernels.attention_batch import AttentionBatch


def reference_scores(index_q: Tensor, keys: list[Tensor], batch: AttentionBatch) -> Tensor:
    """Block scores [Hi, T, max_blocks] in float64 from the written keys [seq_len, Di] of every sequence."""
    page = batch.page_size
    max_blocks = -(-batch.max_seq_len // page)
    scores = torch.full((index_q.shape[1], index_q.shape[0], max_blocks), -math.inf, dtype=torch.float64, device=index_q.device)
    for t, (b, position) in enumerate(zip(batch.sequence_of_token.tolist(), batch.positions.tolist(), strict=True)):
        products = index_q[t].double() @ keys[b][: position + 1].double().T  # [Hi, position + 1]
        for block in range(position // page + 1):
            scores[:, t, block] = products[:, block * page : (block + 1) * page].amax(-1)
    return scores


def reference_topk(scores: Tensor, batch: AttentionBatch, topk: int, num_init: int, num_local: int) -> list[list[list[int]]]:
    """Block ids by head and token: forced ascending, then (score descending, id ascending); all ascending where few."""
    result = []
    for head in scores.tolist():
        rows = []
        for row, position in zip(head, batch.positions.tolist(), strict=True):
            own = position // batch.page_size
            forced = [b for b in range(own + 1) if b < num_init or b > own - num_local]
            free = sorted((b for b in range(own + 1) if b not in forced), key=lambda b: (-row[b], b))
            rows.append((forced + free)[:topk] if own + 1 > topk else list(range(own + 1)))
        result.append(rows)
    return result


def reference_attention(
    q: Tensor, contents: list[Tensor], selection: Tensor | None, batch: AttentionBatch, scale: float
) -> Tensor:
    """Attention [T, Hq, D] in float64; `contents` as [Hkv, 2, seq_len, D] of every sequence, no selection = dense."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // contents[0].shape[0]
    for t, (b, position) in enumerate(zip(batch.sequence_of_token.tolist(), batch.positions.tolist(), strict=True)):
        kv = contents[b][:, :, : position + 1].double()
        for h in range(kv.shape[0]):
            keys = torch.arange(position + 1, device=q.device)
            if selection is not None:
                keys = keys[torch.isin(keys // batch.page_size, selection[h, t])]
            rows = slice(h * group, (h + 1) * group)
            weights = (q[t, rows].double() @ kv[h, 0, keys].T * scale).softmax(-1)
            out[t, rows] = weights @ kv[h, 1, keys]
    return out


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float((actual.double() - expected).norm() / expected.norm())
