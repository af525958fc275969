"""The kernel of `linear_hopper`: one warp copies tiles ahead, two groups of four warps multiply, 64 weight rows each.

A group turns the next step's weights into bf16 while the current step's product runs.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from server.kernels.direct_launch import direct_launch
from server.kernels.hopper import copy_tile, store_tile
from server.kernels.mxfp8 import scale_e4m3_pairs


@gluon.jit
def _place(tile, num_row_tiles, num_token_tiles, BAND: gl.constexpr):
    """Row tile and token tile: through bands of row tiles, so that programs at work share rows and tokens in the cache."""
    per_band = BAND * num_token_tiles
    first = tile // per_band * BAND
    size = gl.minimum(num_row_tiles - first, BAND)
    return first + tile % per_band % size, tile % per_band // size


@gluon.jit
def _copy_tiles(
    w_desc, x_desc, w_bufs, x_bufs, ready, empty, num_row_tiles, num_token_tiles, num_steps,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    i = 0
    for tile in range(gl.program_id(0), num_row_tiles * num_token_tiles, gl.num_programs(0)):
        i_n, i_t = _place(tile, num_row_tiles, num_token_tiles, BAND)
        for step in range(num_steps):
            stage = i % STAGES
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), 2 * w_desc.block_type.nbytes + x_desc.block_type.nbytes)
            copy_tile(w_desc, [i_n * (2 * ROWS), step * (STEP // 2)], ready.index(stage), w_bufs.index(2 * stage))
            copy_tile(w_desc, [i_n * (2 * ROWS) + ROWS, step * (STEP // 2)], ready.index(stage), w_bufs.index(2 * stage + 1))
            copy_tile(x_desc, [i_t * TOKENS, step * STEP], ready.index(stage), x_bufs.index(stage))
            i += 1


@gluon.jit
def _numbers(w_buf, scales, a_layout: gl.constexpr, pairs_layout: gl.constexpr):
    """[ROWS, STEP / 2] pairs of bytes in shared memory and [ROWS, STEP / 32] scales to the row operand of a product."""
    ROWS: gl.constexpr = scales.shape[0]
    STEP: gl.constexpr = scales.shape[1] * 32
    pairs = w_buf.reshape((ROWS, STEP // 32, 16)).load(pairs_layout)
    first, second = scale_e4m3_pairs(pairs, gl.expand_dims(scales, 2))
    return gl.convert_layout(gl.reshape(gl.join(first, second), [ROWS, STEP]), a_layout, assert_trivial=True)


@gluon.jit
def _step(a, acc, scales, i, p_scales, num_left, inside, o_group, w_bufs, x_bufs, ready, empty, has_previous,
          HALF: gl.constexpr, STAGES: gl.constexpr, a_layout: gl.constexpr, pairs_layout: gl.constexpr):  # fmt: skip
    """Run the product of stage `i`; meanwhile give the stage before it back and prepare the one behind it.

    Returns:
        The sums, the next row operand, and the scales of the one behind that.
    """
    product = warpgroup_mma(a, x_bufs.index(i % STAGES).permute((1, 0)), acc, is_async=True)
    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=has_previous)
    next_scales = gl.load(p_scales, mask=inside & (o_group < num_left), other=0)
    following = (i + 1) % STAGES
    mbarrier.wait(ready.index(following), ((i + 1) // STAGES) & 1)
    next_a = _numbers(w_bufs.index(2 * following + HALF), scales, a_layout, pairs_layout)
    acc, a = warpgroup_mma_wait(0, deps=(product, a))
    return acc, next_a, next_scales


@gluon.jit
def _multiply_tiles(
    scales_ptr, out_desc, w_bufs, x_bufs, out_buf, ready, empty, num_row_tiles, num_token_tiles, num_steps, N, K,
    HALF: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr,
):  # fmt: skip
    GROUPS: gl.constexpr = STEP // 32
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    pairs_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0, 0], [0, 0, 4], [0, 0, 8]] + ([[0, 1, 0]] if GROUPS == 2 else [[0, 1, 0], [0, 2, 0]]),
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [ROWS, GROUPS, 16],
    )
    s_layout: gl.constexpr = gl.SliceLayout(2, pairs_layout)
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))[:, None]
    o_group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, s_layout))[None, :]
    i = 0
    for tile in range(gl.program_id(0), num_row_tiles * num_token_tiles, gl.num_programs(0)):
        i_n, i_t = _place(tile, num_row_tiles, num_token_tiles, BAND)
        row = i_n * (2 * ROWS) + HALF * ROWS
        p_scales = scales_ptr + (row + o_row).to(gl.int64) * (K // 32) + o_group
        num_groups = K // 32
        inside = row + o_row < N
        scales = gl.load(p_scales, mask=inside & (o_group < num_groups), other=0)
        next_scales = gl.load(p_scales + GROUPS, mask=inside & (o_group < num_groups - GROUPS), other=0)
        mbarrier.wait(ready.index(i % STAGES), (i // STAGES) & 1)
        a = _numbers(w_bufs.index(2 * (i % STAGES) + HALF), scales, a_layout, pairs_layout)
        acc = gl.zeros([ROWS, TOKENS], gl.float32, layout=mma)
        for step in range(0, num_steps - 2, 2):  # two operands take turns, so that none has to be moved
            acc, b, scales = _step(
                a, acc, next_scales, i, p_scales + (step + 2) * GROUPS, num_groups - (step + 2) * GROUPS, inside, o_group,
                w_bufs, x_bufs, ready, empty, step > 0, HALF, STAGES, a_layout, pairs_layout,
            )  # fmt: skip
            acc, a, next_scales = _step(
                b, acc, scales, i + 1, p_scales + (step + 3) * GROUPS, num_groups - (step + 3) * GROUPS, inside, o_group,
                w_bufs, x_bufs, ready, empty, True, HALF, STAGES, a_layout, pairs_layout,
            )  # fmt: skip
            i += 2
        acc, b, scales = _step(
            a, acc, next_scales, i, p_scales, 0, inside, o_group,
            w_bufs, x_bufs, ready, empty, num_steps > 2, HALF, STAGES, a_layout, pairs_layout,
        )  # fmt: skip
        product = warpgroup_mma(b, x_bufs.index((i + 1) % STAGES).permute((1, 0)), acc, is_async=True)
        mbarrier.arrive(empty.index(i % STAGES))
        acc, b = warpgroup_mma_wait(0, deps=(product, b))
        mbarrier.arrive(empty.index((i + 1) % STAGES))
        i += 2
        tma.store_wait(0)
        out_buf.permute((1, 0)).store(acc.to(out_desc.dtype))
        fence_async_shared()
        store_tile(out_desc, [i_t * TOKENS, row], out_buf)
    tma.store_wait(0)


@direct_launch
@gluon.jit(do_not_specialize=["num_row_tiles", "num_token_tiles", "num_steps"])
def linear_hopper_kernel(
    w_desc, scales_ptr, x_desc, out_desc, N, K, num_row_tiles, num_token_tiles, num_steps,
    ROWS: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """One-dimensional grid; program i takes the tiles i, i + programs, ... of [2 * ROWS, TOKENS] outputs.

    `num_steps`, of STEP inputs each, is even; what lies behind the last input is zero.
    """
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, ROWS, STEP // 2], w_desc.layout)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, STEP], x_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [2, TOKENS, ROWS], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (
                _multiply_tiles,
                (
                    scales_ptr, out_desc, w_bufs, x_bufs, out_bufs.index(0), ready, empty, num_row_tiles, num_token_tiles,
                    num_steps, N, K, 0, ROWS, TOKENS, STEP, STAGES, BAND,
                ),
            ),
            (
                _multiply_tiles,
                (
                    scales_ptr, out_desc, w_bufs, x_bufs, out_bufs.index(1), ready, empty, num_row_tiles, num_token_tiles,
                    num_steps, N, K, 1, ROWS, TOKENS, STEP, STAGES, BAND,
                ),
            ),
            (
                _copy_tiles,
                (
                    w_desc, x_desc, w_bufs, x_bufs, ready, empty, num_row_tiles, num_token_tiles, num_steps,
                    ROWS, TOKENS, STEP, STAGES, BAND,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
