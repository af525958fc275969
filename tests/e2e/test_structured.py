"""Formats and calls from the real engine: a model that knows nothing still follows every grammar."""

import json

import httpx
import openai
import pydantic
import pytest

from tests.e2e.server_process import TINY, UVICORN, ServerProcess, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("server with keys")]

HELLO = [{"role": "user", "content": "Weather in Oslo?"}]
OPTIONS = {"model": "m3", "messages": HELLO, "max_tokens": 400, "seed": 1}
NO_THINKING = {"thinking": {"type": "disabled"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Paris"]}, "days": {"enum": [1, 2, 3]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get_weather", "get_news")
]


class Answer(pydantic.BaseModel, extra="forbid"):
    """Finite, so that no limit cuts it off."""

    sure: bool
    grade: int = pydantic.Field(ge=1, le=5)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("right\n")
    settings = {"M3_MODEL": str(TINY), "M3_SERVED_MODEL_NAME": "m3", "M3_API_KEYS_FILE": str(keys)}
    with ServerProcess(UVICORN, **settings, M3_ADMIN_PORT="0", M3_LOG_FORMAT="json") as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="right", max_retries=0) as client:
        yield client


def test_the_operators_launch_line_takes_settings_from_the_environment(client):
    assert [model.id for model in client.models.list()] == ["m3"]


def test_an_answer_follows_its_schema(client):
    answer = client.chat.completions.parse(**OPTIONS, response_format=Answer, extra_body=NO_THINKING)
    assert isinstance(answer.choices[0].message.parsed, Answer)


def test_a_choice_is_one_of_the_choices(client):
    body = NO_THINKING | {"structured_outputs": {"choice": ["red", "green"]}}
    assert client.chat.completions.create(**OPTIONS, extra_body=body).choices[0].message.content in ("red", "green")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_news"}}])
def test_a_required_call_is_made(client, choice):
    options = OPTIONS | {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "extra_body": NO_THINKING}
    whole = client.chat.completions.create(**options).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == ("get_news" if isinstance(choice, dict) else call.function.name)
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Oslo", "Paris")
    assert arguments["days"] in (1, 2, 3)
    assert whole.finish_reason == "tool_calls"
    with client.chat.completions.stream(**options) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments


def test_a_bad_schema_harms_nobody(client):
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "("}}}
    for _ in range(2):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**OPTIONS, response_format=bad)
        assert caught.value.code == "invalid_grammar"
    body = NO_THINKING | {"guided_regex": "[0-9]{3}"}
    assert client.chat.completions.create(**OPTIONS, extra_body=body).choices[0].message.content.isdecimal()


def test_keys_guard_everything_but_health_and_logs_are_json(server):
    assert httpx.get(server.url + "/v1/models").status_code == 401
    assert httpx.get(server.url + "/metrics").status_code == 401
    assert httpx.get(server.url + "/health").status_code == 200
    url, headers = server.url + "/v1/chat/completions", {"x-api-key": "right"}
    for max_tokens, status in ((1, 200), (0, 400)):
        body = {"messages": HELLO, "max_tokens": max_tokens}
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == status

    def statuses():
        lines = [json.loads(line) for line in list(server.lines) if line.startswith("{")]
        return {line.get("status") for line in lines if line["message"] == "request"}

    wait_until(lambda: statuses() >= {200, 400, 401}, 10)
    assert "Weather in Oslo?" not in server.log
