"""Products of 64 weight rows with the activations of one row tile, for `moe_hopper`; by how the weights reach the matrix unit.

All take stages `i_first` and on from the rings that `moe_hopper_copy` fills, give each back when it has been read, and return
fp32 sums [64, MAIN] and, of a product of their own behind these columns, [64, TAIL]; meaningless where TAIL is 0.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from server.kernels.moe_hopper_mxfp8 import fragments


@gluon.constexpr_function
def main_columns(size):
    """How many of a tile's columns one product takes, a power of two; those behind are another's."""
    return 1 << (size.bit_length() - 1)


@gluon.jit
def _columns(x_bufs, tail_bufs, slot, BEGIN: gl.constexpr, NUM: gl.constexpr):
    """Rows BEGIN .. BEGIN + NUM of the activations of a part of a stage as an operand [64, NUM]."""
    buf = tail_bufs.index(slot) if BEGIN == 256 else x_bufs.index(slot).slice(BEGIN, NUM)
    return buf.permute((1, 0))


@gluon.jit
def _zeros(NUM: gl.constexpr):
    """Sums [64, NUM]; of as few columns as there can be instead of none."""
    COLUMNS: gl.constexpr = NUM if NUM > 0 else 8
    return gl.zeros([64, COLUMNS], gl.float32, layout=gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))


@gluon.jit
def multiply_plain(
    w_bufs, x_bufs, tail_bufs, w_ready, w_empty, i_first,
    HALF: gl.constexpr, STEPS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr, PARTS: gl.constexpr,
    W_STAGES: gl.constexpr,
):  # fmt: skip
    """bf16 weights, straight from shared memory."""
    acc = _zeros(MAIN)
    acc_tail = _zeros(TAIL)
    for i in range(i_first, i_first + STEPS):
        stage = i % W_STAGES
        mbarrier.wait(w_ready.index(stage), (i // W_STAGES) & 1)
        for part in gl.static_range(PARTS):
            w_buf = w_bufs.index((stage * 2 + HALF) * PARTS + part)
            slot = stage * PARTS + part
            acc = warpgroup_mma(w_buf, _columns(x_bufs, tail_bufs, slot, 0, MAIN), acc, is_async=True)
            if TAIL > 0:
                acc_tail = warpgroup_mma(w_buf, _columns(x_bufs, tail_bufs, slot, MAIN, TAIL), acc_tail, is_async=True)
        if TAIL > 0:
            acc, acc_tail = warpgroup_mma_wait(2 * PARTS, deps=(acc, acc_tail))
        else:
            acc = warpgroup_mma_wait(PARTS, deps=(acc,))
        if i > i_first:
            mbarrier.arrive(w_empty.index((i - 1) % W_STAGES))
    if TAIL > 0:
        acc, acc_tail = warpgroup_mma_wait(0, deps=(acc, acc_tail))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(w_empty.index((i_first + STEPS - 1) % W_STAGES))
    return acc, acc_tail


@gluon.jit
def multiply_mxfp8_narrow(
    w_bufs, x_bufs, tail_bufs, w_ready, w_empty, i_first, p_scale,
    HALF: gl.constexpr, STEPS: gl.constexpr, MAIN: gl.constexpr, W_PARTS: gl.constexpr, W_STAGES: gl.constexpr,
):  # fmt: skip
    """Few columns: what takes time is the copies and the conversion, so that the products are waited for at once."""
    # Whole stages, so that the part of a stage is known when it is compiled.
    UNROLL: gl.constexpr = 4 if STEPS % 4 == 0 else (3 if STEPS % 3 == 0 and W_PARTS == 1 else 2 - STEPS % 2)
    gl.static_assert(UNROLL % W_PARTS == 0)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    acc = _zeros(MAIN)
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
            first, second = fragments(w_bufs.index((stage * 2 + HALF) * W_PARTS + u % W_PARTS), words, mma)
            if u == 0:
                words_0 = gl.load(p_next)
            if u == 1:
                words_1 = gl.load(p_next)
            if u == 2:
                words_2 = gl.load(p_next)
            if u == 3:
                words_3 = gl.load(p_next)
            acc = warpgroup_mma(first, _columns(x_bufs, tail_bufs, part * 2, 0, MAIN), acc, is_async=True)
            acc = warpgroup_mma(second, _columns(x_bufs, tail_bufs, part * 2 + 1, 0, MAIN), acc, is_async=True)
            acc, first, second = warpgroup_mma_wait(0, deps=(acc, first, second))
            if u % W_PARTS == W_PARTS - 1:
                mbarrier.arrive(w_empty.index(stage))
    return acc


@gluon.jit
def multiply_mxfp8_wide(
    w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready, x_empty, i_first, p_scale,
    HALF: gl.constexpr, STEPS: gl.constexpr, MAIN: gl.constexpr, TAIL: gl.constexpr, W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
):  # fmt: skip
    """Many columns: weights of the next step are converted while the products of this one run."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    acc = _zeros(MAIN)
    acc_tail = _zeros(TAIL)
    words = gl.load(p_scale)
    mbarrier.wait(w_ready.index(i_first % W_STAGES), (i_first // W_STAGES) & 1)
    first, second = fragments(w_bufs.index((i_first % W_STAGES) * 2 + HALF), words, mma)
    mbarrier.arrive(w_empty.index(i_first % W_STAGES))
    words = gl.load(p_scale + (1 if STEPS > 1 else 0))
    for step in range(STEPS):
        i = i_first + step
        slot = (2 * i) % X_STAGES
        next_slot = (2 * i + 1) % X_STAGES
        mbarrier.wait(x_ready.index(slot), (2 * i // X_STAGES) & 1)
        acc = warpgroup_mma(first, _columns(x_bufs, tail_bufs, slot, 0, MAIN), acc, is_async=True)
        if TAIL > 0:
            acc_tail = warpgroup_mma(first, _columns(x_bufs, tail_bufs, slot, MAIN, TAIL), acc_tail, is_async=True)
        mbarrier.wait(x_ready.index(next_slot), ((2 * i + 1) // X_STAGES) & 1)
        acc = warpgroup_mma(second, _columns(x_bufs, tail_bufs, next_slot, 0, MAIN), acc, is_async=True)
        if TAIL > 0:
            acc_tail = warpgroup_mma(second, _columns(x_bufs, tail_bufs, next_slot, MAIN, TAIL), acc_tail, is_async=True)
        new_first = first
        new_second = second
        if step + 1 < STEPS:
            w_stage = (i + 1) % W_STAGES
            mbarrier.wait(w_ready.index(w_stage), ((i + 1) // W_STAGES) & 1)
            new_first, new_second = fragments(w_bufs.index(w_stage * 2 + HALF), words, mma)
            mbarrier.arrive(w_empty.index(w_stage))
            words = gl.load(p_scale + gl.minimum(step + 2, STEPS - 1))
        if TAIL > 0:
            acc, acc_tail, first, second = warpgroup_mma_wait(2, deps=(acc, acc_tail, first, second))
        else:
            acc, first, second = warpgroup_mma_wait(1, deps=(acc, first, second))
        mbarrier.arrive(x_empty.index(slot))
        if TAIL > 0:
            acc, acc_tail, first, second = warpgroup_mma_wait(0, deps=(acc, acc_tail, first, second))
        else:
            acc, first, second = warpgroup_mma_wait(0, deps=(acc, first, second))
        mbarrier.arrive(x_empty.index(next_slot))
        first = new_first
        second = new_second
    return acc, acc_tail
