import os
import subprocess
import sys

import pytest

from server.media.spawner import worker_environment

MEMORY_BYTES = 400 << 20
CONFINED = f"""
import os, sys
from server.media.sandbox import confine
before = os.readlink("/proc/self/ns/net")
confine({MEMORY_BYTES}, os.getppid())
"""


def confined(script, *arguments):
    """What `script` prints in a process that has confined itself."""
    return subprocess.run(
        [sys.executable, "-c", CONFINED + script, *arguments],
        env=worker_environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


def test_memory_beyond_the_limit_is_refused_and_below_it_is_not():
    script = f"""
size = {MEMORY_BYTES}
del_me = bytearray(size // 4)
try:
    bytearray(size)
except MemoryError:
    print("refused")
"""
    assert confined(script) == "refused"


def test_no_file_can_be_written(tmp_path):
    script = """
try:
    with open(sys.argv[1], "wb", buffering=0) as file:
        file.write(b"x")
except OSError as error:
    print(error.strerror)
"""
    assert confined(script, str(tmp_path / "file")) == "File too large"


def test_no_network_where_the_kernel_allows_to_give_it_up():
    script = """
import socket
if os.readlink("/proc/self/ns/net") == before:
    print("not allowed")
else:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as error:
            print(error.strerror)
"""
    seen = confined(script)
    if seen == "not allowed":
        pytest.skip("this machine does not allow user namespaces")
    assert seen == "Network is unreachable"


def test_a_worker_whose_parent_is_gone_already_leaves():
    script = "from server.media.sandbox import confine; confine(1 << 30, 1 << 30); print('alive')"
    done = subprocess.run([sys.executable, "-c", script], env=worker_environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_environment_carries_no_secrets(monkeypatch):
    monkeypatch.setenv("M3_API_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    environment = worker_environment()
    assert "secret" not in environment.values()
    assert set(environment) <= {
        *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL"),
        *("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
        *("MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    }
    assert environment["PYTHONPATH"].endswith(os.pathsep + "/somewhere")
