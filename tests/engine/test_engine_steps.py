import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine_steps import STEP_FAILED, EngineFailedError, StepPipeline
from server.heartbeat import Heartbeat
from server.messages import Failed, Finished, FinishReason, SamplingParams, Submit, Tokens
from server.scheduler.config import SchedulerConfig
from server.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, expected_tokens

VOCAB = 64
PAGE = 4


def request(name, *prompt, num_output=5, stop=()):
    return Submit(name, list(prompt), SamplingParams(max_tokens=num_output, stop_token_ids=stop))


class Loop:
    """An engine's loop on a fake runner, with what came out of it by request."""

    def __init__(self, *, overlap=True, num_seqs=4, num_pages=32, budget=16, **options):
        self.scheduler = Scheduler(SchedulerConfig(num_seqs, budget, 100, PAGE, num_pages))
        self.runner = FakeRunner(num_seqs, num_pages, PAGE, VOCAB)
        self.events = {}
        self.submitted = {}
        self.heartbeat = Heartbeat()
        self.steps = StepPipeline(self.scheduler, self.runner, self.record, self.heartbeat, overlap=overlap, **options)

    def record(self, events):
        for event in events:
            self.events.setdefault(event.request_id, []).append(event)

    def add(self, *requests):
        for each in requests:
            self.submitted[each.request_id] = each
            self.record(self.scheduler.add(each))

    def turn(self, num_turns=1):
        for _ in range(num_turns):
            self.steps.advance(self.scheduler.schedule())
            self.scheduler.check()

    def drain(self):
        while self.scheduler.has_work or self.steps:
            self.turn()

    def tokens(self, name):
        return [i for event in self.events.get(name, []) if isinstance(event, Tokens) for i in event.token_ids]

    def ends(self, name):
        return [event for event in self.events.get(name, []) if not isinstance(event, Tokens)]

    def assert_served(self, *requests):
        for each in requests:
            assert self.tokens(each.request_id) == expected_tokens(each, VOCAB)
            (end,) = self.ends(each.request_id)
            assert isinstance(end, Finished)

    def assert_failed(self, *names):
        for name in names:
            (end,) = self.ends(name)
            assert isinstance(end, Failed)
            assert end.message == STEP_FAILED

    def assert_all_came_back(self):
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        self.scheduler.check()


@pytest.mark.parametrize(
    ("overlap", "log"),
    [
        (False, ["launch 0", "wait 0", "launch 1", "wait 1", "launch 2", "wait 2"]),
        (True, ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "wait 2"]),
    ],
)
def test_a_step_is_launched_before_the_one_before_it_is_waited_for(overlap, log):
    loop = Loop(overlap=overlap)
    loop.add(request("r", 1, num_output=3))
    loop.drain()
    assert [f"{what} {step_id}" for what, step_id in loop.runner.log] == log
    loop.assert_served(*loop.submitted.values())


def test_a_token_behind_the_end_is_computed_and_dropped():
    loop = Loop()
    probe = request("probe", 1, 2, num_output=9)
    stop = expected_tokens(probe, VOCAB)[3]
    loop.add(request("r", 1, 2, num_output=9, stop=(stop,)))
    loop.drain()
    loop.assert_served(*loop.submitted.values())
    assert loop.ends("r")[0].reason is FinishReason.STOP
    num_output = len(loop.tokens("r"))
    assert loop.runner.num_tokens_computed == 2 + num_output  # the last one's successor was under way
    loop.assert_all_came_back()


def test_an_abort_keeps_pages_and_slot_until_the_step_in_flight_has_landed():
    loop = Loop(num_seqs=1, num_pages=4)
    loop.add(request("a", 1, 2, 3, num_output=9), request("b", 4, 5, num_output=3))
    loop.turn(2)
    loop.record(loop.scheduler.abort("a"))
    assert loop.scheduler.stats().num_free_pages < 4
    assert loop.scheduler.schedule() is None  # "b" has no slot yet
    loop.steps.advance(None)
    loop.drain()
    loop.assert_served(loop.submitted["b"])
    loop.assert_all_came_back()


def test_a_launch_that_fails_behind_a_step_in_flight_costs_its_own_sequences():
    loop = Loop(budget=4)
    first, second = request("first", 1, num_output=1), request("second", 2, num_output=4)
    loop.add(first)
    loop.turn()
    loop.add(second)
    loop.runner.crashing = True
    loop.turn()
    assert not loop.steps
    loop.assert_served(first)
    loop.assert_failed("second")
    loop.assert_all_came_back()


