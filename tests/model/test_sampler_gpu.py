"""The sampler on a GPU beside the sampler on a CPU."""

import pytest
import torch

from server.messages import SamplingParams
from server.model.sampler import Sampler
from server.model.sampling_slot import SamplingRow
from server.scheduler.plan import NewSequence

pytestmark = pytest.mark.gpu

VOCAB = 20_001
PARAMS = [
    SamplingParams(max_tokens=99, temperature=0.0),
    SamplingParams(max_tokens=99, seed=3),
    SamplingParams(max_tokens=99, seed=4, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(max_tokens=99, seed=5, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.25),
    SamplingParams(max_tokens=99, temperature=0.0, repetition_penalty=2.0, logit_bias=((17, 2.0), (19_000, -4.0))),
    SamplingParams(max_tokens=99, seed=6, allowed_token_ids=tuple(range(0, VOCAB, 3)), min_tokens=50, stop_token_ids=(3, 9)),
    SamplingParams(max_tokens=99, temperature=0.0, bad_words=tuple((a, b) for a in range(0, VOCAB, 50) for b in (5, 7))),
    SamplingParams(max_tokens=99, seed=7, top_p=0.8, num_logprobs=20),
]


def admit_all(sampler):
    for slot, params in enumerate(PARAMS):
        sampler.admit(NewSequence(slot, f"r{slot}", list(range(60)), 50, params, ()))


def ids_of(result):
    sampled, failures = result
    assert not failures
    return [token.token_id for token in sampled]


@torch.inference_mode()
def test_tokens_and_logprobs_are_those_of_a_cpu():
    cpu, gpu = (Sampler(8, VOCAB, torch.device(name), 1) for name in ("cpu", "cuda"))
    for sampler in (cpu, gpu):
        admit_all(sampler)
    generator = torch.Generator().manual_seed(0)
    for position in range(60, 70):
        logits = (3 * torch.randn(8, VOCAB, generator=generator)).bfloat16().float()
        rows = [SamplingRow(slot, position) for slot in torch.randperm(8, generator=generator).tolist()]
        expected, chosen = (sampler.launch(logits.to(name), rows).wait() for sampler, name in ((cpu, "cpu"), (gpu, "cuda")))
        assert ids_of(chosen) == ids_of(expected)
        for ours, theirs in zip(chosen[0], expected[0], strict=True):
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            if ours.logprobs is not None:
                assert ours.logprobs.top_logprobs == pytest.approx(theirs.logprobs.top_logprobs, abs=1e-4)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # that it does not see every wait
@torch.inference_mode()
def test_a_launch_does_not_wait_for_the_device():
    sampler = Sampler(8, VOCAB, torch.device("cuda"), 1)
    admit_all(sampler)
    logits = 3 * torch.randn(8, VOCAB, device="cuda")

    def launch_all():
        alone = [sampler.launch(logits[slot : slot + 1], [SamplingRow(slot, 60)]) for slot in range(8)]
        together = sampler.launch(logits, [SamplingRow(slot, 61) for slot in range(8)])
        sampler.release(3)
        sampler.admit(NewSequence(3, "next", [1, 2, 3], 3, PARAMS[3], ()))
        return [*alone, together]

    for cycles in (0, 1 << 29):  # loads the kernels; pins as much of the host's memory as a busy device leaves unreturned
        torch.cuda._sleep(cycles)
        for sample in launch_all():
            sample.wait()
    torch.cuda._sleep(2_000_000_000)  # about a second
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = launch_all()
        is_busy = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert is_busy
    assert all(ids_of(sample.wait()) == sample.token_ids.tolist() for sample in pending)
