from dataclasses import replace

import pytest
import torch

from server.kernels.qkv_norm_rope_cache_triton import qkv_norm_rope_cache_triton
from tests.paged import paged_case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, EPS = 16, 1e-6
SHAPES = [
    pytest.param((4, 2, 2, 32, 16, 8), id="index heads of another size"),
    pytest.param((6, 1, 3, 16, 16, 16), id="kinds meet in a program, all dimensions rotated"),
    pytest.param((3, 3, 1, 8, 8, 4), id="odd numbers of heads"),
]


class Layer:
    """Random inputs of one layer; heads = (Hq, Hkv, Hi, D, Di, rotary)."""

    def __init__(self, heads, case, dtype=torch.float32, sparse=True):
        self.num_heads, self.num_kv_heads, self.num_index, self.dim, self.index_dim, rotary = heads
        batch = self.batch = case.batch
        generator = torch.Generator().manual_seed(11)

        def random(*shape):
            return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

        self.main = (self.num_heads + 2 * self.num_kv_heads) * self.dim
        self.sparse = sparse
        self.qkv = random(len(batch.positions), self.main + (self.num_index + 1) * self.index_dim * sparse)
        self.q_norm, self.k_norm = random(self.dim), random(self.dim)
        self.index_norms = (random(self.index_dim), random(self.index_dim)) if sparse else (None, None)
        angles = torch.arange(int(batch.positions.max()) + 1)[:, None] * 0.3 ** torch.arange(rotary // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1).float().to(DEVICE)
        page = batch.page_size
        self.kv_lane = torch.full((case.num_pages, self.num_kv_heads, 2, page, self.dim), torch.nan, dtype=dtype, device=DEVICE)
        lane = torch.full((case.num_pages, page, self.index_dim), torch.nan, dtype=dtype, device=DEVICE)
        self.index_lane = lane if sparse else None

    def run(self):
        return qkv_norm_rope_cache_triton(
            self.qkv,
            self.q_norm,
            self.k_norm,
            *self.index_norms,
            self.cos_sin,
            self.batch,
            self.kv_lane,
            self.index_lane,
            self.num_heads,
            EPS,
        )

    def expected(self, columns, dim, weight):
        """Heads of `columns`, normed and rotated in float64: [T, H, dim]."""
        x = columns.double().reshape(len(columns), -1, dim)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + weight.double())
        half = self.cos_sin.shape[1] // 2
        cos, sin = self.cos_sin[self.batch.positions].double()[:, None].split(half, dim=-1)
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)
        return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def check(layer, tolerance):
    q, index_q = layer.run()
    dim, kv_width = layer.dim, layer.num_kv_heads * layer.dim
    columns = torch.split(layer.qkv[:, : layer.main], (layer.num_heads * dim, kv_width, kv_width), dim=1)

    def close(actual, expected):
        torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)

    close(q, layer.expected(columns[0], dim, layer.q_norm))
    slots = layer.batch.slot_mapping
    written = slots >= 0
    pages, offsets = slots[written] // layer.batch.page_size, slots[written] % layer.batch.page_size
    close(layer.kv_lane[pages, :, 0, offsets], layer.expected(columns[1], dim, layer.k_norm)[written])
    assert torch.equal(layer.kv_lane[pages, :, 1, offsets], columns[2].reshape(len(q), -1, dim)[written])
    layer.kv_lane[pages, :, :, offsets] = torch.nan
    assert layer.kv_lane.isnan().all()  # nothing else was written
    if not layer.sparse:
        assert index_q is None
        return
    index = layer.qkv[:, layer.main :]
    close(index_q, layer.expected(index[:, : -layer.index_dim], layer.index_dim, layer.index_norms[0]))
    keys = layer.expected(index[:, -layer.index_dim :], layer.index_dim, layer.index_norms[1])[:, 0]
    close(layer.index_lane[pages, offsets], keys[written])
    layer.index_lane[pages, offsets] = torch.nan
    assert layer.index_lane.isnan().all()


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_equals_the_float64_reference_and_writes_only_its_slots(heads, sparse):
    check(Layer(heads, paged_case([1, 1, 5], [30, 17, 21], PAGE, device=DEVICE), sparse=sparse), 1e-5)


def test_half_precision_is_rounded_once():
    check(Layer((4, 2, 2, 32, 16, 8), paged_case([1, 3], [9, 19], PAGE, device=DEVICE), dtype=torch.float16), 2e-3)


def test_tokens_without_a_slot_are_not_cached():
    case = paged_case([1, 1, 1], [30, 17, 5], PAGE, device=DEVICE)
    slots = case.batch.slot_mapping.clone()
    slots[1] = -1
    check(Layer((4, 2, 2, 32, 16, 8), replace(case, batch=replace(case.batch, slot_mapping=slots))), 1e-5)


def test_a_row_may_be_a_slice_of_a_wider_one_and_there_may_be_no_tokens():
    layer = Layer((4, 2, 2, 32, 16, 8), paged_case([1, 2], [30, 17], PAGE, device=DEVICE))
    wide = torch.full((3, layer.qkv.shape[1] + 40), torch.nan, device=DEVICE)
    wide[:, 8:-32] = layer.qkv
    layer.qkv = wide[:, 8:-32]
    check(layer, 1e-5)
    layer.qkv = layer.qkv[:0]
    q, index_q = layer.run()
    assert q.shape == (0, 4, 32)
    assert index_q.shape == (0, 2, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("query_lens", [[1], [1] * 65, [1, 4000]])
def test_true_shapes_in_bfloat16(query_lens):
    case = paged_case(query_lens, [n + 700 for n in query_lens], 128, device=DEVICE)
    check(Layer((64, 4, 4, 128, 128, 64), case, dtype=torch.bfloat16), 2e-2)
