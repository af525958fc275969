"""The process as a whole: its signals, how uvicorn is told to stop, and how it ends when an orderly end takes too long.

uvicorn answers SIGTERM by closing its listener at once and ends by the signal, so that a drained server looks like a killed
one. Our handlers replace its own for as long as it serves.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final, NoReturn

import uvicorn

EXIT_FAILED: Final = 1
"""The engine could not start, died or hung."""

EXIT_CUT: Final = 3
"""The drain's deadline ended requests that were still running."""

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# From the end of the drain, or of the engine, to the end of the process: connections, engine, media workers.
TEARDOWN_S: Final = 20.0
# Of it, for connections whose clients do not read.
FLUSH_S: Final = 3
STDERR: Final = 2


class OwnProcess:
    """A process that serves this application and nothing else."""

    def __init__(self, on_signal: Callable[[], None]) -> None:
        """`on_signal` is called in the event loop for the first signal; the second one ends the process."""
        self._on_signal = on_signal
        self._exit_code = 0
        self._is_ending = False
        self._server: uvicorn.Server | None = None

    def take_signals(self) -> None:
        """Replace uvicorn's handlers; from the main thread, with the event loop running and uvicorn starting up."""
        server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        self._server = server if isinstance(server, uvicorn.Server) else None
        loop = asyncio.get_running_loop()

        def handle(signum: int, _: FrameType | None) -> None:
            if self._is_ending:
                give_up(128 + signum, "a second signal: leaving at once")  # children end with their parent
            self._is_ending = True
            loop.call_soon_threadsafe(self._on_signal)

        for signum in SIGNALS:
            signal.signal(signum, handle)

    def stop_serving(self, exit_code: int) -> None:
        """Let uvicorn end in order: no new connections, open ones get their answer, then the application's own end."""
        self._is_ending = True
        exit_code = self._exit_code = self._exit_code or exit_code  # a drain that ends well does not hide a failure
        leave_after(TEARDOWN_S, exit_code or EXIT_FAILED)
        if self._server is None:
            leave(exit_code)
        else:
            self._server.config.timeout_graceful_shutdown = FLUSH_S
            self._server.should_exit = True

    def end(self) -> None:
        """The application has stopped: end the process with its code; 0 is what uvicorn's own end gives."""
        if self._exit_code:
            leave(self._exit_code)


def leave(code: int) -> NoReturn:
    """End the process at once. Interpreter shutdown could wait for a thread or hide the code."""
    logging.shutdown()
    os._exit(code)


def give_up(code: int, message: str) -> NoReturn:
    """End the process whatever its threads hold: no lock is taken, and a log that nobody reads is not waited for."""
    os.set_blocking(STDERR, False)
    with contextlib.suppress(OSError):
        os.write(STDERR, f"{message}\n".encode())
    os._exit(code)


def leave_after(delay_s: float, code: int) -> None:
    """End the process then, whatever its event loop and its other threads do."""
    timer = threading.Timer(delay_s, give_up, (code, f"the server did not end within {delay_s:g} s"))
    timer.daemon = True
    timer.start()
