import threading
from pathlib import Path

import pytest

import server
from server.engine import Engine
from server.engine_grammars import GrammarQueue
from server.grammars import GrammarTokenizer
from server.messages import (
    Abort,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    Submit,
    Tokens,
)
from server.model.grammar import GrammarCompiler
from server.scheduler.config import SchedulerConfig
from server.scheduler.scheduler import Scheduler
from tests.engine.test_engine import VOCAB, ScriptedChannel
from tests.fakes import FakeRunner, expected_tokens

TINY = Path(server.__file__).parent / "model/tiny"
GOOD, BAD = Grammar(GrammarKind.REGEX, "a+"), Grammar(GrammarKind.REGEX, "(")


class GatedTokenizer(GrammarTokenizer):
    """Compiles when the test lets it."""

    def __init__(self):
        super().__init__(TINY, 1376)
        self.gate = threading.Event()
        self.begun = threading.Event()

    def compile(self, grammar):
        self.begun.set()
        assert self.gate.wait(30)
        return super().compile(grammar)


@pytest.fixture
def tokenizer():
    tokenizer = GatedTokenizer()
    yield tokenizer
    tokenizer.gate.set()


@pytest.fixture
def queue(tokenizer):
    queue = GrammarQueue(GrammarCompiler(tokenizer))
    yield queue
    tokenizer.gate.set()
    queue.shutdown()


def request(name, grammar, num_output=3):
    return Submit(name, [1, 2], SamplingParams(max_tokens=num_output, grammar=grammar))


def take_all(queue):
    """Whatever is held, when it is ready."""
    ready = []
    for _, compiled in list(queue._held.values()):
        compiled.exception(timeout=30)
    ready += queue.take_ready()
    return ready


def test_a_request_waits_until_its_grammar_is_compiled(queue, tokenizer):
    submit = request("r", GOOD)
    assert queue.hold(submit, GOOD) == []
    assert tokenizer.begun.wait(30)
    assert queue.take_ready() == []
    assert len(queue) == 1
    tokenizer.gate.set()
    assert take_all(queue) == [submit]
    assert len(queue) == 0
    again = request("s", GOOD)
    queue.hold(again, GOOD)
    assert queue.take_ready() == [again], "a grammar that is compiled does not wait"


def test_a_grammar_that_cannot_be_used_fails_its_request(queue, tokenizer):
    tokenizer.gate.set()
    queue.hold(request("bad", BAD), BAD)
    (failure,) = take_all(queue)
    assert isinstance(failure, Failed)
    assert (failure.request_id, failure.kind) == ("bad", FailureKind.INVALID)
    assert "unclosed group" in failure.message


def test_a_held_request_can_be_aborted(queue, tokenizer):
    queue.hold(request("r", GOOD), GOOD)
    queue.hold(request("s", GOOD), GOOD)
    assert queue.abort("r") == [Finished("r", FinishReason.ABORT, 2, 0, 0)]
    assert queue.abort("r") == []
    tokenizer.gate.set()
    assert [held.request_id for held in take_all(queue)] == ["s"]


def test_shutdown_answers_what_is_held(queue):
    queue.hold(request("r", GOOD), GOOD)
    queue.hold(request("s", GOOD), GOOD)
    assert [event.reason for event in queue.shutdown()] == [FinishReason.ABORT] * 2


def test_without_a_compiler_grammars_are_refused():
    (failure,) = GrammarQueue(None).hold(request("r", GOOD), GOOD)
    assert failure.kind is FailureKind.INVALID


class OpeningChannel(ScriptedChannel):
    """Opens a gate after some passes; goes on until every request has ended."""

    def __init__(self, gate, num_passes, *batches):
        super().__init__(*batches)
        self.gate = gate
        self.num_passes = num_passes

    def receive(self, timeout_s):
        self.num_passes -= 1
        if self.num_passes == 0:
            self.gate.set()
        is_open = any(not self.ended(name) for name in ("held", "plain", "gone", "bad"))
        return super().receive(timeout_s) if self.batches or not is_open else []

    def ended(self, name):
        return any(isinstance(event, Finished | Failed) for event in self.of(name))


