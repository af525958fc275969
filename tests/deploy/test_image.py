"""The image is built and run without a daemon: another user, a read-only root, no capabilities; then as the rendered pod.

The base is a Debian made here, where the real build takes one by digest; the CPU variant is built. The CUDA variant's layers
differ in the lock file alone.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tomllib

import httpx
import pytest
import yaml

from tests.deploy.processes import chat, event_times, free_port
from tests.deploy.tools import CHART, DEPLOY, ROOT, TOOLS, of_kind, one, render, run, tool
from tests.e2e.server_process import wait_until

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
BASE = "localhost/m3-base:bookworm"
IMAGE = "localhost/m3-server:0.1.0"
CONFIG = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
BUILD_TIMEOUT_S = 900
STORE = TOOLS / "containers"
STORAGE = ["--root", STORE / "root", "--runroot", STORE / "run"]
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"

pytestmark = pytest.mark.timeout(BUILD_TIMEOUT_S)


def engine(program, *arguments, check=True, **options):
    """podman or buildah with their own storage."""
    environment = {**os.environ, "CONTAINERS_CONF": str(STORE / "containers.conf")}
    command = [str(part) for part in (tool(program), *STORAGE, *arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, env=environment, **options)
    assert not check or result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result


@pytest.fixture(scope="module")
def base():
    """A minimal Debian as an image; pip in it trusts what this host trusts. Made once, it stays with the tools."""
    STORE.mkdir(parents=True, exist_ok=True)
    (STORE / "containers.conf").write_text(CONFIG)
    if engine("podman", "image", "exists", BASE, check=False).returncode:
        folder = STORE / "debian"
        shutil.rmtree(folder, ignore_errors=True)
        mirror = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
        command = [tool("debootstrap"), "--variant=minbase", "bookworm", str(folder), mirror]
        subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
        shutil.copy(CERTIFICATES, folder / "usr" / "local" / "share" / "host-ca.crt")
        (folder / "etc" / "pip.conf").write_text("[global]\ncert = /usr/local/share/host-ca.crt\n")
        with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as archive:
            engine("podman", "import", "--quiet", "-", BASE, stdin=archive.stdout)
        shutil.rmtree(folder)
    return BASE


@pytest.fixture(scope="module")
def image(base):
    """The CPU variant. torch's CPU build comes from where this host's pip finds it."""
    find_links = os.environ.get("PIP_FIND_LINKS", "/opt/wheels")
    extra = os.environ.get("PIP_EXTRA_INDEX_URL", "")
    arguments = ["--build-arg", f"BASE={base}", "--build-arg", "VARIANT=cpu", "--build-arg", f"PIP_EXTRA_INDEX_URL={extra}"]
    if os.path.isdir(find_links):
        arguments += ["--build-arg", f"PIP_FIND_LINKS={find_links}", "--volume", f"{find_links}:{find_links}:ro"]
    ignore = f"--ignorefile={DOCKERFILE}.dockerignore"
    engine("buildah", "bud", "--layers", "--isolation", "chroot", ignore, "-f", DOCKERFILE, "-t", IMAGE, *arguments, ROOT)
    return IMAGE


def inside(container, program, check=True):
    """Run Python in a container."""
    return engine("podman", "exec", container, "python", "-c", program, check=check)


@pytest.fixture(scope="module")
def container(image):
    """A container that no test ends: its name and URL."""
    with running(image, "m3-image-test") as url:
        yield "m3-image-test", url


@contextlib.contextmanager
def running(image, name):
    """The image as the chart's security context runs it; gives its URL once it is ready."""
    port = free_port()
    engine("podman", "rm", "--force", "--ignore", name)
    restrictions = [
        "--read-only",
        "--user=10001:10001",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--shm-size=384m",
    ]
    writable = ["--tmpfs=/tmp", "--tmpfs=/home/m3:exec"]
    settings = {
        "M3_MODEL": "/opt/m3/server/model/tiny",
        "M3_MEDIA_SLAB_BYTES": "268435456",
        "M3_DRAIN_TIMEOUT_S": "3",
        "OMP_NUM_THREADS": "1",
    }
    environment = [f"--env={key}={value}" for key, value in settings.items()]
    command = ["uvicorn", "server.main:app", "--host=127.0.0.1", f"--port={port}"]
    engine(
        "podman", "run", "--detach", f"--name={name}", "--network=host", *restrictions, *writable, *environment, image, *command
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_ready(url), 60)
        yield url
    finally:
        print(engine("podman", "logs", name, check=False).stderr[-3000:])
        engine("podman", "rm", "--force", "--ignore", name)


