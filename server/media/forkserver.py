"""The process that worker processes are forked from: `python -m server.media.forkserver PARENT_PID`, socket as standard input.

It pays once for what every worker needs (torch's resize kernel alone takes 1.4 s and 200 MB to import); a worker is then a
fork, ready within milliseconds, and shares all of that memory until it writes to it. It reads no byte of a client: a request
is one message that carries the worker's end of a socket pair, the answer is the worker's process id and a descriptor of the
process, or that there can be none. It leaves when its own socket closes, and the kernel ends its workers with it.
"""

import array
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable

from server.media.sandbox import leave_signals_to_front

READY = b"+"
REFUSED = b"-"
MESSAGE_BYTES = 64
_PR_SET_PDEATHSIG = 1


def serve(worker_main: Callable[[socket.socket, int], None]) -> None:
    """Fork a worker per request until the socket closes.

    Args:
        worker_main: what a worker runs, given its socket and the process id of this process.
    """
    parent_pid = int(sys.argv[1])
    _die_with(parent_pid)
    leave_signals_to_front()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects workers; the front watches them by descriptor
    gc.collect()
    gc.freeze()  # a collection in a worker would write to, and so copy, every page that holds an object
    requests = socket.socket(fileno=0)
    requests.send(READY)
    while True:
        message, fds, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 1)
        if not message:
            return
        our_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            # No process or memory to be had at the moment. This process must not end of it: its workers would, too.
            os.close(fds[0])
            requests.send(REFUSED)
            continue
        if pid == 0:
            _become_worker(worker_main, socket.socket(fileno=fds[0]), our_pid)
        os.close(fds[0])
        _answer(requests, pid)


def _become_worker(worker_main: Callable[[socket.socket, int], None], connection: socket.socket, parent_pid: int) -> None:
    """Never returns: nothing that waits on this process's stack concerns a worker."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the request socket is not a worker's
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        worker_main(connection, parent_pid)
        status = 0
    finally:
        os._exit(status)


def _answer(requests: socket.socket, pid: int) -> None:
    try:
        watch = [os.pidfd_open(pid)]
    except ProcessLookupError:
        watch = []  # it died and was collected already
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", watch))] if watch else []
    requests.sendmsg([str(pid).encode()], rights)
    for fd in watch:
        os.close(fd)


def _die_with(parent_pid: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(0)


def main() -> None:
    """Import what workers need, once, and serve."""
    from server.media import worker

    worker.warm_up()
    serve(worker.main)


if __name__ == "__main__":
    main()
