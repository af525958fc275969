"""Decode steps on a ladder, with work that is run again in place of graphs; `test_graphs_gpu` captures real ones."""

import itertools

import pytest

from server.model.decode_graphs import batch_ladder, context_ladder
from server.scheduler.plan import Chunk
from tests.model.test_runner import NotingModel, new, picture, pools, runner_on, sampled, step

__all__ = ["pools"]  # a fixture


@pytest.fixture
def model():
    return NotingModel()


@pytest.fixture
def runner(model, pools, monkeypatch):
    """Four slots, graphs for 1, 2, 3 and 4 rows and contexts of 16 and 40 tokens."""
    monkeypatch.setattr("server.model.decode_graphs.FIRST_CONTEXT", 16)
    monkeypatch.setattr("server.model.decode_graphs.batch_ladder", lambda max_num_seqs: [1, max_num_seqs])
    runner = runner_on(model, pools)
    assert runner.capture_graphs(lambda work: work) == 4
    model.steps.clear()
    model.num_logit_rows.clear()
    return runner


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 8, 9, 64, 100, 256])
def test_the_ladder_of_batch_sizes_leaves_few_rows_idle(max_num_seqs):
    ladder = batch_ladder(max_num_seqs)
    assert ladder[:8] == list(range(1, max_num_seqs + 1))[:8]
    assert ladder[-1] == max_num_seqs
    assert ladder == sorted(set(ladder))
    for below, rung in itertools.pairwise(ladder):
        assert rung - below - 1 < rung / 5
    assert len(ladder) <= 8 + 4 * 5


def test_the_ladder_of_lengths_ends_with_the_window():
    assert context_ladder(1 << 20) == [8192, 32768, 131072, 524288, 1048576]
    assert context_ladder(8192) == [8192]
    assert context_ladder(100) == [100]


def prefilled(runner, lengths):
    """Slot i holds `lengths[i]` tokens, the last of which is i + 1, on pages 4 i and following."""
    for slot, length in enumerate(lengths):
        pages = tuple(range(4 * slot, 4 * slot + -(-length // 4)))
        sequence = new(slot, [9] * (length - 1) + [slot + 1])
        step(runner, Chunk(slot, 0, length, pages, samples=True), new_sequences=[sequence])


def test_rows_without_a_sequence_repeat_the_shortest_and_write_nothing(runner, model):
    prefilled(runner, [7, 3, 6])
    result = step(runner, *(Chunk(slot, length, 1, (), samples=True) for slot, length in enumerate([7, 3, 6])))
    assert sampled(result) == {0: 3, 1: 4, 2: 5}
    token_ids, batch, embeddings = model.steps[-1]
    assert embeddings is None
    assert token_ids.tolist() == [2, 3, 4, 3]
    assert batch.positions.tolist() == [7, 3, 6, 3]
    assert batch.seq_lens.tolist() == [8, 4, 7, 4]
    assert batch.slot_mapping.tolist() == [1 * 4 + 3, 4 * 4 + 3, 9 * 4 + 2, -1]
    assert batch.page_table[3].tolist() == batch.page_table[1].tolist()
    assert (batch.num_decodes, batch.max_query_len, batch.max_seq_len) == (4, 1, 16)


def test_a_step_takes_the_smallest_graph_that_holds_it(runner, model):
    prefilled(runner, [15, 3])
    step(runner, Chunk(1, 3, 1, (), samples=True))
    assert (model.steps[-1][1].num_decodes, model.steps[-1][1].max_seq_len) == (1, 16)
    step(runner, Chunk(0, 15, 1, (), samples=True))
    assert model.steps[-1][1].max_seq_len == 16
    step(runner, Chunk(0, 16, 1, (4,), samples=True), Chunk(1, 4, 1, (9,), samples=True))
    assert (model.steps[-1][1].num_decodes, model.steps[-1][1].max_seq_len) == (4, 40)


def test_steps_with_prefills_or_media_run_outside_the_graphs(runner, model):
    prefilled(runner, [3])
    step(
        runner,
        Chunk(0, 3, 1, (), samples=True),
        Chunk(1, 0, 2, (5,), samples=True),
        new_sequences=[new(1, [4, 5])],
    )
    assert model.steps[-1][1].num_decodes == 1
    step(runner, Chunk(2, 0, 1, (6,), samples=False), new_sequences=[new(2, range(6), media=(picture(10, 0),))])
    _, batch, embeddings = model.steps[-1]
    assert embeddings is not None
    assert batch.max_seq_len == 1


def test_only_rows_that_end_a_sequence_are_sampled(runner, model):
    prefilled(runner, [5])
    result = step(
        runner,
        Chunk(0, 5, 1, (), samples=True),
        Chunk(1, 0, 1, (5,), samples=False),
        Chunk(2, 0, 1, (6,), samples=True),
        new_sequences=[new(1, [20, 21]), new(2, [30])],
    )
    assert model.steps[-1][1].num_decodes == 4
    assert sampled(result) == {0: 3, 2: 31}
    assert sampled(step(runner, Chunk(0, 6, 1, (), samples=True), Chunk(1, 1, 1, (), samples=True))) == {0: 4, 1: 22}


def test_prompts_are_scored_in_graph_steps_too(runner):
    sequence = new(0, [5, 6, 7], num_prompt_logprobs=1)
    entries = [
        step(runner, Chunk(0, i, 1, (1,) if not i else (), samples=i == 2), new_sequences=[sequence] if not i else [])
        for i in range(3)
    ]
    scored = [entry for result in entries for entry in result.prompt_logprobs]
    assert [(entry.start, entry.logprobs[0].top_ids[0]) for entry in scored] == [(1, 6), (2, 7)]
