"""The endpoints around the chat path with the real engine: a tiny model whose answers say nothing, in the right shapes."""

import json

import anthropic
import httpx
import openai
import pydantic
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("server")]

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class Answer(pydantic.BaseModel, extra="forbid"):
    """Finite, so that no limit cuts it off."""

    sure: bool


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def messages(server):
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client.messages


def tokens_of(server, text):
    return httpx.post(server.url + "/tokenize", json={"prompt": text}).json()["tokens"]


def test_an_echo_judges_a_text_as_it_was_judged_when_it_was_written(server, client):
    letters = {letter: tokens_of(server, letter)[0] for letter in "abcdef"}
    options = {"model": "tiny", "temperature": 0, "logprobs": 0}
    extra = {"ignore_eos": True, "allowed_token_ids": list(letters.values())}
    prompt = tokens_of(server, "Once upon a time")
    written = client.completions.create(prompt=prompt, max_tokens=8, extra_body=extra, **options).choices[0]
    ids = [*prompt, *[letters[token] for token in written.logprobs.tokens]]
    judged = client.completions.create(prompt=ids, max_tokens=0, echo=True, **options).choices[0]
    assert judged.text == "Once upon a time" + written.text
    assert judged.logprobs.token_logprobs[len(prompt) :] == pytest.approx(written.logprobs.token_logprobs, abs=1e-3)


def test_prompts_in_one_request_are_answered_as_in_their_own(client):
    options = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    together = client.completions.create(prompt=["One", "Two two"], **options)
    apart = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in ("One", "Two two")]
    assert [choice.text for choice in together.choices] == apart


def test_a_response_follows_its_schema_and_calls_its_tool(client):
    parsed = client.responses.parse(model="tiny", input="hi", text_format=Answer, reasoning={"effort": "none"})
    assert isinstance(parsed.output_parsed, Answer)
    tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": None}
    options = {"model": "tiny", "input": "hi", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**options, reasoning={"effort": "none"}, max_output_tokens=200) as stream:
        final = stream.get_final_response()
    assert json.loads(final.output[-1].arguments)["city"] in ("Oslo", "Paris")


def test_a_message_calls_its_tool(messages):
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    options = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    with messages.stream(**options, tool_choice={"type": "any", "disable_parallel_tool_use": True}) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[-1].input["city"] in ("Oslo", "Paris")
    counted = messages.count_tokens(model="tiny", messages=options["messages"], tools=[tool])
    assert counted.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens
