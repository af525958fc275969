"""The second product of `moe_few_mxfp8`: over (expert, width) as one long inner dimension."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from server.kernels.direct_launch import direct_launch
from server.kernels.few_operands import add_mxfp8, copy_async, places, scale_layout, word_layout
from server.kernels.launch import wait_for_inputs


@direct_launch
@gluon.jit(do_not_specialize=["T", "num_pairs", "shared_expert"])
def few_down_kernel(
    act_ptr, w_ptr, scales_ptr, ids_ptr, table_ptr, out_ptr, T, num_pairs, shared_expert,
    H: gl.constexpr, WIDTH: gl.constexpr, TOPK: gl.constexpr, HAS_SHARED: gl.constexpr, MAX_PAIRS: gl.constexpr,
    J: gl.constexpr, C: gl.constexpr, B: gl.constexpr, S: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (H / 8 J,); out is [T, H].

    Choices are read before the wait for the first product: its programs wait for whatever wrote them, and let this kernel start
    only afterwards.
    """
    w_layout: gl.constexpr = word_layout(B)
    s_layout: gl.constexpr = scale_layout(B)
    num_experts = _list_experts(ids_ptr, table_ptr, T, num_pairs, shared_expert, TOPK, HAS_SHARED, MAX_PAIRS, B)
    num_chunks = num_experts * (WIDTH // 64)

    i_n = gl.program_id(0) * (8 * J)
    w_row = i_n + places(J, 0, w_layout) * 8 + places(8, 2, w_layout)
    s_row = i_n + places(J, 0, s_layout) * 8 + places(8, 2, s_layout)
    p_w = w_ptr + (w_row * (WIDTH // 4) + places(16, 3, w_layout))
    p_s = scales_ptr + (s_row * (WIDTH // 32) + places(4, 3, s_layout) // 2)
    token = places(8, 2, w_layout)
    p_act = act_ptr + (token * (WIDTH // 2) + places(16, 3, w_layout) // 4 * 8 + places(16, 3, w_layout) % 4)

    sums = gl.zeros([B, J * 8, 8], gl.float32, layout=gl.NVMMADistributedLayout([2, 0], [B, 1, 1], [1, 16, 8]))
    if S == 0:
        sums = _add_from_registers(sums, p_w, p_s, p_act, table_ptr, token, T, num_experts, num_chunks, H, WIDTH, C, B, PDL)
    else:
        sums = _add_from_ring(sums, p_w, p_s, p_act, table_ptr, token, T, num_experts, num_chunks, H, WIDTH, J, C, B, S, PDL)
    out = gl.sum(sums, 0)
    o_n = i_n + gl.arange(0, J * 8, layout=gl.SliceLayout(1, out.type.layout))[:, None]
    o_t = gl.arange(0, 8, layout=gl.SliceLayout(0, out.type.layout))[None, :]
    gl.store(out_ptr + (o_t * H + o_n), out.to(gl.bfloat16), mask=o_t < T)


@gluon.jit
def _add_from_registers(
    sums, p_w, p_s, p_act, table_ptr, token, T, num_experts, num_chunks,
    H: gl.constexpr, WIDTH: gl.constexpr, C: gl.constexpr, B: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Add the products of all rounds; weights are loaded two rounds ahead, into registers that take turns."""
    num_rounds = (num_chunks + C * B - 1) // (C * B)
    entry_a = _entry(table_ptr, 0, num_experts, WIDTH // 64, C, B)
    entry_b = _entry(table_ptr, 1, num_experts, WIDTH // 64, C, B)
    weights_a, scales_a = _load_weights(p_w, p_s, entry_a, 0, H, WIDTH, C, B)
    weights_b, scales_b = _load_weights(p_w, p_s, entry_b, 1, H, WIDTH, C, B)
    wait_for_inputs(PDL)
    first_a, last_a = _load_act(p_act, entry_a, 0, token, T, num_chunks, WIDTH, C, B)
    first_b, last_b = _load_act(p_act, entry_b, 1, token, T, num_chunks, WIDTH, C, B)
    entry_a = _entry(table_ptr, 2, num_experts, WIDTH // 64, C, B)
    entry_b = _entry(table_ptr, 3, num_experts, WIDTH // 64, C, B)
    for i_round in range(2, num_rounds, 2):
        sums = add_mxfp8(weights_a, scales_a, first_a, last_a, sums, C)
        weights_a, scales_a = _load_weights(p_w, p_s, entry_a, i_round, H, WIDTH, C, B)
        first_a, last_a = _load_act(p_act, entry_a, i_round, token, T, num_chunks, WIDTH, C, B)
        entry_a = _entry(table_ptr, i_round + 2, num_experts, WIDTH // 64, C, B)
        sums = add_mxfp8(weights_b, scales_b, first_b, last_b, sums, C)
        weights_b, scales_b = _load_weights(p_w, p_s, entry_b, i_round + 1, H, WIDTH, C, B)
        first_b, last_b = _load_act(p_act, entry_b, i_round + 1, token, T, num_chunks, WIDTH, C, B)
        entry_b = _entry(table_ptr, i_round + 3, num_experts, WIDTH // 64, C, B)
    sums = add_mxfp8(weights_a, scales_a, first_a, last_a, sums, C)
    return add_mxfp8(weights_b, scales_b, first_b, last_b, sums, C)


@gluon.jit
def _add_from_ring(
    sums, p_w, p_s, p_act, table_ptr, token, T, num_experts, num_chunks,
    H: gl.constexpr, WIDTH: gl.constexpr, J: gl.constexpr, C: gl.constexpr, B: gl.constexpr, S: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The same with weights that come S - 1 rounds ahead, into shared memory; each thread takes out what it has put in."""
    num_rounds = (num_chunks + 2 * C * B - 1) // (2 * C * B) * 2
    ring = gl.allocate_shared_memory(gl.int32, [S, J, C * B, 8, 16], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    for i in gl.static_range(S - 1):
        entry = _entry(table_ptr, i, num_experts, WIDTH // 64, C, B)
        _copy_words(ring, p_w, entry, i, num_rounds, H, WIDTH, C, B, S)
    entry_a = _entry(table_ptr, 0, num_experts, WIDTH // 64, C, B)
    entry_b = _entry(table_ptr, 1, num_experts, WIDTH // 64, C, B)
    scales_a = _load_scales(p_s, entry_a, 0, H, WIDTH, C, B)
    scales_b = _load_scales(p_s, entry_b, 1, H, WIDTH, C, B)
    wait_for_inputs(PDL)
    first_a, last_a = _load_act(p_act, entry_a, 0, token, T, num_chunks, WIDTH, C, B)
    first_b, last_b = _load_act(p_act, entry_b, 1, token, T, num_chunks, WIDTH, C, B)
    entry_a = _entry(table_ptr, 2, num_experts, WIDTH // 64, C, B)
    entry_b = _entry(table_ptr, 3, num_experts, WIDTH // 64, C, B)
    ahead_a = _entry(table_ptr, S - 1, num_experts, WIDTH // 64, C, B)
    ahead_b = _entry(table_ptr, S, num_experts, WIDTH // 64, C, B)
    for i_round in range(0, num_rounds, 2):
        words = _next_words(ring, p_w, ahead_a, i_round, num_rounds, H, WIDTH, C, B, S)
        ahead_a = _entry(table_ptr, i_round + S + 1, num_experts, WIDTH // 64, C, B)
        sums = add_mxfp8(words, scales_a, first_a, last_a, sums, C)
        scales_a = _load_scales(p_s, entry_a, i_round + 2, H, WIDTH, C, B)
        first_a, last_a = _load_act(p_act, entry_a, i_round + 2, token, T, num_chunks, WIDTH, C, B)
        entry_a = _entry(table_ptr, i_round + 4, num_experts, WIDTH // 64, C, B)
        words = _next_words(ring, p_w, ahead_b, i_round + 1, num_rounds, H, WIDTH, C, B, S)
        ahead_b = _entry(table_ptr, i_round + S + 2, num_experts, WIDTH // 64, C, B)
        sums = add_mxfp8(words, scales_b, first_b, last_b, sums, C)
        scales_b = _load_scales(p_s, entry_b, i_round + 3, H, WIDTH, C, B)
        first_b, last_b = _load_act(p_act, entry_b, i_round + 3, token, T, num_chunks, WIDTH, C, B)
        entry_b = _entry(table_ptr, i_round + 5, num_experts, WIDTH // 64, C, B)
    return sums


@gluon.jit
def _list_experts(
    ids_ptr, table_ptr, T, num_pairs, shared_expert, TOPK: gl.constexpr, HAS_SHARED: gl.constexpr, MAX_PAIRS: gl.constexpr,
    B: gl.constexpr,
):  # fmt: skip
    """Write the list of distinct experts in the order of their slots, and return its length.

    An entry holds 16 bits of the expert, 16 bits of its slot, and from bit 32 on one for every token that chose it. All
    programs write the same, and each reads what it wrote itself.
    """
    square: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, B], [1, 0])
    o_p = gl.arange(0, MAX_PAIRS, layout=gl.SliceLayout(1, square))
    o_q = gl.arange(0, MAX_PAIRS, layout=gl.SliceLayout(0, square))[None, :]
    ids = gl.load(ids_ptr + o_p, mask=o_p < num_pairs, other=-1)
    is_same = ids[:, None] == gl.load(ids_ptr + o_q, mask=o_q < num_pairs, other=-2)
    is_earlier = o_q < o_p[:, None]
    is_first = (gl.sum((is_same & is_earlier).to(gl.int32), 1) == 0) & (o_p < num_pairs)
    is_first_q = gl.convert_layout(is_first.to(gl.int32), gl.SliceLayout(0, square))[None, :]
    rank = gl.sum(gl.where(is_earlier, is_first_q, 0), 1)
    chosen = gl.sum(gl.where(is_same, 1 << o_q // TOPK, 0), 1)
    entry = (chosen.to(gl.int64) << 32) | ((o_p + HAS_SHARED) << 16 | ids).to(gl.int64)
    gl.store(table_ptr + HAS_SHARED + rank, entry, mask=is_first)
    if HAS_SHARED:
        gl.store(table_ptr, (((1 << T) - 1).to(gl.int64) << 32) | shared_expert.to(gl.int64))
    tl.debug_barrier()
    return gl.sum(is_first.to(gl.int32), 0) + HAS_SHARED


@gluon.jit
def _entry(table_ptr, i_round, num_experts, CHUNKS: gl.constexpr, C: gl.constexpr, B: gl.constexpr):
    """Entries of the experts of a round's chunks, a single one where they are always the same expert's."""
    if CHUNKS % (C * B) == 0:
        i_expert = i_round // (CHUNKS // (C * B))
    else:
        i_expert = (i_round * (C * B) + places(C * B, 1, word_layout(B))) // CHUNKS
    return gl.load(table_ptr + gl.minimum(i_expert, num_experts - 1))


@gluon.jit
def _chunk(i_round, CHUNKS: gl.constexpr, C: gl.constexpr, B: gl.constexpr, layout: gl.constexpr):
    """Numbers of a round's chunks within their experts."""
    if CHUNKS % (C * B) == 0:
        return i_round % (CHUNKS // (C * B)) * (C * B) + places(C * B, 1, layout)
    else:
        return (i_round * (C * B) + places(C * B, 1, layout)) % CHUNKS


@gluon.jit
def _place(p_w, entry, i_round, H: gl.constexpr, WIDTH: gl.constexpr, C: gl.constexpr, B: gl.constexpr):
    """Where the words of a round of chunks are."""
    return p_w + ((entry & 0xFFFF) * (H * WIDTH // 4) + _chunk(i_round, WIDTH // 64, C, B, word_layout(B)) * 16)


@gluon.jit
def _copy_words(
    ring, p_w, entry, i_round, num_rounds, H: gl.constexpr, WIDTH: gl.constexpr, C: gl.constexpr, B: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """Let the words of a round come into the ring, if there is such a round."""
    if i_round < num_rounds:
        copy_async(ring.index(i_round % S), _place(p_w, entry, i_round, H, WIDTH, C, B))
    async_copy.commit_group()


@gluon.jit
def _next_words(
    ring, p_w, entry, i_round, num_rounds, H: gl.constexpr, WIDTH: gl.constexpr, C: gl.constexpr, B: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """Take the words of a round out of the ring and fill the place of the round before; `entry` is of S - 1 rounds later."""
    async_copy.wait_group(S - 2)
    words = ring.index(i_round % S).load(word_layout(B))
    _copy_words(ring, p_w, entry, i_round + S - 1, num_rounds, H, WIDTH, C, B, S)
    return words


@gluon.jit
def _load_weights(p_w, p_s, entry, i_round, H: gl.constexpr, WIDTH: gl.constexpr, C: gl.constexpr, B: gl.constexpr):
    """Words and scales of a round of chunks."""
    return gl.load(_place(p_w, entry, i_round, H, WIDTH, C, B)), _load_scales(p_s, entry, i_round, H, WIDTH, C, B)


@gluon.jit
def _load_scales(p_s, entry, i_round, H: gl.constexpr, WIDTH: gl.constexpr, C: gl.constexpr, B: gl.constexpr):
    """Scales of a round of chunks."""
    CHUNKS: gl.constexpr = WIDTH // 64
    expert = entry & 0xFFFF
    if CHUNKS % (C * B) != 0:
        expert = gl.convert_layout(expert, scale_layout(B), assert_trivial=True)
    return gl.load(p_s + (expert * (H * WIDTH // 32) + _chunk(i_round, CHUNKS, C, B, scale_layout(B)) * 2))


@gluon.jit
def _load_act(p_act, entry, i_round, token, T, num_chunks, WIDTH: gl.constexpr, C: gl.constexpr, B: gl.constexpr):
    """Activations of a round of chunks, the first and the last four of each lane's eight words; zeros of who did not choose."""
    is_chunk = i_round * (C * B) + places(C * B, 1, word_layout(B)) < num_chunks
    is_chosen = (((entry >> 32).to(gl.int32) >> token & 1) != 0) & is_chunk
    slot = (entry >> 16).to(gl.int32) & 0xFFFF
    p_act += slot * T * (WIDTH // 2) + _chunk(i_round, WIDTH // 64, C, B, word_layout(B)) * 32
    return gl.load(p_act, mask=is_chosen, other=0), gl.load(p_act + 4, mask=is_chosen, other=0)
