"""The overlapped loop and padded decode steps give what the plain loop gives, request by request, whatever else goes on.

All run the same program on the real scheduler, runner and model, on pages poisoned with NaN: prompts that share prefixes,
pictures, grammars, seeds, penalties, bad words, stops, log-probabilities, preemptions, and aborts between steps.
"""

import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from server.engine_steps import EngineFailedError
from server.grammars import GrammarTokenizer
from server.messages import (
    Failed,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    MediaItem,
    MediaKind,
    SamplingParams,
    Submit,
    TokenRange,
    Tokens,
)
from server.model.config import M3Config
from server.model.grammar import GrammarCompiler
from server.model.m3 import M3Model
from server.model.progress import NoProgress
from tests.engine.serving import Pixels, Server
from tests.oracle import IMAGE_TOKEN, save_checkpoint, tiny_config

TOKENIZER_DIR = Path(__file__).parents[2] / "server/model/tiny"
VOCAB, EOS, PAGE = 1376, 1320, 16
GRAMMARS = [
    Grammar(GrammarKind.CHOICE, json.dumps(["yes", "yesterday", "no way", "日本"])),
    Grammar(GrammarKind.REGEX, r"(\d{3}-){2}\d{4} [a-z]{2,9}\.?"),
]
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.3, "seed": 6, "top_p": 0.9, "top_k": 40, "num_logprobs": 3},
    {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"temperature": 0.0, "stop_token_ids": tuple(range(0, VOCAB, 5))},
    {"temperature": 0.9, "seed": 8, "stop_token_ids": tuple(range(0, VOCAB, 3)), "min_tokens": 6},
    {"temperature": 0.0, "bad_words": tuple((first, second) for first in range(0, VOCAB, 9) for second in range(0, VOCAB, 7))},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(100)), "logit_bias": ((7, 3.0),)},
    {"temperature": 0.0, "num_prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 9, "grammar": GRAMMARS[0], "stop_token_ids": (EOS,)},
    {"temperature": 2.0, "seed": 10, "grammar": GRAMMARS[1], "stop_token_ids": (EOS,)},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model with pages of 16 tokens and the bundled tokenizer's ids.

    In float64: a fault changes who shares a step with whom, and in float32 such sums round otherwise on some processors, by
    which a drawn token may become its neighbour.
    """
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(tiny_config(block_size=PAGE, topk_blocks=4, vocab_size=VOCAB), folder)
    return M3Model.load(folder, M3Config.from_file(folder), torch.device("cpu"), torch.float64, progress=NoProgress())


@pytest.fixture(scope="module")
def tokenizer():
    return GrammarTokenizer(TOKENIZER_DIR, VOCAB)


def prompt_of(length, seed):
    return torch.randint(3, 240, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def make_request(name, rng, pixels):
    """One of few prefixes, possibly a picture, a tail of its own, and some way of sampling."""
    prompt, media = prompt_of(rng.choice([5, 33, 80]), rng.randrange(2)), ()
    if rng.random() < 0.3:
        seed = rng.randrange(2)
        picture = np.random.default_rng(seed).integers(0, 256, (96, 3, 14, 14), dtype=np.uint8)
        spans = (TokenRange(len(prompt), 24),)
        media = (MediaItem(MediaKind.IMAGE, bytes([seed]) * 32, (1, 8, 12), spans, pixels.add(picture)),)
        prompt = prompt + [IMAGE_TOKEN] * 24
    prompt = prompt + prompt_of(rng.randrange(1, 40), rng.randrange(1000))
    return Submit(name, prompt, SamplingParams(max_tokens=rng.randrange(1, 25), **rng.choice(SAMPLING)), media)


class Program:
    """What happens between which steps, drawn from a seed. Nine seeds in a row meet every two sizes together."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.pixels = Pixels()
        self.requests = [make_request(f"r{i}", rng, self.pixels) for i in range(10)]
        self.num_steps_before = [rng.randrange(5) for _ in self.requests]
        self.aborts = {rng.randrange(30): f"r{rng.randrange(10)}" for _ in range(3)}
        first, second = seed % 3, seed // 3 % 3
        self.sizes = {
            "max_num_seqs": [2, 5, 9][first],
            "max_num_batched_tokens": [16, 40, 200][second],
            "num_pages": [16, 24, 60][(first + second) % 3],
            "enable_prefix_caching": (first - second) % 3 > 0,
        }

    def run(self, model, tokenizer, **options):
        server = Server(model, pixels=self.pixels, grammars=GrammarCompiler(tokenizer), **self.sizes, **options)
        arrivals = {}
        due = 0
        for request, num_steps in zip(self.requests, self.num_steps_before, strict=True):
            due += num_steps
            arrivals.setdefault(due, []).append(request)
        turn = 0
        while turn <= due or server.scheduler.has_work or server.steps:
            for request in arrivals.get(turn, []):
                server.submit(request)
            if turn in self.aborts:
                server.abort(self.aborts[turn])
            server.steps.advance(server.scheduler.schedule())
            server.scheduler.check()
            turn += 1
        stats = server.scheduler.stats()
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        return server


def tokens_of(server, name):
    return [i for event in server.events[name] if isinstance(event, Tokens) for i in event.token_ids]


def logprobs_of(server, name, field):
    events = [event for event in server.events[name] if isinstance(event, Tokens)]
    return [entry for event in events for entry in getattr(event, field)]


@pytest.mark.parametrize("seed", range(18))
def test_the_overlapped_loop_gives_the_same(model, tokenizer, seed):
    program = Program(seed)
    plain, overlapped = (program.run(model, tokenizer, overlap_steps=overlap) for overlap in (False, True))
    assert_same(program, plain, overlapped)


@pytest.mark.parametrize("seed", range(18, 27))
def test_decode_steps_on_a_ladder_of_sizes_give_the_same(model, tokenizer, seed, monkeypatch):
    monkeypatch.setattr("server.model.decode_graphs.FIRST_CONTEXT", 48)
    ladder = {2: [2], 5: [3, 5], 9: [2, 6, 9]}
    monkeypatch.setattr("server.model.decode_graphs.batch_ladder", ladder.get)
    program = Program(seed)
    plain = program.run(model, tokenizer, overlap_steps=False)
    graphs = program.run(model, tokenizer, overlap_steps=True, record=lambda work: work)
    assert_same(program, plain, graphs)


class Faulty:
    """The model, with faults at its n-th call."""

    def __init__(self, model):
        self._model = model
        self.raising = {}
        self.not_finite = {}
        self.num_forwards = self.num_logits = 0

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, *inputs):
        self.num_forwards += 1
        if self.num_forwards in self.raising:
            raise self.raising[self.num_forwards]
        return self._model.forward(*inputs)

    def logits(self, hidden):
        self.num_logits += 1
        logits = self._model.logits(hidden)
        logits[self.not_finite.get(self.num_logits, [])] = torch.nan
        return logits


