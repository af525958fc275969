"""Our decoder against the reference implementation, in float32, far enough that selection drops blocks."""

import dataclasses

import pytest
import torch

from tests.oracle import SEED, Oracle, tiny_config

TOLERANCE = 1e-4
PROMPT_LEN = 3000
NUM_DECODE_STEPS = 64


def prompt(length, seed=SEED):
    return torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_equal_logits(ours, reference):
    assert (ours - reference).abs().max().item() < TOLERANCE
    assert torch.equal(ours.argmax(-1), reference.argmax(-1))


@dataclasses.dataclass(frozen=True)
class ReferenceRun:
    """A prompt, greedy tokens after it, and the logits that chose each of them."""

    prompt: list[int]
    prompt_logits: torch.Tensor  # [prompt, vocab]
    tokens: list[int]
    step_logits: torch.Tensor  # [steps, vocab], after each of `tokens`


@pytest.fixture(scope="session")
def reference_run(real_blocks):
    ids = prompt(PROMPT_LEN)
    with torch.inference_mode():
        out = real_blocks.reference(input_ids=torch.tensor([ids]), use_cache=True)
        prompt_logits, tokens, steps = out.logits[0], [], []
        last = prompt_logits[-1]
        for _ in range(NUM_DECODE_STEPS):
            tokens.append(int(last.argmax()))
            out = real_blocks.reference(input_ids=torch.tensor([tokens[-1:]]), cache=out.cache, use_cache=True)
            last = out.logits[0, -1]
            steps.append(last)
    return ReferenceRun(ids, prompt_logits, tokens, torch.stack(steps))


def test_one_prefill_of_3000_tokens(real_blocks, reference_run, selections):
    (ours,) = real_blocks.runner().step([(0, reference_run.prompt)])
    assert_equal_logits(ours, reference_run.prompt_logits)
    selections.assert_blocks_were_dropped(topk=16)


def test_the_selected_blocks_are_the_references(real_blocks, selections):
    ids, theirs = prompt(2500), []
    hooks = [
        layer.self_attn.indexer.register_forward_hook(lambda module, inputs, output: theirs.append(output[0]))
        for layer in real_blocks.reference.model.language_model.layers
        if layer.self_attn.indexer is not None
    ]
    real_blocks.reference_logits(ids)
    for hook in hooks:
        hook.remove()
    real_blocks.runner().step([(0, ids)])
    assert len(theirs) == len(selections.calls) == 2
    for reference, (ours, _) in zip(theirs, selections.calls, strict=True):
        assert torch.equal(ours.sort(-1).values, reference.int().sort(-1).values)


@pytest.mark.parametrize("chunk_len", [333, 128, 2049])
def test_chunked_prefill(real_blocks, reference_run, chunk_len):
    runner, ids = real_blocks.runner(), reference_run.prompt
    parts = [runner.step([(0, ids[i : i + chunk_len])])[0] for i in range(0, PROMPT_LEN, chunk_len)]
    assert_equal_logits(torch.cat(parts), reference_run.prompt_logits)


def test_greedy_decoding_after_the_prefill(real_blocks, reference_run, selections):
    runner = real_blocks.runner()
    (logits,) = runner.step([(0, reference_run.prompt)])
    selections.calls.clear()
    tokens, steps = [], []
    for _ in range(NUM_DECODE_STEPS):
        tokens.append(int(logits[-1].argmax()))
        (logits,) = runner.step([(0, tokens[-1:])])
        steps.append(logits[-1])
    assert tokens == reference_run.tokens
    assert_equal_logits(torch.stack(steps), reference_run.step_logits)
    selections.assert_blocks_were_dropped(topk=16)


def test_a_ragged_batch_of_decodes_and_prefills(small_blocks, selections):
    lengths = {0: 500, 1: 63, 2: 17, 3: 111, 4: 300, 5: 1, 6: 64}
    ids = {i: prompt(length, seed=100 + i) for i, length in lengths.items()}
    runner = small_blocks.runner(num_pages=128)
    computed = {0: 499, 1: 62, 3: 64, 4: 7}  # tokens that earlier steps have put into the cache
    early = runner.step([(i, ids[i][:count]) for i, count in computed.items()])
    selections.calls.clear()
    order = [0, 1, 5, 2, 3, 4, 6]  # single tokens first
    late = runner.step([(i, ids[i][computed.get(i, 0) :]) for i in order])
    ours = {i: [logits] for i, logits in zip(computed, early, strict=True)}
    for i, logits in zip(order, late, strict=True):
        ours.setdefault(i, []).append(logits)
    for i in order:
        assert_equal_logits(torch.cat(ours[i]), small_blocks.reference_logits(ids[i]))
    selections.assert_blocks_were_dropped(topk=4)


def test_decoding_a_batch_equals_decoding_alone(small_blocks):
    lengths = [90, 200, 33]
    ids = [prompt(length + 5, seed=40 + i) for i, length in enumerate(lengths)]
    runner = small_blocks.runner()
    runner.step([(i, ids[i][:length]) for i, length in enumerate(lengths)])
    for step in range(5):
        logits = runner.step([(i, ids[i][length + step : length + step + 1]) for i, length in enumerate(lengths)])
        for i, length in enumerate(lengths):
            reference = small_blocks.reference_logits(ids[i][: length + step + 1])[-1:]
            assert_equal_logits(logits[i], reference)


def test_small_blocks(small_blocks, selections):
    ids = prompt(700)
    (ours,) = small_blocks.runner().step([(0, ids)])
    assert_equal_logits(ours, small_blocks.reference_logits(ids))
    selections.assert_blocks_were_dropped(topk=4)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 79, 80, 81])
def test_lengths_around_block_and_selection_limits(small_blocks, length):
    ids = prompt(length, seed=length)
    runner = small_blocks.runner()
    first = max(1, length - 2)
    parts = [runner.step([(0, ids[:first])])[0]]
    parts += [runner.step([(0, [token_id])])[0] for token_id in ids[first:]]
    assert_equal_logits(torch.cat(parts), small_blocks.reference_logits(ids))


def test_two_local_blocks(tmp_path, selections):
    oracle = Oracle.create(tiny_config(block_size=16, topk_blocks=4, num_local_blocks=2), tmp_path, seed=SEED)
    ids = prompt(300)
    (ours,) = oracle.runner().step([(0, ids)])
    assert_equal_logits(ours, oracle.reference_logits(ids))
    selections.assert_blocks_were_dropped(topk=4)
