"""The twins of norms, rotation with cache write, activation and segment attention against float64."""

import math
from itertools import pairwise

import pytest
import torch

from server.kernels.norm import add_rms_norm, gemma_rms_norm
from server.kernels.qkv_norm_rope_cache import qkv_norm_rope_cache
from server.kernels.swiglu import swiglu_oai
from server.kernels.vision_attention import segment_attention
from tests.paged import paged_case

EPS = 1e-6


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference_norm(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + weight.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gemma_rms_norm(dtype):
    x, weight = randn(7, 3, 100, dtype=dtype), randn(100, seed=1, dtype=dtype) * 0.3
    normed = gemma_rms_norm(x, weight, EPS)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed, reference_norm(x, weight).to(dtype), atol=1e-6, rtol=2 * torch.finfo(dtype).eps)


def test_gemma_rms_norm_of_large_and_of_zero_rows():
    x = torch.stack((torch.full((64,), 300.0), torch.zeros(64))).to(torch.float16)
    normed = gemma_rms_norm(x, torch.zeros(64, dtype=torch.float16), EPS)
    assert normed[0].tolist() == [1.0] * 64
    assert normed[1].tolist() == [0.0] * 64


def test_add_rms_norm_normalises_the_rounded_sum():
    x, residual, weight = (randn(63, 100, seed=i, dtype=torch.bfloat16) for i in range(3))
    kept = residual.clone()
    normed, new_residual = add_rms_norm(x, residual, weight[0], EPS)
    assert torch.equal(new_residual, x + kept)
    assert torch.equal(normed, gemma_rms_norm(x + kept, weight[0], EPS))


HEADS, KV_HEADS, DIM, INDEX_HEADS, INDEX_DIM, ROTARY, PAGE = 6, 2, 24, 2, 20, 12, 16


def table(num_positions):
    frequencies = 10000.0 ** (-torch.arange(0, ROTARY, 2) / ROTARY)
    angles = torch.arange(num_positions)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


def reference_heads(x, weight, position):
    """One token's heads [H, D]: norm, then a rotation by complex numbers."""
    x = reference_norm(x, weight)
    half = ROTARY // 2
    angles = position * 10000.0 ** (-torch.arange(0, ROTARY, 2).double() / ROTARY)
    turned = torch.complex(x[:, :half], x[:, half:ROTARY]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag, x[:, ROTARY:]), -1)


@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qkv_norm_rope_cache(is_sparse, dtype):
    case = paged_case([1, 1, 37, 2], [50, 1, 100, 2], PAGE)
    batch, num_tokens = case.batch, 41
    widths = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM] + [INDEX_HEADS * INDEX_DIM, INDEX_DIM] * is_sparse
    qkv = randn(num_tokens, sum(widths), dtype=dtype)
    q_norm, k_norm = (randn(DIM, seed=s, dtype=dtype) * 0.3 for s in (1, 2))
    index_norms = [randn(INDEX_DIM, seed=s, dtype=dtype) * 0.3 for s in (3, 4)] if is_sparse else [None, None]
    kv_lane = torch.full((case.num_pages, KV_HEADS, 2, PAGE, DIM), math.nan, dtype=dtype)
    index_lane = torch.full((case.num_pages, PAGE, INDEX_DIM), math.nan, dtype=dtype) if is_sparse else None

    q, index_q = qkv_norm_rope_cache(qkv, q_norm, k_norm, *index_norms, table(128), batch, kv_lane, index_lane, HEADS, EPS)

    assert q.shape == (num_tokens, HEADS, DIM)
    assert q.dtype == dtype
    assert (index_q is not None) == is_sparse
    tolerance = {"atol": 1e-5, "rtol": 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps}
    parts = qkv.split(widths, dim=1)
    for t, (position, slot) in enumerate(zip(batch.positions.tolist(), batch.slot_mapping.tolist(), strict=True)):
        page, offset = divmod(slot, PAGE)

        def check(ours, part, weight, t=t, position=position):
            heads = parts[part][t].reshape(-1, len(weight))
            torch.testing.assert_close(ours, reference_heads(heads, weight, position).to(dtype), **tolerance)

        check(q[t], 0, q_norm)
        check(kv_lane[page, :, 0, offset], 1, k_norm)
        assert torch.equal(kv_lane[page, :, 1, offset], parts[2][t].view(KV_HEADS, DIM))
        if is_sparse:
            check(index_q[t], 3, index_norms[0])
            check(index_lane[page, offset][None], 4, index_norms[1])
    written = torch.zeros(case.num_pages * PAGE, dtype=torch.bool)
    written[batch.slot_mapping] = True
    assert torch.equal(kv_lane.isnan().all(-1).all(2).all(1).flatten(), ~written), "only the step's slots are written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_oai(dtype):
    gate, up = (randn(63, 100, seed=s, dtype=dtype) * 8 for s in (0, 1))
    g, u = gate.double().clamp(max=7.0), up.double().clamp(-7.0, 7.0)
    expected = g / (1 + (-1.702 * g).exp()) * (u + 1.0)
    tolerance = {"atol": 1e-5, "rtol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(swiglu_oai(gate, up, 1.702, 1.0, 7.0), expected.to(dtype), **tolerance)


def test_swiglu_oai_clamps_the_gate_from_above_only():
    gate, up = torch.tensor([-20.0, 9.0]), torch.tensor([0.0, -9.0])
    low, high = swiglu_oai(gate, up, 0.1, 1.0, 7.0).tolist()
    assert low == pytest.approx(-20.0 / (1 + math.exp(2.0)))
    assert high == pytest.approx(7.0 / (1 + math.exp(-0.7)) * -6.0)


def test_segment_attention():
    bounds = [0, 5, 6, 23]
    q, k, v = (randn(23, 3, 10, seed=s) for s in range(3))
    out = segment_attention(q, k, v, torch.tensor(bounds, dtype=torch.int32))
    for begin, end in pairwise(bounds):
        for head in range(3):
            query, key, value = (x[begin:end, head].double() for x in (q, k, v))
            expected = (query @ key.T / 10**0.5).softmax(-1) @ value
            torch.testing.assert_close(out[begin:end, head].double(), expected, atol=1e-5, rtol=1e-5)
