"""The other ranks of an engine, as processes that rank 0 starts, watches and ends.

They live as long as rank 0: the kernel tells them of its end. Rank 0 lives as long as all of them: one that leaves ends the
engine, even while it waits for that rank in a collective, because a thread of its own watches each.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from server.engine_launch import EngineLaunch
from server.engine_steps import MAX_FAILED_STEPS, Runner
from server.messages import StartFailed
from server.model.ranks import OneRank, Ranks
from server.model.runner import ModelRunner
from server.model.shard import Shard
from server.parent_death import stacks_signal_blocked
from server.rank_group import RankGroup
from server.rank_plans import STOP, LeadRunner
from server.transport import EngineChannel

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-m", "server.rank_worker")
LOSS_NOTICE_S = 2.0  # from the first sign that a rank is gone to its exit code
LEAVE_S = 1.0
STOP_TIMEOUT_S = 5.0


def store_of(launch: EngineLaunch) -> Path:
    """The file through which the ranks meet."""
    return launch.address / "ranks"


def reason_file_of(launch: EngineLaunch, rank: int) -> Path:
    """Where a rank says why it leaves."""
    return launch.address / f"rank-{rank}"


class RankTeam:
    """All ranks of one engine, seen from rank 0. With one rank there is nobody, and nothing happens."""

    def __init__(self, launch: EngineLaunch) -> None:
        self._launch = launch
        self._world = launch.settings.tensor_parallel_size
        self._group: RankGroup | None = None
        self._workers: list[subprocess.Popen[bytes]] = []
        self._is_serving = False
        self._has_lost_one = threading.Event()
        self._is_closing = threading.Event()

    @property
    def max_failed_steps(self) -> int:
        """Steps in a row that may fail: of several ranks none, as the others may be anywhere in the step."""
        return MAX_FAILED_STEPS if self._world == 1 else 1

    def start(self, device: torch.device) -> Ranks:
        """Start the processes of the other ranks and meet them."""
        if self._world == 1:
            return OneRank()
        for rank in range(1, self._world):
            with stacks_signal_blocked():
                worker = subprocess.Popen([*WORKER_COMMAND, str(rank), str(os.getpid())], stdin=subprocess.PIPE)
            self._workers.append(worker)
            threading.Thread(target=self._watch, args=(rank, worker), name=f"rank {rank} watch", daemon=True).start()
            assert worker.stdin is not None
            worker.stdin.write(self._launch.model_dump_json().encode() + b"\n")
            worker.stdin.flush()
        self._group = RankGroup(Shard(0, self._world), device, store_of(self._launch))
        return self._group

    def lead(self, runner: ModelRunner) -> Runner:
        """The runner for the loop, which begins now: with several ranks, one that takes all of them along."""
        self._is_serving = True
        return runner if self._group is None else LeadRunner(runner, self._group)

    def notices_loss(self) -> bool:
        """Whether a rank has left; gives one that is just leaving some time to be gone."""
        return bool(self._workers) and self._has_lost_one.wait(LOSS_NOTICE_S)

    def dismiss(self) -> None:
        """Tell the other ranks that there are no more steps."""
        self._is_closing.set()
        if self._group is not None:
            self._group.send(STOP)

    def close(self) -> None:
        """End the other ranks; those that were dismissed get some time to leave by themselves. Idempotent."""
        deadline_s = time.monotonic() + (STOP_TIMEOUT_S if self._is_closing.is_set() else 0)
        self._is_closing.set()
        for worker in self._workers:
            try:
                worker.wait(max(0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def _watch(self, rank: int, worker: "subprocess.Popen[bytes]") -> None:
        """Wait for the end of a rank, and see to it that the engine ends then."""
        code = worker.wait()
        if self._is_closing.is_set():
            return
        file = reason_file_of(self._launch, rank)
        reason = f": {file.read_text()}" if file.exists() else ""
        text = f"rank {rank} of {self._world} left with exit code {code}{reason}"
        logger.critical("%s", text)
        if not self._is_serving:
            channel = EngineChannel(self._launch.address)  # the loop's own is the other thread's
            channel.send([StartFailed(text)])
            channel.close()
        self._has_lost_one.set()
        if not self._is_closing.wait(LEAVE_S):
            os._exit(1)
