"""Flash-decoding of one KV head's query group over tiles of keys and values: the steps that sparse and dense decode share.

Transposed throughout: keys (then head dimensions) are the M side of the products and the few query heads of a group the N
side, so a group of 16 fills a warp-group instruction that 16 rows could not. States are kept in the log2 domain, not yet
divided by their sums.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.direct_launch import direct_launch
from server.kernels.launch import pdl_options, wait_for_inputs

MIN_SIDE = 16  # of a tensor-core product: smaller query groups are padded with zeros, tiles have no fewer keys


@dataclass(frozen=True)
class Partials:
    """Scratch for the states of all splits of all units (a unit is a sequence and KV head).

    Attributes:
        acc: [units, splits, D, G] fp32, weighted sums of values.
        stats: [units, splits, 2, G] fp32, maxima and sums of weights.
    """

    acc: Tensor
    stats: Tensor

    @classmethod
    def empty(cls, num_units: int, num_splits: int, dim: int, group_pad: int, device: torch.device) -> "Partials":
        """Scratch of a launch; nothing when a unit is not split."""
        num_units = num_units if num_splits > 1 else 0
        acc = torch.empty((num_units, num_splits, dim, group_pad), dtype=torch.float32, device=device)
        return cls(acc, torch.empty((num_units, num_splits, 2, group_pad), dtype=torch.float32, device=device))


@triton.jit
def load_group(q_ptr, stride_q_head, GROUP: tl.constexpr, DIM: tl.constexpr, GROUP_PAD: tl.constexpr):
    """Query heads of one KV head, transposed: [DIM, GROUP_PAD], zero beyond GROUP."""
    dims, heads = tl.arange(0, DIM), tl.arange(0, GROUP_PAD)
    return tl.load(q_ptr + heads[None, :] * stride_q_head + dims[:, None], mask=heads[None, :] < GROUP, other=0.0)


@triton.jit
def attend_tile(
    queries, k_ptr, v_ptr, stride_row, num_keys, peak, sums, acc, scale_log2, KEYS: tl.constexpr, DIM: tl.constexpr
):
    """Add the first `num_keys` keys of a tile to the state of the softmax.

    Args:
        queries: [DIM, G].
        k_ptr: key tile, KEYS rows of DIM.
        v_ptr: value tile, same strides. Rows beyond `num_keys` may hold NaN: keys are masked as scores, values as loads.
        stride_row: elements between rows.
        num_keys: int32 scalar, any value; <= 0 adds nothing.
        peak: [G] running maximum of the scaled scores, finite.
        sums: [KEYS, G] running sums of weights, one per row of the tile: added up across rows only in the end.
        acc: [DIM, G] running weighted sum of values.
        scale_log2: softmax scale times log2(e).
        KEYS: rows of a tile.
        DIM: head dimension.

    Returns:
        The new (peak, sums, acc).
    """
    rows, dims = tl.arange(0, KEYS), tl.arange(0, DIM)
    valid = rows[:, None] < num_keys
    offsets = rows[:, None] * stride_row + dims[None, :]
    keys = tl.load(k_ptr + offsets)
    values = tl.load(v_ptr + offsets, mask=valid, other=0.0)
    scores = tl.dot(keys, queries, input_precision="ieee") * scale_log2  # [KEYS, G]
    scores = tl.where(valid, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 0))
    weights = tl.exp2(scores - new_peak[None, :])
    decay = tl.exp2(peak - new_peak)
    sums = sums * decay[None, :] + weights
    acc = tl.dot(tl.trans(values), weights.to(values.dtype), acc * decay[None, :], input_precision="ieee")
    return new_peak, sums, acc


@triton.jit
def store_output(
    out_ptr, stride_out_head, total, acc, first_row, GROUP: tl.constexpr, ROWS: tl.constexpr, GROUP_PAD: tl.constexpr
):
    """Divide and write dimensions first_row : first_row + ROWS of a finished group; zeros where no key was attended to."""
    dims, heads = first_row + tl.arange(0, ROWS), tl.arange(0, GROUP_PAD)
    result = acc / tl.where(total > 0.0, total, 1.0)[None, :]
    pointers = out_ptr + heads[None, :] * stride_out_head + dims[:, None]
    tl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=heads[None, :] < GROUP)


@triton.jit
def store_partial(acc_ptr, stats_ptr, peak, total, acc, DIM: tl.constexpr, GROUP_PAD: tl.constexpr):
    """Write one split's state: acc [DIM, GROUP_PAD] and stats [2, GROUP_PAD], both fp32."""
    dims, heads = tl.arange(0, DIM), tl.arange(0, GROUP_PAD)
    tl.store(acc_ptr + dims[:, None] * GROUP_PAD + heads[None, :], acc)
    tl.store(stats_ptr + heads, peak)
    tl.store(stats_ptr + GROUP_PAD + heads, total)


