"""The copy warp of `moe_hopper`: weights and activations of one work item after another into rings of shared memory."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from server.kernels.hopper import copy_tile


@gluon.jit
def copy_tiles(
    w_desc, x_desc, tiles_ptr, w_bufs, x_bufs, tail_bufs, w_ready, w_empty, x_ready, x_empty, num_tiles,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, MXFP8: gl.constexpr, SIZES: gl.constexpr, X_BOX: gl.constexpr,
    PARTS: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    """Copy, for each work item and stage, two halves of 64 weight rows and the activations of the item's row tile.

    A stage is PARTS * 64 columns. Its activations come as PARTS pieces of 64 columns, with the weights or, where there are
    X_STAGES, in a ring of their own; only as many boxes of X_BOX rows as the tile has, those from row 256 on into `tail_bufs`.
    """
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
