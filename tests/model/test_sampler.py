import math

import pytest
import torch

from server.messages import SamplingParams
from server.model.pending_sample import NO_CHOICE
from server.model.sampler import Sampler
from server.model.sampling_slot import SamplingRow
from server.scheduler.plan import NewSequence, SampledToken, SlotFailure

VOCAB = 50


@pytest.fixture
def logits():
    return 2 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5))


def sampler_with(*slots, prompt=(1, 2, 3), output=(), base_seed=99):
    """A sampler whose slot i has the parameters `slots[i]`."""
    sampler = Sampler(8, VOCAB, torch.device("cpu"), base_seed)
    for slot, params in enumerate(slots):
        sampler.admit(NewSequence(slot, f"r{slot}", [*prompt, *output], len(prompt), params, ()))
    return sampler


def choose(sampler, logits, slots=(0,), position=3):
    pending = sampler.launch(logits[: len(slots)].clone(), [SamplingRow(slot, position) for slot in slots])
    sampled, failures = pending.wait()
    assert not failures
    assert pending.token_ids.tolist() == [token.token_id for token in sampled]
    return pending.token_ids.tolist()


def params(**values):
    return SamplingParams(max_tokens=100, **values)


def test_temperature_zero_is_the_best_token_whatever_else_is_set(logits):
    sampler = sampler_with(params(temperature=0, top_k=5, top_p=0.5, seed=3))
    assert choose(sampler, logits) == [logits[0].argmax().item()]


def test_mixed_rows_choose_as_they_would_alone(logits):
    mixed = [params(temperature=0), params(seed=1), params(seed=2, top_p=0.8, top_k=9), params(seed=3, presence_penalty=1.0)]
    together = choose(sampler_with(*mixed), logits, slots=(0, 1, 2, 3))
    for slot, expected in enumerate(together):
        assert choose(sampler_with(*mixed), logits[slot : slot + 1], slots=(slot,)) == [expected]


def test_a_seed_repeats_and_its_stream_moves_with_the_position(logits):
    stream = [choose(sampler_with(params(seed=7)), logits, position=position) for position in range(3, 40)]
    assert stream == [choose(sampler_with(params(seed=7)), logits, position=position) for position in range(3, 40)]
    assert len({ids[0] for ids in stream}) > 3


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 - 1, -(2**63)])
def test_any_64_bit_seed_is_accepted(logits, seed):
    assert choose(sampler_with(params(seed=seed)), logits) == choose(sampler_with(params(seed=seed)), logits)


def test_without_a_seed_requests_differ_from_each_other_and_from_run_to_run(logits):
    row = logits[:1]
    slots = [params() for _ in range(8)]
    first, second = sampler_with(*slots, base_seed=1), sampler_with(*slots, base_seed=2)
    streams = [
        tuple(choose(sampler, row, (slot,), position)[0] for position in range(3, 30))
        for sampler in (first, second)
        for slot in range(8)
    ]
    assert len(set(streams)) == 16


def test_a_resumed_sequence_without_a_seed_continues_its_stream(logits):
    sampler = sampler_with(params())
    expected = choose(sampler, logits, position=6)
    sampler.release(0)
    sampler.admit(NewSequence(0, "r0", [1, 2, 3, 4, 5, 6], 3, params(), ()))
    assert choose(sampler, logits, position=6) == expected


def test_logit_bias_moves_the_choice_and_ignores_ids_beyond_the_logits(logits):
    sampler = sampler_with(params(temperature=0, logit_bias=((17, 100.0), (VOCAB, 1000.0), (200_025, 1000.0))))
    assert choose(sampler, logits) == [17]


def test_min_tokens_masks_stop_ids_until_there_are_enough(logits):
    best, second = logits[0].topk(2).indices.tolist()
    sampler = sampler_with(params(temperature=0, min_tokens=2, stop_token_ids=(best, VOCAB + 5)))
    assert [choose(sampler, logits, position=position)[0] for position in (3, 4, 5)] == [second, second, best]


def test_repetition_penalty_covers_the_prompt_and_tolerates_placeholder_ids():
    logits = torch.full((1, VOCAB), 1.0)
    logits[0, 2], logits[0, 9] = 4.0, 3.0
    assert choose(sampler_with(params(temperature=0)), logits) == [2]
    assert choose(sampler_with(params(temperature=0, repetition_penalty=2.0), prompt=(1, 2, 200_025)), logits) == [9]


def test_frequency_penalty_counts_what_was_generated_and_not_the_prompt():
    logits = torch.full((1, VOCAB), 0.0)
    logits[0, 2], logits[0, 9] = 1.0, 0.5
    sampler = sampler_with(params(temperature=0, frequency_penalty=0.2))
    assert [choose(sampler, logits, position=3 + i)[0] for i in range(6)] == [2, 2, 2, 9, 2, 9]


def test_penalties_of_a_resumed_sequence_count_its_output():
    logits = torch.full((1, VOCAB), 0.0)
    logits[0, 2], logits[0, 9] = 1.0, 0.5
    sampler = sampler_with(params(temperature=0, frequency_penalty=0.2), output=(2, 2, 2))
    assert choose(sampler, logits, position=6) == [9]


