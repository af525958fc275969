"""What `/metrics` says after known things have happened."""

import asyncio
import base64
import itertools
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.api.timeline import Timeline
from server.messages import FailureKind, FinishReason
from server.metrics import buckets
from server.metrics.aliases import FAMILIES
from server.metrics.front import ENDS
from tests.api.scripted import CHAT, LiveServer, Say, ScriptedEngine, chat, http_client, ids, until

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
HELLO = Say("Hello there, you", num_cached=2)
NUM_TOKENS = len(HELLO.token_ids)


class Page:
    """A scrape, parsed: the values of series by name and labels."""

    def __init__(self, text):
        self.text = text
        self.families = list(text_string_to_metric_families(text))
        self.series = {}
        for family in self.families:
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.series, f"{key} twice"
                self.series[key] = sample.value

    def __call__(self, name, **labels):
        return self.series[name, frozenset(labels.items())]

    def vllm(self, name, **labels):
        return self(f"vllm:{name}", model_name="tiny", engine="0", **labels)

    def histograms(self):
        """(family, labels without `le`) -> buckets by bound, count."""
        found = {}
        for family in self.families:
            if family.type == "histogram":
                for sample in family.samples:
                    labels = {key: value for key, value in sample.labels.items() if key != "le"}
                    entry = found.setdefault((family.name, tuple(labels.items())), {})
                    entry[sample.labels.get("le", sample.name.removeprefix(family.name))] = sample.value
        return found


def scrape(scenario, engine=None, **settings):
    """The page after `scenario(client)` has run against an application of its own."""

    async def run():
        async with asyncio.timeout(30), http_client(engine or ScriptedEngine(HELLO), **settings) as client:
            await scenario(client)
            return Page((await client.get("/metrics")).text)

    return asyncio.run(run())


async def one_answer(client):
    assert (await client.post(CHAT, json=chat(max_tokens=50))).status_code == 200


def test_one_answer_is_one_observation_everywhere():
    page = scrape(one_answer)
    for name in (
        *("m3_request_seconds", "m3_time_to_first_token_seconds", "m3_request_inference_seconds"),
        *("m3_request_output_token_seconds", "m3_request_prompt_tokens", "m3_request_output_tokens", "m3_request_max_tokens"),
        "m3_request_choices",
    ):
        assert page(f"{name}_count") == 1, name
    for stage in ("prepare", "queue", "prefill", "decode"):
        assert page("m3_request_stage_seconds_count", stage=stage) == 1
    assert page("m3_request_output_tokens_sum") == NUM_TOKENS
    assert page("m3_request_max_tokens_sum") == 50
    assert page("m3_request_choices_sum") == 1
    stages = [page("m3_request_stage_seconds_sum", stage=stage) for stage in ("prepare", "queue", "prefill")]
    assert sum(stages) == pytest.approx(page("m3_time_to_first_token_seconds_sum"))
    assert page("m3_requests_total", status="200") == 1
    assert page("m3_requests_ended_total", reason="stop") == 1


def test_counts_are_exact_after_a_mixture_of_requests():
    engine = ScriptedEngine(
        HELLO,
        Say("a b c", end=FinishReason.LENGTH),
        Say("streamed"),
        Say("x"),
        Say("y", end=FinishReason.LENGTH),
        Say("broken", end=FailureKind.INTERNAL),
        Say("z"),
    )

    async def scenario(client):
        prompt = {"model": "tiny", "prompt": "hi"}
        message = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
        answers = [await client.post(CHAT, json=chat())]
        answers.append(await client.post("/v1/completions", json=prompt))
        answers.append(await client.post(CHAT, json=chat(stream=True)))
        answers.append(await client.post(CHAT, json=chat(n=2)))
        answers.append(await client.post(CHAT, json=chat(stream=True)))  # breaks off
        answers.append(await client.post("/v1/messages", json=message))
        answers.append(await client.post(CHAT, json=chat(n=0)))
        answers.append(await client.post("/v1/completions", json=prompt | {"max_tokens": -1}))
        assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 200, 200, 400, 400]
        engine.max_open = 0
        assert (await client.post(CHAT, json=chat())).status_code == 429

    page = scrape(scenario, engine)
    statuses = {status: page("m3_requests_total", status=status) for status in ("200", "400", "429", "500")}
    assert statuses == {"200": 5, "400": 2, "429": 1, "500": 1}
    ends = {reason: page("m3_requests_ended_total", reason=reason) for reason in ENDS}
    assert ends == {"stop": 3, "length": 2, "abort": 0, "error": 1}, "two choices, one of them cut: the request is cut"
    assert {reason: page.vllm("request_success_total", finished_reason=reason) for reason in ENDS} == ends
    assert page("m3_choices_total", finish_reason="stop") == 4
    assert page("m3_choices_total", finish_reason="length") == 2
    assert page("m3_time_to_first_token_seconds_count") == 6, "the one that broke off had a first token"
    assert page("m3_request_seconds_count") == 5
    assert page("m3_request_choices_sum") == 6
    num_tokens = NUM_TOKENS + sum(len(ids(text)) for text in ("a b c", "streamed", "x", "y", "z"))
    assert page("m3_request_output_tokens_sum") == num_tokens
    assert page("m3_requests_open") == page("m3_sequences_open") == page("m3_queued_prompt_tokens") == 0


