"""The real server as an operator starts it, on a free port, with the bundled checkpoint."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
TINY = ROOT / "server" / "model" / "tiny"
SERVE = (sys.executable, "-m", "server.cli", "serve", "--port", "0", "--model", str(TINY))
UVICORN = (sys.executable, "-m", "uvicorn", "server.main:app", "--port", "0")
START_TIMEOUT_S = 120
EXAMPLE = re.compile(r"curl (http://\S+?)/v1/chat/completions .*")


class ServerProcess:
    """A context manager; `url` is known when it is entered, unless it shall only wait for a line with some text."""

    def __init__(self, command=SERVE, wait_for=None, **environment):
        self._command = command
        self._wait_for = wait_for
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
        self.lines = []
        self.url = None
        self.example = None
        self._changed = threading.Condition()

    def __enter__(self):
        self.process = subprocess.Popen(
            self._command, cwd=ROOT, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        with self._changed:
            assert self._changed.wait_for(lambda: self._has_begun or self.process.poll() is not None, START_TIMEOUT_S), self.log
        assert self._has_begun, self.log
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self._reader.join(10)

    @property
    def _has_begun(self):
        return self.url if self._wait_for is None else self._wait_for in self.log

    @property
    def log(self):
        return "".join(self.lines)

    def _read(self):
        with self.process.stderr as stream:
            for line in stream:
                with self._changed:
                    self.lines.append(line)
                    if match := EXAMPLE.match(line):
                        self.example, self.url = match[0], match[1]
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def engine_pid(self):
        """The engine's process id."""
        return self.child_pid("server.engine")

    def child_pid(self, module):
        """The process id of the child that runs a module."""
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in path.read_text().split():
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        raise AssertionError(f"there is no {module}")

    def get(self, path):
        """A response, without the certificates that httpx would load for each."""
        return httpx.get(self.url + path, verify=False)

    def metric(self, name):
        """The value of a family without labels."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")


def wait_until(condition, timeout_s):
    """Seconds until `condition()` held."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < timeout_s, "it did not happen in time"
        threading.Event().wait(0.02)
    return time.monotonic() - start_s


def is_running(pid):
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
