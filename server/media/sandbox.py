"""What a worker process may not do: the last line of defence behind decoders that read strangers' bytes.

Everything here is one-way and happens once, after the imports and before the first byte of a client.
"""

import ctypes
import os
import resource
import signal

_CLONE_NEWUSER = 0x1000_0000
_CLONE_NEWNET = 0x4000_0000
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_MAX_FILES = 64


def confine(memory_bytes: int, parent_pid: int) -> None:
    """Give up network, new files, core dumps, and memory beyond `memory_bytes`; die when the parent does.

    The memory limit is on private writable memory (RLIMIT_DATA): the slab is shared and may be larger than the limit. What
    the process has mapped already does not count.

    Args:
        memory_bytes: how much more private memory it may map.
        parent_pid: who started this process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)  # not every kernel or container allows it; then the network stays
    for limit, value in (
        (resource.RLIMIT_DATA, _private_bytes() + memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # After unshare, which clears it. A parent that died before this line is noticed by its pid.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(0)


def leave_signals_to_front() -> None:
    """Ignore Ctrl-C and the SIGTERM that a service manager sends to all processes: a front that drains needs its workers."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)


def _private_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[5]) * resource.getpagesize()


def silence() -> None:
    """Send what C decoders print about a client's bytes to nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)