def test_a_client_that_leaves_is_an_abort():
    engine = ScriptedEngine(Say("partial ", end=None))
    with LiveServer(engine) as server:
        with httpx.Client() as client, client.stream("POST", server.url + CHAT, json=chat(stream=True)) as response:
            assert next(response.iter_lines()).startswith("data: ")
        assert engine.abort_seen.wait(20)

        def aborted():
            return Page(httpx.get(server.url + "/metrics").text)("m3_requests_aborted_total", reason="client")

        while aborted() < 1:
            pass
        page = Page(httpx.get(server.url + "/metrics").text)
    assert page("m3_requests_total", status="499") == 1
    assert page("m3_requests_aborted_total", reason="client") == 1
    assert page("m3_requests_aborted_total", reason="shutdown") == 0
    assert page.vllm("request_success_total", finished_reason="abort") == 1
    assert page("m3_request_seconds_count") == 0


def test_the_queue_ends_when_the_engine_says_that_it_starts():
    class Counts:
        def first_token(self, *stages):
            self.stages = stages

        def next_tokens(self, delay_s, num_tokens):
            self.num_next = num_tokens

        def answered(self, *values):
            self.values = values

    counts = Counts()
    timeline = Timeline(counts)
    timeline.submitted()
    started_s = timeline._submitted_s + 0.0  # an engine that starts at once
    timeline.tokens(0, 1, started_s)
    prepare_s, queue_s, prefill_s = counts.stages
    assert queue_s == 0
    assert min(prepare_s, prefill_s) >= 0
    late = Timeline(counts)
    late._submitted_s -= 5
    late._arrival_s -= 7
    late.tokens(0, 1, late._submitted_s + 3)
    assert counts.stages[:2] == (pytest.approx(2), pytest.approx(3))
    assert counts.stages[2] == pytest.approx(2, abs=1)
    late.tokens(1, 1, late._submitted_s + 4)
    assert not hasattr(counts, "num_next"), "the first token of another choice follows none"
    late.tokens(1, 3, late._submitted_s + 4)
    assert counts.num_next == 3
    late.answered(5, 2)
    assert counts.values[3:] == (5, 2)


def test_the_page_is_sound():
    page = scrape(one_answer)
    described = [line.split()[2] for line in page.text.splitlines() if line.startswith("# HELP")]
    assert len(described) == len(set(described)) > 60
    assert all(family.documentation for family in page.families)
    for (name, labels), entry in page.histograms().items():
        counts = [value for bound, value in entry.items() if bound not in ("_count", "_sum")]
        assert counts == sorted(counts), (name, labels)
        assert counts[-1] == entry["_count"] == entry["+Inf"]
        assert "_sum" in entry


def test_aliases_say_what_ours_say():
    engine = ScriptedEngine(HELLO)
    engine.heartbeat.step_started()
    engine.heartbeat.step_ended(100)

    async def scenario(client):
        await one_answer(client)
        client._transport.app.state.service.metrics.front.next_tokens(0.06, 3)

    page = scrape(scenario, engine)
    assert page("m3_inter_token_seconds_bucket", le="0.02") - page("m3_inter_token_seconds_bucket", le="0.015") == 3
    assert page.vllm("num_requests_running") == page("m3_sequences_running") == 1
    assert page.vllm("num_requests_waiting") == page("m3_sequences_waiting") == 2
    assert page.vllm("num_preemptions_total") == page("m3_preemptions_total")
    assert page.vllm("generation_tokens_total") == page("m3_generation_tokens_total")
    assert page.vllm("prefix_cache_hits_total") == page("m3_prefix_hit_tokens_total") == 3
    assert page.vllm("mm_cache_queries_total") == page("m3_media_feature_queries_total") == 12
    assert page.vllm("mm_cache_hits_total") == page("m3_media_feature_hits_total") == 11
    assert page.vllm("kv_cache_usage_perc") == pytest.approx(0.2)
    assert page.vllm("cache_config_info", block_size="128", num_gpu_blocks="100") == 1
    by_source = [page.vllm("prompt_tokens_by_source_total", source=source) for source in ("local_compute", "local_cache_hit")]
    assert sum(by_source) == page.vllm("prompt_tokens_total")
    assert page.vllm("iteration_tokens_total_sum") == page("m3_engine_step_tokens_sum") == 100
    assert page.vllm("iteration_tokens_total_count") == 1
    for alias, ours in (
        ("time_to_first_token_seconds", "m3_time_to_first_token_seconds"),
        ("inter_token_latency_seconds", "m3_inter_token_seconds"),
        ("e2e_request_latency_seconds", "m3_request_seconds"),
        ("request_generation_tokens", "m3_request_output_tokens"),
    ):
        assert page.vllm(f"{alias}_sum") == page(f"{ours}_sum")
        assert page.vllm(f"{alias}_bucket", le="+Inf") == page(f"{ours}_bucket", le="+Inf") > 0
    for stage in ("queue", "prefill", "decode"):
        assert page.vllm(f"request_{stage}_time_seconds_count") == 1
    shown = {family.name for family in page.families}
    assert {f"vllm:{name}" for name, _, _ in FAMILIES} <= shown


