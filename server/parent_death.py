"""The end of a process whose parent has ended: the kernel sends it a signal, upon which it says where it was.

While a parent of many threads ends, the kernel sends the signal several times: whenever the thread ends that the process was
passed on to last. So that the first one's print is whole, one thread takes them all, the next one after the print. Nothing of
this needs the interpreter, which may be what hangs.
"""

import ctypes
import faulthandler
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from server.heartbeat import STACKS_SIGNAL

_PR_SET_PDEATHSIG = 1
_SA_NODEFER = 0x40000000


class _SigAction(ctypes.Structure):
    """`struct sigaction` of Linux's C libraries."""

    flags: int

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@contextmanager
def stacks_signal_blocked() -> Iterator[None]:
    """Processes and threads that are started within it do not take `STACKS_SIGNAL`."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_SIGNAL})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def end_with_parent() -> None:
    """From now on, end when the thread ends that started this process, with the stacks of all threads on stderr, once or twice.

    The process must have been started while the signal was blocked, and must not unblock it.
    """
    # chained to the default, which ends the process
    faulthandler.register(STACKS_SIGNAL, chain=True)
    libc, action = ctypes.CDLL(None), _SigAction()
    libc.sigaction(STACKS_SIGNAL, None, ctypes.byref(action))
    action.flags &= ~_SA_NODEFER  # which chaining sets, and lets the next signal interrupt the print
    libc.sigaction(STACKS_SIGNAL, ctypes.byref(action), None)
    threading.Thread(target=_take_signals, name="stacks", daemon=True).start()
    libc.prctl(_PR_SET_PDEATHSIG, STACKS_SIGNAL, 0, 0, 0)


def _take_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STACKS_SIGNAL})
    threading.Event().wait()
