"""Grouped products on Hopper: weights on the M side of the matrix unit, up to 288 rows of an expert on its N side.

A copy warp streams weights and activations through rings of shared memory, across tile borders, so that the memory never
waits for the end of a tile. Two groups of four warps own 64 rows of the weight each. The number of rows of a tile picks one of
a few widths of the product, so that nearly empty tiles cost little arithmetic.

MXFP8 weights go from shared memory to registers, become bf16 there and enter the product from there. A thread reads 32 bytes of
a row at once, which is one group of one scale. The product wants other columns in one thread, so the inner dimension is
permuted within 128 columns, and activations are stored in that order, as `moe_plan` gathers them; a sum does not mind.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from server.kernels.hopper import copy_tile
from server.kernels.launch import pdl_options
from server.kernels.moe_configs import HopperConfig
from server.kernels.moe_plan import ExpertPlan
from server.kernels.moe_tiles import Activation, Weight, stored

_X_STEP = 64  # columns of activations per stage: 128 bytes
_FRAGMENT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
_GROUPED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 32],
    )
)
_FACTORS = gl.constexpr(gl.SliceLayout(2, _GROUPED.value))


@gluon.jit
def _copy_tiles(
    w_desc, x_desc, tiles_ptr, w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready, x_empty, num_tiles,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr, SIZES: gl.constexpr, X_BOX: gl.constexpr,
    PARTS: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    W_COLUMNS: gl.constexpr = 128 if MXFP8 else 64
    W_PARTS: gl.constexpr = PARTS * 64 // W_COLUMNS
    W_TILES: gl.constexpr = N // (64 if GATED else 128)
    LARGEST: gl.constexpr = SIZES[len(SIZES) - 1]
    MAIN: gl.constexpr = 256 if LARGEST > 256 else LARGEST
    w_bytes: gl.constexpr = 2 * W_PARTS * w_desc.block_type.nbytes
    i_w = 0
    i_x = 0
    for i_work in range(gl.program_id(0), num_tiles * W_TILES, gl.num_programs(0)):
        p_tile = tiles_ptr + (i_work // W_TILES) * 4
        expert = gl.load(p_tile)
        row = gl.load(p_tile + 1)
        num_rows = gl.load(p_tile + 2)
        w_tile = i_work % W_TILES
        num_boxes = (num_rows + X_BOX - 1) // X_BOX
        for begin in range(0, K, PARTS * 64):
            stage = i_w % W_STAGES
            mbarrier.wait(w_empty.index(stage), ((i_w // W_STAGES) & 1) ^ 1)
            if X_STAGES == 0:
                for count in gl.static_range(1, LARGEST // X_BOX + 1):
                    if num_boxes == count:
                        mbarrier.expect(w_ready.index(stage), w_bytes + PARTS * count * x_desc.block_type.nbytes)
            else:
                mbarrier.expect(w_ready.index(stage), w_bytes)
            for half in gl.static_range(2):
                for part in gl.static_range(W_PARTS):
                    buf = w_bufs.index((stage * 2 + half) * W_PARTS + part)
                    column = begin + part * W_COLUMNS
                    if GATED:
                        chunk = expert * (2 * N // 128) + w_tile // 2
                        quarter = (w_tile % 2) * 2 + half
                        target = buf.reshape([1, 4, 2, 8, W_COLUMNS])
                        if MXFP8:
                            copy_tile(w_desc, [chunk, 0, 0, quarter * 8, column], w_ready.index(stage), target)
                        else:
                            copy_tile(w_desc, [chunk, quarter * 4, 0, 0, column], w_ready.index(stage), target)
                    else:
                        copy_tile(w_desc, [expert * N + w_tile * 128 + half * 64, column], w_ready.index(stage), buf)
            i_w += 1
            for part in gl.static_range(PARTS):
                if X_STAGES == 0:
                    slot = stage * PARTS + part
                    arrived = w_ready.index(stage)
                else:
                    slot = i_x % X_STAGES
                    arrived = x_ready.index(slot)
                    mbarrier.wait(x_empty.index(slot), ((i_x // X_STAGES) & 1) ^ 1)
                    for count in gl.static_range(1, LARGEST // X_BOX + 1):
                        if num_boxes == count:
                            mbarrier.expect(arrived, count * x_desc.block_type.nbytes)
                    i_x += 1
                for box in gl.static_range(MAIN // X_BOX):
                    if box < num_boxes:
                        copy_tile(
                            x_desc,
                            [row + box * X_BOX, begin + part * 64],
                            arrived,
                            x_bufs.index(slot).slice(box * X_BOX, X_BOX),
                        )
                if LARGEST > 256 and num_rows > 256:
                    copy_tile(x_desc, [row + 256, begin + part * 64], arrived, tail_bufs.index(slot))


@gluon.jit
def _scale_e4m3(values, factors):
    """E4m3 bytes times bf16 factors, four at a time; bytes 0, 2, 1, 3 of a word in this order.

    The bits of an e4m3 number in the place of a bf16 number's are the number times 2^-120, subnormals included.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, rest;
        shl.b32 rest, $2, 4;
        shl.b32 low, $2, 8;
        and.b32 rest, rest, 0x07f007f0;
        lop3.b32 low, low, 0x80008000, rest, 0xea;
        shr.u32 rest, $2, 4;
        and.b32 rest, rest, 0x07f007f0;
        lop3.b32 high, $2, 0x80008000, rest, 0xea;
        mul.rn.bf16x2 $0, low, $3;
        mul.rn.bf16x2 $1, high, $4;
        }
        """,
        "=r,=r,r,r,r",
        [values, factors],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _fragments(w_buf, words, MMA: gl.constexpr):
    """A tile of bytes [64, 128] and a word of four scales per row to two operands [64, 64] bf16 of permuted columns."""
    operand: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    o_c = gl.arange(0, 4, layout=gl.SliceLayout(0, _FACTORS))
    exponents = ((words[:, None] >> (o_c * 8)[None, :]) & 255).to(gl.uint16)
    # 2^(exponent - 127 + 120); infinite above 134, so above any weight that bf16 is made for.
    bits = gl.where(exponents == 255, 0x7FC0, gl.where(exponents > 134, 0x7F80, (exponents + 120) << 7)).to(gl.uint16)
    factors = bits.to(gl.bfloat16, bitcast=True).expand_dims(2).broadcast_to([64, 4, 32])
    values = gl.convert_layout(w_buf.load(_FRAGMENT).reshape([64, 4, 32]), _GROUPED)
    # Bits of a number's place, high to low: c1 c0 h s1 s0 j0 j1; as columns of the product: h s1 s0 j0 c1 c0 j1.
    split = _scale_e4m3(values, factors).reshape([64, 4, 2, 4, 2, 2]).permute((0, 3, 4, 1, 5, 2))
    first, second = split.reshape([64, 64, 2]).split()
    return gl.convert_layout(first, operand), gl.convert_layout(second, operand)


@gluon.jit
def _columns(x_bufs, tail_bufs, slot, MAIN: gl.constexpr, IS_TAIL: gl.constexpr):
    """Activations of a part of a stage as an operand [64, columns]."""
    buf = tail_bufs.index(slot) if IS_TAIL else x_bufs.index(slot).slice(0, MAIN)
    return buf.permute((1, 0))


@gluon.jit
def _multiply_plain(
    w_bufs, x_bufs, tail_bufs, w_ready, w_empty, i_first,
    HALF: gl.constexpr, STEPS: gl.constexpr, MAIN: gl.constexpr, HAS_TAIL: gl.constexpr, PARTS: gl.constexpr,
    W_STAGES: gl.constexpr,
):  # fmt: skip
    acc = gl.zeros([64, MAIN], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16]))
    acc_tail = gl.zeros([64, 32], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
    for i in range(i_first, i_first + STEPS):
        stage = i % W_STAGES
        mbarrier.wait(w_ready.index(stage), (i // W_STAGES) & 1)
        for part in gl.static_range(PARTS):
            w_buf = w_bufs.index((stage * 2 + HALF) * PARTS + part)
            slot = stage * PARTS + part
            acc = warpgroup_mma(w_buf, _columns(x_bufs, tail_bufs, slot, MAIN, False), acc, is_async=True)
            if HAS_TAIL:
                acc_tail = warpgroup_mma(w_buf, _columns(x_bufs, tail_bufs, slot, MAIN, True), acc_tail, is_async=True)
        if HAS_TAIL:
            acc, acc_tail = warpgroup_mma_wait(2 * PARTS, deps=(acc, acc_tail))
        else:
            acc = warpgroup_mma_wait(PARTS, deps=(acc,))
        if i > i_first:
            mbarrier.arrive(w_empty.index((i - 1) % W_STAGES))
    if HAS_TAIL:
        acc, acc_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(w_empty.index((i_first + STEPS - 1) % W_STAGES))
    return acc, acc_tail


@gluon.jit
def _multiply_mxfp8_narrow(
    w_bufs, x_bufs, tail_bufs, w_ready, w_empty, i_first, p_scale,
    HALF: gl.constexpr, STEPS: gl.constexpr, MAIN: gl.constexpr, W_PARTS: gl.constexpr, W_STAGES: gl.constexpr,
):  # fmt: skip
    """Few columns: what takes time is the copies and the conversion, so that the products are waited for at once."""
    # Whole stages, so that the part of a stage is known when it is compiled.
    UNROLL: gl.constexpr = 4 if STEPS % 4 == 0 else (3 if STEPS % 3 == 0 and W_PARTS == 1 else 2 - STEPS % 2)
    gl.static_assert(UNROLL % W_PARTS == 0)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    acc = gl.zeros([64, MAIN], gl.float32, layout=mma)
    # Scales are loaded UNROLL steps ahead.
    words_0 = gl.load(p_scale)
    words_1 = gl.load(p_scale + (1 if UNROLL > 1 else 0))
    words_2 = gl.load(p_scale + (2 if UNROLL > 2 else 0))
    words_3 = gl.load(p_scale + (3 if UNROLL > 3 else 0))
    for block in range(STEPS // UNROLL):
        for u in gl.static_range(UNROLL):
            step = block * UNROLL + u
            i = i_first + step // W_PARTS
            stage = i % W_STAGES
            p_next = p_scale + gl.minimum(step + UNROLL, STEPS - 1)
            if u % W_PARTS == 0:
                mbarrier.wait(w_ready.index(stage), (i // W_STAGES) & 1)
            words = words_0 if u == 0 else (words_1 if u == 1 else (words_2 if u == 2 else words_3))
            part = stage * W_PARTS + u % W_PARTS
            first, second = _fragments(w_bufs.index((stage * 2 + HALF) * W_PARTS + u % W_PARTS), words, mma)
            if u == 0:
                words_0 = gl.load(p_next)
            if u == 1:
                words_1 = gl.load(p_next)
            if u == 2:
                words_2 = gl.load(p_next)
            if u == 3:
                words_3 = gl.load(p_next)
            acc = warpgroup_mma(first, _columns(x_bufs, tail_bufs, part * 2, MAIN, False), acc, is_async=True)
            acc = warpgroup_mma(second, _columns(x_bufs, tail_bufs, part * 2 + 1, MAIN, False), acc, is_async=True)
            acc, first, second = warpgroup_mma_wait(0, deps=(acc, first, second))
            if u % W_PARTS == W_PARTS - 1:
                mbarrier.arrive(w_empty.index(stage))
    return acc


@gluon.jit
def _multiply_mxfp8_wide(
    w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready, x_empty, i_first, p_scale,
    HALF: gl.constexpr, STEPS: gl.constexpr, MAIN: gl.constexpr, HAS_TAIL: gl.constexpr, W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):  # fmt: skip
    """Many columns: weights of the next step are converted while the products of this one run."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    mma_tail: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    acc = gl.zeros([64, MAIN], gl.float32, layout=mma)
    acc_tail = gl.zeros([64, 32], gl.float32, layout=mma_tail)
    words = gl.load(p_scale)
    mbarrier.wait(w_ready.index(i_first % W_STAGES), (i_first // W_STAGES) & 1)
    first, second = _fragments(w_bufs.index((i_first % W_STAGES) * 2 + HALF), words, mma)
    mbarrier.arrive(w_empty.index(i_first % W_STAGES))
    words = gl.load(p_scale + (1 if STEPS > 1 else 0))
    for step in range(STEPS):
        i = i_first + step
        slot = (2 * i) % X_STAGES
        next_slot = (2 * i + 1) % X_STAGES
        mbarrier.wait(x_ready.index(slot), (2 * i // X_STAGES) & 1)
        acc = warpgroup_mma(first, _columns(x_bufs, tail_bufs, slot, MAIN, False), acc, is_async=True)
        if HAS_TAIL:
            acc_tail = warpgroup_mma(first, _columns(x_bufs, tail_bufs, slot, MAIN, True), acc_tail, is_async=True)
        mbarrier.wait(x_ready.index(next_slot), ((2 * i + 1) // X_STAGES) & 1)
        acc = warpgroup_mma(second, _columns(x_bufs, tail_bufs, next_slot, MAIN, False), acc, is_async=True)
        if HAS_TAIL:
            acc_tail = warpgroup_mma(second, _columns(x_bufs, tail_bufs, next_slot, MAIN, True), acc_tail, is_async=True)
        new_first = first
        new_second = second
        if step + 1 < STEPS:
            w_stage = (i + 1) % W_STAGES
            mbarrier.wait(w_ready.index(w_stage), ((i + 1) // W_STAGES) & 1)
            new_first, new_second = _fragments(w_bufs.index(w_stage * 2 + HALF), words, mma)
            mbarrier.arrive(w_empty.index(w_stage))
            words = gl.load(p_scale + gl.minimum(step + 2, STEPS - 1))
        if HAS_TAIL:
            acc, acc_tail, first, second = warpgroup_mma_wait(0, deps=(acc, acc_tail, first, second))
        else:
            acc, first, second = warpgroup_mma_wait(0, deps=(acc, first, second))
        mbarrier.arrive(x_empty.index(slot))
        mbarrier.arrive(x_empty.index(next_slot))
        first = new_first
        second = new_second
    return acc, acc_tail


@gluon.jit
def _store_chunk(
    acc, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit,
    N: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr,
):  # fmt: skip
    """Columns of the product [64, n] as rows begin .. begin + n of the output."""
    n: gl.constexpr = acc.shape[1]
    if GATED:
        pairs = acc.reshape([4, 2, 8, n]).permute((0, 2, 3, 1))
        gate, up = pairs.split()
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        hidden = gate / (1.0 + gl.exp(-alpha * gate)) * (up + beta)
        if MXFP8:
            # Bits of a row, high to low: c1 c0 s0 j1 j0; columns of the output go in the order s0 j0 c1 c0 j1.
            hidden = hidden.reshape([4, 2, 2, 2, n]).permute((1, 3, 0, 2, 4))
        hidden = hidden.reshape([32, n])
        layout: gl.constexpr = hidden.type.layout
        o_n = begin + gl.arange(0, n, layout=gl.SliceLayout(0, layout))
        weight = gl.load(row_weight_ptr + o_n, mask=o_n < num_rows, other=0.0)
        hidden = hidden * weight[None, :]
    else:
        hidden = acc
    WIDTH: gl.constexpr = 32 if GATED else 64
    out_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    b_out = gl.convert_layout(hidden.to(p_out.dtype.element_ty).permute((1, 0)), out_layout)
    o_r = begin + gl.arange(0, n, layout=gl.SliceLayout(1, out_layout))
    o_c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, out_layout))
    gl.store(p_out + o_r.to(gl.int64)[:, None] * N + o_c[None, :], b_out, mask=(o_r < num_rows)[:, None])


@gluon.jit
def _halves(acc):
    """Left and right half of the columns."""
    n: gl.constexpr = acc.shape[1]
    return acc.reshape([acc.shape[0], 2, n // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _store(
    acc, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit,
    N: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr,
):  # fmt: skip
    """As `_store_chunk`, in pieces that need little shared memory."""
    n: gl.constexpr = acc.shape[1]
    if n == 256:
        left, right = _halves(acc)
        _store_128(left, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)
        _store_128(right, p_out, row_weight_ptr, num_rows, begin + 128, alpha, beta, limit, N, GATED, MXFP8)
    elif n == 128:
        _store_128(acc, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)
    else:
        _store_chunk(acc, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)


@gluon.jit
def _store_128(
    acc, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit,
    N: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr,
):  # fmt: skip
    left, right = _halves(acc)
    _store_chunk(left, p_out, row_weight_ptr, num_rows, begin, alpha, beta, limit, N, GATED, MXFP8)
    _store_chunk(right, p_out, row_weight_ptr, num_rows, begin + 64, alpha, beta, limit, N, GATED, MXFP8)


@gluon.jit
def _multiply_and_store(
    scale_ptr, o_row, p_out, p_weight, num_rows, w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready, x_empty, i_first,
    alpha, beta, limit,
    HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr, SIZE: gl.constexpr,
    PARTS: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    MAIN: gl.constexpr = 256 if SIZE > 256 else SIZE
    STEPS: gl.constexpr = K // (64 * PARTS)
    if MXFP8:
        p_scale = scale_ptr.to(gl.pointer_type(gl.uint32)) + o_row * (K // 128)
        if X_STAGES == 0:
            acc = _multiply_mxfp8_narrow(
                w_bufs, x_bufs, tail_bufs, w_ready, w_empty, i_first, p_scale,
                HALF, K // 128, MAIN, PARTS // 2, W_STAGES,
            )  # fmt: skip
            acc_tail = acc
        else:
            acc, acc_tail = _multiply_mxfp8_wide(
                w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready, x_empty, i_first, p_scale,
                HALF, STEPS, MAIN, SIZE > 256, W_STAGES, X_STAGES,
            )  # fmt: skip
    else:
        acc, acc_tail = _multiply_plain(
            w_bufs, x_bufs, tail_bufs, w_ready, w_empty, i_first, HALF, STEPS, MAIN, SIZE > 256, PARTS, W_STAGES
        )
    _store(acc, p_out, p_weight, num_rows, 0, alpha, beta, limit, N, GATED, MXFP8)
    if SIZE > 256:
        _store(acc_tail, p_out, p_weight, num_rows, 256, alpha, beta, limit, N, GATED, MXFP8)


@gluon.jit
def _multiply_tiles(
    scale_ptr, out_ptr, row_weight_ptr, tiles_ptr, w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready, x_empty, num_tiles,
    alpha, beta, limit,
    HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr, SIZES: gl.constexpr,
    PARTS: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    W_TILES: gl.constexpr = N // (64 if GATED else 128)
    i_first = 0
    for i_work in range(gl.program_id(0), num_tiles * W_TILES, gl.num_programs(0)):
        p_tile = tiles_ptr + (i_work // W_TILES) * 4
        expert = gl.load(p_tile)
        row = gl.load(p_tile + 1)
        num_rows = gl.load(p_tile + 2)
        w_tile = i_work % W_TILES
        o_m = gl.arange(0, 64, layout=gl.SliceLayout(1, _FACTORS))
        if GATED:
            quarter = (w_tile % 2) * 2 + HALF
            o_row = expert.to(gl.int64) * (2 * N) + (w_tile // 2) * 128 + quarter * 8
            o_row = o_row + (o_m // 16) * 32 + ((o_m // 8) % 2) * N + o_m % 8
            p_out = out_ptr + row.to(gl.int64) * N + (w_tile // 2) * 128 + quarter * 32
        else:
            o_row = expert.to(gl.int64) * N + w_tile * 128 + HALF * 64 + o_m
            p_out = out_ptr + row.to(gl.int64) * N + w_tile * 128 + HALF * 64
        for v in gl.static_range(len(SIZES)):
            if (num_rows > (SIZES[v - 1] if v > 0 else 0)) & (num_rows <= SIZES[v]):
                _multiply_and_store(
                    scale_ptr, o_row, p_out, row_weight_ptr + row, num_rows, w_bufs, x_bufs, tail_bufs, w_ready, w_empty,
                    x_ready, x_empty, i_first, alpha, beta, limit, HALF, N, K, GATED, MXFP8, SIZES[v], PARTS, W_STAGES,
                    X_STAGES,
                )  # fmt: skip
        i_first += K // (64 * PARTS)


@gluon.jit
def _grouped_hopper_kernel(
    w_desc, x_desc, scale_ptr, out_ptr, row_weight_ptr, tiles_ptr, num_tiles_ptr, alpha, beta, limit,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr, SIZES: gl.constexpr, X_BOX: gl.constexpr,
    PARTS: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One-dimensional grid; program i takes the work items i, i + programs, ... An item is a row tile and 128 weight rows.

    N is the width of the output: that of the experts if GATED, the hidden width otherwise. Without X_STAGES the activations
    travel with the weights.
    """
    W_COLUMNS: gl.constexpr = 128 if MXFP8 else 64
    LARGEST: gl.constexpr = SIZES[len(SIZES) - 1]
    MAIN: gl.constexpr = 256 if LARGEST > 256 else LARGEST
    X_SLOTS: gl.constexpr = X_STAGES if X_STAGES > 0 else W_STAGES * PARTS
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, W_COLUMNS], w_desc.dtype)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [2 * W_STAGES * PARTS * 64 // W_COLUMNS, 64, W_COLUMNS], w_layout)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [X_SLOTS, MAIN, 64], x_desc.layout)
    tail_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [X_SLOTS if LARGEST > 256 else 1, 32 if LARGEST > 256 else 8, 64], x_desc.layout
    )
    w_ready = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    w_empty = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [X_SLOTS, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [X_SLOTS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(W_STAGES):
        mbarrier.init(w_ready.index(stage), count=1)
        mbarrier.init(w_empty.index(stage), count=2)
    for stage in gl.static_range(X_STAGES):
        mbarrier.init(x_ready.index(stage), count=1)
        mbarrier.init(x_empty.index(stage), count=2)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_tiles = gl.load(num_tiles_ptr)
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (
                    scale_ptr, out_ptr, row_weight_ptr, tiles_ptr, w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready,
                    x_empty, num_tiles, alpha, beta, limit, 0, N, K, GATED, MXFP8, SIZES, PARTS, W_STAGES, X_STAGES,
                ),
            ),
            (
                _multiply_tiles,
                (
                    scale_ptr, out_ptr, row_weight_ptr, tiles_ptr, w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready,
                    x_empty, num_tiles, alpha, beta, limit, 1, N, K, GATED, MXFP8, SIZES, PARTS, W_STAGES, X_STAGES,
                ),
            ),
            (
                _copy_tiles,
                (
                    w_desc, x_desc, tiles_ptr, w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready, x_empty, num_tiles,
                    N, K, GATED, MXFP8, SIZES, X_BOX, PARTS, W_STAGES, X_STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 40],
    )  # fmt: skip


@cache
def _layout(*shape: int, is_byte: bool) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(shape), gl.uint8 if is_byte else gl.bfloat16)


def _weight_descriptor(values: Tensor, is_gated: bool, is_mxfp8: bool) -> TensorDescriptor:
    """Boxes of 64 rows: for gated weights four times eight gate rows and the eight up rows that belong to them."""
    num_experts, num_rows, k = values.shape
    step = 128 if is_mxfp8 else 64
    if not is_gated:
        block = [64, step]
        return TensorDescriptor(values, [num_experts * num_rows, k], [k, 1], block, _layout(*block, is_byte=is_mxfp8))
    half, chunks = num_rows // 2, num_experts * num_rows // 128
    block = [1, 4, 2, 8, step]
    layout = _layout(*block, is_byte=is_mxfp8)
    if is_mxfp8:
        return TensorDescriptor(values, [chunks, 4, 2, 32, k], [128 * k, 32 * k, half * k, k, 1], block, layout)
    return TensorDescriptor(values, [chunks, 16, 2, 8, k], [128 * k, 8 * k, half * k, k, 1], block, layout)


def grouped_hopper(x: Tensor, weight: Weight, plan: ExpertPlan, activation: Activation | None, config: HopperConfig) -> Tensor:
    """Products of rows in expert order, [R, K] to [R, N], with `weight`; gated by `activation` unless that is None.

    With MXFP8 weights the columns of `x`, and those of a gated result, are permuted as `gather_rows` does it.
    """
    values, scales, is_mxfp8 = stored(weight)
    is_gated = activation is not None
    width = values.shape[1] // 2 if is_gated else values.shape[1]
    out = x.new_empty((x.shape[0], width))
    x_box = min(32, config.sizes[0])
    x_block = [x_box, _X_STEP]
    x_desc = TensorDescriptor(x, list(x.shape), [x.shape[1], 1], x_block, _layout(*x_block, is_byte=False))
    constants = activation or Activation(1.0, 0.0, 0.0)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    assert config.x_stages == 0 or (is_mxfp8 and config.parts == 2), "only MXFP8 has a ring for activations, in steps of 128"
    assert config.x_stages > 0 or not is_mxfp8 or config.sizes[-1] <= 256, "without that ring MXFP8 has no columns behind 256"
    parts = config.parts if x.shape[1] % (64 * config.parts) == 0 else config.parts // 2
    two = config.programs_per_processor == 2
    w_tiles = width // (64 if is_gated else 128)
    _grouped_hopper_kernel[(min(processors * config.programs_per_processor, plan.max_tiles * w_tiles),)](
        _weight_descriptor(values, is_gated, is_mxfp8), x_desc, scales, out, plan.row_weights, plan.tiles, plan.num_tiles,
        constants.alpha, constants.beta, constants.limit, N=width, K=x.shape[1], GATED=is_gated, MXFP8=is_mxfp8,
        SIZES=config.sizes, X_BOX=x_box, PARTS=parts, W_STAGES=config.w_stages, X_STAGES=config.x_stages,
        REGISTERS=96 if two else 232, num_warps=4, maxnreg=80 if two else None,
        **pdl_options(x.device),
    )  # fmt: skip
    return out
