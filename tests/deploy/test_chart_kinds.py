"""Every object passes its kind's schema, unknown fields included; no kind goes unchecked; every checker refuses a fault."""

import copy
import json
import subprocess

import pytest
import yaml

from tests.deploy.tools import KUBE_VERSIONS, ROOT, TOOLS, VALUES, pod_templates, render, run, supported

CORE_GROUPS = ("v1", "apps/v1", "batch/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1")
# Custom resources with published types, and the module that has them.
TYPED = {
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): "gateway-api",
    ("keda.sh/v1alpha1", "ScaledObject"): "keda",
    ("monitoring.coreos.com/v1", "PodMonitor"): "prometheus-operator",
    ("monitoring.coreos.com/v1", "ServiceMonitor"): "prometheus-operator",
    ("monitoring.coreos.com/v1", "PrometheusRule"): "prometheus-operator",
}
# Custom resources of which no package has types: the fields that the chart writes.
OWN_SCHEMAS = ROOT / "tests" / "deploy" / "schemas"
CHECK = """
import * as fs from "node:fs";
const faults = [];
for (const {module, kind, object} of JSON.parse(fs.readFileSync(0, "utf8"))) {
  try { new (await import(module))[kind](object).validate(); faults.push(""); } catch (error) { faults.push(String(error)); }
}
console.log(JSON.stringify(faults));
"""


def is_core(manifest):
    return manifest["apiVersion"] in CORE_GROUPS


def is_typed(manifest):
    return (manifest["apiVersion"], manifest["kind"]) in TYPED


def module_of(manifest):
    return f"@kubernetes-models/{TYPED[manifest['apiVersion'], manifest['kind']]}/{manifest['apiVersion']}/{manifest['kind']}"


def check_core(manifests, version, folder):
    """Kubernetes' own schema; an empty text or what is wrong."""
    file = folder / "core.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    result = run("kubernetes-validate", "--strict", "-k", version.rpartition(".")[0], file, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def check_values(manifests):
    """The custom resource's patterns and required fields; one text each, empty if nothing is wrong."""
    items = [{"module": module_of(item), "kind": item["kind"], "object": item} for item in manifests]
    script = TOOLS / "node" / "check.mjs"
    script.write_text(CHECK)
    return json.loads(run("node", script, text=json.dumps(items), cwd=TOOLS / "node").stdout)


def check_fields(manifests):
    """The names of the custom resource's fields: a typed literal takes no others. Numbers of the objects at fault."""
    lines = []
    for number, item in enumerate(manifests):
        lines.append(f"const o{number}: import({json.dumps(module_of(item))}).I{item['kind']} = {json.dumps(item)};")
    source = TOOLS / "node" / "objects.ts"
    source.write_text("\n".join([*lines, "export {};"]))
    compiler = TOOLS / "node" / "node_modules" / ".bin" / "tsc"
    options = ["--strict", "--noEmit", "--skipLibCheck", "--target", "es2022", "--module", "nodenext"]
    result = subprocess.run([compiler, *options, source.name], cwd=source.parent, capture_output=True, text=True, timeout=120)
    return {
        int(line.partition("(")[2].partition(",")[0]) - 1
        for line in result.stdout.splitlines()
        if line.startswith("objects.ts(")
    }


def check_own(manifest, folder):
    """Our schema of a custom resource; its pods as Pods."""
    file = folder / "own.json"
    file.write_text(json.dumps(manifest))
    result = run("check-jsonschema", "--schemafile", OWN_SCHEMAS / f"{manifest['kind']}.json", file, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


@pytest.fixture(scope="module")
def everything():
    return [manifest for path in VALUES for manifest in render(path)]


def test_a_checker_covers_every_kind(everything):
    own = {path.stem for path in OWN_SCHEMAS.glob("*.json")}
    unchecked = {
        f"{item['apiVersion']} {item['kind']}"
        for item in everything
        if not (is_core(item) or is_typed(item) or item["kind"] in own)
    }
    assert unchecked == set()
    assert own | {kind for _, kind in TYPED} <= {item["kind"] for item in everything}, "a kind is never rendered"


@pytest.mark.parametrize("version", KUBE_VERSIONS)
def test_core_objects_are_valid(version, tmp_path):
    manifests = [item for path in VALUES if supported(path, version) for item in render(path, kube_version=version)]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **pod["metadata"]}, "spec": pod["spec"]}
        for name, pod in pod_templates(manifests)
        if name.startswith("LeaderWorkerSet")
    ]
    assert pods
    assert check_core([item for item in manifests if is_core(item)] + pods, version, tmp_path) == ""


def test_custom_resources_are_valid(everything, tmp_path):
    typed = [item for item in everything if is_typed(item)]
    assert check_values(typed) == [""] * len(typed)
    assert check_fields(typed) == set()
    own = [item for item in everything if not is_core(item) and not is_typed(item)]
    assert [check_own(item, tmp_path) for item in own] == [""] * len(own)


def with_fault(manifest, change):
    """A copy that `change` spoiled."""
    spoiled = copy.deepcopy(manifest)
    change(spoiled)
    return spoiled


CORE_FAULTS = {
    "unknown field": lambda pod: pod["spec"]["template"]["spec"].update(terminationGraceSeconds=3),
    "wrong type": lambda pod: pod["spec"].update(replicas="three"),
    "missing": lambda pod: pod["spec"].pop("selector"),
}


@pytest.mark.parametrize("fault", CORE_FAULTS)
def test_the_core_checker_refuses(everything, fault, tmp_path):
    deployment = next(item for item in everything if item["kind"] == "Deployment")
    assert check_core([with_fault(deployment, CORE_FAULTS[fault])], "1.33.0", tmp_path) != ""


def test_the_sleep_action_needs_the_chart_s_oldest_cluster(everything, tmp_path):
    deployment = next(item for item in everything if item["kind"] == "Deployment")
    assert "sleep" in check_core([deployment], "1.28.0", tmp_path)


def test_the_custom_checkers_refuse(everything, tmp_path):
    route, scaled, monitor, rule = (
        next(item for item in everything if item["kind"] == kind)
        for kind in ("HTTPRoute", "ScaledObject", "PodMonitor", "PrometheusRule")
    )
    wrong_values = [
        with_fault(route, lambda item: item["spec"]["rules"][0]["timeouts"].update(request="0")),
        with_fault(scaled, lambda item: item["spec"]["triggers"][0].pop("type")),
        with_fault(monitor, lambda item: item["spec"]["podMetricsEndpoints"][0].update(interval="often")),
        with_fault(rule, lambda item: item["spec"]["groups"][0].pop("name")),
    ]
    assert all(check_values(wrong_values))
    wrong_names = [
        with_fault(route, lambda item: item["spec"]["rules"][0].update(timeout={})),
        with_fault(scaled, lambda item: item["spec"].update(maxReplicas=3)),
        with_fault(monitor, lambda item: item["spec"]["podMetricsEndpoints"][0].update(period="15s")),
        with_fault(rule, lambda item: item["spec"]["groups"][0]["rules"][0].update(annotation={})),
    ]
    assert check_fields([route, *wrong_names]) == {1, 2, 3, 4}
    pool, group = (next(item for item in everything if item["kind"] == kind) for kind in ("InferencePool", "LeaderWorkerSet"))
    assert check_own(with_fault(pool, lambda item: item["spec"].update(targetPortNumber=8000)), tmp_path) != ""
    assert check_own(with_fault(group, lambda item: item["spec"]["leaderWorkerTemplate"].pop("workerTemplate")), tmp_path) != ""
