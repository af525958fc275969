"""What a kubelet does to a container, with a rendered pod's numbers: start, probes, preStop, SIGTERM, grace period, SIGKILL.

It runs the container's command as a plain process. Host names and ports are replaced; times, thresholds and the rest are the
pod's.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from tests.deploy.processes import free_port
from tests.e2e.server_process import ROOT

REPLACED = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


class Probe:
    """One probe's state: it flips after as many equal results in a row as the pod says."""

    def __init__(self, url, spec):
        self._url = url + spec["httpGet"]["path"]
        self._spec = spec
        self.num_failures = 0
        self.results = []

    def run(self):
        """Ask once; whether the answer was a success."""
        try:
            is_good = httpx.get(self._url, timeout=self._spec["timeoutSeconds"]).is_success
        except httpx.TransportError:
            is_good = False
        self.num_failures = 0 if is_good else self.num_failures + 1
        self.results.append(is_good)
        return is_good

    @property
    def has_failed(self):
        return self.num_failures >= self._spec["failureThreshold"]

    @property
    def period_s(self):
        return self._spec["periodSeconds"]


class MiniKubelet:
    """A context manager around one container of the server.

    Attributes:
        events: what a kubelet would report, in order: "started", "ready", "not ready", "startup failed", "liveness failed",
            "exited N", "killed".
        url: where the server listens.
    """

    def __init__(self, pod, environment, model, start_delay_s=0.0):
        self._pod = pod
        self._container = pod["spec"]["containers"][0]
        assert "admin" in {port["name"] for port in self._container["ports"]}
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        admin_port = free_port()
        self._command = [sys.executable, "-m"]
        for argument in self._container["args"]:
            self._command.append(
                {"--host=0.0.0.0": "--host=127.0.0.1", "--port=8000": f"--port={port}"}.get(argument, argument)
            )
        if start_delay_s:
            self._command = ["/bin/sh", "-c", f'sleep {start_delay_s}; exec "$@"', "sh", *self._command]
        # Of the host only what a container has too; the pod's folders do not exist here.
        given = {name: value for name, value in environment.items() if name not in REPLACED}
        self._environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | given
        self._environment |= {"M3_MODEL": str(model), "M3_ADMIN_PORT": str(admin_port), "M3_ADMIN_HOST": "127.0.0.1"}
        self.events = []
        self.startup, self.readiness, self.liveness = (
            Probe(f"http://127.0.0.1:{admin_port}", self._container[f"{name}Probe"])
            for name in ("startup", "readiness", "liveness")
        )
        self._is_over = threading.Event()
        self._is_terminating = threading.Event()
        self._changed = threading.Condition()

    def __enter__(self):
        self.process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._log = []
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._probe)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._is_terminating.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        for thread in self._threads:
            thread.join(30)

    @property
    def log(self):
        return "".join(self._log)

    def wait_for(self, event, timeout_s=60):
        """Return when the event was reported."""
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.events, timeout_s), f"{event} not in {self.events}\n{self.log}"

    def stop(self):
        """Delete the pod; seconds from SIGTERM to the end. As with a kubelet, liveness is asked no more, readiness still is."""
        self._is_terminating.set()
        pre_stop_s = self._container["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace_s = self._pod["spec"]["terminationGracePeriodSeconds"]
        self._is_over.wait(pre_stop_s)
        self._note("terminating")
        start_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(grace_s - pre_stop_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self._note("killed")
        self._is_over.set()
        return time.monotonic() - start_s

    def _note(self, event):
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def _read(self):
        with self.process.stderr as stream:
            self._log.extend(stream)
        self._note(f"exited {self.process.wait()}")

    def _probe(self):
        while not self.startup.run():
            if self.startup.has_failed:
                self._note("startup failed")
                return
            if self._is_over.wait(self.startup.period_s):
                return
        self._note("started")
        liveness = threading.Thread(target=self._probe_liveness)
        liveness.start()
        is_ready = False
        while not self._is_over.is_set():
            self.readiness.run()
            if self.readiness.num_failures == 0 and not is_ready:
                is_ready = True
                self._note("ready")
            elif self.readiness.has_failed and is_ready:
                is_ready = False
                self._note("not ready")
            self._is_over.wait(self.readiness.period_s)
        liveness.join(30)

    def _probe_liveness(self):
        while not self._is_terminating.is_set():
            self.liveness.run()
            if self.liveness.has_failed:
                self._note("liveness failed")
                return
            self._is_terminating.wait(self.liveness.period_s)


def model_folder():
    """The bundled checkpoint."""
    return Path(ROOT, "server", "model", "tiny")
