"""The sum over ranks with residual addition and norm on the GPU: one program per row, words of two bf16 everywhere."""

# Parameters of kernels have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from server.kernels.all_reduce_norm import EMPTY, NUM_ROUNDS, SENDER_BYTES, Mailboxes
from server.kernels.direct_launch import direct_launch
from server.kernels.integers import next_power_of_2
from server.kernels.launch import pdl_options, wait_for_inputs

_EMPTY = tl.constexpr(EMPTY)


@triton.jit
def _low(words):
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _pack(low, high):
    """Two floats, rounded to bf16, in a word."""
    high_bits = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return high_bits | (low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit
def _sendable(words):
    """The same numbers without `EMPTY`."""
    return tl.where(words == _EMPTY, 0, words)


@triton.jit
def _words_of(tensor_ptr):
    return tensor_ptr.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def _mailbox(addresses_ptr, rank):
    return tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _receive(places_ptr, wanted):
    """Read places again and again until no wanted word is missing."""
    words = tl.load(places_ptr, mask=wanted, other=0, volatile=True)
    while tl.max((words == _EMPTY).to(tl.int32)) != 0:
        words = tl.load(places_ptr, mask=wanted, other=0, volatile=True)
    return words


@triton.jit
def _send(words, place, inside, addresses_ptr, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Write a row to the same place of all other mailboxes."""
    for i in tl.static_range(1, WORLD):
        tl.store(_mailbox(addresses_ptr, (RANK + i) % WORLD) + place, words, mask=inside)


@triton.jit
def _new_residual(own, residual, places_ptr, inside, SENDER_WORDS: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
                  BLOCK_R: tl.constexpr):  # fmt: skip
    """The residual with the sum of all ranks' rows, rounded once; `places_ptr` are those of the first sender's row."""
    o_r = tl.arange(0, BLOCK_R)[:, None]
    wanted = (o_r < WORLD) & (o_r != RANK) & inside[None, :]
    words = tl.where(o_r == RANK, own[None, :], _receive(places_ptr[None, :] + o_r * SENDER_WORDS, wanted))
    low = tl.sum(_low(words), 0) + _low(residual)
    high = tl.sum(_high(words), 0) + _high(residual)
    return _sendable(_pack(low, high))


@direct_launch
@triton.jit
def _all_reduce_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    addresses_ptr,
    rounds_ptr,
    eps,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    OWNED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SENDER_WORDS: tl.constexpr,
    NUM_ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows,). Each program needs that of the same row on other ranks only, and programs start in the order of rows."""
    WORDS: tl.constexpr = DIM // 2
    row = tl.program_id(0)
    o_w = tl.arange(0, BLOCK)
    inside = o_w < WORDS
    o_row = row.to(tl.int64) * WORDS + o_w
    weight = tl.load(_words_of(weight_ptr) + o_w, mask=inside, other=0)
    mailbox_ptr = _mailbox(addresses_ptr, RANK)
    wait_for_inputs(PDL)
    turn = tl.load(rounds_ptr + row)
    now = turn * (WORLD * SENDER_WORDS) + row * WORDS + o_w
    own = _sendable(tl.load(_words_of(x_ptr) + o_row, mask=inside, other=0))
    residual = tl.load(_words_of(residual_ptr) + o_row, mask=inside, other=0)
    if OWNED:
        owner = row % WORLD
        if owner == RANK:
            total = _new_residual(own, residual, mailbox_ptr + now, inside, SENDER_WORDS, RANK, WORLD, BLOCK_R)
            _send(total, RANK * SENDER_WORDS + now, inside, addresses_ptr, RANK, WORLD)
        else:
            tl.store(_mailbox(addresses_ptr, owner) + RANK * SENDER_WORDS + now, own, mask=inside)
            total = _receive(mailbox_ptr + owner * SENDER_WORDS + now, inside)
    else:
        _send(own, RANK * SENDER_WORDS + now, inside, addresses_ptr, RANK, WORLD)
        total = _new_residual(own, residual, mailbox_ptr + now, inside, SENDER_WORDS, RANK, WORLD, BLOCK_R)
    low = _low(total)
    high = _high(total)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / DIM + eps)
    normed = _pack(low * scale * (1.0 + _low(weight)), high * scale * (1.0 + _high(weight)))
    tl.store(_words_of(out_ptr) + o_row, normed, mask=inside)
    tl.store(_words_of(total_ptr) + o_row, total, mask=inside)
    before = (turn + NUM_ROUNDS - 1) % NUM_ROUNDS * (WORLD * SENDER_WORDS) + row * WORDS + o_w
    for sender in tl.static_range(WORLD):
        if sender != RANK:
            tl.store(mailbox_ptr + sender * SENDER_WORDS + before, tl.full([BLOCK], _EMPTY, tl.int32), mask=inside)
    tl.store(rounds_ptr + row, (turn + 1) % NUM_ROUNDS)


def all_reduce_add_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, mail: Mailboxes, *, owned: bool
) -> tuple[Tensor, Tensor]:
    """(normed, new residual), both [T, D]; see `all_reduce_add_norm`."""
    num_rows, dim = x.shape
    out, total = torch.empty_like(x), torch.empty_like(x)
    block = next_power_of_2(dim // 2)
    _all_reduce_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        total,
        mail.addresses,
        mail.rounds,
        eps,
        RANK=mail.rank,
        WORLD=mail.world,
        OWNED=owned,
        DIM=dim,
        BLOCK=block,
        BLOCK_R=next_power_of_2(mail.world),
        SENDER_WORDS=SENDER_BYTES // 4,
        NUM_ROUNDS=NUM_ROUNDS,
        num_warps=max(1, min(16, block // 256)),
        **pdl_options(x.device),
    )
    return out, total
