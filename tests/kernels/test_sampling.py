import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.kernels.sampling import (
    SamplingBatch,
    logprobs,
    sample_greedy,
    sample_plain,
    uniform,
)
from server.kernels.sampling import sample_filtered as sample_ranked


def sample_filtered(logits, batch):
    """Ranks every logit, as rows without top_k need it."""
    return sample_ranked(logits, batch, logits.shape[1])


def batch_of(num_rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, position=None):
    def full(value, dtype):
        return torch.full((num_rows,), value, dtype=dtype)

    return SamplingBatch(
        temperature=full(temperature, torch.float32),
        top_k=full(top_k, torch.int64),
        top_p=full(top_p, torch.float32),
        min_p=full(min_p, torch.float32),
        seed=torch.arange(num_rows) if seed is None else seed,
        position=full(7, torch.int64) if position is None else position,
    )


def draws(probabilities, num_draws=20_000, draw=sample_filtered, **parameters):
    """Relative frequencies of the ids over many seeds."""
    logits = torch.tensor(probabilities).log().expand(num_draws, -1).contiguous()
    ids = draw(logits, batch_of(num_draws, **parameters))
    return torch.bincount(ids, minlength=len(probabilities)) / num_draws


def splitmix64(x):
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_the_generator_is_splitmix64(seed):
    expected = splitmix64(splitmix64(seed % 2**64) ^ 12345) >> 32
    assert uniform(torch.tensor([seed]), torch.tensor([12345])).item() == expected / 2**32


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions():
    n = torch.arange(50_000)
    for numbers in (uniform(n, torch.full_like(n, 3)), uniform(torch.full_like(n, 3), n)):
        assert ((numbers >= 0) & (numbers < 1)).all()
        counts = torch.histc(numbers.float(), bins=50, min=0, max=1)
        chi_squared = ((counts - 1000) ** 2 / 1000).sum()
        assert chi_squared < 100  # 49 degrees of freedom: p < 1e-4


@pytest.mark.parametrize("draw", [sample_plain, sample_filtered])
def test_frequencies_follow_the_distribution(draw):
    probabilities = [0.5, 0.05, 0.25, 0.2]
    assert torch.allclose(draws(probabilities, draw=draw), torch.tensor(probabilities), atol=0.015)


def test_temperature_sharpens():
    expected = torch.tensor([0.5, 0.05, 0.25, 0.2]) ** 2
    assert torch.allclose(draws([0.5, 0.05, 0.25, 0.2], temperature=0.5), expected / expected.sum(), atol=0.015)


def test_top_k_keeps_the_k_best_and_renormalises():
    assert torch.allclose(draws([0.5, 0.05, 0.25, 0.2], top_k=2), torch.tensor([2 / 3, 0, 1 / 3, 0]), atol=0.015)


@pytest.mark.parametrize("top_k", [4, 5, 10**6])
def test_top_k_beyond_the_vocabulary_is_off(top_k):
    assert torch.equal(draws([0.5, 0.05, 0.25, 0.2], top_k=top_k), draws([0.5, 0.05, 0.25, 0.2]))


def test_top_p_keeps_the_token_that_crosses_the_mass():
    assert torch.allclose(draws([0.5, 0.05, 0.25, 0.2], top_p=0.6), torch.tensor([2 / 3, 0, 1 / 3, 0]), atol=0.015)


def test_top_p_counts_the_mass_that_top_k_left():
    # top_k leaves 0.5 and 0.3, renormalised 0.625 and 0.375: a mass of 0.6 is reached by the first alone.
    assert draws([0.5, 0.3, 0.2], top_k=2, top_p=0.6).tolist() == [1, 0, 0]


def test_a_tiny_top_p_keeps_the_best_token():
    assert draws([0.2, 0.5, 0.3], top_p=1e-9).tolist() == [0, 1, 0]


def test_min_p_is_relative_to_the_best_token():
    assert torch.allclose(draws([0.5, 0.05, 0.26, 0.19], min_p=0.5), torch.tensor([0.5 / 0.76, 0, 0.26 / 0.76, 0]), atol=0.015)


def test_equal_candidates_are_ranked_by_id():
    assert draws([0.25, 0.25, 0.25, 0.25], top_k=1).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("draw", [sample_plain, sample_filtered])