def test_other_requests_go_on_while_a_grammar_compiles(tokenizer):
    plain, held = request("plain", None, num_output=10), request("held", GOOD, num_output=4)
    channel = OpeningChannel(tokenizer.gate, 30, [held, plain, request("gone", GOOD), request("bad", BAD)], [Abort("gone")])
    runner = FakeRunner(num_slots=4, num_pages=32, page_size=4, vocab_size=VOCAB)
    scheduler = Scheduler(SchedulerConfig(4, 16, 100, 4, 32))
    Engine(channel, scheduler, runner, VOCAB, GrammarCompiler(tokenizer)).run()
    for each in (plain, held):
        assert channel.tokens_of(each.request_id) == expected_tokens(each, VOCAB)
    assert channel.of("gone") == [Finished("gone", FinishReason.ABORT, 2, 0, 0)]
    assert [event.kind for event in channel.of("bad")] == [FailureKind.INVALID]
    order = [event.request_id for event in channel.events]
    assert order.index("held") > max(i for i, name in enumerate(order) if name == "plain")


class CountingTokenizer(GrammarTokenizer):
    """Notes which thread compiles what."""

    def __init__(self):
        super().__init__(TINY, 1376)
        self.compiled = []

    def compile(self, grammar):
        self.compiled.append((threading.current_thread(), grammar))
        return super().compile(grammar)


class OpeningRunner(FakeRunner):
    """Opens the grammar of every sequence that takes a slot, as a sampler does."""

    def __init__(self, compiler):
        super().__init__(num_slots=2, num_pages=32, page_size=4, vocab_size=VOCAB)
        self.compiler = compiler

    def launch(self, plan):
        for sequence in plan.new_sequences:
            self.compiler.matcher(sequence.sampling.grammar)
        return super().launch(plan)


class PatientChannel(ScriptedChannel):
    """Goes on until every request has ended."""

    def __init__(self, *requests):
        super().__init__(list(requests))
        self.num_open = len(requests)

    def receive(self, timeout_s):
        return super().receive(timeout_s) if self.batches or not self.num_open else []

    def send(self, messages):
        super().send(messages)
        self.num_open -= sum(isinstance(message, Finished | Failed) for message in messages)


def test_no_grammar_is_compiled_again_while_its_request_waits(monkeypatch):
    monkeypatch.setattr("server.model.grammar.MAX_COMPILED", 2)
    tokenizer = CountingTokenizer()
    compiler = GrammarCompiler(tokenizer)
    grammars = [Grammar(GrammarKind.REGEX, "a" * (1 + number)) for number in range(9)]
    channel = PatientChannel(*(request(f"r{number}", grammar) for number, grammar in enumerate([*grammars, grammars[0]])))
    runner = OpeningRunner(compiler)
    Engine(channel, Scheduler(SchedulerConfig(2, 16, 100, 4, 32)), runner, VOCAB, compiler).run()
    assert all(
        isinstance(end, Finished) and end.reason is FinishReason.LENGTH
        for end in channel.events
        if not hasattr(end, "token_ids")
    )
    assert sorted(grammar.text for _, grammar in tokenizer.compiled) == [grammar.text for grammar in grammars]
    assert threading.current_thread() not in [thread for thread, _ in tokenizer.compiled]
    assert sum(compiler.has(grammar) for grammar in grammars) == 2, "they are let go when their requests have ended"


def test_a_grammar_is_let_go_however_its_request_ends(queue, tokenizer, monkeypatch):
    monkeypatch.setattr("server.model.grammar.MAX_COMPILED", 0)
    tokenizer.gate.set()
    ended = {"finished": GOOD, "failed": GOOD, "aborted": Grammar(GrammarKind.REGEX, "b")}
    for name, grammar in ended.items():
        queue.hold(request(name, grammar), grammar)
        queue.hold(request(name, grammar), grammar)
    take_all(queue)
    assert all(queue._compiler.has(grammar) for grammar in ended.values())
    queue.note_ends([Tokens("failed", [1]), Failed("failed", FailureKind.INTERNAL, "no")])
    assert queue._compiler.has(GOOD)
    queue.note_ends([Finished("finished", FinishReason.STOP, 2, 0, 1), Finished("aborted", FinishReason.ABORT, 2, 0, 0)])
    assert not any(queue._compiler.has(grammar) for grammar in ended.values())
    queue.hold(request("held", GOOD), GOOD)
    queue.note_ends(queue.abort("held"))
    assert not queue._kept