def test_what_the_engine_and_the_media_pool_count_is_shown():
    def body(data):
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}] * 2}]}

    engine = ScriptedEngine(HELLO)
    engine.heartbeat.load_began(1000)
    engine.heartbeat.loaded(600)
    for num_tokens in (1, 8192):
        engine.heartbeat.step_started()
        engine.heartbeat.step_ended(num_tokens)

    async def scenario(client):
        for data in (b"good", b"bad"):
            await client.post(CHAT, json=body(data))

    page = scrape(scenario, engine)
    assert page("m3_media_items_total", kind="image") == 2
    assert page("m3_media_items_total", kind="video") == 0
    assert page("m3_media_errors_total") == 1
    assert page("m3_media_encoded_bytes_total") == 2 * len(b"good")
    assert page("m3_media_worker_deaths_total") == 0
    assert (page("m3_weights_bytes"), page("m3_weights_loaded_bytes")) == (1000, 600)
    assert page("m3_engine_step_seconds_count") == page("m3_engine_step_tokens_count") == 2
    assert page("m3_engine_step_tokens_bucket", le="1.0") == 1
    assert page("m3_engine_step_tokens_bucket", le="8192.0") == 2
    assert page("m3_engine_heartbeat_age_seconds") >= 0
    assert page("m3_engine_idle_seconds_total") > 0
    for lane, num_bytes in (("dense", 10), ("index", 20), ("sparse", 30)):
        assert page("m3_cache_bytes", lane=lane, tier="gpu") == 100 * num_bytes
        assert page("m3_cache_held_bytes", lane=lane, tier="gpu") == 20 * num_bytes


def test_a_server_that_loads_shows_its_state_and_no_numbers_of_the_engine():
    async def run():
        engine = ScriptedEngine(HELLO, ready=False)
        engine.stats = None
        engine.heartbeat.load_began(1000)
        async with asyncio.timeout(30), http_client(engine) as client:
            loading = Page((await client.get("/metrics")).text), (await client.get("/readyz")).json()
            engine.heartbeat.loaded(1000)
            warming = Page((await client.get("/metrics")).text), (await client.get("/readyz")).json()
            engine.become_ready()
            await until(lambda: client._transport.app.state.service.is_ready)
            return loading, warming, Page((await client.get("/metrics")).text)

    loading, warming, ready = asyncio.run(run())
    for (page, answer), state in ((loading, "loading"), (warming, "warming")):
        assert answer == {"state": state}
        states = ("loading", "warming", "ready", "draining", "failed")
        assert {name: page("m3_server_state", state=name) for name in states} == {name: name == state for name in states}
        assert page("m3_engine_up") == 0
        assert not any(name.startswith("m3_cache") for name, _ in page.series)
    assert (ready("m3_server_state", state="ready"), ready("m3_engine_up")) == (1, 1)


def test_buckets_resolve_fast_tokens_and_reach_a_million():
    within = [bound for bound in buckets.INTER_TOKEN_S if 0.001 <= bound <= 0.1]
    assert len(within) >= 16
    assert all(after / before <= 2 for before, after in itertools.pairwise(within))
    assert buckets.TOKENS[-1] == 1 << 20
    assert buckets.FIRST_TOKEN_S[-1] > 30 * 60
    for name in ("INTER_TOKEN_S", "FIRST_TOKEN_S", "STAGE_S", "REQUEST_S", "TOKENS", "CHOICES"):
        bounds = list(getattr(buckets, name))
        assert bounds == sorted(set(bounds)), name


def row(family):
    """A line of docs/metrics.md."""
    labels = sorted({label for sample in family.samples for label in sample.labels} - {"le", "model_name", "engine"})
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return f"| `{name}` | {family.type} | {', '.join(f'`{label}`' for label in labels)} | {family.documentation} |"


def test_the_document_lists_all_families_and_no_others():
    engine = ScriptedEngine(HELLO)
    page = scrape(one_answer, engine)
    listed = {line for line in DOCUMENT.read_text().splitlines() if line.startswith(("| `m3_", "| `vllm:"))}
    assert listed == {row(family) for family in page.families if family.name.startswith(("m3_", "vllm:"))}