def greedy(name, seed):
    return Submit(name, prompt_of(30, seed), SamplingParams(max_tokens=9, temperature=0.0))


@pytest.mark.parametrize("overlap_steps", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("no"), torch.OutOfMemoryError("no")])
def test_a_model_that_raises_costs_the_sequences_of_its_step(model, overlap_steps, error):
    first, second = greedy("first", 1), greedy("second", 2)
    alone = Server(model).serve([second])
    faulty = Faulty(model)
    faulty.raising[4] = error
    server = Server(faulty, max_num_seqs=1, overlap_steps=overlap_steps)
    server.submit(first)
    server.submit(second)
    server.run()
    assert isinstance(server.end("first"), Failed)
    assert len(tokens_of(server, "first")) == 3
    assert server.output("second") == alone["second"]
    server.scheduler.check()


@pytest.mark.parametrize("overlap_steps", [False, True])
def test_a_row_that_is_not_finite_costs_one_sequence(model, overlap_steps):
    requests = [greedy(f"r{i}", i) for i in range(3)]
    alone = {each.request_id: Server(model).serve([each])[each.request_id] for each in requests}
    faulty = Faulty(model)
    faulty.not_finite[4] = [1]
    server = Server(faulty, overlap_steps=overlap_steps, enable_prefix_caching=True)
    for each in requests:
        server.submit(each)
    server.run()
    assert isinstance(server.end("r1"), Failed)
    assert tokens_of(server, "r1") == alone["r1"][:3]
    assert {name: server.output(name) for name in ("r0", "r2")} == {name: alone[name] for name in ("r0", "r2")}
    assert server.serve([greedy("again", 1)])["again"] == alone["r1"]


