"""A process of a parent that is killed."""

import subprocess
import sys

import pytest

from server.heartbeat import STACKS_SIGNAL

CHILD = """
import sys, threading, time
from server.parent_death import end_with_parent

def at_work():
    time.sleep(60)

end_with_parent()
print("ready", flush=True)
at_work()
"""
PARENT = f"""
import os, signal, subprocess, sys, threading, time
from server.parent_death import stacks_signal_blocked

with stacks_signal_blocked():
    child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
assert child.stdout.readline()
for _ in range(20):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("attempt", range(8))
def test_the_stacks_are_printed_to_their_end_whatever_number_of_threads_the_parent_had(attempt):
    parent = subprocess.run([sys.executable, "-c", PARENT], stderr=subprocess.PIPE, text=True, timeout=30)
    assert " in at_work\n" in parent.stderr
    assert " in <module>\n" in parent.stderr


def test_a_parent_does_not_keep_the_signal_blocked():
    code = f"""
import os
from server.parent_death import stacks_signal_blocked

with stacks_signal_blocked():
    pass
os.kill(os.getpid(), {int(STACKS_SIGNAL)})
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == -STACKS_SIGNAL
