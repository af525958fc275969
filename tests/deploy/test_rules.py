"""Alerts and dashboards speak of metrics that the server has; every alert is tried and has a runbook; boards are well made."""

import json
import re

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.metrics.collector import ENGINE_COUNTERS, ENGINE_GAUGES, MEDIA_COUNTERS, MEDIA_GAUGES
from server.metrics.registry import Metrics
from server.metrics.snapshot import Distribution, EngineView, Snapshot
from tests.deploy.tools import CHART, DASHBOARDS, DEPLOY, RULES, VALUES, name_of, of_kind, one, render, run

RULE_TESTS = DEPLOY / "prometheus" / "rules_test" / "m3.yaml"
# Metrics of other exporters, with the labels that are used of them.
FOREIGN = {
    "up": {"job", "instance", "namespace"},
    "kube_pod_container_status_restarts_total": {"container", "pod", "namespace"},
    "kube_pod_container_status_last_terminated_reason": {"container", "pod", "namespace", "reason"},
    "kubelet_volume_stats_available_bytes": {"persistentvolumeclaim", "namespace"},
    "kubelet_volume_stats_capacity_bytes": {"persistentvolumeclaim", "namespace"},
    **{
        f"DCGM_FI_DEV_{name}": {"gpu", "Hostname", "pod", "namespace"}
        for name in (
            "GPU_UTIL",
            "FB_USED",
            "POWER_USAGE",
            "GPU_TEMP",
            "SM_CLOCK",
            "NVLINK_BANDWIDTH_TOTAL",
            "XID_ERRORS",
            "ECC_DBE_VOL_TOTAL",
        )
    },
}
# Every scraped series has these.
TARGET_LABELS = {"job", "instance", "namespace", "pod"}
METRIC = re.compile(r"\b(?:m3_|vllm:|process_|DCGM_|kube_|kubelet_)[A-Za-z0-9_:]+|\bup\b")
SELECTOR = re.compile(r"([A-Za-z_][A-Za-z0-9_:]*)\{([^}]*)\}")


@pytest.fixture(scope="module")
def families():
    """What `/metrics` shows once a bit of everything has happened: names of series with their labels."""
    steps = Distribution((1.0,), (1, 0), 0.5)
    snapshot = Snapshot(
        state="ready",
        states=("loading", "ready"),
        num_requests=1,
        num_sequences=1,
        page_size=128,
        lane_page_bytes={"dense": 1},
        stats={statistic: 1.0 for _, statistic, _ in (*ENGINE_GAUGES, *ENGINE_COUNTERS)},
        engine=EngineView(0.0, 1.0, 1, 1, steps, steps),
        media={name: 1.0 for _, name, _ in (*MEDIA_GAUGES, *MEDIA_COUNTERS)} | {"pictures_total": 1.0, "clips_total": 1.0},
    )
    metrics = Metrics("tiny", lambda: snapshot)
    metrics.front.request_ended(200)
    metrics.front.choice_finished("stop")
    shown = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            shown.setdefault(sample.name, set()).update(sample.labels)
    return shown


def alerts():
    return {
        rule["alert"]: rule
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }


