"""Pods satisfy the "restricted" Pod Security level, and a policy scanner finds nothing that is not explained here."""

import json

import pytest
import yaml

from tests.deploy.tools import CHART, VALUES, containers, name_of, pod_templates, render, run

ALLOWED_VOLUMES = {
    "configMap",
    "emptyDir",
    "persistentVolumeClaim",
    "secret",
    "projected",
    "csi",
    "downwardAPI",
    "ephemeral",
    "image",
}
# Findings that are decisions: the check, the kinds, the reason.
EXPLAINED = {
    "CKV_K8S_43": ({"Deployment", "Job", "Pod"}, "the digest is the operator's to give; image.digest is there for it"),
    "CKV_K8S_15": ({"Deployment", "Job", "Pod"}, "tags are never reused, and `latest` is refused: pulling again gains nothing"),
    "CKV_K8S_8": ({"Pod"}, "a test runs once; its deadline is its liveness"),
    "CKV_K8S_9": ({"Pod"}, "a test runs once and serves nobody"),
}


def violations(pod):
    """What the level "restricted" forbids in this pod template."""
    spec = pod["spec"]
    security = spec.get("securityContext", {})
    found = [f"{name} is set" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    if security.get("runAsNonRoot") is not True:
        found.append("runAsNonRoot")
    if not security.get("runAsUser"):
        found.append("runAsUser")
    if security.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        found.append("seccompProfile")
    for volume in spec.get("volumes", []):
        if not set(volume) - {"name"} <= ALLOWED_VOLUMES:
            found.append(f"volume {volume['name']}")
    for container in containers(pod):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            found.append("allowPrivilegeEscalation")
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
            found.append("capabilities")
        if own.get("privileged"):
            found.append("privileged")
        if own.get("readOnlyRootFilesystem") is not True:
            found.append("readOnlyRootFilesystem, which is ours")
        if any("hostPort" in port for port in container.get("ports", [])):
            found.append("hostPort")
    return found


@pytest.mark.parametrize("path", VALUES, ids=name_of)
def test_pods_are_restricted(path):
    expected = ["volume model"] if name_of(path) == "hostpath" else []
    for name, pod in pod_templates(render(path)):
        assert violations(pod) == expected, name


FAULTS = {
    "root": lambda pod: pod["spec"]["securityContext"].update(runAsNonRoot=False),
    "privileged": lambda pod: pod["spec"]["containers"][0]["securityContext"].update(privileged=True),
    "capability": lambda pod: pod["spec"]["containers"][0]["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
    "hostIPC": lambda pod: pod["spec"].update(hostIPC=True),
    "writable root": lambda pod: pod["spec"]["containers"][0]["securityContext"].pop("readOnlyRootFilesystem"),
    "no seccomp": lambda pod: pod["spec"]["securityContext"].pop("seccompProfile"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_of_pods_refuses(fault):
    (_, pod), *_ = pod_templates(render(CHART / "ci" / "minimal-values.yaml"))
    assert violations(pod) == []
    FAULTS[fault](pod)
    assert violations(pod) != []


def scan(manifests, folder):
    """Failed checks of checkov with the kind they were found in. Offline: without --skip-download it would call its maker."""
    file = folder / "rendered.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    result = run("checkov", "-f", file, "--framework", "kubernetes", "--compact", "--skip-download", "-o", "json", check=False)
    report = json.loads(result.stdout)
    assert report["summary"]["passed"] > 50
    return {(check["check_id"], check["resource"].partition(".")[0]) for check in report["results"]["failed_checks"]}


def test_the_scanner_finds_nothing_unexplained_and_sees_a_fault(tmp_path):
    manifests = [item for path in VALUES if name_of(path) != "hostpath" for item in render(path, release=name_of(path))]
    for item in manifests:
        item["metadata"]["namespace"] = "llm"
    failed = scan(manifests, tmp_path)
    assert {(check, kind) for check, kind in failed if kind not in EXPLAINED.get(check, [()])[0]} == set()
    assert {check for check, _ in failed} == set(EXPLAINED), "an explanation without a finding"
    spoiled = render(CHART / "ci" / "minimal-values.yaml")
    for _, pod in pod_templates(spoiled):
        pod["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    assert {"CKV_K8S_16", "CKV_K8S_20", "CKV_K8S_22"} <= {check for check, _ in scan(spoiled, tmp_path)}
