"""The front's side of the engine: it owns the engine process, the channel to it and the open requests.

A request is open from `submit` until the engine's terminal event, also after an abort: only then are its resources free. If
the engine dies, this client writes the terminal events itself. It knows nothing of HTTP, text or media.
"""

import asyncio
import enum
import logging
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.api.request_stream import RequestStream
from server.engine_launch import EngineLaunch
from server.errors import EngineUnavailableError, OverloadedError, PayloadTooLargeError
from server.heartbeat import STACKS_SIGNAL, Heartbeat
from server.messages import (
    Abort,
    Failed,
    FailureKind,
    Finished,
    FromEngine,
    Ready,
    Shutdown,
    Started,
    StartFailed,
    Stats,
    Submit,
    Tokens,
)
from server.settings import Settings
from server.transport import FrontChannel, MessageTooLargeError, PeerGoneError, make_address

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "server.engine")
LAST_WORDS_S = 0.1
CLOSE_TIMEOUT_S = 10.0


class EngineState(enum.StrEnum):
    """Life of the engine process; it is never restarted."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    CLOSED = "closed"


@dataclass(frozen=True)
class _OpenRequest:
    stream: RequestStream
    on_end: Callable[[], None] | None


class EngineClient:
    """Starts one engine process and carries requests to it. All methods belong to one event loop.

    Attributes:
        state: where the engine is in its life.
        ready: the engine's limits, once it is ready.
        stats: the latest counters; None before the first.
        heartbeat: what the engine process notes while it works.
        died: set when the engine is gone without having been told to leave.
    """

    def __init__(self, settings: Settings, slab_name: str | None = None, *, command: Sequence[str] = ENGINE_COMMAND) -> None:
        """`command` is the engine's command line."""
        self.state = EngineState.STARTING
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.heartbeat = Heartbeat.shared()
        self.died = asyncio.Event()
        self._settings = settings
        self._slab_name = slab_name
        self._command = tuple(command)
        self._open: dict[str, _OpenRequest] = {}
        self._started = asyncio.Event()
        self._failure = "the engine process is not running"
        self._address: Path | None = None
        self._channel: FrontChannel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_open(self) -> int:
        """Requests without a terminal event."""
        return len(self._open)

    @property
    def pid(self) -> int | None:
        """The engine's process id, once it was spawned."""
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the engine process left; None before. 0 only after `close`."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Spawn the engine; returns before the model is loaded."""
        self._address = make_address()
        self._channel = FrontChannel(self._address)
        launch = EngineLaunch(
            settings=self._settings, address=self._address, slab_name=self._slab_name, heartbeat_fd=self.heartbeat.fd
        )
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, pass_fds=(self.heartbeat.fd,)
        )
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(launch.model_dump_json().encode() + b"\n")
        reader = asyncio.create_task(self._read(self._channel), name="engine events")
        watcher = asyncio.create_task(self._watch(self._channel, self._process, reader), name="engine watch")
        self._tasks = [reader, watcher]

    async def wait_ready(self) -> Ready:
        """Wait until the engine takes requests.

        Raises:
            EngineUnavailableError: it cannot start, with its reason, or did not in `engine_start_timeout_s`.
        """
        try:
            async with asyncio.timeout(self._settings.engine_start_timeout_s):
                await self._started.wait()
        except TimeoutError:
            limit_s = self._settings.engine_start_timeout_s
            raise EngineUnavailableError(f"the engine was not ready after {limit_s:g} s") from None
        if self.ready is None or self.state is not EngineState.READY:
            raise EngineUnavailableError(self._failure)
        return self.ready

    def submit(self, message: Submit, on_end: Callable[[], None] | None = None) -> RequestStream:
        """Send a request and return its events. Never blocks.

        Args:
            message: validated; its id must be unused.
            on_end: called exactly once, when the request has its terminal event; not called when this raises.

        Raises:
            EngineUnavailableError: the engine is not ready.
            OverloadedError: too many open requests.
            PayloadTooLargeError: the message does not fit the channel.
        """
        if self.state is not EngineState.READY or self._channel is None:
            raise EngineUnavailableError("the engine is not ready")
        if self.num_open >= self._settings.max_num_seqs + self._settings.max_queued_requests:
            raise OverloadedError(f"{self.num_open} requests are open; retry later")
        assert message.request_id not in self._open, "request ids are unique"
        try:
            self._channel.send(message)
        except PeerGoneError:
            raise EngineUnavailableError("the engine is not running") from None
        except MessageTooLargeError:
            raise PayloadTooLargeError("the prompt and its media are too large for one request") from None
        stream = RequestStream(message.request_id, self._send_abort)
        self._open[message.request_id] = _OpenRequest(stream, on_end)
        return stream

    def end_open(self) -> None:
        """End all open requests on this side, because the server leaves; what the engine still says of them is ignored."""
        self._fail_open(FailureKind.SHUTDOWN, "the server is shutting down")

    def end_with_stacks(self, timeout_s: float) -> None:
        """Have a hanging engine print the stacks of its threads, which ends it; kill it if it cannot. From any thread."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return
        try:
            signal.pidfd_send_signal(descriptor, STACKS_SIGNAL)
            if not select.select([descriptor], [], [], timeout_s)[0]:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)

    async def close(self) -> None:
        """Stop the engine: abort what is open, wait for its answers, kill the process after a deadline. Idempotent."""
        if self.state is EngineState.CLOSED:
            return
        can_answer = self.state is EngineState.READY
        self.state = EngineState.CLOSED
        if self._process is not None:
            await self._stop(self._process, can_answer)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.end_open()
        self._started.set()
        self.heartbeat.close()
        if self._channel is not None:
            self._channel.close()
        if self._address is not None:
            shutil.rmtree(self._address, ignore_errors=True)

    async def _stop(self, process: asyncio.subprocess.Process, can_answer: bool) -> None:
        if can_answer:
            self._send_quietly(Shutdown())
        elif process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await process.wait()
                await self._tasks[-1]
        except TimeoutError:
            logger.error("the engine did not leave in %g s and is killed", CLOSE_TIMEOUT_S)
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _read(self, channel: FrontChannel) -> None:
        while True:
            self._dispatch(await channel.receive())
            # A frame that is already there does not suspend `receive`: give the other tasks their turn.
            await asyncio.sleep(0)

    async def _watch(self, channel: FrontChannel, process: asyncio.subprocess.Process, reader: asyncio.Task[None]) -> None:
        await asyncio.wait({reader, asyncio.ensure_future(process.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if reader.done() and process.returncode is None:
            logger.error("the engine's messages cannot be read", exc_info=reader.exception())
            process.kill()
        code = await process.wait()
        reader.cancel()
        await asyncio.wait({reader})
        try:
            while events := await channel.receive_within(LAST_WORDS_S):
                self._dispatch(events)
        except Exception:
            logger.exception("the engine's last messages cannot be read")
        finally:
            self._on_exit(code)

    def _on_exit(self, code: int) -> None:
        if self.state is EngineState.CLOSED:
            return
        if not self._started.is_set():
            self._failure = f"the engine process left with exit code {code} while starting; its log says why"
        self.state = EngineState.DEAD
        logger.error("the engine process left with exit code %d", code)
        self._fail_open(FailureKind.ENGINE_DEAD, "the engine died while the request was open")
        self._started.set()
        self.died.set()

    def _dispatch(self, events: list[FromEngine]) -> None:
        for event in events:
            match event:
                case Started():
                    if request := self._open.get(event.request_id):
                        request.stream.started()
                case Tokens():
                    if request := self._open.get(event.request_id):
                        request.stream.put(event)
                case Finished() | Failed():
                    self._end(event)
                case Stats():
                    self.stats = event
                case Ready():
                    self.ready = event
                    if self.state is EngineState.STARTING:
                        self.state = EngineState.READY
                    self._started.set()
                case StartFailed():
                    self._failure = event.message
                    self._started.set()

    def _end(self, event: Finished | Failed) -> None:
        request = self._open.pop(event.request_id, None)
        if request is None:
            return
        request.stream.put(event)
        if request.on_end is not None:
            try:
                request.on_end()
            except Exception:
                logger.exception("releasing the resources of request %s failed", event.request_id)

    def _fail_open(self, kind: FailureKind, message: str) -> None:
        for request_id in list(self._open):
            self._end(Failed(request_id, kind, message))

    def _send_abort(self, request_id: str) -> None:
        if request_id in self._open:
            self._send_quietly(Abort(request_id))

    def _send_quietly(self, message: Abort | Shutdown) -> None:
        """A dead engine needs no telling: its exit ends every request."""
        if self._channel is None:
            return
        try:
            self._channel.send(message)
        except PeerGoneError:
            logger.debug("not sent, the engine is gone: %r", message)