@direct_launch
@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    acc_ptr,
    stats_ptr,
    out_ptr,
    stride_out_token,
    stride_out_head,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (B * NUM_KV_HEADS, DIM / ROWS): ROWS dimensions of one group from all its splits, always in the same order.

    Every thread holds the same elements of every split, so nothing is exchanged; CHUNK splits are loaded at a time.
    """
    wait_for_inputs(PDL)
    unit, first_row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    rows, heads = tl.arange(0, ROWS), tl.arange(0, GROUP_PAD)
    stats_ptr += unit * num_splits * 2 * GROUP_PAD + heads[None, :]
    acc_ptr += unit * num_splits * DIM * GROUP_PAD + (first_row + rows[:, None]) * GROUP_PAD + heads[None, :]
    peak = tl.full((1, GROUP_PAD), -1e30, tl.float32)
    total = tl.zeros((1, GROUP_PAD), tl.float32)
    acc = tl.zeros((ROWS, GROUP_PAD), tl.float32)
    for first in range(0, num_splits, CHUNK):
        new_peak = peak
        for i in tl.static_range(CHUNK):
            inside = heads[None, :] * 0 + first + i < num_splits
            new_peak = tl.maximum(new_peak, tl.load(stats_ptr + (first + i) * 2 * GROUP_PAD, mask=inside, other=-1e30))
        decay = tl.exp2(peak - new_peak)
        total, acc = total * decay, acc * decay
        for i in tl.static_range(CHUNK):
            inside = heads[None, :] * 0 + first + i < num_splits
            stats = stats_ptr + (first + i) * 2 * GROUP_PAD
            weight = tl.exp2(tl.load(stats, mask=inside, other=-1e30) - new_peak)
            total += weight * tl.load(stats + GROUP_PAD, mask=inside, other=0.0)
            acc += weight * tl.load(acc_ptr + (first + i) * (DIM * GROUP_PAD), mask=inside, other=0.0)
        peak = new_peak
    b, head = unit // NUM_KV_HEADS, unit % NUM_KV_HEADS
    out_ptr += b * stride_out_token + head * GROUP * stride_out_head
    store_output(out_ptr, stride_out_head, tl.reshape(total, (GROUP_PAD,)), acc, first_row, GROUP, ROWS, GROUP_PAD)


def merge(partials: Partials, out: Tensor, num_kv_heads: int) -> None:
    """Launch the merge of all units' splits into `out` [B, Hq, D]."""
    num_units, num_splits, dim, group_pad = partials.acc.shape
    rows = min(dim, 8)
    _merge_kernel[(num_units, dim // rows)](
        partials.acc,
        partials.stats,
        out,
        out.stride(0),
        out.stride(1),
        num_splits,
        NUM_KV_HEADS=num_kv_heads,
        CHUNK=4 if num_splits <= 4 else 16,
        ROWS=rows,
        GROUP=out.shape[1] // num_kv_heads,
        DIM=dim,
        GROUP_PAD=group_pad,
        num_warps=1,
        **pdl_options(out.device),
    )