def test_a_step_that_fails_under_another_one_costs_its_own_sequences():
    loop = Loop()
    old, new = request("old", 1, num_output=9), request("new", 2, num_output=4)
    loop.runner.errors[1] = RuntimeError("no")
    loop.add(old)
    loop.turn(2)
    loop.add(new)
    loop.turn()  # launches "old" and "new" together, then learns of the failure
    loop.assert_failed("old")
    loop.drain()
    loop.assert_served(new)
    assert loop.tokens("old") == expected_tokens(old, VOCAB)[:1]
    loop.assert_all_came_back()


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_lost_device_costs_all_steps_in_flight_and_ends_the_engine(where):
    loop = Loop()
    error = torch.AcceleratorError("an illegal memory access was encountered")
    loop.add(request("old", 1, num_output=9))
    if where == "wait":
        loop.runner.errors[0] = error
    loop.turn()
    loop.add(request("new", 2))
    if where == "launch":
        launch = loop.runner.launch

        def lose(plan):
            launch(plan)
            raise error

        loop.runner.launch = lose
    with pytest.raises(EngineFailedError):
        loop.turn()
    loop.assert_failed("old", "new")
    assert not loop.steps


class Activations:
    """What a step has computed when it fails."""


@pytest.mark.parametrize("overlap", [False, True])
def test_a_launch_that_fails_holds_on_to_nothing(overlap):
    loop = Loop(overlap=overlap)
    alive = []

    def compute(activations):
        alive.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("no")

    def lose(plan):
        FakeRunner.launch(loop.runner, plan)
        compute(Activations())

    gc.disable()
    try:
        loop.add(request("r", 1, num_output=9))
        loop.turn()
        loop.runner.launch = lose
        loop.turn()
        assert [activations() for activations in alive] == [None]
    finally:
        gc.enable()
    loop.assert_failed("r")


@pytest.mark.parametrize("overlap", [False, True])
def test_three_failed_steps_in_a_row_end_the_engine(overlap):
    loop = Loop(overlap=overlap)
    loop.runner.errors = {1: RuntimeError("no"), 3: RuntimeError("no"), 4: RuntimeError("no"), 5: RuntimeError("no")}
    for i in range(9):
        loop.add(request(f"r{i}", i, num_output=1))
        if i < 5:
            loop.turn()
    with pytest.raises(EngineFailedError, match="3 steps"):
        loop.drain()
    loop.assert_failed("r1", "r3", "r4", "r5")
    loop.assert_served(*(loop.submitted[f"r{i}"] for i in (0, 2)))


@pytest.mark.parametrize("overlap", [False, True])
def test_where_no_step_may_fail_the_first_one_ends_the_engine(overlap):
    loop = Loop(overlap=overlap, max_failed_steps=1)
    loop.runner.errors = {1: RuntimeError("no")}
    loop.add(request("served", 1, num_output=1))
    loop.drain()
    loop.add(request("failed", 2, num_output=1))
    with pytest.raises(EngineFailedError, match="the last with: no"):
        loop.drain()
    loop.assert_served(loop.submitted["served"])
    loop.assert_failed("failed")


def test_every_step_beats_however_it_ends():
    loop = Loop()
    loop.runner.errors[1] = RuntimeError("no")
    loop.add(request("a", 1, 2, 3, num_output=3))
    loop.drain()
    loop.add(request("b", 1, num_output=2))
    loop.runner.crashing = True
    loop.drain()
    num_launched = sum(what == "launch" for what, _ in loop.runner.log)
    assert sum(loop.heartbeat.pulse().steps_by_tokens) == num_launched == loop.scheduler.stats().steps_total


operations = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 9), st.integers(1, 12), st.integers(0, 5)),
    st.tuples(st.just("turn"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("fail"), st.sampled_from(["launch", "wait", "slot"])),
)


@given(st.lists(operations, min_size=5, max_size=40), st.booleans(), st.integers(6, 20), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_whatever_happens_everyone_ends_once_and_everything_comes_back(program, overlap, num_pages, num_seqs):
    loop = Loop(overlap=overlap, num_pages=num_pages, num_seqs=num_seqs)
    for number, (what, *values) in enumerate(program):
        try:
            if what == "add":
                length, num_output, stop = values
                prompt = [7, 7, 7, 7, 7, 7, number % 3, length, number][-length:]
                loop.add(request(f"r{number}", *prompt, num_output=num_output, stop=tuple(range(10 * stop))))
            elif what == "turn":
                loop.turn(*values)
            elif what == "abort" and loop.submitted:
                loop.record(loop.scheduler.abort(list(loop.submitted)[values[0] % len(loop.submitted)]))
            elif values == ["launch"]:
                loop.runner.crashing = True
            elif values == ["wait"]:
                loop.runner.errors[loop.runner.log[-1][1] + 2 if loop.runner.log else 0] = RuntimeError("no")
            else:
                doomed = f"r{number - 1}"
                loop.runner.failing = lambda chunk, request_id, doomed=doomed: request_id == doomed
        except EngineFailedError:
            assert not loop.steps
    while loop.scheduler.has_work or loop.steps:
        try:
            loop.turn()
        except EngineFailedError:
            assert not loop.steps
    for name, submit in loop.submitted.items():
        (end,) = loop.ends(name)
        tokens, expected = loop.tokens(name), expected_tokens(submit, VOCAB)
        assert tokens == expected[: len(tokens)]
        if isinstance(end, Finished) and end.reason is not FinishReason.ABORT:
            assert tokens == expected
    loop.assert_all_came_back()
