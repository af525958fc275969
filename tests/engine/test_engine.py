from collections import deque

import msgspec
import pytest
import torch

from server.engine import IDLE_STATS_PERIOD_S, MAX_PROMPT_LOGPROBS, Engine
from server.engine_steps import EngineFailedError
from server.heartbeat import Heartbeat
from server.messages import (
    Abort,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    SamplingParams,
    Shutdown,
    Started,
    Stats,
    Submit,
    TokenLogprobs,
    Tokens,
)
from server.model.feature_cache import FeatureCache, FeatureKey
from server.scheduler.config import SchedulerConfig
from server.scheduler.scheduler import Scheduler
from server.transport import MAX_MESSAGE_BYTES
from tests.fakes import FakeRunner, expected_tokens

VOCAB = 64


class ScriptedChannel:
    """Hands out one batch of messages per pass, and `Shutdown` when the engine would wait with nothing left to come."""

    def __init__(self, *batches):
        self.batches = deque(batches)
        self.events = []
        self.stats = []
        self.started = []
        self.timeouts_s = []

    def receive(self, timeout_s):
        self.timeouts_s.append(timeout_s)
        if self.batches:
            return self.batches.popleft()
        return [Shutdown()] if timeout_s > 0 else []

    def send(self, messages):
        for message in messages:
            kinds = {Stats: self.stats, Started: self.started}
            kinds.get(type(message), self.events).append(message)

    def tokens_of(self, request_id):
        return [i for event in self.of(request_id) if isinstance(event, Tokens) for i in event.token_ids]

    def of(self, request_id):
        return [event for event in self.events if event.request_id == request_id]


def request(name, *prompt, num_output=5):
    return Submit(name, list(prompt), SamplingParams(max_tokens=num_output))


@pytest.fixture
def runner():
    return FakeRunner(num_slots=4, num_pages=32, page_size=4, vocab_size=VOCAB)


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def engine_on(runner, request):
    """Builds an engine on a scripted channel."""

    def build(channel, runner=runner, **options):
        scheduler = Scheduler(SchedulerConfig(4, 16, 100, 4, 32))
        return Engine(channel, scheduler, runner, VOCAB, **options, overlap_steps=request.param)

    return build


def test_requests_are_served_and_each_ends_once(engine_on):
    requests = [request(f"r{i}", *range(1, i + 2), num_output=i + 1) for i in range(9)]
    channel = ScriptedChannel(requests[:3], [], requests[3:])
    engine_on(channel).run()
    for each in requests:
        assert channel.tokens_of(each.request_id) == expected_tokens(each, VOCAB)
        ends = [event for event in channel.of(each.request_id) if not isinstance(event, Tokens)]
        assert [end.reason for end in ends] == [FinishReason.LENGTH]


def test_an_abort_ends_its_request_and_unknown_ids_are_ignored(engine_on):
    channel = ScriptedChannel([request("r", 1, num_output=90), request("s", 1)], [], [Abort("r"), Abort("nobody")])
    engine_on(channel).run()
    assert channel.of("r")[-1].reason is FinishReason.ABORT
    assert channel.of("s")[-1].reason is FinishReason.LENGTH
    assert channel.of("nobody") == []


def test_shutdown_answers_what_is_open(engine_on):
    channel = ScriptedChannel([request("running", 1, num_output=90)], [], [request("waiting", 2), Shutdown()])
    engine_on(channel).run()
    assert channel.of("running")[-1].reason is FinishReason.ABORT
    assert channel.of("waiting") == [Finished("waiting", FinishReason.ABORT, 1, 0, 0)]


def test_a_step_that_raises_costs_the_requests_in_it_and_no_later_one(engine_on, runner):
    runner.crashing = True
    after = request("after", 3)
    channel = ScriptedChannel([request("a", 1), request("b", 2)], [after])
    engine_on(channel).run()
    for name in ("a", "b"):
        (failure,) = channel.of(name)
        assert failure.kind is FailureKind.INTERNAL
        assert "failed" not in failure.message
    assert channel.tokens_of("after") == expected_tokens(after, VOCAB)


def test_a_slot_failure_costs_one_request(engine_on, runner):
    runner.failing = lambda chunk, request_id: request_id == "bad"
    good = request("good", 1)
    channel = ScriptedChannel([good, request("bad", 2)])
    engine_on(channel).run()
    assert [type(event) for event in channel.of("bad")] == [Failed]
    assert channel.tokens_of("good") == expected_tokens(good, VOCAB)


class BrokenRunner:
    def __init__(self, error):
        self.error = error
        self.num_steps = 0

    def launch(self, plan):
        self.num_steps += 1
        raise self.error


def test_steps_that_keep_failing_end_the_engine_after_their_requests_were_answered(engine_on):
    runner = BrokenRunner(RuntimeError("secret path"))
    channel = ScriptedChannel(*([request(f"r{i}", 1)] for i in range(9)))
    with pytest.raises(EngineFailedError):
        engine_on(channel, runner).run()
    assert runner.num_steps == 3
    assert [event.request_id for event in channel.events] == ["r0", "r1", "r2"]
    assert not any("secret" in event.message for event in channel.events)