def is_ready(url):
    try:
        return httpx.get(url + "/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_the_dockerfile_is_clean_and_the_linter_sees_a_fault(tmp_path):
    run("hadolint", DOCKERFILE)
    spoiled = tmp_path / "Dockerfile"
    spoiled.write_text(DOCKERFILE.read_text().replace("--no-install-recommends ", ""))
    assert "DL3015" in run("hadolint", spoiled, check=False).stdout


def test_the_policy_scanner_finds_nothing_unexplained_in_the_dockerfile():
    # No HEALTHCHECK: Kubernetes ignores it, and compose has its own.
    arguments = ["-f", DOCKERFILE, "--framework", "dockerfile", "--compact", "--skip-download", "-o", "json"]
    report = json.loads(run("checkov", *arguments, check=False).stdout)
    assert {check["check_id"] for check in report["results"]["failed_checks"]} <= {"CKV_DOCKER_2", "CKV_DOCKER_7"}
    assert report["summary"]["passed"] > 5


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_lock_has_hashes_and_every_dependency(variant):
    lines = [
        line
        for line in (DEPLOY / "docker" / f"requirements-{variant}.lock").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    locked = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {re.match(r"[A-Za-z0-9_.-]+", item)[0].lower() for item in project["dependencies"]}
    assert asked <= locked, "a dependency was added: run deploy/docker/lock.py"


def test_the_compose_file_runs_the_image_with_the_same_restrictions():
    service = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]["server"]
    assert (ROOT / "deploy" / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DOCKERFILE
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["user"] == "10001:10001"
    assert int(service["stop_grace_period"].rstrip("s")) > 600


def test_the_container_has_no_rights_to_spare(container):
    name, _ = container
    status = inside(name, "print(open('/proc/1/status').read())").stdout
    assert re.search(r"CapEff:\s+0000000000000000", status)
    assert re.search(r"NoNewPrivs:\s+1", status)
    assert re.search(r"Seccomp:\s+2", status)
    assert inside(name, "import os, pwd; print(pwd.getpwuid(os.getuid()).pw_name)").stdout == "m3\n"
    assert "Read-only file system" in inside(name, "open('/opt/m3/x', 'w')", check=False).stderr


def test_the_container_answers_and_streams(container):
    _, url = container
    with httpx.Client(timeout=60) as client:
        _, events = event_times(client, url, chat(max_tokens=16))
    assert events[-1] == "data: [DONE]"


def test_the_image_can_compile_what_triton_makes_at_run_time(container):
    name, _ = container
    program = """
import subprocess, sysconfig, tempfile, pathlib
folder = pathlib.Path(tempfile.mkdtemp(dir='/home/m3'))
(folder / 'a.c').write_text('#include <Python.h>\\nint f(void) { return 7; }')
subprocess.run(['gcc', '-shared', '-fPIC', '-I', sysconfig.get_path('include'), 'a.c', '-o', 'a.so'], cwd=folder, check=True)
import ctypes
print(ctypes.CDLL(folder / 'a.so').f())
"""
    assert inside(name, program).stdout == "7\n"


def test_the_image_carries_no_more_than_it_needs(image):
    config = json.loads(engine("podman", "inspect", image).stdout)[0]["Config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["tini", "--"]
    assert config["StopSignal"] == "SIGTERM"
    listing = engine("podman", "run", "--rm", "--network=none", "--entrypoint=find", image, "/opt/m3", "-maxdepth", "1").stdout
    assert set(listing.split()) == {"/opt/m3", "/opt/m3/server", "/opt/m3/LICENSE"}


def test_too_little_shared_memory_is_noticed(image):
    """The reason why the chart always mounts /dev/shm: a runtime's 64 MiB do not hold the decoded pictures."""
    name = "m3-small-shm"
    engine("podman", "rm", "--force", "--ignore", name)
    arguments = ["--read-only", "--tmpfs=/tmp", "--network=none", "--shm-size=64m", "--env=M3_MODEL=/opt/m3/server/model/tiny"]
    engine("podman", "run", "--detach", f"--name={name}", *arguments, image)
    try:
        wait_until(lambda: "/dev/shm: No space left on device" in engine("podman", "logs", name).stderr, 60)
    finally:
        engine("podman", "rm", "--force", "--ignore", name)


@pytest.fixture
def claim():
    """A volume with the tiny checkpoint, under the name of the values' claim."""
    engine("podman", "volume", "rm", "--force", "weights", check=False)
    engine("podman", "volume", "create", "weights")
    mount = engine("podman", "volume", "inspect", "weights", "--format", "{{.Mountpoint}}").stdout.strip()
    shutil.copytree(ROOT / "server" / "model" / "tiny", f"{mount}/tiny")
    yield
    engine("podman", "volume", "rm", "--force", "weights", check=False)


def test_the_rendered_pod_serves(image, claim, tmp_path):
    """`podman kube play` takes the Deployment as it is, apart from probes, which it would need systemd for, and the port."""
    manifests = render(
        CHART / "ci" / "cpu-values.yaml", sets=['image={"repository": "localhost/m3-server", "pullPolicy": "Never"}']
    )
    deployment = one(manifests, "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    port = free_port()
    container["args"] = [argument.replace("8000", str(port)).replace("0.0.0.0", "127.0.0.1") for argument in container["args"]]
    for name in ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports"):
        del container[name]
    settings = [item for item in of_kind(manifests, "ConfigMap") if item["metadata"]["name"].endswith("-settings")]
    file = tmp_path / "pod.yaml"
    file.write_text(yaml.safe_dump_all([*settings, deployment]))
    engine("podman", "kube", "play", "--network=host", file)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_ready(url), 60)
        assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == "tiny"
        assert httpx.post(url + "/v1/chat/completions", json=chat(max_tokens=4), timeout=60).status_code == 200
    finally:
        names = engine("podman", "ps", "--all", "--format", "{{.Names}}").stdout.split()
        print([engine("podman", "logs", name, check=False).stderr[-2000:] for name in names if name.endswith("-server")])
        engine("podman", "kube", "down", file, check=False)


def test_podman_stop_drains_and_ends(image):
    name = "m3-stop-test"
    with (
        running(image, name) as url,
        httpx.Client(timeout=60) as client,
        client.stream("POST", url + "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        with subprocess.Popen(
            [tool("podman"), *map(str, STORAGE), "stop", "--time=60", name], stdout=subprocess.DEVNULL
        ) as stopping:
            rest = [line for line in lines if line]
            assert stopping.wait(70) == 0
        assert '"code":"shutting_down"' in rest[-1]
        state = json.loads(engine("podman", "inspect", name).stdout)[0]["State"]
        assert state["ExitCode"] == 3, "the server's own code for a stream that was cut; 137 would be a kill"
