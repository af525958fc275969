"""The kernels of `linear_narrow`: a copy warp feeds groups of four warps, which share the rows and the inputs of a tile.

Units, STEP inputs of a tile, are numbered through all tiles, and each program has an equal share of consecutive ones, which may
begin and end inside a tile. Where several programs have a tile, their sums go to memory and a second kernel adds them in order.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from server.kernels.direct_launch import direct_launch
from server.kernels.hopper import copy_tile
from server.kernels.launch import wait_for_inputs

STEP = gl.constexpr(128)  # inputs per unit: the four scales of a word

# Pairs of bytes, with columns as (group that shares a scale, pair in the group), where the product wants them.
_PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0, 0], [0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 16],
    )
)
_FACTORS = gl.constexpr(gl.SliceLayout(2, _PAIRS.value))


@gluon.jit
def _first_unit(num_units, i_p):
    """Of program i_p."""
    return (num_units.to(gl.int64) * i_p // gl.num_programs(0)).to(gl.int32)


@gluon.jit
def _copy_weights(
    w_desc, w_bufs, ready, empty, unit, i, num_steps, ROW_GROUPS: gl.constexpr, STAGES: gl.constexpr, BYTES: gl.constexpr
):
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), BYTES)
    for group in gl.static_range(ROW_GROUPS):
        row = (unit // num_steps * ROW_GROUPS + group) * 64
        copy_tile(w_desc, [row, unit % num_steps * (STEP // 2)], ready.index(stage), w_bufs.index(stage * ROW_GROUPS + group))


@gluon.jit
def _copy_tokens(x_desc, x_bufs, ready, unit, i, num_steps, STAGES: gl.constexpr):
    for half in gl.static_range(2):
        column = unit % num_steps * STEP + half * (STEP // 2)
        copy_tile(x_desc, [0, column], ready.index(i % STAGES), x_bufs.index(i % STAGES * 2 + half))


@gluon.jit
def _copy(
    w_desc, x_desc, w_bufs, x_bufs, ready, empty, num_units, num_steps,
    ROW_GROUPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Weights go ahead of the wait for inputs, as far as there are stages."""
    BYTES: gl.constexpr = ROW_GROUPS * w_desc.block_type.nbytes + 2 * x_desc.block_type.nbytes
    begin = _first_unit(num_units, gl.program_id(0))
    count = _first_unit(num_units, gl.program_id(0) + 1) - begin
    ahead = gl.minimum(count, STAGES)
    for i in range(ahead):
        _copy_weights(w_desc, w_bufs, ready, empty, begin + i, i, num_steps, ROW_GROUPS, STAGES, BYTES)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for i in range(ahead):
        _copy_tokens(x_desc, x_bufs, ready, begin + i, i, num_steps, STAGES)
    for i in range(ahead, count):
        _copy_weights(w_desc, w_bufs, ready, empty, begin + i, i, num_steps, ROW_GROUPS, STAGES, BYTES)
        _copy_tokens(x_desc, x_bufs, ready, begin + i, i, num_steps, STAGES)


@gluon.jit
def _scale_pairs(pairs, factors):
    """Pairs of e4m3 bytes (int16) times factors of 2^120 (bf16, twice in a word), see `scale_e4m3` in `mxfp8`."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 both;
        cvt.u32.u16 both, $2;
        prmt.b32 both, both, 0, 0x9180;
        shl.b32 both, both, 4;
        and.b32 both, both, 0x87f087f0;
        mul.rn.bf16x2 both, both, $3;
        mov.b32 {$0, $1}, both;
        }
        """,
        "=h,=h,h,r",
        [pairs, factors],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _numbers(w_buf, words, MMA: gl.constexpr):
    """Bytes [64, STEP] in shared memory and a word of four scales per row to two row operands [64, STEP / 2]."""
    operand: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    o_group = gl.arange(0, 4, layout=gl.SliceLayout(0, _FACTORS))
    exponents = (words[:, None] >> (o_group * 8)[None, :]) & 255
    # 2^(exponent - 127 + 120), twice; NaN for 255. Loading refuses scales above MAX_SCALE of `mxfp8`.
    factors = gl.minimum(exponents * 0x00800080 + 0x3C003C00, 0x7FC07FC0)
    pairs = w_buf.reshape((64, 4, 16)).load(_PAIRS)
    first, second = _scale_pairs(pairs, factors.expand_dims(2).broadcast_to([64, 4, 16]))
    left, right = gl.join(first, second).reshape([64, 2, 64]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, operand, assert_trivial=True), gl.convert_layout(right, operand, assert_trivial=True)


