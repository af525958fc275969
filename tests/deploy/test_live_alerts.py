"""The real Prometheus scrapes the real server, our rules fire on real faults, and the real Alertmanager receives them."""

import json
import os
import re
import signal
import threading

import httpx
import pytest
import yaml

from tests.deploy.processes import chat, free_port, running
from tests.deploy.tools import CHART, DEPLOY, RULES, run
from tests.e2e.server_process import SERVE, ServerProcess, wait_until

ALERT_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def server():
    with ServerProcess([*SERVE, "--max-num-seqs", "2"]) as process:
        yield process


@pytest.fixture(scope="module")
def alertmanager(folder):
    config = yaml.safe_load((DEPLOY / "prometheus" / "alertmanager.yml").read_text())
    config["route"]["group_wait"] = "1s"
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{free_port()}"
    options = [f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/alerts", "--cluster.listen-address="]
    listen = f"--web.listen-address={url.removeprefix('http://')}"
    with running("prometheus-alertmanager", *options, listen, url=url + "/-/ready", log=folder / "alertmanager.log"):
        yield url


@pytest.fixture(scope="module")
def prometheus(folder, server, alertmanager):
    """Our configuration with our rules; only addresses and durations differ: seconds instead of minutes."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = ["rules.yaml"]
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager.removeprefix("http://")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://")]
    rules = re.sub(r"for: \d+m", "for: 1s", RULES.read_text())
    (folder / "rules.yaml").write_text(re.sub(r"\[\d+[mh]\]", "[10s]", rules))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{free_port()}"
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    listen = f"--web.listen-address={url.removeprefix('http://')}"
    with running("prometheus", *options, listen, url=url + "/-/ready", log=folder / "prometheus.log"):
        yield url


@pytest.fixture(scope="module")
def firing(alertmanager, prometheus):
    """The names of the alerts that Alertmanager holds."""

    def names():
        result = run("amtool", "alert", "query", f"--alertmanager.url={alertmanager}", "-o", "json")
        return {item["labels"]["alertname"] for item in json.loads(result.stdout)}

    return names


class Streams:
    """Requests that do not end, until the block does."""

    def __init__(self, url, num_streams):
        self._url = url
        self._num_streams = num_streams
        self._client = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=None))
        self._is_over = threading.Event()

    def _read(self):
        try:
            with self._client.stream("POST", self._url + "/v1/chat/completions", json=chat(stream=True)) as response:
                for _ in response.iter_raw():
                    if self._is_over.is_set():
                        return
        except httpx.TransportError:
            return

    def __enter__(self):
        self._threads = [threading.Thread(target=self._read) for _ in range(self._num_streams)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)
        self._client.close()


def test_what_the_server_exports_is_well_formed(server):
    text = httpx.get(server.url + "/metrics").text
    result = run("promtool", "check", "metrics", text=text, check=False)
    # The names that gateways read have colons, which the linter keeps for recording rules.
    complaints = [line for line in (result.stdout + result.stderr).splitlines() if line and not line.startswith("vllm:")]
    assert complaints == []


def test_a_healthy_server_fires_nothing_and_a_queue_does(server, firing):
    httpx.post(server.url + "/v1/chat/completions", json=chat(max_tokens=8), timeout=30)
    wait_until(lambda: firing() == set(), 10)
    with Streams(server.url, 12):
        wait_until(lambda: "M3QueueBacklog" in firing(), ALERT_TIMEOUT_S)


def test_every_panel_has_data(server, prometheus):
    httpx.post(server.url + "/v1/chat/completions", json=chat(max_tokens=8), timeout=30)
    board = json.loads((CHART / "dashboards" / "m3-overview.json").read_text())
    targets = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", [])]

    def empty():
        found = set()
        for title, expression in targets:
            query = expression.replace("$__rate_interval", "1m")
            query = re.sub(r"\$(namespace|job|instance)", ".*", query)
            if not run("promtool", "query", "instant", prometheus, query).stdout.strip():
                found.add(title)
        return found

    assert len(targets) > 25
    # What has not happened, like a failed request or a picture, shows as zero.
    wait_until(lambda: not empty(), 30)


def test_a_query_that_matches_nothing_shows(prometheus):
    assert run("promtool", "query", "instant", prometheus, "m3_nothing").stdout.strip() == ""


def test_a_hanging_engine_and_then_a_dead_server_fire(server, firing):
    with Streams(server.url, 1):
        wait_until(lambda: server.metric("m3_sequences_running") == 1, 10)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        try:
            wait_until(lambda: "M3EngineStalled" in firing(), ALERT_TIMEOUT_S)
        finally:
            os.kill(engine, signal.SIGCONT)
    server.process.kill()
    wait_until(lambda: "M3ReplicaDown" in firing(), ALERT_TIMEOUT_S)