def test_a_row_that_is_not_finite_fails_alone(logits):
    expected = choose(sampler_with(params(seed=1), params(temperature=0), params(top_k=3, seed=2)), logits, (0, 1, 2))
    sampler = sampler_with(params(seed=1), params(temperature=0), params(top_k=3, seed=2))
    logits[1, 7] = math.nan
    sampled, failures = sampler.launch(logits[:3], [SamplingRow(slot, 3) for slot in range(3)]).wait()
    assert [failure.slot for failure in failures] == [1]
    assert [(token.slot, token.token_id) for token in sampled] == [(0, expected[0]), (2, expected[2])]


def test_rules_that_leave_nothing_fail_their_row_alone(logits):
    sampler = sampler_with(params(allowed_token_ids=(4,), bad_words=((4,),)), params(temperature=0, allowed_token_ids=(4,)))
    sampled, failures = sampler.launch(logits[:2], [SamplingRow(0, 3), SamplingRow(1, 3)]).wait()
    assert failures == (SlotFailure(0, NO_CHOICE),)
    assert sampled == (SampledToken(1, 4),)


def test_every_rule_of_one_row_at_once():
    logits = torch.arange(VOCAB, 0, -1).float()[None]  # id 0 is the best, then 1, ...
    rules = params(
        temperature=0,
        logit_bias=((9, 10.0),),  # from 41 to 51
        presence_penalty=4.0,
        allowed_token_ids=tuple(range(1, 20)),
        bad_words=((2,),),
        min_tokens=3,
        stop_token_ids=(3,),
    )
    sampler = sampler_with(rules)
    # 9 falls to 47 and 1 (49) to 45. Not 0 (50), which is not allowed, nor 2 (48), a bad word; 3 (47) waits.
    assert [choose(sampler, logits, position=3 + i)[0] for i in range(4)] == [9, 1, 9, 3]


def test_logprobs_come_from_the_raw_logits_and_only_where_asked(logits):
    sampler = sampler_with(
        params(temperature=0, logit_bias=((17, 100.0),), num_logprobs=3),
        params(seed=1),
        params(temperature=0, num_logprobs=0),
    )
    (first, second, third), _ = sampler.launch(logits[:3], [SamplingRow(slot, 3) for slot in range(3)]).wait()
    expected = torch.log_softmax(logits, dim=-1)
    assert first.token_id == 17
    assert first.logprobs.logprob == pytest.approx(expected[0, 17].item(), abs=1e-5)
    assert list(first.logprobs.top_ids) == expected[0].topk(3).indices.tolist()
    assert list(first.logprobs.top_logprobs) == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-5)
    assert second.logprobs is None
    assert third.logprobs.logprob == pytest.approx(expected[2].max().item(), abs=1e-5)
    assert third.logprobs.top_ids == ()


def test_the_logits_are_not_changed(logits):
    before = logits.clone()
    sampler = sampler_with(
        params(temperature=0, logit_bias=((17, 100.0),), presence_penalty=1.0, min_tokens=3, stop_token_ids=(4,))
    )
    choose(sampler, logits)
    sampler.launch(logits[:1], [SamplingRow(0, 4)]).wait()
    assert torch.equal(logits, before)


def test_a_slot_starts_afresh_for_its_next_sequence(logits):
    sampler = sampler_with(
        params(temperature=0, logit_bias=((17, 100.0),), frequency_penalty=2.0, min_tokens=9, stop_token_ids=(1,))
    )
    choose(sampler, logits)
    sampler.release(0)
    sampler.release(0)
    sampler.admit(NewSequence(0, "next", [1], 1, params(temperature=0), ()))
    assert choose(sampler, logits) == [logits[0].argmax().item()]


def test_waiting_twice_gives_the_same_result_and_takes_the_token_once(logits):
    best, second = logits[0].topk(2).indices.tolist()
    sampler = sampler_with(params(temperature=0, bad_words=((best, best),)))
    pending = sampler.launch(logits[:1], [SamplingRow(0, 3)])
    assert pending.wait() is pending.wait()
    assert [choose(sampler, logits, position=position) for position in (4, 5)] == [[second], [best]]


def test_a_sample_of_a_slot_that_was_given_on_leaves_the_next_sequence_alone(logits):
    best = int(logits[0].argmax())
    sampler = sampler_with(params(temperature=0, bad_words=((best, best),)))
    pending = sampler.launch(logits[:1], [SamplingRow(0, 3)])
    sampler.release(0)
    sampler.admit(NewSequence(0, "next", [1, 2, 3], 3, params(temperature=0, bad_words=((best, best),)), ()))
    sampled, failures = pending.wait()
    assert [token.token_id for token in sampled] == [best]
    assert not failures
    assert choose(sampler, logits) == [best]


def test_only_rules_about_earlier_tokens_need_history():
    sampler = sampler_with(
        params(),
        params(min_tokens=5, stop_token_ids=(1,), allowed_token_ids=(1, 2), bad_words=((4,),)),
        params(bad_words=((4, 5),)),
    )
    assert [sampler.needs_history([SamplingRow(slot, 3)]) for slot in range(3)] == [False, False, True]
    assert sampler.needs_history([SamplingRow(slot, 3) for slot in range(3)])