@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e6])
def test_extreme_temperatures_stay_valid(draw, temperature):
    logits = torch.tensor([[3.0, 80.0, -50.0, 79.0]]).expand(200, -1).contiguous()
    ids = draw(logits, batch_of(200, temperature=temperature))
    assert set(ids.tolist()) <= ({1} if temperature < 1 else {0, 1, 2, 3})


@pytest.mark.parametrize("draw", [sample_plain, sample_filtered])
def test_a_masked_token_is_never_drawn(draw):
    logits = torch.zeros(5000, 5)
    logits[:, [0, 4]] = -math.inf
    assert set(draw(logits, batch_of(5000)).tolist()) == {1, 2, 3}


@pytest.mark.parametrize("draw", [sample_plain, sample_filtered])
def test_a_row_that_is_not_finite_leaves_the_others_alone(draw):
    logits = torch.randn(6, 33, generator=torch.Generator().manual_seed(1))
    alone = draw(logits, batch_of(6))
    broken = logits.clone()
    broken[1], broken[3, 5], broken[4] = math.nan, math.inf, -math.inf
    ids = draw(broken, batch_of(6))
    assert ids[[0, 2, 5]].tolist() == alone[[0, 2, 5]].tolist()
    assert ((ids >= 0) & (ids < 33)).all()


def test_greedy_takes_the_lowest_id_on_ties():
    assert sample_greedy(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([sample_plain, sample_filtered]), st.integers(1, 9))
def test_a_row_does_not_depend_on_its_batch_mates(seed, draw, num_rows):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_rows, 101, generator=generator)
    batch = SamplingBatch(
        temperature=0.2 + 2 * torch.rand(num_rows, generator=generator),
        top_k=torch.randint(0, 20, (num_rows,), generator=generator),
        top_p=0.3 + 0.7 * torch.rand(num_rows, generator=generator),
        min_p=0.2 * torch.rand(num_rows, generator=generator),
        seed=torch.randint(-(2**62), 2**62, (num_rows,), generator=generator),
        position=torch.randint(0, 10**6, (num_rows,), generator=generator),
    )
    together = draw(logits, batch)
    for i in range(num_rows):
        row = SamplingBatch(**{field.name: getattr(batch, field.name)[i : i + 1] for field in fields(batch)})
        assert draw(logits[i : i + 1], row).item() == together[i]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(20, 120))
def test_ranking_fewer_candidates_changes_nothing(seed, num_candidates):
    generator = torch.Generator().manual_seed(seed)
    # Coarse logits, as bfloat16 gives them: many are equal, also at the edge of top_k.
    logits = torch.randint(-6, 6, (40, 101), generator=generator).float()
    batch = batch_of(40, top_p=0.9, seed=torch.arange(40) + seed)
    batch = replace(batch, top_k=torch.randint(1, 21, (40,), generator=generator))
    assert torch.equal(sample_ranked(logits, batch, num_candidates), sample_ranked(logits, batch, 101))


def test_equal_logits_at_the_edge_of_top_k_go_by_id():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]]).expand(3000, -1).contiguous()
    assert set(sample_ranked(logits, batch_of(3000, top_k=3), 3).tolist()) == {0, 1, 2}


def test_logprobs_are_of_the_raw_distribution():
    probabilities = torch.tensor([[0.1, 0.6, 0.3]])
    choice, ids, top = logprobs(probabilities.log() + 5, torch.tensor([2]), 2)
    assert math.exp(choice.item()) == pytest.approx(0.3)
    assert ids.tolist() == [[1, 2]]
    assert top.exp()[0].tolist() == pytest.approx([0.6, 0.3])


def test_logprobs_of_half_precision_logits_are_not_rounded_to_it():
    logits = torch.randn(3, 301, generator=torch.Generator().manual_seed(0)).bfloat16()
    choices = torch.tensor([4, 5, 6])
    for ours, expected in zip(logprobs(logits, choices, 5), logprobs(logits.float(), choices, 5), strict=True):
        assert torch.equal(ours, expected)


def test_no_alternatives_and_more_than_the_vocabulary():
    logits = torch.zeros(1, 3)
    assert logprobs(logits, torch.tensor([0]), 0)[1].shape == (1, 0)
    assert logprobs(logits, torch.tensor([0]), 9)[1].shape == (1, 3)
