"""Values that are wrong are refused, with a message that says what is wrong."""

import json

import pytest
import yaml

from tests.deploy.tools import CHART, HELMS, VALUES, name_of, run, template

MINIMAL = CHART / "ci" / "minimal-values.yaml"
SCHEMA = CHART / "values.schema.json"

# Values as --set-json takes them, and a part of the expected message.
BAD = {
    "typo": ("replica=2", "replica"),
    "typo below": ('model={"pvc": {"claim": "x"}}', "claim"),
    "unknown setting": ('settings={"max_num_seq": 3}', "max_num_seq"),
    "setting of a wrong type": ('settings={"max_num_seqs": "many"}', "max_num_seqs"),
    "setting out of range": ('settings={"gpu_memory_utilization": 1.5}', "gpu_memory_utilization"),
    "negative replicas": ("replicas=-1", "replicas"),
    "latest": ('image.tag="latest"', "tag"),
    "short digest": ('image.digest="sha256:1234"', "digest"),
    "root": ("user.uid=0", "uid"),
    "a route's timeout without unit": ('httpRoute={"enabled": true, "requestTimeout": "0"}', "requestTimeout"),
    "no time to stop": ("drain.preStopSeconds=0", "preStopSeconds"),
    "a setting smuggled in as a variable": ('extraEnv={"M3_MODEL": "x"}', "M3_MODEL"),
    "a branch as revision": ('model={"source": "download", "download": {"revision": "main"}}', "revision"),
    "both zero": ("rollout.maxUnavailable=0", "cannot both be 0"),
    "one writer, two pods": ('{"replicas": 2, "model": {"pvc": {"accessMode": "ReadWriteOnce"}}}', "several replicas need"),
    "shared memory above memory": ('shm.size="1Ti"', "resources.limits.memory must exceed"),
    "pictures above shared memory": ('shm.size="128Mi"', "shm.size must exceed settings.media_slab_bytes"),
    "no claim": ('model.pvc.claimName=""', "model.pvc.claimName"),
    "no path": ('model={"source": "hostPath"}', "model.hostPath.path"),
    "no revision": ('model={"source": "download"}', "model.download.revision"),
    "both monitors": ('monitoring={"podMonitor": {"enabled": true}, "serviceMonitor": {"enabled": true}}', "twice"),
    "no gateway": ('httpRoute={"enabled": true}', "parentRefs"),
    "no picker": ('inferencePool={"enabled": true}', "endpointPicker.name"),
    "min above max": ('autoscaling={"mode": "keda", "minReplicas": 5}', "exceeds"),
    "unknown threshold": ('monitoring={"rules": {"enabled": true, "thresholds": {"nope": 1}}}', "no rule has such a threshold"),
}


def test_the_schema_is_a_schema():
    run("check-jsonschema", "--check-metaschema", SCHEMA)


@pytest.mark.parametrize("path", [CHART / "values.yaml", *VALUES], ids=name_of)
def test_values_files_are_valid_and_clean(path, tmp_path):
    whole = tmp_path / "values.yaml"
    whole.write_text(
        yaml.safe_dump(merged(yaml.safe_load((CHART / "values.yaml").read_text()), yaml.safe_load(path.read_text())))
    )
    run("check-jsonschema", "--schemafile", SCHEMA, whole)
    rules = "{extends: default, rules: {line-length: {max: 160}, document-start: disable, braces: {max-spaces-inside: 1}}}"
    run("yamllint", "--strict", "-d", rules, path)


def merged(defaults, values):
    """Values over defaults, as Helm does it."""
    if not isinstance(defaults, dict) or not isinstance(values, dict):
        return values
    return defaults | {name: merged(defaults.get(name), value) for name, value in values.items()}


def closed_objects(schema, path=()):
    """Every object that lists its properties and the place where it is."""
    if schema.get("properties"):
        yield path, schema
        for name, part in schema["properties"].items():
            yield from closed_objects(part, (*path, name))


def test_no_level_takes_unknown_names():
    open_paths = {
        ".".join(path)
        for path, part in closed_objects(json.loads(SCHEMA.read_text()))
        if part.get("additionalProperties") is not False and "propertyNames" not in part
    }
    assert open_paths == set()


def test_every_default_is_in_the_schema_and_the_other_way_round():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads(SCHEMA.read_text())
    assert set(values) == set(schema["properties"])
    for path, part in closed_objects(schema):
        section = values
        for name in path:
            section = section[name]
        # Settings have their defaults in the server; resources take more names than the defaults use.
        if path and path[0] != "settings" and path[-1] not in ("requests", "limits"):
            assert set(section) == set(part["properties"]), path


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("case", BAD, ids=lambda case: case.replace(" ", "-"))
def test_bad_values_are_refused(helm, case, tmp_path):
    values, message = BAD[case]
    if values.startswith("{"):
        file = tmp_path / "bad.yaml"
        file.write_text(values)
        result = template(MINIMAL, file, helm=helm, check=False)
    else:
        result = template(MINIMAL, helm=helm, sets=[values], check=False)
    assert result.returncode != 0
    assert message in result.stderr


@pytest.mark.parametrize("helm", HELMS)
def test_an_old_cluster_is_refused(helm):
    result = template(MINIMAL, helm=helm, kube_version="1.29.9", check=False)
    assert result.returncode != 0
    assert "incompatible with Kubernetes" in result.stderr


@pytest.mark.parametrize(("name", "version"), [("image", "1.32.0"), ("claim", "1.30.0")])
def test_newer_features_need_a_newer_cluster(name, version):
    result = template(CHART / "ci" / f"{name}-values.yaml", kube_version=version, check=False)
    assert result.returncode != 0
    assert "or later" in result.stderr
