import asyncio

import pytest
from opentelemetry import trace

from server.api.tracing import TracingMiddleware
from server.messages import FailureKind
from tests.api.scripted import CHAT, Say, ScriptedEngine, chat, http_client

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class RecordedSpan(trace.NonRecordingSpan):
    def __init__(self, name, context, kind):
        super().__init__(trace.INVALID_SPAN_CONTEXT)
        self.name, self.kind = name, kind
        self.parent = trace.get_current_span(context).get_span_context()
        self.attributes, self.status, self.num_ends = {}, None, 0

    def update_name(self, name):
        self.name = name

    def set_attributes(self, attributes):
        self.attributes.update(attributes)

    def set_status(self, status, description=None):
        self.status = status

    def end(self, end_time=None):
        self.num_ends += 1


class Recorder:
    def __init__(self):
        self.spans = []

    def start_span(self, name, context, kind):
        self.spans.append(RecordedSpan(name, context, kind))
        return self.spans[-1]


def spans_of(script, path=CHAT, headers=None, monkeypatch=None, **fields):
    recorder = Recorder()
    original = TracingMiddleware.__init__
    monkeypatch.setattr(TracingMiddleware, "__init__", lambda self, app, tracer: original(self, app, recorder))

    async def run():
        async with asyncio.timeout(30), http_client(ScriptedEngine(script)) as client:
            if path == CHAT:
                await client.post(CHAT, json=chat(**fields), headers=headers)
            else:
                await client.get(path)

    asyncio.run(run())
    return recorder.spans


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_in_the_clients_trace(monkeypatch, stream):
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "x-request-id": "id-1"}
    (span,) = spans_of(Say("hello"), headers=headers, monkeypatch=monkeypatch, stream=stream)
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert (span.name, span.kind, span.num_ends, span.status) == (f"POST {CHAT}", trace.SpanKind.SERVER, 1, None)
    assert span.attributes["http.response.status_code"] == 200
    assert (span.attributes["http.route"], span.attributes["m3.request_id"]) == (CHAT, "id-1")
    assert span.attributes["gen_ai.usage.output_tokens"] > 0
    assert span.attributes["gen_ai.response.time_to_first_chunk"] >= 0


def test_a_stream_that_breaks_off_is_a_failed_span(monkeypatch):
    (span,) = spans_of(Say("x", end=FailureKind.INTERNAL), monkeypatch=monkeypatch, stream=True)
    assert span.attributes["http.response.status_code"] == 500
    assert span.status is trace.StatusCode.ERROR


def test_a_refused_request_is_a_span_without_usage(monkeypatch):
    (span,) = spans_of(Say("x"), monkeypatch=monkeypatch, n=0)
    assert (span.attributes["http.response.status_code"], span.status) == (400, None)
    assert "gen_ai.usage.input_tokens" not in span.attributes
    assert not span.parent.is_valid


def test_a_path_that_does_not_exist_is_not_in_the_name(monkeypatch):
    (span,) = spans_of(Say("x"), "/v1/models/a/../../secret", monkeypatch=monkeypatch)
    assert (span.name, span.attributes["http.response.status_code"]) == ("GET", 404)
    assert "http.route" not in span.attributes


def test_probes_are_no_spans(monkeypatch):
    assert spans_of(Say("x"), path="/health", monkeypatch=monkeypatch) == []
