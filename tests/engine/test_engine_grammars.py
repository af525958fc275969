import threading
from pathlib import Path

import pytest

import server
from server.engine import Engine
from server.engine_grammars import GrammarQueue
from server.grammars import GrammarTokenizer
from server.messages import Abort, Failed, FailureKind, Finished, FinishReason, Grammar, GrammarKind, SamplingParams, Submit
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
