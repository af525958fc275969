import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from server.api.watchdog import Watchdog

ROOT = Path(__file__).parents[2]


class Part:
    def __init__(self, beat=1):
        self.beat = beat

    def __call__(self):
        return self.beat


class Watched:
    """A watchdog with a limit of four seconds that looks once a second."""

    def __init__(self, **parts):
        self.stalls = []
        self.watchdog = Watchdog(parts, 4.0, self.stalls.append)
        self._now_s = 100.0

    def look(self, num_times=1, passed_s=1.0):
        for _ in range(num_times):
            self._now_s += passed_s
            self.watchdog.look(self._now_s)


@pytest.fixture
def part():
    return Part()


@pytest.fixture
def watched(part):
    return Watched(engine=part, other=itertools.count(1).__next__)


def test_a_part_that_is_silent_for_the_limit_hangs_and_is_reported_once(watched):
    watched.look(4)
    assert watched.watchdog.stalled is None
    watched.look()
    assert (watched.watchdog.stalled, watched.stalls) == ("engine", ["engine"])
    watched.look(10)
    assert watched.stalls == ["engine"]


def test_a_beat_starts_the_silence_anew(watched, part):
    for _ in range(20):
        watched.look(4)
        part.beat += 1
    assert watched.stalls == []


def test_a_part_that_need_not_beat_is_not_watched(watched, part):
    part.beat = 0
    watched.look(100)
    part.beat = 1
    watched.look(4)
    assert watched.stalls == []
    watched.look()
    assert watched.stalls == ["engine"]


def test_time_in_which_the_watchdog_did_not_run_is_not_held_against_a_part(watched):
    watched.look(2)
    watched.look(passed_s=3600)
    assert watched.stalls == [], "the whole machine stood still"
    watched.look(2)
    assert watched.stalls == ["engine"]


def test_the_thread_looks_by_itself_until_it_is_stopped(part):
    stalled = threading.Event()
    watchdog = Watchdog({"engine": part}, 0.05, lambda name: stalled.set())
    watchdog.start()
    assert stalled.wait(20)
    watchdog.stop()


HANGING_LOOP = """
import asyncio, threading, time
from server.api.lifecycle import Lifecycle
from server.settings import load_settings

def hang_here():
    threading.Event().wait()

async def main():
    life = Lifecycle(load_settings({"model": ".", "stall_timeout_s": 0.4}, environ={}), print, owns_process=True)
    life.start()
    await asyncio.sleep(0)
    hang_here()

asyncio.run(main())
"""


def test_a_hanging_event_loop_ends_the_process_and_shows_where_it_hangs():
    command = [sys.executable, "-c", HANGING_LOOP]
    result = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "the event loop has done nothing for 0.4 s" in result.stderr
    assert "in hang_here" in result.stderr
