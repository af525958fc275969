"""Numbers and names that must agree with each other, in every rendered set of values."""

import math

import pytest
import yaml

from server.api.drain import LAST_WORDS_S
from server.api.process import TEARDOWN_S
from server.settings import PREFIX, Settings, load_settings
from tests.deploy.tools import (
    CHART,
    PLANNED,
    PRESENT,
    VALUES,
    containers,
    name_of,
    of_kind,
    one,
    pod_templates,
    render,
    server_environment,
    server_pod,
)

# What the chart can set for a later server; today's refuses them.
PLANNED_SETTINGS = {
    "M3_LEADER_ADDRESS",
    "M3_NODE_RANK",
    "M3_NUM_NODES",
}
MEBIBYTES = {"Mi": 1, "Gi": 1024, "Ti": 1024**2}
DEPLOYMENTS = [path for path in VALUES if "leaderworkerset" not in path.name]
every_values = pytest.mark.parametrize("path", VALUES, ids=name_of)


def values_of(path):
    """The chart's defaults under the values of a file, two levels deep, which is as deep as the files go here."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name, value in yaml.safe_load(path.read_text()).items():
        values[name] = values[name] | value if isinstance(value, dict) else value
    return values


def mebibytes(quantity):
    return int(quantity[:-2]) * MEBIBYTES[quantity[-2:]]


def our_variables(environment):
    return {name: value for name, value in environment.items() if name.startswith(PREFIX)}


@pytest.mark.parametrize("path", PRESENT, ids=name_of)
def test_the_server_accepts_the_variables(path):
    environment = server_environment(render(path))
    settings = load_settings(environ=our_variables(environment))
    given = values_of(path)["settings"]
    assert {name: getattr(settings, name) for name in given} == given
    assert settings.model_name == values_of(path)["model"]["servedName"]


@every_values
def test_the_server_uses_as_many_gpus_as_the_pod_has(path):
    values = values_of(path)
    num_pods = values["multiNode"]["size"] if values["kind"] == "LeaderWorkerSet" else 1
    environment = server_environment(render(path))
    assert int(environment.get("M3_TENSOR_PARALLEL_SIZE", 1)) == max(1, values["gpu"]["count"]) * num_pods


@pytest.mark.parametrize("path", PLANNED, ids=name_of)
def test_planned_values_set_planned_variables_and_no_others(path):
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    unknown = set(our_variables(server_environment(render(path)))) - known
    assert unknown <= PLANNED_SETTINGS


def test_settings_in_the_schema_are_the_server_s():
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]["settings"]["properties"]) <= set(Settings.model_fields)


def test_a_changed_number_stays_a_number():
    environment = server_environment(render(CHART / "ci" / "full-values.yaml"))
    assert environment["M3_MEDIA_SLAB_BYTES"] == "4294967296"
    assert environment["M3_MEDIA_TASK_TIMEOUT_S"] == "12.5"
    assert environment["NCCL_NVLS_ENABLE"] == "0"


@every_values
def test_the_grace_period_is_the_sum_of_its_parts(path):
    drain = values_of(path)["drain"]
    for name, pod in pod_templates(render(path)):
        if name.startswith(("Deployment", "LeaderWorkerSet")):
            container = pod["spec"]["containers"][0]
            assert pod["spec"]["terminationGracePeriodSeconds"] == sum(drain.values())
            assert container["lifecycle"]["preStop"]["sleep"]["seconds"] == drain["preStopSeconds"]
            assert pod["spec"]["terminationGracePeriodSeconds"] > drain["preStopSeconds"] + drain["drainSeconds"]


@every_values
def test_the_server_drains_for_as_long_as_the_grace_period_allows(path):
    assert server_environment(render(path))["M3_DRAIN_TIMEOUT_S"] == str(values_of(path)["drain"]["drainSeconds"])


def test_the_shortest_teardown_is_longer_than_the_server_s_own():
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    assert schema["properties"]["drain"]["properties"]["teardownSeconds"]["minimum"] > 2 * LAST_WORDS_S + TEARDOWN_S


@every_values
def test_probes_have_the_numbers_that_the_budget_asks_for(path):
    manifests = render(path)
    _pod, container = server_pod(manifests)
    budget_s = values_of(path)["startup"]["budgetSeconds"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    startup, readiness, liveness = (container[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    assert startup["failureThreshold"] == math.ceil(budget_s / startup["periodSeconds"])
    assert server_environment(manifests)["M3_ENGINE_START_TIMEOUT_S"] == str(budget_s)
    assert (readiness["httpGet"]["path"], liveness["httpGet"]["path"]) == ("/readyz", "/livez")
    for probe in (startup, readiness, liveness):
        assert probe["httpGet"]["port"] in ports
        assert probe["timeoutSeconds"] >= 5
        assert probe["failureThreshold"] >= 2
        assert "initialDelaySeconds" not in probe
    assert ports["http"] == int(dict(a.lstrip("-").split("=") for a in container["args"] if "=" in a)["port"])


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=name_of)
def test_a_rollout_is_not_called_failed_while_the_weights_are_read(path):
    deployment = one(render(path), "Deployment")
    startup = values_of(path)["startup"]
    assert deployment["spec"]["progressDeadlineSeconds"] > startup["initSeconds"] + startup["budgetSeconds"]


@every_values
def test_every_mount_has_its_volume_and_every_volume_its_mount(path):
    for name, pod in pod_templates(render(path)):
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        mounted = {mount["name"] for container in containers(pod) for mount in container.get("volumeMounts", [])}
        assert volumes == mounted, name


@every_values
def test_what_the_environment_calls_writable_is_writable(path):
    for name, pod in pod_templates(render(path)):
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        for container in containers(pod):
            writable = [m["mountPath"] for m in container.get("volumeMounts", []) if not m.get("readOnly")]
            assert all("configMap" not in volumes[m["name"]] for m in container["volumeMounts"] if not m.get("readOnly")), name
            for variable in container.get("env", []):
                if variable["name"] in ("HOME", "TMPDIR") or variable["name"].endswith(
                    ("_CACHE_HOME", "_CACHE_DIR", "_CACHE_PATH")
                ):
                    assert any(f"{variable['value']}/".startswith(f"{folder}/") for folder in writable), (name, variable)


@every_values
def test_shared_memory_is_mounted_bounded_and_below_the_memory_limit(path):
    pod, container = server_pod(render(path))
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    size = mebibytes(volume["emptyDir"]["sizeLimit"])
    assert size < mebibytes(container["resources"]["limits"]["memory"])
    assert size * 2**20 > values_of(path)["settings"].get("media_slab_bytes", 0)


@every_values
def test_the_model_is_mounted_read_only_where_the_server_looks(path):
    manifests = render(path)
    _pod, container = server_pod(manifests)
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "model"]
    assert mount["readOnly"]
    assert server_environment(manifests)["M3_MODEL"].startswith(mount["mountPath"])


@every_values
def test_selectors_find_the_pods_they_mean(path):
    manifests = render(path)
    pod, _ = server_pod(manifests)
    # The controller adds the worker's index.
    labels = pod["metadata"]["labels"] | {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    selectors = []
    for item in of_kind(manifests, "Service"):
        selectors.append(item["spec"]["selector"])
    for item in of_kind(manifests, "Deployment", "PodDisruptionBudget", "PodMonitor", "InferencePool"):
        selectors.append(item["spec"]["selector"]["matchLabels"])
    for item in of_kind(manifests, "NetworkPolicy"):
        if not item["metadata"]["name"].endswith(("-download", "-test")):
            selectors.append(item["spec"]["podSelector"]["matchLabels"])
    assert selectors
    for selector in selectors:
        assert selector.items() <= labels.items()
        for name, other in pod_templates(manifests):
            if name.startswith(("Job", "Pod")):
                assert not selector.items() <= other["metadata"]["labels"].items(), (selector, name)


@every_values
def test_monitors_and_routes_name_things_that_exist(path):
    manifests = render(path)
    _, container = server_pod(manifests)
    ports = {port["name"] for port in container["ports"]}
    services = {
        item["metadata"]["name"]: {port["name"]: port["port"] for port in item["spec"]["ports"]}
        for item in of_kind(manifests, "Service")
    }
    for item in of_kind(manifests, "PodMonitor"):
        assert {endpoint["port"] for endpoint in item["spec"]["podMetricsEndpoints"]} <= ports
    for item in of_kind(manifests, "ServiceMonitor"):
        (service,) = [
            s
            for s in of_kind(manifests, "Service")
            if item["spec"]["selector"]["matchLabels"].items() <= s["metadata"]["labels"].items()
        ]
        assert {endpoint["port"] for endpoint in item["spec"]["endpoints"]} <= set(services[service["metadata"]["name"]])
    for item in of_kind(manifests, "Ingress"):
        backend = item["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
        assert backend["port"]["name"] in services[backend["name"]]
    for item in of_kind(manifests, "HTTPRoute"):
        for reference in item["spec"]["rules"][0]["backendRefs"]:
            (target,) = [i for i in of_kind(manifests, reference["kind"]) if i["metadata"]["name"] == reference["name"]]
            assert reference.get("port") in (None, *services.get(target["metadata"]["name"], {}).values())


@every_values
def test_routes_cut_no_stream(path):
    for item in of_kind(render(path), "HTTPRoute"):
        assert item["spec"]["rules"][0]["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    for item in of_kind(render(path), "Ingress"):
        annotations = item["metadata"]["annotations"]
        assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
        assert int(annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"]) >= 3600


@every_values
def test_an_autoscaler_owns_the_number_of_replicas(path):
    manifests = render(path)
    scalers = of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject")
    (workload,) = of_kind(manifests, "Deployment", "LeaderWorkerSet")
    assert ("replicas" in workload["spec"]) == (not scalers)
    for scaler in scalers:
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) == (workload["kind"], workload["metadata"]["name"])
        assert target["apiVersion"] == workload["apiVersion"]


@every_values
def test_what_hangs_on_the_host_is_never_shared(path):
    for name, pod in pod_templates(render(path)):
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod["spec"]), name
        assert pod["spec"]["enableServiceLinks"] is False
        assert pod["spec"]["automountServiceAccountToken"] is False
        for container in containers(pod):
            assert not container["image"].endswith(":latest")
            assert container["image"].rpartition("/")[2].count(":") == 1, "a tag or a digest"


@every_values
def test_names_fit_with_a_long_release_name(path):
    manifests = render(path, release="r" * 53)
    for item in manifests:
        # Controllers add up to 17 characters to the names of what makes pods.
        assert len(item["metadata"]["name"]) + (17 if item["kind"] in ("Deployment", "LeaderWorkerSet") else 0) <= 63
        assert all(len(value) <= 63 for value in item["metadata"].get("labels", {}).values())


@every_values
def test_two_releases_in_one_namespace_do_not_collide(path):
    def identities(release):
        return {(item["kind"], item["metadata"]["name"]) for item in render(path, release=release)}

    assert not identities("blue") & identities("green")
    pod, _ = server_pod(render(path, release="green"))
    selector = one(render(path, release="blue"), "Service" if not of_kind(render(path), "Deployment") else "Deployment")[
        "spec"
    ]["selector"]
    assert not selector.get("matchLabels", selector).items() <= pod["metadata"]["labels"].items()


def test_a_changed_setting_replaces_the_pods():
    path = CHART / "ci" / "minimal-values.yaml"

    def checksum(*sets):
        return server_pod(render(path, sets=sets))[0]["metadata"]["annotations"]["checksum/config"]

    assert checksum() == checksum()
    assert checksum() != checksum("settings.max_num_seqs=65")


def test_keys_are_mounted_and_named_but_never_written_out():
    manifests = render(CHART / "ci" / "gpus-values.yaml")
    pod, container = server_pod(manifests)
    (volume,) = [volume for volume in pod["spec"]["volumes"] if "secret" in volume]
    assert volume["secret"]["secretName"] == "api-keys"
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
    assert "subPath" not in mount
    assert server_environment(manifests)["M3_API_KEYS_FILE"].startswith(mount["mountPath"] + "/")
    assert not any(
        "secretKeyRef" in str(container.get("env")) for _, pod in pod_templates(manifests) for container in containers(pod)
    )


@pytest.mark.parametrize(("count", "expected"), [(0, None), (1, None), (8, "8")])
def test_the_server_uses_the_gpus_of_its_pod(count, expected):
    manifests = render(CHART / "ci" / "minimal-values.yaml", sets=(f"gpu.count={count}",))
    assert server_environment(manifests).get("M3_TENSOR_PARALLEL_SIZE") == expected


def test_workers_of_a_group_are_no_target():
    manifests = render(CHART / "ci" / "planned-leaderworkerset-values.yaml")
    assert one(manifests, "Service")["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    group = one(manifests, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    assert "ports" not in worker
    assert "readinessProbe" not in worker
    assert {name: leader[name] for name in worker} == worker, "one template: apart from probes and ports they are the same"


def test_the_chart_s_version_of_the_server_is_the_server_s():
    from server import __version__

    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__
