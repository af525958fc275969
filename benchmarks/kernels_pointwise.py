"""The kernels that read and write everything once: norms, the cache write, and the cutting of frames into patches.

A step of a few tokens is timed in a CUDA graph over rotating inputs, a chunk of a prompt and pictures with the cache flushed.
The limit is the traffic of inputs and outputs.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.report import Row, make_row
from benchmarks.timing import limit_us, time_events, time_graph
from server.kernels.attention_batch import AttentionBatch
from server.kernels.norm import add_rms_norm
from server.kernels.patchify import patchify
from server.kernels.qkv_norm_rope_cache import qkv_norm_rope_cache

STAGES = ("add_rms_norm", "qkv_norm_rope_cache", "patchify")
NUM_TOKENS = (1, 64, 2048, 8192)
FRAMES = ((1, 1512, 2016), (8, 504, 896))  # frames, height, width
_HIDDEN, _HEADS, _KV_HEADS, _DIM, _PAGE, _ROTARY, _EPS = 6144, 64, 4, 128, 128, 64, 1e-6
_ROTATED_BYTES = 300 << 20  # several times the second-level cache
_MOST_SETS = 64
_GRAPH_TOKENS = 512  # longer inputs do not stay in the cache between calls of a graph anyway


def pointwise_rows(stages: set[str]) -> Iterator[Row]:
    """Measure the wanted stages."""
    for num_tokens in NUM_TOKENS:
        if "add_rms_norm" in stages:
            yield _row("add_rms_norm", num_tokens, _norm_call, 4 * num_tokens * _HIDDEN * 2)
        if "qkv_norm_rope_cache" in stages:
            width = (_HEADS + 2 * _KV_HEADS + _KV_HEADS + 1) * _DIM
            yield _row("qkv_norm_rope_cache", num_tokens, _cache_call, num_tokens * (2 * width * 2 + _ROTARY * 4))
    if "patchify" in stages:
        for num_frames, height, width in FRAMES:
            frames = torch.randint(0, 256, (num_frames, height, width, 3), dtype=torch.uint8, device="cuda")
            timing = time_events(lambda frames=frames: patchify(frames))  # type: ignore[misc]
            case = f"{num_frames}x{width}x{height}"
            yield make_row("patchify", case, timing, limit_us(frames.numel() * (1 + 4), 0))


def _row(stage: str, num_tokens: int, make: Callable[[int], Callable[[], object]], num_bytes: int) -> Row:
    if num_tokens > _GRAPH_TOKENS:
        timing = time_events(make(num_tokens))
    else:
        timing = time_graph([make(num_tokens) for _ in range(min(_MOST_SETS, -(-_ROTATED_BYTES // num_bytes)))])
    return make_row(stage, f"T{num_tokens}", timing, limit_us(num_bytes, 0))


def _norm_call(num_tokens: int) -> Callable[[], object]:
    x, residual = _normal(num_tokens, _HIDDEN), _normal(num_tokens, _HIDDEN)
    weight = _normal(_HIDDEN)
    return lambda: add_rms_norm(x, residual, weight, _EPS)


def _cache_call(num_tokens: int) -> Callable[[], object]:
    num_pages = -(-num_tokens // _PAGE)
    positions = torch.arange(num_tokens, device="cuda")
    batch = AttentionBatch(
        positions=positions,
        slot_mapping=positions.clone(),
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device="cuda"),
        page_table=torch.arange(num_pages, dtype=torch.int32, device="cuda")[None],
        sequence_of_token=torch.zeros(num_tokens, dtype=torch.int32, device="cuda"),
        num_decodes=0,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        page_size=_PAGE,
    )
    qkv = _normal(num_tokens, (_HEADS + 2 * _KV_HEADS + _KV_HEADS + 1) * _DIM)
    kv_lane, index_lane = _normal(num_pages, _KV_HEADS, 2, _PAGE, _DIM), _normal(num_pages, _PAGE, _DIM)
    cos_sin = torch.randn((num_tokens, _ROTARY), device="cuda")
    weight = _normal(_DIM)
    return lambda: qkv_norm_rope_cache(qkv, weight, weight, weight, weight, cos_sin, batch, kv_lane, index_lane, _HEADS, _EPS)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