@pytest.mark.parametrize("seed", range(27, 36))
def test_faults_anywhere_cost_their_own_sequences_and_leave_nothing_behind(model, tokenizer, seed):
    program, rng = Program(seed), random.Random(seed)
    plain = program.run(model, tokenizer, overlap_steps=False)
    faulty = Faulty(model)
    first = rng.randrange(2, 12)
    faulty.raising = {call: RuntimeError("no") for call in (first, first + rng.randrange(1, 9))}
    faulty.not_finite = {rng.randrange(1, 25): [0] for _ in range(3)}
    graphs = {"record": lambda work: work} if seed % 2 else {}
    server = program.run(faulty, tokenizer, overlap_steps=True, **graphs)
    ends = {request.request_id: server.end(request.request_id) for request in program.requests}
    assert any(isinstance(end, Failed) for end in ends.values())
    for name, end in ends.items():
        terminal = [event for event in server.events[name] if isinstance(event, Finished | Failed)]
        assert terminal == [end]
        tokens, expected = tokens_of(server, name), tokens_of(plain, name)
        is_whole = isinstance(end, Finished) and end.reason is not FinishReason.ABORT
        if plain.end(name).reason is FinishReason.ABORT:
            length = min(len(tokens), len(expected))
            assert tokens[:length] == expected[:length]
        else:
            assert tokens == (expected if is_whole else expected[: len(tokens)])
    again = msgspec.structs.replace(
        program.requests[0], request_id="again", sampling=SamplingParams(max_tokens=9, temperature=0.0)
    )
    alone = Server(model, pixels=program.pixels).serve([again])
    faulty.raising, faulty.not_finite = {}, {}
    assert server.serve([again]) == alone, "pages of failed steps are not found again"


def test_a_lost_device_ends_what_is_in_flight(model):
    faulty = Faulty(model)
    faulty.raising[4] = torch.AcceleratorError("an illegal memory access was encountered")
    server = Server(faulty, max_num_seqs=1, overlap_steps=True)
    server.submit(greedy("running", 1))
    server.submit(greedy("waiting", 2))
    with pytest.raises(EngineFailedError):
        server.run()
    assert isinstance(server.end("running"), Failed)
    assert len(tokens_of(server, "running")) == 3
    assert "waiting" not in server.events


def assert_same(program, *servers):
    for request in program.requests:
        name = request.request_id
        ends = [server.end(name) for server in servers]
        assert all(isinstance(end, Finished) for end in ends)
        outputs = [tokens_of(server, name) for server in servers]
        if FinishReason.ABORT in [end.reason for end in ends]:
            length = min(map(len, outputs))
            assert outputs[0][:length] == outputs[1][:length]
            continue
        assert outputs[0] == outputs[1]
        assert ends[0].reason is ends[1].reason
        for field in ("logprobs", "prompt_logprobs"):
            first, second = (logprobs_of(server, name, field) for server in servers)
            assert [entry.top_ids for entry in first] == [entry.top_ids for entry in second]
            assert [entry.logprob for entry in first] == pytest.approx([entry.logprob for entry in second], abs=1e-3)


def test_the_programs_preempt_reuse_prefixes_and_abort(model, tokenizer):
    servers = [Program(seed).run(model, tokenizer, overlap_steps=True) for seed in range(8)]
    stats = [server.scheduler.stats() for server in servers]
    reasons = {event.reason for server in servers for events in server.events.values() for event in events[-1:]}
    assert sum(each.preemptions_total for each in stats) > 0
    assert sum(each.prefix_hit_tokens_total for each in stats) > 0
    assert reasons == set(FinishReason)
