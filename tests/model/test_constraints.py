import pytest
import torch

from server.kernels.sampling_adjust import keep_tokens
from server.messages import Grammar, GrammarKind, SamplingParams
from server.model.constraints import NO_GRAMMARS, Constraints
from server.model.sampling_slot import SamplingRow
from server.scheduler.plan import NewSequence

VOCAB = 50


@pytest.fixture
def constraints():
    return Constraints(VOCAB, torch.device("cpu"))


def admit(constraints, slot, output=(), **params):
    prompt = [1, 2, 3]
    sequence = NewSequence(slot, f"r{slot}", [*prompt, *output], len(prompt), SamplingParams(max_tokens=9, **params), ())
    constraints.admit(sequence)


def forbidden(constraints, slot=0, position=3):
    """The ids that one row may not choose."""
    limits = constraints.limits([SamplingRow(slot, position)])
    assert not limits.faults
    ids = {token_id for _, token_id in limits.forbidden}
    mask_row = constraints.mask_row(slot)
    assert limits.is_masked == (mask_row is not None)
    if mask_row is not None:
        kept = keep_tokens(torch.zeros(1, VOCAB), constraints.masks[[mask_row]])
        ids.update(kept[0].isinf().nonzero().flatten().tolist())
    return ids


def test_rows_without_rules_change_nothing(constraints):
    admit(constraints, 0)
    admit(constraints, 1, stop_token_ids=(4,))
    assert not constraints.limits([SamplingRow(slot, 3) for slot in range(3)]).change_logits


def test_rules_belong_to_their_row(constraints):
    admit(constraints, 1, allowed_token_ids=(4, 7, VOCAB + 9), min_tokens=1, stop_token_ids=(7,))
    limits = constraints.limits([SamplingRow(slot, 3) for slot in (0, 1, 2)])
    assert limits.forbidden == ((1, 7),)
    assert [constraints.mask_row(slot) is None for slot in (0, 1, 2)] == [True, False, True]
    assert forbidden(constraints, 1, position=9) == set(range(VOCAB)) - {4, 7}


def test_masks_of_many_slots_stay_apart(constraints):
    for slot in range(5):
        admit(constraints, slot, allowed_token_ids=(slot, 40 + slot))
    constraints.release(2)
    admit(constraints, 2, bad_words=((33,),))
    expected = [set(range(VOCAB)) - {slot, 40 + slot} for slot in range(5)]
    expected[2] = {33}
    assert [forbidden(constraints, slot) for slot in range(5)] == expected


def test_stop_tokens_wait_for_min_tokens(constraints):
    admit(constraints, 0, min_tokens=2, stop_token_ids=(5, 9, VOCAB))
    assert [forbidden(constraints, position=position) for position in (3, 4, 5)] == [{5, 9}, {5, 9}, set()]


def test_a_bad_word_is_stopped_at_its_last_token(constraints):
    admit(constraints, 0, bad_words=((8,), (), (4, 5), (4, 4, 6), (4, VOCAB)))
    seen = []
    for token_id in (4, 4, 5):
        seen.append(forbidden(constraints))
        constraints.follower(0)(token_id)
    assert seen == [{8}, {8, 5}, {8, 5, 6}]


def test_a_bad_word_does_not_reach_back_into_the_prompt(constraints):
    admit(constraints, 0, bad_words=((3, 4),))
    assert forbidden(constraints) == set()


def test_a_resumed_sequence_remembers_its_output(constraints):
    admit(constraints, 0, output=(4, 4), bad_words=((4, 4, 6),))
    assert forbidden(constraints, position=5) == {6}


def test_a_released_slot_has_no_rules(constraints):
    admit(constraints, 0, allowed_token_ids=(4,))
    constraints.release(0)
    constraints.release(0)
    assert constraints.follower(0) is None
    assert forbidden(constraints) == set()


def test_without_a_compiler_a_grammar_is_a_fault_of_its_row(constraints):
    admit(constraints, 1, grammar=Grammar(GrammarKind.REGEX, "a"))
    assert constraints.limits([SamplingRow(0, 3), SamplingRow(1, 3)]).faults == {1: NO_GRAMMARS}
