"""The process that prepares large bodies: `python -m server.api.prepare_worker PARENT_PID`, its socket as standard input.

Takes one task at a time, answers it, and leaves when the socket closes. It may be killed at any moment, so that a body may
exhaust time or memory and cost nothing but itself. It holds no secrets, and gives way to everything else on the machine.
"""

import gc
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from server.api.chat_format import ChatFormat
from server.api.checkpoint import CheckpointError
from server.api.completions_prepare import COMPLETION_JOB
from server.api.messages_prepare import COUNT_JOB, MESSAGES_JOB
from server.api.prepare import CHAT_JOB, Checker, Job
from server.api.prepare_protocol import (
    TOO_MUCH_MEMORY,
    Answer,
    Idle,
    LogLine,
    PeerEndedError,
    Refusal,
    Setup,
    Task,
    packed,
    receive,
    receive_exactly,
    send,
)
from server.api.responses_prepare import RESPONSE_JOB
from server.api.tokenize_prepare import DETOKENIZE_JOB, TOKENIZE_JOB
from server.errors import M3Error, PayloadTooLargeError
from server.logs import frames_of
from server.media.sandbox import confine, leave_signals_to_front, silence

JOBS: Final[dict[str, Job[Any]]] = {
    job.name: job for job in (CHAT_JOB, COMPLETION_JOB, RESPONSE_JOB, MESSAGES_JOB, COUNT_JOB, TOKENIZE_JOB, DETOKENIZE_JOB)
}
# A start is short, and requests may wait for it; still it gives way.
START_NICENESS: Final = 10
# For one body; the largest legal ones take 10 s. Not wall time, of which there may be little left for this process.
CPU_LIMIT_S: Final = 60.0
# A body of 60 MB takes 0.5 GB; text that the tokenizer cannot cut, or millions of empty lists, take forty times their length.
MEMORY_BYTES: Final = 2 << 30
# What pydantic's parser raises when there is no more memory; it cannot be imported, and is no `Exception`.
PANIC: Final = "PanicException"

logger = logging.getLogger(__name__)


class LogKeeper(logging.Handler):
    """Keeps what is logged until it is taken: the front writes the log."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[LogLine] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._lines.append(LogLine(record.name, record.levelno, self.format(record)))

    def take(self) -> tuple[LogLine, ...]:
        """The lines since the last call."""
        lines, self._lines = self._lines, []
        return tuple(lines)


def prepare(checker: Checker, job: Job[Any], raw: bytes) -> tuple[Answer, list[bytes]]:
    """Run one job; the answer and what follows it."""
    try:
        light, following = packed(job.run(checker, raw))
        return Answer(msgspec.Raw(msgspec.json.encode(light)), num_bytes=tuple(map(len, following))), following
    except M3Error as error:
        return Answer(refusal=Refusal.of(error)), []
    except MemoryError:
        pass  # behind this block, what the exception's frames hold is free
    except BaseException as error:
        if type(error).__name__ != PANIC:
            logger.error("preparing a request failed with %s\n%s", type(error).__name__, frames_of(error))
            return Answer(fault=type(error).__name__), []
    return Answer(refusal=Refusal.of(PayloadTooLargeError(TOO_MUCH_MEMORY))), []


def serve(connection: socket.socket, parent_pid: int, log: LogKeeper) -> None:
    """Set up as the first message says, then answer tasks until the socket closes."""
    setup = receive(connection, Setup)
    os.nice(min(setup.niceness, START_NICENESS))
    try:
        checker = Checker(setup.limits, setup.media_limits, ChatFormat.load(Path(setup.model_dir)))
    except CheckpointError as error:
        send(connection, Answer(fault=str(error)))
        return
    confine(MEMORY_BYTES, parent_pid)
    silence()
    os.nice(max(0, setup.niceness - START_NICENESS))
    gc.collect()
    gc.freeze()
    send(connection, Answer())
    start_bytes = resident_bytes()
    while True:
        task = receive(connection, Task)
        raw = receive_exactly(connection, task.num_bytes)
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # its signal ends the process
        answer, following = prepare(checker, JOBS[task.job], raw)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, msgspec.structs.replace(answer, log=log.take()), following)
        del raw, answer, following
        gc.collect()  # errors and frames that refer to each other may hold a whole body
        send(connection, Idle(resident_bytes() - start_bytes))


def resident_bytes() -> int:
    """Memory that this process has."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def main() -> None:
    """Serve until the front is done or gone."""
    leave_signals_to_front()
    log = LogKeeper()
    logging.getLogger().addHandler(log)
    try:
        serve(socket.socket(fileno=0), int(sys.argv[1]), log)
    except PeerEndedError:
        return


if __name__ == "__main__":
    main()
