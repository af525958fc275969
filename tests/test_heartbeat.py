import os

import pytest

from server.heartbeat import STEP_BUCKETS_S, STEP_BUCKETS_TOKENS, Heartbeat

MS = 1_000_000


class Clock:
    def __init__(self):
        self.now_ns = 1000 * MS

    def __call__(self):
        return self.now_ns

    def pass_ms(self, num_ms):
        self.now_ns += num_ms * MS


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def heartbeat(clock):
    return Heartbeat(clock_ns=clock)


def test_before_the_loop_runs_there_is_no_age_and_no_idle_time(heartbeat, clock):
    heartbeat.load_began(100)
    heartbeat.loaded(30)
    clock.pass_ms(5000)
    heartbeat.loaded(30)
    pulse = heartbeat.pulse()
    assert (pulse.is_serving, pulse.age_s, pulse.idle_seconds) == (False, 0, 0)
    assert (pulse.num_loaded_bytes, pulse.num_bytes_to_load) == (60, 100)


def test_a_step_ages_until_it_ends(heartbeat, clock):
    heartbeat.idle()
    heartbeat.step_started()
    clock.pass_ms(700)
    assert heartbeat.pulse().age_s == pytest.approx(0.7)
    heartbeat.step_ended(3)
    assert heartbeat.pulse().age_s == 0
    clock.pass_ms(100)
    heartbeat.idle()
    assert heartbeat.pulse().age_s == 0


def test_time_is_either_busy_or_idle(heartbeat, clock):
    heartbeat.idle()
    clock.pass_ms(100)
    heartbeat.step_started()
    clock.pass_ms(40)
    assert heartbeat.pulse().idle_seconds == pytest.approx(0.1), "a step that still runs is no idle time"
    heartbeat.step_ended(1)
    clock.pass_ms(60)
    pulse = heartbeat.pulse()
    assert (pulse.step_seconds, pulse.idle_seconds) == (pytest.approx(0.04), pytest.approx(0.16))


def test_idle_time_never_goes_back_even_when_a_step_ends_while_it_is_read(heartbeat, clock):
    heartbeat.idle()
    clock.pass_ms(100)
    heartbeat.step_started()
    clock.pass_ms(40)
    before = heartbeat.pulse().idle_seconds
    heartbeat._memory.steps_ns += 40_000_000  # ended, but `step_since_ns` was read before
    assert heartbeat.pulse().idle_seconds == before == pytest.approx(0.1)


def test_overlapping_steps_count_every_moment_once(heartbeat, clock):
    heartbeat.step_started()
    clock.pass_ms(2)
    heartbeat.step_started()
    clock.pass_ms(8)
    heartbeat.step_ended(1)  # 10 ms
    clock.pass_ms(4)
    heartbeat.step_started()
    heartbeat.step_ended(1)  # 4 ms: before, it waited
    clock.pass_ms(3)
    heartbeat.step_ended(1)
    pulse = heartbeat.pulse()
    assert pulse.step_seconds == pytest.approx(0.017)
    assert pulse.idle_seconds == 0
    by_time = dict(zip(STEP_BUCKETS_S, pulse.steps_by_time, strict=False))
    assert {bound: count for bound, count in by_time.items() if count} == {0.005: 2, 0.01: 1}


def test_steps_are_counted_by_tokens_and_beyond_the_last_bucket(heartbeat, clock):
    for num_tokens in (1, 2, 3, STEP_BUCKETS_TOKENS[-1] + 1):
        heartbeat.step_started()
        clock.pass_ms(100_000)
        heartbeat.step_ended(num_tokens)
    pulse = heartbeat.pulse()
    assert pulse.steps_by_tokens[:4] == (1, 1, 1, 0)
    assert (pulse.steps_by_tokens[-1], pulse.steps_by_time[-1]) == (1, 4)
    assert pulse.num_step_tokens == 6 + STEP_BUCKETS_TOKENS[-1] + 1


def test_both_sides_see_the_same_memory_and_it_outlives_the_writer():
    reader = Heartbeat.shared()
    writer = Heartbeat(os.dup(reader.fd))
    writer.step_started()
    writer.step_ended(5)
    writer.close()
    writer.close()
    reader.close()
    del writer
    assert reader.pulse().num_step_tokens == 5
    assert reader.pulse().is_serving
