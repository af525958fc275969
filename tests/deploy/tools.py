"""What the tests of `deploy/` share: where programs are, how one is run, and charts rendered once per set of values."""

import functools
import json
import os
import shutil
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart" / "minimax-m3"
RULES = CHART / "rules" / "m3.yaml"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
# Chart values for what the server does not have yet: their pods do not start with today's server.
PLANNED = [path for path in VALUES if path.name.startswith("planned-")]
PRESENT = [path for path in VALUES if path not in PLANNED]
HELMS = ("helm3", "helm4")
KUBE_VERSIONS = ("1.30.0", "1.33.0", "1.37.0")
# Values that need more than the oldest version.
NOT_ON_OLDEST = {"image", "claim"}
TOOLS = Path(os.environ.get("DEPLOY_TOOLS", Path.home() / ".cache" / "m3-deploy-tools"))
RUN_TIMEOUT_S = 120


def name_of(path):
    """A short name for a test's id."""
    return path.name.removesuffix("-values.yaml").removesuffix(".json")


def tool(name):
    """Path of an installed program: from `.ci/install-deploy-tools`, or of the system."""
    for folder in (TOOLS, TOOLS / "venv" / "bin"):
        if (folder / name).is_file():
            return str(folder / name)
    found = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    assert found, f"{name} is missing: run .ci/install-deploy-tools {TOOLS}"
    return found


def supported(path, kube_version):
    """Whether the values of `path` can be used with that Kubernetes."""
    return kube_version != KUBE_VERSIONS[0] or name_of(path) not in NOT_ON_OLDEST


def run(program, *arguments, text=None, check=True, **options):
    """Run a program to its end; its output belongs to the error if it fails."""
    environment = {**os.environ, "HOME": str(TOOLS / "home"), **options.pop("env", {})}
    result = subprocess.run(
        [tool(program), *map(str, arguments)],
        input=text,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        env=environment,
        **options,
    )
    assert not check or result.returncode == 0, f"{program} {arguments}: {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


def template(*files, helm="helm4", kube_version="1.33.0", release="rel", sets=(), check=True):
    """`helm template`, not parsed."""
    arguments = ["template", release, CHART, "--namespace", "llm", "--kube-version", kube_version]
    for file in files:
        arguments += ["--values", file]
    for item in sets:
        arguments += ["--set-json", item]
    return run(helm, *arguments, check=check)


@functools.lru_cache(maxsize=512)
def _rendered(files, helm, kube_version, release, sets):
    documents = yaml.load_all(
        template(*files, helm=helm, kube_version=kube_version, release=release, sets=sets).stdout,
        Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),
    )
    return json.dumps([document for document in documents if document])


def render(*files, helm="helm4", kube_version="1.33.0", release="rel", sets=()):
    """All manifests of a release as parsed objects; a fresh copy each time, so that a test may change them."""
    return json.loads(_rendered(files, helm, kube_version, release, tuple(sets)))


def of_kind(manifests, *kinds):
    """The manifests of some kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def one(manifests, kind):
    """The only manifest of a kind."""
    (found,) = of_kind(manifests, kind)
    return found


def pod_templates(manifests):
    """(name, pod template) of all that makes pods; a Pod is its own template."""
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        match manifest["kind"]:
            case "Pod":
                yield name, manifest
            case "Deployment" | "Job":
                yield name, manifest["spec"]["template"]
            case "LeaderWorkerSet":
                group = manifest["spec"]["leaderWorkerTemplate"]
                yield f"{name}/leader", group["leaderTemplate"]
                yield f"{name}/worker", group["workerTemplate"]


def containers(template):
    """All containers of a pod template."""
    return template["spec"].get("initContainers", []) + template["spec"]["containers"]


def server_pod(manifests):
    """The template of the pods that answer requests, and their main container."""
    (template,) = [
        template
        for name, template in pod_templates(manifests)
        if name.startswith(("Deployment", "LeaderWorkerSet")) and not name.endswith("worker")
    ]
    return template, template["spec"]["containers"][0]


def server_environment(manifests):
    """The variables that the server's container gets as plain values."""
    _, container = server_pod(manifests)
    environment = {}
    for source in container.get("envFrom", []):
        name = source["configMapRef"]["name"]
        (config,) = [item for item in of_kind(manifests, "ConfigMap") if item["metadata"]["name"] == name]
        environment |= config["data"]
    return environment | {item["name"]: item.get("value", "") for item in container["env"]}
