"""How a server stops: when it is asked to, when its engine is lost, when a part of it hangs.

Owns the open requests, the watchdog and, in a process of its own, signals and exit code. Knows nothing of what requests want.
"""

import asyncio
import contextlib
import faulthandler
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from server.api.drain import drain
from server.api.engine_client import EngineClient, EngineState
from server.api.open_requests import OpenRequests
from server.api.process import EXIT_CUT, EXIT_FAILED, STDERR, TEARDOWN_S, OwnProcess, leave, leave_after
from server.api.watchdog import Watchdog
from server.settings import Settings

logger = logging.getLogger(__name__)

# For a hanging engine to print its stacks.
STACKS_S: Final = 5.0
MAX_TICK_S: Final = 1.0


class Lifecycle:
    """`start` and `stop` frame the server's life.

    Attributes:
        requests: those inside.
        is_draining: new requests are refused, open ones may finish.
        has_failed: the engine could not start or died.
    """

    def __init__(self, settings: Settings, on_cut: Callable[[int], None], *, owns_process: bool) -> None:
        """Set up.

        Args:
            settings: the operator's.
            on_cut: told how many requests a shutdown's deadline ended, when there was a shutdown.
            owns_process: signals drain the server, and the process ends with a code that says how it went.
        """
        self.requests = OpenRequests()
        self.is_draining = False
        self.has_failed = False
        self._settings = settings
        self._on_cut = on_cut
        self._engine: EngineClient | None = None
        self._process = OwnProcess(self._begin_drain) if owns_process else None
        self._loop_beat = 0
        self._tasks: list[asyncio.Task[None]] = []
        beats = {"engine": self._engine_beat, "event loop": lambda: self._loop_beat}
        self._watchdog = Watchdog(beats, settings.stall_timeout_s, self._on_stall)

    @property
    def is_alive(self) -> bool:
        """Whether waiting makes sense: the engine has not failed, and nothing hangs."""
        return not self.has_failed and self._watchdog.stalled is None

    def start(self) -> None:
        """Take the process's signals and watch the event loop."""
        if self._process is not None:
            self._process.take_signals()
        self._tasks.append(asyncio.create_task(self._tick(), name="beat of the event loop"))
        self._watchdog.start()

    def watch(self, engine: EngineClient) -> None:
        """Watch the engine, too."""
        self._engine = engine

    def fail(self) -> None:
        """The engine is lost: end the process in order."""
        self.has_failed = True
        if self._process is not None:
            self._process.stop_serving(EXIT_FAILED)

    @contextlib.asynccontextmanager
    async def stopping(self) -> AsyncIterator[None]:
        """Around the end of everything else; does not return when the process has to end with a code of its own."""
        self._watchdog.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            yield
        finally:
            if self._process is not None:
                self._process.end()

    def _begin_drain(self) -> None:
        self.is_draining = True
        self._tasks.append(asyncio.create_task(self._drain(), name="drain"))

    async def _drain(self) -> None:
        assert self._process is not None, "signals come from a process of its own"
        timeout_s = self._settings.drain_timeout_s
        num_open = len(self.requests)
        logger.info("shutting down: %d requests may go on for up to %g s; a second signal ends them", num_open, timeout_s)
        num_cut = await drain(self.requests, self._end_open, timeout_s)
        self._on_cut(num_cut)
        if num_cut:
            logger.error("the shutdown's deadline ended %d requests", num_cut)
        self._process.stop_serving(EXIT_CUT if num_cut else 0)

    def _end_open(self) -> None:
        if self._engine is not None:
            self._engine.end_open()

    async def _tick(self) -> None:
        """Show the watchdog that the event loop takes turns."""
        period_s = min(MAX_TICK_S, self._settings.stall_timeout_s / 10)
        while True:
            self._loop_beat = time.monotonic_ns()
            await asyncio.sleep(period_s)

    def _engine_beat(self) -> int:
        engine = self._engine
        return engine.heartbeat.beat_ns if engine is not None and engine.state is EngineState.READY else 0

    def _on_stall(self, part: str) -> None:
        """End a process of which a part hangs; in the watchdog's thread."""
        if self._process is not None:
            leave_after(TEARDOWN_S, EXIT_FAILED)  # first: nothing of what follows is sure to return
        limit_s = self._settings.stall_timeout_s
        logger.critical("the %s has done nothing for %g s and is taken to hang; stacks of all threads follow", part, limit_s)
        faulthandler.dump_traceback(STDERR)
        if self._process is None:
            return
        if self._engine is not None:
            self._engine.end_with_stacks(STACKS_S)
        if part != "engine":
            leave(EXIT_FAILED)
