"""The first product of `moe_few_mxfp8`: gate and up, SwiGLU-OAI, and the weight of the choice."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from server.kernels.direct_launch import direct_launch
from server.kernels.few_operands import add_mxfp8, places, scale_layout, word_layout
from server.kernels.launch import wait_for_inputs, wait_for_inputs_only
from server.kernels.moe_tiles import swiglu


@direct_launch
@gluon.jit(do_not_specialize=["T", "num_pairs", "shared_expert"])
def few_gate_up_kernel(
    x_ptr, w_ptr, scales_ptr, ids_ptr, weights_ptr, act_ptr, T, num_pairs, shared_expert, alpha, beta, limit, scaling, stride_x,
    H: gl.constexpr, WIDTH: gl.constexpr, TOPK: gl.constexpr, HAS_SHARED: gl.constexpr, MAX_PAIRS: gl.constexpr,
    J: gl.constexpr, C: gl.constexpr, B: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid (WIDTH / 4 J, slots): the shared expert's slot is the first, then come those of (token, choice).

    act is [slots, T, WIDTH]; the first of an expert's slots gets rows of the tokens that chose it, other rows stay unwritten.
    """
    i_slot = gl.program_id(1)
    i_pair = i_slot - HAS_SHARED
    expert = shared_expert
    chosen = (1 << T) - 1  # a bit for each token
    if i_pair >= 0:
        wait_for_inputs_only(PDL)
        o_p = gl.arange(0, MAX_PAIRS, layout=gl.BlockedLayout([1], [32], [B], [0]))
        expert = gl.load(ids_ptr + i_pair)
        is_same = gl.load(ids_ptr + o_p, mask=o_p < num_pairs, other=-1) == expert
        chosen = gl.sum(gl.where(is_same, 1 << o_p // TOPK, 0), 0)
    if (chosen & ((1 << gl.maximum(i_pair, 0) // TOPK) - 1)) != 0:
        return

    w_layout: gl.constexpr = word_layout(B)
    s_layout: gl.constexpr = scale_layout(B)
    i_n = gl.program_id(0) * (4 * J)
    row = expert.to(gl.int64) * (2 * WIDTH) + i_n
    w_row = places(J, 0, w_layout) % 2 * WIDTH + places(J, 0, w_layout) // 2 * 8 + places(8, 2, w_layout)
    s_row = places(J, 0, s_layout) % 2 * WIDTH + places(J, 0, s_layout) // 2 * 8 + places(8, 2, s_layout)
    w_column = places(C * B, 1, w_layout) * 16 + places(16, 3, w_layout)
    s_column = places(C * B, 1, s_layout) * 2 + places(4, 3, s_layout) // 2
    x_column = places(C * B, 1, w_layout) * 32 + places(16, 3, w_layout) // 4 * 8 + places(16, 3, w_layout) % 4
    p_w = w_ptr + row * (H // 4) + (w_row * (H // 4) + w_column)
    p_s = scales_ptr + row * (H // 32) + (s_row * (H // 32) + s_column)
    p_act = act_ptr + i_slot * T * WIDTH + i_n
    _gate_up(
        x_ptr, p_w, p_s, w_column, s_column, x_column, stride_x, ids_ptr, weights_ptr, p_act, expert, chosen, i_pair < 0,
        alpha, beta, limit, scaling, H, WIDTH, TOPK, J, C, B, PDL,
    )  # fmt: skip


@gluon.jit
def _gate_up(
    x_ptr, p_w, p_s, w_column, s_column, x_column, stride_x, ids_ptr, weights_ptr, p_act, expert, chosen, is_shared,
    alpha, beta, limit, scaling, H: gl.constexpr, WIDTH: gl.constexpr, TOPK: gl.constexpr,
    J: gl.constexpr, C: gl.constexpr, B: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One tile for the chosen tokens, up to eight; two rounds of inputs are in flight, in registers that take turns."""
    NUM_ROUNDS: gl.constexpr = (H + 128 * C * B - 1) // (128 * C * B) * 2
    weights_a, scales_a = _load_weights(p_w, p_s, w_column, s_column, 0, H, C * B)
    weights_b, scales_b = _load_weights(p_w, p_s, w_column, s_column, 1, H, C * B)
    wait_for_inputs(PDL)
    x_row, _ = _nth_bit(chosen, places(8, 2, word_layout(B)))  # columns that nobody reads repeat a row
    p_x = x_ptr + (x_row * stride_x + x_column)
    first_a, last_a = _load_rows(p_x, x_column, 0, H, C * B)
    first_b, last_b = _load_rows(p_x, x_column, 1, H, C * B)
    sums = gl.zeros([B, J * 8, 8], gl.float32, layout=gl.NVMMADistributedLayout([2, 0], [B, 1, 1], [1, 16, 8]))
    for i_round in range(2, NUM_ROUNDS, 2):
        sums = add_mxfp8(weights_a, scales_a, first_a, last_a, sums, C)
        weights_a, scales_a = _load_weights(p_w, p_s, w_column, s_column, i_round, H, C * B)
        first_a, last_a = _load_rows(p_x, x_column, i_round, H, C * B)
        sums = add_mxfp8(weights_b, scales_b, first_b, last_b, sums, C)
        weights_b, scales_b = _load_weights(p_w, p_s, w_column, s_column, i_round + 1, H, C * B)
        first_b, last_b = _load_rows(p_x, x_column, i_round + 1, H, C * B)
    sums = add_mxfp8(weights_a, scales_a, first_a, last_a, sums, C)
    sums = add_mxfp8(weights_b, scales_b, first_b, last_b, sums, C)

    rows: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, B], [0, 1])
    gate, up = gl.split(gl.permute(gl.reshape(gl.sum(sums, 0), [J // 2, 2, 8, 8]), [0, 2, 3, 1]))
    gate = gl.convert_layout(gl.reshape(gate, [J * 4, 8]), rows)
    up = gl.convert_layout(gl.reshape(up, [J * 4, 8]), rows)
    act = swiglu(gate, up, alpha, beta, limit)
    o_n = gl.arange(0, J * 4, layout=gl.SliceLayout(1, rows))
    token, exists = _nth_bit(chosen, gl.arange(0, 8, layout=gl.SliceLayout(0, rows)))
    if not is_shared:
        act = act * (_choice_weight(ids_ptr, weights_ptr, token, expert, TOPK) * scaling)[None, :]
    gl.store(p_act + (token[None, :] * WIDTH + o_n[:, None]), act.to(gl.bfloat16), mask=exists[None, :])


@gluon.jit
def _load_weights(p_w, p_s, w_column, s_column, i_round, H: gl.constexpr, CB: gl.constexpr):
    """Words and scales of a round of CB chunks; zeros behind the last input."""
    if H % (128 * CB) == 0:
        return gl.load(p_w + i_round * (CB * 16)), gl.load(p_s + i_round * (CB * 2))
    else:
        is_word = i_round * (CB * 16) + w_column < H // 4
        is_scale = i_round * (CB * 2) + s_column < H // 32
        weights = gl.load(p_w + i_round * (CB * 16), mask=is_word, other=0)
        return weights, gl.load(p_s + i_round * (CB * 2), mask=is_scale, other=0)


@gluon.jit
def _load_rows(p_x, x_column, i_round, H: gl.constexpr, CB: gl.constexpr):
    """The same of activations: the first and the last four of each lane's eight words."""
    p_x += i_round * (CB * 32)
    if H % (128 * CB) == 0:
        return gl.load(p_x), gl.load(p_x + 4)
    else:
        is_word = i_round * (CB * 32) + x_column < H // 2
        return gl.load(p_x, mask=is_word, other=0), gl.load(p_x + 4, mask=is_word, other=0)


@gluon.jit
def _nth_bit(bits, n):
    """Place of the n-th lowest set bit for n up to 7, or of the last one, and whether there is an n-th."""
    exists = n >= 0
    for k in gl.static_range(7):
        rest = bits & (bits - 1)
        exists = exists & ((n <= k) | (rest != 0))
        bits = gl.where((n > k) & (rest != 0), rest, bits)
    return ((bits & -bits).to(gl.float32).to(gl.int32, bitcast=True) >> 23) - 127, exists


@gluon.jit
def _choice_weight(ids_ptr, weights_ptr, token, expert, TOPK: gl.constexpr):
    """The weights of the choices of `expert` by tokens."""
    weight = gl.to_tensor(0.0)
    for j in gl.static_range(TOPK):
        is_choice = gl.load(ids_ptr + token * TOPK + j) == expert
        weight = weight + gl.load(weights_ptr + token * TOPK + j, mask=is_choice, other=0.0)
    return weight
