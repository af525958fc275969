"""Probes and drain, with the numbers that the chart renders, against the real server."""

import os
import signal
import threading
import time

import httpx

from tests.deploy.kubelet import MiniKubelet, model_folder
from tests.deploy.processes import chat
from tests.deploy.tools import CHART, render, server_environment, server_pod
from tests.e2e.server_process import wait_until

VALUES = CHART / "ci" / "cpu-values.yaml"


def kubelet(sets=(), **options):
    manifests = render(VALUES, sets=sets)
    return MiniKubelet(server_pod(manifests)[0], server_environment(manifests), model_folder(), **options)


class Stream(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, url, **fields):
        super().__init__()
        self._url = url
        self._body = chat(stream=True, **fields)
        self.lines = []
        self.fault = None
        self.first = threading.Event()
        self.start()

    def run(self):
        try:
            with httpx.stream("POST", self._url + "/v1/chat/completions", json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line)
                        if "content" in line:
                            self.first.set()
        except httpx.TransportError as error:
            self.fault = error
        self.first.set()


def test_a_stream_survives_a_drain_and_new_requests_do_until_sigterm():
    with kubelet(["drain.drainSeconds=60"]) as pod:
        pod.wait_for("ready")
        stream = Stream(pod.url, max_tokens=3000)
        assert stream.first.wait(30)
        stopping = threading.Thread(target=pod.stop)
        stopping.start()
        # The endpoints have not forgotten the pod yet: it must go on serving.
        assert httpx.post(pod.url + "/v1/chat/completions", json=chat(max_tokens=2), timeout=30).status_code == 200
        assert "terminating" not in pod.events
        pod.wait_for("terminating")
        wait_until(lambda: is_refused(pod.url), 5)
        stopping.join(60)
        stream.join(60)
    assert stream.fault is None
    assert stream.lines[-1] == "data: [DONE]", "a stream that fits into the drain was cut"
    assert pod.events[-1] == "exited 0"
    assert "not ready" in pod.events
    assert "liveness failed" not in pod.events
    assert "Traceback" not in pod.log


def is_refused(url):
    """Whether a new request is told to go elsewhere."""
    return httpx.post(url + "/v1/chat/completions", json=chat(max_tokens=2), timeout=30).status_code == 503


def test_the_drain_ends_a_stream_without_end_in_time():
    with kubelet() as pod:
        pod.wait_for("ready")
        stream = Stream(pod.url)
        assert stream.first.wait(30)
        delay_s = pod.stop()
        stream.join(60)
    assert '"code":"shutting_down"' in stream.lines[-1]
    assert pod.events[-1] == "exited 3", "the grace period is longer than the drain, so nobody has to be killed"
    drain_s = 4
    assert drain_s <= delay_s < drain_s + 10


def test_a_server_that_does_not_drain_in_time_is_killed():
    """The kubelet of these tests can tell: with a hanging process the grace period ends in a kill."""
    sets = ['drain={"preStopSeconds": 1, "drainSeconds": 1, "teardownSeconds": 25}']
    with kubelet(sets) as pod:
        pod.wait_for("ready")
        os.kill(pod.process.pid, signal.SIGSTOP)
        delay_s = pod.stop()
    assert "killed" in pod.events
    assert delay_s >= 26


def test_load_makes_no_probe_fail():
    with kubelet() as pod:
        pod.wait_for("ready")
        streams = [Stream(pod.url, max_tokens=200) for _ in range(16)]
        for stream in streams:
            stream.join(120)
        results = [*pod.readiness.results, *pod.liveness.results]
    assert all(stream.lines[-1] == "data: [DONE]" for stream in streams)
    assert results.count(True) > 6
    assert False not in results


def test_a_slow_start_within_the_budget_is_waited_for():
    with kubelet(start_delay_s=5) as pod:
        pod.wait_for("ready", 120)
        assert "startup failed" not in pod.events
        assert len(pod.startup.results) > 1


def test_a_start_beyond_the_budget_is_given_up():
    with kubelet(['startup={"budgetSeconds": 10}'], start_delay_s=30) as pod:
        pod.wait_for("startup failed", 30)


def test_an_engine_that_dies_ends_the_container_with_a_code():
    with kubelet() as pod:
        pod.wait_for("ready")
        for pid in children(pod.process.pid):
            with open(f"/proc/{pid}/cmdline", "rb") as stream:
                if b"server.engine" in stream.read():
                    os.kill(pid, signal.SIGKILL)
        pod.wait_for("exited 1", 30)


def test_an_engine_that_hangs_fails_the_liveness_probe_and_ends_the_container():
    with kubelet(["settings.stall_timeout_s=5"]) as pod:
        pod.wait_for("ready")
        stream = Stream(pod.url)
        assert stream.first.wait(30)
        for pid in children(pod.process.pid):
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"server.engine" in file.read():
                    os.kill(pid, signal.SIGSTOP)
        pod.wait_for("exited 1", 40)
        stream.join(60)
    assert False in pod.liveness.results
    assert "taken to hang" in pod.log


def children(pid):
    """Process ids of a process's children."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as stream:
            found += [int(child) for child in stream.read().split()]
    return found


def test_a_setting_that_does_not_exist_ends_the_container_at_once():
    start_s = time.monotonic()
    manifests = render(VALUES)
    environment = server_environment(manifests) | {"M3_NOPE": "1"}
    with MiniKubelet(server_pod(manifests)[0], environment, model_folder()) as pod:
        pod.wait_for("exited 2", 60)
    assert "M3_NOPE: no such setting" in pod.log
    assert time.monotonic() - start_s < 60
