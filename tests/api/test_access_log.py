import asyncio
import json
import logging
from pathlib import Path

import pytest

from server.logs import FIELDS, JsonFormatter, TextFormatter
from server.messages import FailureKind
from tests.api.scripted import CHAT, Say, ScriptedEngine, chat, http_client, ids

SECRET = "my secret prompt"
REPLY = "my secret answer"


def records(caplog, script, *bodies, **settings):
    """The fields of the lines that requests leave behind."""

    async def run():
        async with asyncio.timeout(30), http_client(ScriptedEngine(script), **settings) as client:
            for body in bodies:
                await client.post(CHAT, json=body, headers={"x-request-id": "id-1"})
            for path in ("/health", "/metrics", "/nope"):
                await client.get(path)

    with caplog.at_level(logging.INFO, logger="server"):
        asyncio.run(run())
    return [getattr(record, FIELDS) for record in caplog.records if record.name == "server.api.access_log"]


def test_every_request_but_probes_leaves_a_line(caplog):
    whole, streamed, bad, nope = records(caplog, Say(REPLY), chat(SECRET), chat(SECRET, stream=True), chat(SECRET, n=0))
    for line in (whole, streamed):
        assert line["request_id"] == "id-1"
        assert (line["method"], line["path"], line["status"]) == ("POST", CHAT, 200)
        assert line["num_output_tokens"] == len(ids(REPLY))
        assert line["num_prompt_tokens"] > 5
        assert 0 <= line["first_token_s"] <= line["duration_s"]
    assert (whole["stream"], streamed["stream"]) == (False, True)
    assert bad["status"] == 400
    assert "num_prompt_tokens" not in bad
    assert (nope["path"], nope["status"]) == ("/nope", 404)
    assert SECRET not in caplog.text
    assert "secret" not in json.dumps([whole, streamed, bad, nope])


def test_a_stream_that_breaks_off_is_logged_with_its_error(caplog):
    line, _ = records(caplog, Say("x", end=FailureKind.INTERNAL), chat(stream=True))
    assert line["status"] == 500


def test_what_clients_send_is_logged_only_when_asked_for(caplog):
    line, _ = records(caplog, Say("x"), chat(SECRET), log_content=True)
    assert SECRET in line["body"]


def record(message, fields=None, exc_info=None):
    made = logging.LogRecord("server.x", logging.INFO, __file__, 1, message, None, exc_info)
    if fields is not None:
        setattr(made, FIELDS, fields)
    return made


def test_json_lines_hold_the_fields():
    line = JsonFormatter().format(record("request", {"path": '/a"\n{"x":1}', "status": 200}))
    assert "\n" not in line
    parsed = json.loads(line)
    assert (parsed["message"], parsed["path"], parsed["status"]) == ("request", '/a"\n{"x":1}', 200)
    assert (parsed["level"], parsed["logger"]) == ("info", "server.x")
    assert parsed["time"].endswith("+00:00")


def test_json_lines_hold_tracebacks():
    try:
        raise ValueError("x")
    except ValueError as error:
        line = JsonFormatter().format(record("bad", exc_info=(type(error), error, error.__traceback__)))
    assert "ValueError" in json.loads(line)["traceback"]


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_line_without_fields_is_fine(formatter):
    assert "hello" in formatter.format(record("hello"))


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_value_that_is_not_json_is_shown_as_text(formatter):
    assert "/models/x" in formatter.format(record("loaded", {"folder": Path("/models/x")}))


def test_text_lines_cannot_be_forged():
    assert TextFormatter().format(record("request", {"path": "/a\nERROR"})).count("\n") == 0