def recorded():
    return {
        rule["record"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if "record" in rule
    }


def expressions():
    """(where, expression) of all rules, panels, variables and scalers."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.name}: {panel['title']}", target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{path.name}: ${variable['name']}", variable["definition"]
    for path in VALUES:
        manifests = render(path)
        for item in of_kind(manifests, "ScaledObject"):
            yield f"{path.name}: ScaledObject", item["spec"]["triggers"][0]["metadata"]["query"]
        for item in of_kind(manifests, "HorizontalPodAutoscaler"):
            yield f"{path.name}: HorizontalPodAutoscaler", item["spec"]["metrics"][0]["pods"]["metric"]["name"]


def unknown_names(expression, families):
    """Metrics and labels of the expression that nobody exports."""
    bare = re.sub(r"job:[a-z0-9_:]+", "", expression)
    known = families | FOREIGN
    faults = {name for name in METRIC.findall(bare) if name not in known}
    for name, selector in SELECTOR.findall(bare):
        for label in re.findall(r"([A-Za-z_]+)\s*(?:=|!=|=~|!~)", selector):
            if label not in known.get(name, set()) | TARGET_LABELS:
                faults.add(f"{name}{{{label}}}")
    return faults


def test_every_metric_and_label_exists(families):
    checked = list(expressions())
    assert len(checked) > 60
    faults = {where: names for where, expression in checked if (names := unknown_names(expression, families))}
    assert faults == {}
    used = {name for _, expression in checked for name in re.findall(r"job:[a-z0-9_]+:[a-z0-9_]+", expression)}
    assert used <= recorded()


@pytest.mark.parametrize(
    "expression",
    [
        "rate(m3_tokens_total[5m])",
        "sum(m3_requests)",
        'm3_requests_total{code="200"}',
        "vllm:gpu_cache_usage_perc",
        "DCGM_FI_DEV_NOPE",
    ],
)
def test_the_check_of_names_refuses(families, expression):
    assert unknown_names(expression, families)


def test_gateways_find_the_names_they_read(families):
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert "model_name" in families[name]
    assert {"block_size", "num_gpu_blocks"} <= families["vllm:cache_config_info"]


def test_the_rules_are_sound_and_every_alert_is_tried():
    run("promtool", "check", "rules", "--lint=all", "--lint-fatal", RULES)
    run("promtool", "test", "rules", RULE_TESTS)
    fires, silent = set(), set()
    for case in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        for check in case["alert_rule_test"]:
            (fires if check["exp_alerts"] else silent).add(check["alertname"])
    assert fires == silent == set(alerts())


@pytest.mark.parametrize("name", sorted(alerts()))
def test_the_trial_of_an_alert_can_fail(name, tmp_path):
    """With its comparison turned round, an alert fails its own trial."""
    trials = yaml.safe_load(RULE_TESTS.read_text())
    trials["rule_files"] = [str(tmp_path / "rules.yaml")]
    trials["tests"] = [case for case in trials["tests"] if case["name"].startswith(name + " ")]
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == name:
                rule["expr"] = f"absent({rule['expr']}\n)"
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "trials.yaml").write_text(yaml.safe_dump(trials))
    assert run("promtool", "test", "rules", tmp_path / "trials.yaml", check=False).returncode != 0


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    assert {path.stem for path in (DEPLOY / "runbooks").glob("*.md")} == set(alerts())
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"].endswith(f"/{name}.md")
        assert rule["labels"]["severity"] in ("critical", "warning")
        text = (DEPLOY / "runbooks" / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
        assert "## Look" in text
        assert "## Do" in text


def test_the_chart_s_rules_are_the_file_s():
    settings = ['monitoring={"rules": {"enabled": true, "runbookBaseUrl": "https://example.invalid/runbooks"}}']
    rule = one(render(CHART / "ci" / "minimal-values.yaml", sets=settings), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())


def test_a_threshold_changes_its_numbers_and_nothing_else():
    plain = one(render(CHART / "ci" / "minimal-values.yaml", sets=["monitoring.rules.enabled=true"]), "PrometheusRule")
    changed = one(
        render(
            CHART / "ci" / "minimal-values.yaml", sets=['monitoring.rules={"enabled": true, "thresholds": {"burnRatio": 0.5}}']
        ),
        "PrometheusRule",
    )
    first, second = json.dumps(plain["spec"]), json.dumps(changed["spec"])
    assert first != second
    assert first.replace("0.072 # threshold: burnRatio", "0.5 # threshold: burnRatio") == second


def test_all_configurations_are_accepted():
    run("promtool", "check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    run("amtool", "check-config", DEPLOY / "prometheus" / "alertmanager.yml")


def board_faults(board):
    """What is wrong with a dashboard, beyond what its expressions say."""
    faults = []
    if board["id"] is not None or not board["uid"]:
        faults.append("an id of another Grafana, or no uid")
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        if cells & taken or place["x"] + place["w"] > 24:
            faults.append(f"{panel['title']}: overlaps")
        taken |= cells
        if panel["type"] == "row":
            continue
        if not panel["fieldConfig"]["defaults"].get("unit"):
            faults.append(f"{panel['title']}: no unit")
        identities = [target["refId"] for target in panel["targets"]]
        if len(set(identities)) != len(identities):
            faults.append(f"{panel['title']}: refId twice")
        for target in panel["targets"]:
            if target["datasource"]["uid"] != "${datasource}":
                faults.append(f"{panel['title']}: a fixed data source")
            if not target["legendFormat"]:
                faults.append(f"{panel['title']}: no legend")
            if re.search(r"\[\d", target["expr"]):
                faults.append(f"{panel['title']}: a fixed range")
            if re.search(r"(?<!rate\()(?<!increase\()\bm3_[a-z_]+_(total|bucket)\b", target["expr"]):
                faults.append(f"{panel['title']}: a counter without rate")
    numbers = [panel["id"] for panel in board["panels"]]
    if len(set(numbers)) != len(numbers):
        faults.append("a panel's id twice")
    return faults


@pytest.mark.parametrize("path", DASHBOARDS, ids=name_of)
def test_a_dashboard_is_well_made(path):
    assert board_faults(json.loads(path.read_text())) == []
    assert path.stat().st_size < 2**20


BOARD_FAULTS = {
    "id": lambda board: board.update(id=7),
    "overlap": lambda board: board["panels"][2].update(gridPos=board["panels"][1]["gridPos"]),
    "unit": lambda board: board["panels"][1]["fieldConfig"]["defaults"].pop("unit"),
    "source": lambda board: board["panels"][1]["targets"][0].update(datasource={"uid": "abc"}),
    "range": lambda board: board["panels"][1]["targets"][0].update(expr="rate(m3_requests_total[5m])"),
    "counter": lambda board: board["panels"][1]["targets"][0].update(expr="sum(m3_requests_total)"),
}


@pytest.mark.parametrize("fault", BOARD_FAULTS)
def test_the_check_of_dashboards_refuses(fault):
    board = json.loads(DASHBOARDS[0].read_text())
    BOARD_FAULTS[fault](board)
    assert board_faults(board)


def test_rendered_dashboards_are_the_files_byte_for_byte():
    manifests = render(CHART / "ci" / "full-values.yaml")
    rendered = {}
    for item in of_kind(manifests, "ConfigMap"):
        rendered |= {name: text for name, text in item["data"].items() if name.endswith(".json")}
    assert {name: text.rstrip("\n") for name, text in rendered.items()} == {
        p.name: p.read_text().rstrip("\n") for p in DASHBOARDS
    }