def test_a_lost_device_ends_the_engine_at_once(engine_on):
    runner = BrokenRunner(torch.AcceleratorError("an illegal memory access was encountered"))
    channel = ScriptedChannel([request("r", 1)])
    with pytest.raises(EngineFailedError):
        engine_on(channel, runner).run()
    assert runner.num_steps == 1
    assert isinstance(channel.of("r")[-1], Failed)


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**40])
def test_a_token_id_outside_the_vocabulary_never_reaches_the_model(engine_on, token_id):
    good = request("good", VOCAB - 1, 0)
    channel = ScriptedChannel([request("bad", 1, token_id), good])
    engine_on(channel).run()
    (failure,) = channel.of("bad")
    assert failure.kind is FailureKind.INVALID
    assert channel.tokens_of("good") == expected_tokens(good, VOCAB)


def test_prompt_logprobs_that_no_message_could_carry_are_refused(engine_on, monkeypatch):
    monkeypatch.setattr("server.engine.MAX_PROMPT_LOGPROBS", 100)
    few, many = (Submit(f"{n}", [1] * 5, SamplingParams(max_tokens=1, num_prompt_logprobs=n)) for n in (16, 17))
    channel = ScriptedChannel([many, few])
    engine_on(channel).run()
    (failure,) = channel.of("17")
    assert failure.kind is FailureKind.INVALID
    assert channel.tokens_of("16") == expected_tokens(few, VOCAB)


def test_the_largest_prompt_logprobs_fit_a_message():
    num_top = 20
    entry = TokenLogprobs(-1.5, (200_000,) * num_top, (-2.5,) * num_top)
    num_bytes = len(msgspec.msgpack.encode([Tokens("r" * 64, [1], [], [entry] * 1000)])) / 1000
    assert 2 * num_bytes * MAX_PROMPT_LOGPROBS / (num_top + 4) < MAX_MESSAGE_BYTES


def test_a_busy_engine_does_not_wait_for_messages(engine_on):
    channel = ScriptedChannel([request("r", 1, num_output=20)])
    engine_on(channel).run()
    assert channel.timeouts_s[1:20] == [0.0] * 19


def test_statistics_come_as_a_heartbeat_when_idle_and_rarely_when_busy(engine_on, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr("server.engine.time.monotonic", lambda: now_s)

    class Clock(ScriptedChannel):
        """Waiting takes as long as it was asked to, and a pass with work takes 10 ms."""

        def receive(self, timeout_s):
            nonlocal now_s
            now_s += timeout_s if timeout_s and not self.batches else 0.01
            return [] if now_s < 10 and not self.batches else super().receive(timeout_s)

    busy = request("r", 1, num_output=90)
    channel = Clock([busy])
    engine_on(channel).run()
    num_busy = sum(stats.num_running > 0 for stats in channel.stats)
    num_idle = sum(stats.num_running == 0 for stats in channel.stats)
    assert 3 <= num_busy <= 6
    assert 17 <= num_idle <= 22
    assert channel.stats[-1].generation_tokens_total == 90
    assert IDLE_STATS_PERIOD_S <= 1


def test_every_step_beats_also_one_that_fails_and_so_does_an_idle_engine(engine_on, runner):
    heartbeat = Heartbeat()
    channel = ScriptedChannel([request("r", 1, 2, 3, num_output=4)])
    engine_on(channel, heartbeat=heartbeat).run()
    pulse = heartbeat.pulse()
    assert sum(pulse.steps_by_time) == sum(pulse.steps_by_tokens) == 4
    assert pulse.num_step_tokens == 3 + 3
    runner.crashing = True
    engine_on(ScriptedChannel([request("s", 1)]), heartbeat=heartbeat).run()
    assert sum(heartbeat.pulse().steps_by_time) == 5
    idle = Heartbeat()
    engine_on(ScriptedChannel([], []), heartbeat=idle).run()
    assert idle.pulse().is_serving
    assert sum(idle.pulse().steps_by_time) == 0


def test_a_sequence_that_leaves_the_queue_is_announced_before_its_step(engine_on, runner):
    channel = ScriptedChannel([request(name, 1) for name in "abcde"])
    seen = []
    launch = runner.launch

    def watched(plan):
        seen.append([event.request_id for event in channel.started])
        return launch(plan)

    runner.launch = watched
    engine_on(channel).run()
    assert seen[0] == ["a", "b", "c", "d"], "the engine has four slots"
    assert [event.request_id for event in channel.started] == list("abcde")


def test_statistics_show_the_lookups_of_encoded_media(engine_on):
    features = FeatureCache(1 << 10)
    key = FeatureKey(b"picture", 0)
    assert features.get(key) is None
    features.put(key, torch.zeros(1))
    for _ in range(3):
        features.get(key)
    channel = ScriptedChannel([request("r", 1)])
    engine_on(channel, features=features).run()
    assert (channel.stats[0].feature_queries_total, channel.stats[0].feature_hits_total) == (4, 3)