@gluon.jit
def _scale_pointers(scales_ptr, row, step, N, K):
    """Of the words of 64 rows, the last row repeated where there are no more."""
    o_m = gl.arange(0, 64, layout=gl.SliceLayout(1, _FACTORS))
    return scales_ptr.to(gl.pointer_type(gl.uint32)) + gl.minimum(row + o_m, N - 1).to(gl.int64) * (K // STEP) + step


@gluon.jit
def _store(sums, out_ptr, partial_ptr, tile, row, slot, is_whole, T, N, ROWS: gl.constexpr):
    """Sums [rows, TOKENS] of a tile's rows from `row` on: to the output, or to the tile's slot."""
    layout: gl.constexpr = sums.type.layout
    o_r = row + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    o_t = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    if is_whole:
        o_n = tile * ROWS + o_r
        gl.store(out_ptr + o_t.to(gl.int64) * N + o_n, sums.to(gl.bfloat16), mask=(o_n < N) & (o_t < T))
    else:
        gl.store(partial_ptr + (slot * T + o_t).to(gl.int64) * ROWS + o_r, sums, mask=o_t < T)


@gluon.jit
def _exchange(acc, sum_bufs, sum_ready, sum_empty, segment, GROUP: gl.constexpr):
    """Sums of both groups, each of which has them of the same 64 rows; a group gets half of the rows, [32, TOKENS]."""
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    mbarrier.wait(sum_empty, (segment & 1) ^ 1)
    sum_bufs.index(GROUP).store(acc)
    mbarrier.arrive(sum_ready)
    mbarrier.wait(sum_ready, segment & 1)
    sums = sum_bufs.index(0).slice(32 * GROUP, 32).load(layout) + sum_bufs.index(1).slice(32 * GROUP, 32).load(layout)
    mbarrier.arrive(sum_empty)
    return sums


@gluon.jit
def _multiply(
    scales_ptr, out_ptr, partial_ptr, w_bufs, x_bufs, sum_bufs, ready, empty, sum_ready, sum_empty, num_units, num_steps,
    T, N, K,
    GROUP: gl.constexpr, ROW_GROUPS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The products of one of two groups, which has rows of its own or every other unit of the program."""
    INPUT_GROUPS: gl.constexpr = 2 // ROW_GROUPS
    gl.static_assert(STAGES % INPUT_GROUPS == 0)  # a stage has one reader, which cannot overtake its copies
    ROW_GROUP: gl.constexpr = GROUP % ROW_GROUPS
    INPUT_GROUP: gl.constexpr = GROUP // ROW_GROUPS
    ROWS: gl.constexpr = 64 * ROW_GROUPS
    row: gl.constexpr = 64 * ROW_GROUP
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    begin = _first_unit(num_units, gl.program_id(0))
    end = _first_unit(num_units, gl.program_id(0) + 1)
    unit = begin
    segment = 0
    while unit < end:
        tile = unit // num_steps
        count = gl.minimum(end - unit, num_steps - unit % num_steps)
        first = (INPUT_GROUP + INPUT_GROUPS - (unit - begin) % INPUT_GROUPS) % INPUT_GROUPS
        p_scale = _scale_pointers(scales_ptr, tile * ROWS + row, unit % num_steps, N, K)
        words = gl.load(p_scale + gl.minimum(first, count - 1))
        acc = gl.zeros([64, TOKENS], gl.float32, layout=mma)
        for step in range(first, count, INPUT_GROUPS):
            i = unit - begin + step
            stage = i % STAGES
            w_buf = stage * ROW_GROUPS + ROW_GROUP
            left = x_bufs.index(stage * 2).permute((1, 0))
            right = x_bufs.index(stage * 2 + 1).permute((1, 0))
            following = gl.minimum(step + INPUT_GROUPS, count - 1)
            next_words = gl.load(p_scale + following)
            mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
            a, b = _numbers(w_bufs.index(w_buf), words, mma)
            acc = warpgroup_mma(a, left, acc, is_async=True)
            acc = warpgroup_mma(b, right, acc, is_async=True)
            words = next_words
            acc, a, b = warpgroup_mma_wait(0, deps=(acc, a, b))
            mbarrier.arrive(empty.index(stage))
        slot = gl.program_id(0) * 2 + (unit % num_steps == 0).to(gl.int32)
        is_whole = count == num_steps
        if INPUT_GROUPS > 1:
            sums = _exchange(acc, sum_bufs, sum_ready, sum_empty, segment, GROUP)
            _store(sums, out_ptr, partial_ptr, tile, 32 * GROUP, slot, is_whole, T, N, ROWS)
        else:
            _store(acc, out_ptr, partial_ptr, tile, row, slot, is_whole, T, N, ROWS)
        unit += count
        segment += 1


@direct_launch
@gluon.jit(do_not_specialize=["T", "num_units", "num_steps"])
def linear_narrow_kernel(
    w_desc, scales_ptr, x_desc, out_ptr, partial_ptr, T, N, K, num_units, num_steps,
    ROW_GROUPS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One-dimensional grid; a tile has 64 * ROW_GROUPS rows and `num_steps` units.

    What a program has of a tile that it has not as a whole goes to `partial` [programs, 2, T, rows] fp32: to place 1 if the
    program has the beginning of the tile, else to place 0.
    """
    INPUT_GROUPS: gl.constexpr = 2 // ROW_GROUPS
    sum_layout: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES * ROW_GROUPS, 64, STEP // 2], w_desc.layout)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, TOKENS, STEP // 2], x_desc.layout)
    sum_bufs = gl.allocate_shared_memory(gl.float32, [2, 64, TOKENS if INPUT_GROUPS > 1 else 2], sum_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    sum_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    sum_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=ROW_GROUPS)
    mbarrier.init(sum_ready.index(0), count=2)
    mbarrier.init(sum_empty.index(0), count=2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    scales_ptr, out_ptr, partial_ptr, w_bufs, x_bufs, sum_bufs, ready, empty, sum_ready.index(0),
                    sum_empty.index(0), num_units, num_steps, T, N, K, 0, ROW_GROUPS, TOKENS, STAGES,
                ),
            ),
            (
                _multiply,
                (
                    scales_ptr, out_ptr, partial_ptr, w_bufs, x_bufs, sum_bufs, ready, empty, sum_ready.index(0),
                    sum_empty.index(0), num_units, num_steps, T, N, K, 1, ROW_GROUPS, TOKENS, STAGES,
                ),
            ),
            (_copy, (w_desc, x_desc, w_bufs, x_bufs, ready, empty, num_units, num_steps, ROW_GROUPS, STAGES, PDL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@direct_launch
@triton.jit(do_not_specialize=["T", "num_units", "num_steps", "num_programs"])
def sum_shares_kernel(
    partial_ptr, out_ptr, T, N, num_units, num_steps, num_programs,
    ROWS: tl.constexpr, BLOCK_T: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, tokens / BLOCK_T): adds what at most MOST programs have of a tile, in their order."""
    first_unit = tl.program_id(0).to(tl.int64) * num_steps
    first = (((first_unit + 1) * num_programs - 1) // num_units).to(tl.int32)
    last = (((first_unit + num_steps) * num_programs - 1) // num_units).to(tl.int32)
    o_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    o_r = tl.arange(0, ROWS)[None, :]
    o_n = tl.program_id(0) * ROWS + o_r
    inside = (o_t < T) & (o_n < N) & (first < last)
    total = tl.zeros([BLOCK_T, ROWS], tl.float32)
    wait_for_inputs(PDL)
    for i in tl.static_range(MOST):
        slot = (first + i) * 2 + (i == 0)
        p_slot = partial_ptr + (slot * T).to(tl.int64) * ROWS
        total += tl.load(p_slot + o_t * ROWS + o_r, mask=inside & (first + i <= last), other=0.0)
    tl.store(out_ptr + o_t.to(tl.int64) * N + o_n, total.to(out_ptr.dtype.element_ty), mask=inside)
