"""The scripts that the chart puts into pods: `helm test`'s questions and the verified download, also where they must fail."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.deploy.tools import CHART, ROOT, of_kind, render, run
from tests.e2e.server_process import ServerProcess

DOWNLOAD = CHART / "files" / "download.py"
REVISION = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "maker/model"
BIG = bytes(range(256)) * 4096
FILES = {"config.json": b'{"a": 1}', "model-1.safetensors": BIG, "sub/empty.txt": b""}


def serve(handler):
    """A server on a free port, in a thread; its address and how to end it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def stop():
        server.shutdown()
        thread.join(10)
        server.server_close()

    return f"http://127.0.0.1:{server.server_port}", stop


class Hub(BaseHTTPRequestHandler):
    """Enough of a model hub: a listing with hashes, and files with ranges. `state` steers it and remembers."""

    def __init__(self, state, *args):
        self._state = state
        super().__init__(*args)

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._state["requests"].append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if self.path.startswith("/api/"):
            body = json.dumps({"sha": self._state.get("sha", REVISION), "siblings": self._state["listing"]}).encode()
        else:
            name = self.path.partition(f"/resolve/{REVISION}/")[2]
            if target := self._state.get("redirect"):
                self.send_response(302)
                self.send_header("Location", f"{target}{self.path}")
                self.end_headers()
                return
            body = self._state["files"][name]
        first = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if "Range" in self.headers else 0
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(body) - first))
        self.end_headers()
        cut = self._state.pop("cut", None) if len(body) == len(BIG) else None
        self.wfile.write(body[first : cut or len(body)])


def listing(files):
    entries = []
    for name, data in files.items():
        entry = {"rfilename": name, "size": len(data)}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest()}
        else:
            entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entries.append(entry)
    return entries


@pytest.fixture
def hub():
    state = {"requests": [], "files": dict(FILES), "listing": listing(FILES)}
    state["url"], stop = serve(partial(Hub, state))
    yield state
    stop()


def download(action, folder, hub, **environment):
    given = {
        "PATH": os.environ["PATH"],
        "MODEL_REPOSITORY": REPOSITORY,
        "MODEL_REVISION": REVISION,
        "MODEL_ENDPOINT": hub["url"],
    }
    command = [sys.executable, DOWNLOAD, action, folder]
    return subprocess.run(command, env=given | environment, capture_output=True, text=True, timeout=60)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_download_is_complete_and_marked(hub, tmp_path):
    result = download("fetch", tmp_path, hub)
    assert result.returncode == 0, result.stderr
    found = contents(tmp_path / REVISION)
    assert json.loads(found.pop(".complete")) == {"repository": REPOSITORY, "revision": REVISION}
    assert found == FILES
    assert not (tmp_path / f"{REVISION}.partial").exists()
    assert download("wait", tmp_path, hub).returncode == 0


def test_an_interrupted_download_goes_on_where_it_was(hub, tmp_path):
    hub["cut"] = 300_000
    first = download("fetch", tmp_path, hub)
    assert first.returncode != 0
    assert not (tmp_path / REVISION).exists()
    hub["requests"].clear()
    assert download("fetch", tmp_path, hub).returncode == 0
    fetched = [(path.rpartition("/")[2], first_byte) for path, first_byte, _ in hub["requests"] if "/resolve/" in path]
    assert fetched == [("model-1.safetensors", "bytes=300000-")]
    assert contents(tmp_path / REVISION)["model-1.safetensors"] == BIG


@pytest.mark.parametrize("name", ["config.json", "model-1.safetensors"])
def test_a_wrong_file_is_refused_and_removed(hub, tmp_path, name):
    hub["files"][name] = b"x" * len(FILES[name])
    result = download("fetch", tmp_path, hub)
    assert result.returncode != 0
    assert f"{name}: size or hash differs" in result.stderr
    assert not (tmp_path / REVISION).exists()
    hub["files"][name] = FILES[name]
    assert download("fetch", tmp_path, hub).returncode == 0


def test_another_revision_is_refused(hub, tmp_path):
    hub["sha"] = "f" * 40
    assert "instead of" in download("fetch", tmp_path, hub).stderr
    assert not (tmp_path / REVISION).exists()


def test_a_name_that_leaves_the_folder_is_refused(hub, tmp_path):
    hub["listing"][0]["rfilename"] = "../../outside"
    result = download("fetch", tmp_path / "models", hub)
    assert "not a name within the folder" in result.stderr
    assert contents(tmp_path) == {}


def test_waiting_refuses_another_repository_s_files(hub, tmp_path):
    download("fetch", tmp_path, hub)
    result = download("wait", tmp_path, hub, MODEL_REPOSITORY="other/model")
    assert result.returncode != 0
    assert "expected" in result.stderr


def test_the_token_goes_to_the_hub_and_not_where_it_redirects(hub, tmp_path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    store = {"requests": [], "files": hub["files"], "listing": []}
    store["url"], stop = serve(partial(Hub, store))
    try:
        hub["redirect"] = store["url"]
        result = download("fetch", tmp_path / "models", hub, MODEL_TOKEN_FILE=str(token))
    finally:
        stop()
    assert result.returncode == 0, result.stderr
    assert {authorization for _, _, authorization in hub["requests"]} == {"Bearer secret"}
    assert {authorization for _, _, authorization in store["requests"]} == {None}
    assert "secret" not in result.stdout + result.stderr


@pytest.fixture(scope="module")
def server():
    with ServerProcess() as process:
        yield process


@pytest.fixture(scope="module")
def hook(tmp_path_factory):
    """Runs one rendered `helm test` pod as a process against another address."""
    manifests = render(CHART / "ci" / "cpu-values.yaml")
    folder = tmp_path_factory.mktemp("smoke")
    for item in of_kind(manifests, "ConfigMap"):
        for name, text in item["data"].items():
            if name == "smoke.py":
                (folder / name).write_text(text)
    pods = {pod["metadata"]["name"].rpartition("-")[2]: pod for pod in of_kind(manifests, "Pod")}
    assert set(pods) == {"models", "chat", "stream"}

    def run_hook(name, **environment):
        container = pods[name]["spec"]["containers"][0]
        given = {item["name"]: item["value"] for item in container["env"]}
        program, script, *arguments = container["args"]
        assert (program, script) == ("python", "/etc/m3/smoke/smoke.py")
        command = [sys.executable, folder / "smoke.py", *arguments]
        return subprocess.run(command, env=given | environment, capture_output=True, text=True, timeout=60)

    return run_hook


@pytest.mark.parametrize("name", ["models", "chat", "stream"])
def test_helm_test_succeeds_with_a_healthy_server(hook, server, name):
    result = hook(name, BASE_URL=server.url)
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr


class Collecting(BaseHTTPRequestHandler):
    """What a proxy that buffers makes of a stream."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'data: {"choices": []}\n\n' * 64 + b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_helm_test_sees_a_stream_that_was_held_back(hook):
    url, stop = serve(Collecting)
    try:
        result = hook("stream", BASE_URL=url)
    finally:
        stop()
    assert result.returncode != 0
    assert "arrived at once" in result.stderr


def test_helm_test_fails_with_another_model_and_without_a_server(hook, server):
    assert "is not among" in hook("models", BASE_URL=server.url, MODEL_NAME="other").stderr
    for name in ("models", "chat", "stream"):
        assert hook(name, BASE_URL="http://127.0.0.1:9").returncode != 0


def test_shell_scripts_are_clean():
    run("shellcheck", ROOT / ".ci" / "install-deploy-tools", ROOT / "deploy" / "cluster-smoke.sh")
