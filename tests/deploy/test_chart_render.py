"""Every set of values renders with both majors of Helm and every Kubernetes version, to the same objects."""

import shutil
import textwrap

import pytest
import yaml

from tests.deploy.tools import CHART, HELMS, KUBE_VERSIONS, VALUES, name_of, render, run, supported, template

CASES = [
    pytest.param(path, version, id=f"{name_of(path)}-{version}")
    for path in VALUES
    for version in KUBE_VERSIONS
    if supported(path, version)
]


def by_identity(manifests):
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


@pytest.mark.parametrize(("path", "version"), CASES)
def test_both_helms_agree(path, version):
    first, second = (by_identity(render(path, helm=helm, kube_version=version)) for helm in HELMS)
    assert first
    assert first == second


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("path", VALUES, ids=name_of)
def test_lint_is_silent(helm, path):
    run(helm, "lint", "--strict", CHART, "--values", path, "--kube-version", "1.33.0")


@pytest.mark.parametrize("helm", HELMS)
def test_lint_sees_a_fault(helm):
    result = run(helm, "lint", "--strict", CHART, "--set", "replicas=-1", check=False)
    assert result.returncode != 0


@pytest.mark.parametrize("path", VALUES, ids=name_of)
def test_rendering_twice_gives_the_same_bytes(path):
    assert template(path).stdout == template(path).stdout


@pytest.mark.parametrize("path", VALUES, ids=name_of)
def test_no_object_appears_twice(path):
    manifests = render(path)
    assert len(by_identity(manifests)) == len(manifests)


@pytest.mark.parametrize("helm", HELMS)
def test_the_chart_can_be_packaged(helm, tmp_path):
    run(helm, "package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("minimax-m3-*.tgz")
    shown = yaml.safe_load(run(helm, "show", "chart", package).stdout)
    assert shown["name"] == "minimax-m3"
    minimal = CHART / "ci" / "minimal-values.yaml"
    result = run(helm, "template", "rel", package, "--values", minimal, "--kube-version", "1.33.0")
    assert "kind: Deployment" in result.stdout


def test_the_chart_works_as_a_part_of_another(tmp_path):
    parent = tmp_path / "parent"
    (parent / "charts").mkdir(parents=True)
    (parent / "Chart.yaml").write_text("apiVersion: v2\nname: parent\nversion: 1.0.0\n")
    (parent / "values.yaml").write_text("global: {site: a}\nminimax-m3: {model: {pvc: {claimName: weights}}}\n")
    run("helm4", "package", CHART, "--destination", parent / "charts")
    result = run("helm4", "template", "rel", parent, "--kube-version", "1.33.0")
    assert "kind: Deployment" in result.stdout


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    """Renders NOTES.txt, which Helm shows only where there is a cluster: as the text of a ConfigMap in a copy of the chart."""
    copy = tmp_path_factory.mktemp("notes") / "minimax-m3"
    shutil.copytree(CHART, copy)
    text = textwrap.indent((copy / "templates" / "NOTES.txt").read_text(), "    ")
    (copy / "templates" / "notes.yaml").write_text("kind: ConfigMap\nmetadata: {name: notes}\ndata:\n  text: |\n" + text)

    def rendered(helm, path):
        arguments = ["template", "rel", copy, "--namespace", "llm", "--kube-version", "1.33.0", "--values", path]
        result = run(helm, *arguments, "--show-only", "templates/notes.yaml")
        return yaml.safe_load(result.stdout)["data"]["text"]

    return rendered


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(
    ("name", "shown", "hidden"),
    [
        ("minimal", ["no authentication", "stops service until the new pod has loaded"], ["no such setting", "autoscaler"]),
        ("hostpath", ["hostPath needs a namespace", "the autoscaler"], ["stops service"]),
        ("planned-leaderworkerset", ["no such setting"], ["get secret"]),
        ("gpus", ["get secret api-keys"], ["no such setting", "no authentication"]),
        ("full", ["get secret api-keys"], ["no such setting", "no authentication"]),
    ],
)
def test_notes_warn_of_what_the_values_leave_open(notes, helm, name, shown, hidden):
    text = notes(helm, CHART / "ci" / f"{name}-values.yaml")
    assert [part for part in shown if part not in text] == []
    assert [part for part in hidden if part in text] == []
