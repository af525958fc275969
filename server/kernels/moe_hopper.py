"""Grouped products on Hopper: weights on the M side of the matrix unit, up to 288 rows of an expert on its N side.

A copy warp streams weights and activations through rings of shared memory, across tile borders, so that the memory never
waits for the end of a tile. Two groups of four warps own 64 rows of the weight each. The number of rows of a tile picks one of
a few widths of the product, so that nearly empty tiles cost little arithmetic; a width that is no power of two is two products.

MXFP8 weights go from shared memory to registers, become bf16 there and enter the product from there, see `moe_hopper_mxfp8`.
"""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from server.kernels.device import num_multiprocessors
from server.kernels.direct_launch import direct_launch
from server.kernels.hopper import box_descriptor
from server.kernels.launch import pdl_options
from server.kernels.moe_configs import HopperConfig
from server.kernels.moe_hopper_copy import copy_tiles
from server.kernels.moe_hopper_multiply import main_columns, multiply_mxfp8_narrow, multiply_mxfp8_wide, multiply_plain
from server.kernels.moe_hopper_mxfp8 import FACTORS
from server.kernels.moe_hopper_store import store_columns
from server.kernels.moe_plan import ExpertPlan
from server.kernels.moe_tiles import Activation, Weight, stored

_X_STEP = 64  # columns of activations per stage: 128 bytes


@gluon.jit
def _multiply_and_store(
    scale_ptr, o_row, p_out, p_weight, num_rows, w_bufs, x_bufs, tail_bufs, out_buf, w_ready, w_empty, x_ready, x_empty,
    i_first, alpha, beta, limit,
    HALF: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr, SIZE: gl.constexpr,
    PARTS: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    MAIN: gl.constexpr = main_columns(SIZE)
    TAIL: gl.constexpr = SIZE - MAIN
    STEPS: gl.constexpr = K // (64 * PARTS)
    if MXFP8:
        p_scale = scale_ptr.to(gl.pointer_type(gl.uint32)) + o_row * (K // 128)
        if X_STAGES == 0:
            acc = multiply_mxfp8_narrow(
                w_bufs, x_bufs, tail_bufs, w_ready, w_empty, i_first, p_scale,
                HALF, K // 128, MAIN, PARTS // 2, W_STAGES,
            )  # fmt: skip
            acc_tail = acc
        else:
            acc, acc_tail = multiply_mxfp8_wide(
                w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready, x_empty, i_first, p_scale,
                HALF, STEPS, MAIN, TAIL, W_STAGES, X_STAGES,
            )  # fmt: skip
    else:
        acc, acc_tail = multiply_plain(
            w_bufs, x_bufs, tail_bufs, w_ready, w_empty, i_first, HALF, STEPS, MAIN, TAIL, PARTS, W_STAGES
        )
    store_columns(acc, p_out, p_weight, out_buf, num_rows, 0, alpha, beta, limit, N, GATED, MXFP8)
    if TAIL > 0:
        store_columns(acc_tail, p_out, p_weight, out_buf, num_rows, MAIN, alpha, beta, limit, N, GATED, MXFP8)


@gluon.jit
def _multiply_tiles(
    scale_ptr, out_ptr, row_weight_ptr, tiles_ptr, w_bufs, x_bufs, tail_bufs, out_bufs, w_ready, w_empty, x_ready, x_empty,
    num_tiles, alpha, beta, limit,
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
        o_m = gl.arange(0, 64, layout=gl.SliceLayout(1, FACTORS))
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
                    scale_ptr, o_row, p_out, row_weight_ptr + row, num_rows, w_bufs, x_bufs, tail_bufs, out_bufs.index(HALF),
                    w_ready, w_empty, x_ready, x_empty, i_first, alpha, beta, limit, HALF, N, K, GATED, MXFP8, SIZES[v], PARTS,
                    W_STAGES, X_STAGES,
                )  # fmt: skip
        i_first += K // (64 * PARTS)


@direct_launch
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
    MAIN: gl.constexpr = 256 if LARGEST > 128 else 2 * main_columns(LARGEST - 1)
    OUT_ROWS: gl.constexpr = 64 if LARGEST > 128 else 8
    OUT_WIDTH: gl.constexpr = 32 if GATED else 64
    X_SLOTS: gl.constexpr = X_STAGES if X_STAGES > 0 else W_STAGES * PARTS
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, W_COLUMNS], w_desc.dtype)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [2 * W_STAGES * PARTS * 64 // W_COLUMNS, 64, W_COLUMNS], w_layout)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [X_SLOTS, MAIN, 64], x_desc.layout)
    tail_bufs = gl.allocate_shared_memory(
        x_desc.dtype, [X_SLOTS if LARGEST > 256 else 1, 32 if LARGEST > 256 else 8, 64], x_desc.layout
    )
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([OUT_ROWS, OUT_WIDTH], x_desc.dtype)
    out_bufs = gl.allocate_shared_memory(x_desc.dtype, [2, OUT_ROWS, OUT_WIDTH], out_layout)
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
                    scale_ptr, out_ptr, row_weight_ptr, tiles_ptr, w_bufs, x_bufs, tail_bufs, out_bufs, w_ready, w_empty,
                    x_ready, x_empty, num_tiles, alpha, beta, limit, 0, N, K, GATED, MXFP8, SIZES, PARTS, W_STAGES, X_STAGES,
                ),
            ),
            (
                _multiply_tiles,
                (
                    scale_ptr, out_ptr, row_weight_ptr, tiles_ptr, w_bufs, x_bufs, tail_bufs, out_bufs, w_ready, w_empty,
                    x_ready, x_empty, num_tiles, alpha, beta, limit, 1, N, K, GATED, MXFP8, SIZES, PARTS, W_STAGES, X_STAGES,
                ),
            ),
            (
                copy_tiles,
                (
                    w_desc, x_desc, tiles_ptr, w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready, x_empty, num_tiles,
                    N, K, GATED, MXFP8, SIZES, X_BOX, PARTS, W_STAGES, X_STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 40],
    )  # fmt: skip


def _weight_descriptor(values: Tensor, is_gated: bool, is_mxfp8: bool) -> TensorDescriptor:
    """Boxes of 64 rows: for gated weights four times eight gate rows and the eight up rows that belong to them."""
    num_experts, num_rows, k = values.shape
    step = 128 if is_mxfp8 else 64
    if not is_gated:
        return box_descriptor(values, (64, step), (num_experts * num_rows, k), (k, 1))
    half, chunks = num_rows // 2, num_experts * num_rows // 128
    box = (1, 4, 2, 8, step)
    if is_mxfp8:
        return box_descriptor(values, box, (chunks, 4, 2, 32, k), (128 * k, 32 * k, half * k, k, 1))
    return box_descriptor(values, box, (chunks, 16, 2, 8, k), (128 * k, 8 * k, half * k, k, 1))


def grouped_hopper(x: Tensor, weight: Weight, plan: ExpertPlan, activation: Activation | None, config: HopperConfig) -> Tensor:
    """Products of rows in expert order, [R, K] to [R, N], with `weight`; gated by `activation` unless that is None.

    With MXFP8 weights the columns of `x`, and those of a gated result, are permuted as `sort_rows` does it.
    """
    values, scales, is_mxfp8 = stored(weight)
    is_gated = activation is not None
    width = values.shape[1] // 2 if is_gated else values.shape[1]
    out = x.new_empty((x.shape[0], width))
    x_box = min(32, config.sizes[0])
    x_desc = box_descriptor(x, (x_box, _X_STEP))
    constants = activation or Activation(1.0, 0.0, 0.0)
    processors = num_multiprocessors(x.device)
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
