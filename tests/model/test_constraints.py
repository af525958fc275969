import pytest
import torch

from server.messages import Grammar, GrammarKind, SamplingParams
from server.model.constraints import NO_GRAMMARS, Constraints
from server.model.sampling_slot import SamplingRow
from server.scheduler.plan import NewSequence

VOCAB = 50


@pytest.fixture
def constraints():
    return Constraints(8, VOCAB, torch.device("cpu"))


@pytest.fixture
def logits():
    return torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))


def admit(constraints, slot, output=(), **params):
    prompt = [1, 2, 3]
    sequence = NewSequence(slot, f"r{slot}", [*prompt, *output], len(prompt), SamplingParams(max_tokens=9, **params), ())
    constraints.admit(sequence)


def forbidden(constraints, logits, slot=0, position=3):
    """The ids that one row may not choose."""
    outcome = constraints.apply(logits[:1], [SamplingRow(slot, position)])
    assert not outcome.faults
    return set((outcome.logits[0] == float("-inf")).nonzero().flatten().tolist())


def test_rows_without_rules_keep_the_very_tensor(constraints, logits):
    admit(constraints, 0)
    admit(constraints, 1, stop_token_ids=(4,))
    outcome = constraints.apply(logits, [SamplingRow(slot, 3) for slot in range(3)])
    assert outcome.logits is logits
    assert outcome.has_choice is None


def test_rules_of_one_row_leave_the_others_alone(constraints, logits):
    admit(constraints, 1, allowed_token_ids=(4, 7, VOCAB + 9))
    before = logits.clone()
    outcome = constraints.apply(logits, [SamplingRow(slot, 3) for slot in (0, 1, 2)])
    assert torch.equal(logits, before)
    assert torch.equal(outcome.logits[[0, 2]], logits[[0, 2]])
    assert outcome.logits[1].isfinite().nonzero().flatten().tolist() == [4, 7]
    assert outcome.has_choice.tolist() == [True] * 3


def test_stop_tokens_wait_for_min_tokens(constraints, logits):
    admit(constraints, 0, min_tokens=2, stop_token_ids=(5, 9, VOCAB))
    assert [forbidden(constraints, logits, position=position) for position in (3, 4, 5)] == [{5, 9}, {5, 9}, set()]


def test_a_bad_word_is_stopped_at_its_last_token(constraints, logits):
    admit(constraints, 0, bad_words=((8,), (), (4, 5), (4, 4, 6), (4, VOCAB)))
    seen = []
    for token_id in (4, 4, 5):
        seen.append(forbidden(constraints, logits))
        constraints.follower(0)(token_id)
    assert seen == [{8}, {8, 5}, {8, 5, 6}]


def test_a_bad_word_does_not_reach_back_into_the_prompt(constraints, logits):
    admit(constraints, 0, bad_words=((3, 4),))
    assert forbidden(constraints, logits) == set()


def test_a_resumed_sequence_remembers_its_output(constraints, logits):
    admit(constraints, 0, output=(4, 4), bad_words=((4, 4, 6),))
    assert forbidden(constraints, logits, position=5) == {6}


def test_rules_that_leave_nothing_are_noticed(constraints, logits):
    admit(constraints, 0, allowed_token_ids=(4,), bad_words=((4,),))
    outcome = constraints.apply(logits[:2], [SamplingRow(0, 3), SamplingRow(1, 3)])
    assert outcome.has_choice.tolist() == [False, True]


def test_a_released_slot_has_no_rules(constraints, logits):
    admit(constraints, 0, allowed_token_ids=(4,))
    constraints.release(0)
    constraints.release(0)
    constraints.follower(0)(4)
    assert forbidden(constraints, logits) == set()


def test_without_a_compiler_a_grammar_is_a_fault_of_its_row(constraints, logits):
    admit(constraints, 1, grammar=Grammar(GrammarKind.REGEX, "a"))
    outcome = constraints.apply(logits[:2], [SamplingRow(0, 3), SamplingRow(1, 3)])
    assert outcome.faults == {1: NO_GRAMMARS}
