"""`/v1/responses` with OpenAI's own client, against a server whose engine is scripted."""

import json

import openai
import pytest
from pydantic import BaseModel

from server.messages import FailureKind, FinishReason
from tests.api.scripted import LiveServer, Say, ScriptedEngine, ids, tiny_format
from tests.api.test_openai_client import client_of, picture
from tests.api.tool_replies import NS

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "strict": None,
}
CALL = f'<invoke name="get_weather">{NS}<city>Pa"ris{NS}</city>{NS}<days>2{NS}</days>{NS}</invoke>\n{NS}'
CALLS = f"Checking.{NS}<tool_call>\n{NS}{CALL}{CALL}</tool_call>"
THINKING = {"reasoning": {"effort": "high"}}


@pytest.fixture(scope="module")
def idle():
    """An engine that nothing reaches, and a client of its server."""
    engine = ScriptedEngine(Say("x"))
    with LiveServer(engine) as server, client_of(server) as client:
        yield engine, client


def create(client, **fields):
    return client.responses.create(**{"model": "tiny", "input": "hi", **fields})


def prompt_of(engine, index=-1):
    return b"".join(tiny_format().token_bytes(token_id) for token_id in engine.submitted[index].prompt_token_ids).decode()


def plain(response):
    """A response without what is drawn anew for each."""
    items = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    return items, response.status, response.usage, response.incomplete_details


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_reasoning_text_and_calls_are_the_same_streamed_and_whole(group):
    engine = ScriptedEngine(Say(f"I should look.</mm:think>{CALLS}", group=group, num_cached=5))
    with LiveServer(engine) as server, client_of(server) as client:
        whole = create(client, tools=[WEATHER], **THINKING)
        events = list(create(client, tools=[WEATHER], stream=True, **THINKING))
    reasoning, message, first, second = whole.output
    assert [piece.text for piece in reasoning.content] == ["I should look."]
    assert message.content[0].text == whole.output_text == "Checking."
    for call in (first, second):
        assert (call.type, call.name, json.loads(call.arguments)) == (
            "function_call",
            "get_weather",
            {"city": 'Pa"ris', "days": 2},
        )
    assert first.call_id != second.call_id
    assert whole.status == "completed"
    assert whole.usage.input_tokens_details.cached_tokens == 5
    assert whole.usage.output_tokens_details.reasoning_tokens == len(ids("I should look."))
    assert plain(events[-1].response) == plain(whole)


def test_events_come_in_order():
    with LiveServer(ScriptedEngine(Say(f"hm</mm:think>{CALLS}", group=4))) as server, client_of(server) as client:
        events = list(create(client, tools=[WEATHER], stream=True, **THINKING))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    distinct = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    part = ["content_part.done", "output_item.done"]
    assert distinct == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", *part),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", *part),
        *call,
        *call,
        "completed",
    ]
    for event in events:
        if event.type == "response.output_item.done":
            assert events[-1].response.output[event.output_index] == event.item


def test_the_streaming_helper_sees_the_same_answer():
    class City(BaseModel):
        name: str

    engine = ScriptedEngine(Say('{"name": "Oslo"}', group=2))
    with LiveServer(engine) as server, client_of(server) as client:
        with client.responses.stream(model="tiny", input="hi", text_format=City) as stream:
            stream.until_done()
            final = stream.get_final_response()
        whole = client.responses.parse(model="tiny", input="hi", text_format=City)
    assert final.output_parsed == whole.output_parsed == City(name="Oslo")
    assert whole.text.format.type == "json_schema"
    assert "name" in engine.submitted[0].sampling.grammar.text


def test_a_conversation_goes_back_as_it_came():
    engine = ScriptedEngine(Say(f"I should look.</mm:think>{CALLS}"), Say("done</mm:think>Sunny."))
    with LiveServer(engine) as server, client_of(server) as client:
        first = create(client, tools=[WEATHER], **THINKING)
        calls = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": text}
            for call, text in zip(reversed(calls), ["second", "first"], strict=True)
        ]
        history = [{"role": "user", "content": "hi"}, *first.output, *results]
        second = create(client, tools=[WEATHER], input=history, instructions="Be brief.", **THINKING)
    assert second.output_text == "Sunny."
    prompt = prompt_of(engine)
    assert "]~b]developer\nBe brief." in prompt
    assert f"<mm:think>I should look.</mm:think>Checking.{NS}<tool_call>" in prompt
    assert "<response>first</response>\n<response>second</response>" in prompt, "results stand in the order of the calls"


def test_pictures_of_the_user_and_of_a_result():
    engine = ScriptedEngine(Say("teal"))
    image = {"type": "input_image", "image_url": picture("PNG")["image_url"]["url"]}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "colour?"}, image]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "see"}, image]},
    ]
    with LiveServer(engine) as server, client_of(server) as client:
        assert create(client, input=items).output_text == "teal"
    assert len(engine.submitted[0].media) == 2
    assert engine.submitted[0].prompt_token_ids.count(ids("]<]image[>[")[0]) == 8


def test_the_limit_makes_a_response_incomplete():
    with LiveServer(ScriptedEngine(Say("abc", end=FinishReason.LENGTH))) as server, client_of(server) as client:
        whole = create(client, max_output_tokens=3)
        last = list(create(client, max_output_tokens=3, stream=True))[-1]
    for response in (whole, last.response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.output[0].status == "incomplete"
    assert last.type == "response.incomplete"


def test_log_probabilities():
    with LiveServer(ScriptedEngine(Say("Hello"))) as server, client_of(server) as client:
        whole = create(client, top_logprobs=2)
        included = create(client, include=["message.output_text.logprobs"])
        deltas = [e for e in create(client, top_logprobs=2, stream=True) if e.type == "response.output_text.delta"]
    entries = whole.output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == "Hello"
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert [entry.token for delta in deltas for entry in delta.logprobs] == [entry.token for entry in entries]
    assert len(included.output[0].content[0].logprobs) == len(entries)


def test_a_response_repeats_its_request_and_is_not_stored():
    fields = {"instructions": "Be kind.", "metadata": {"k": "v"}, "temperature": 0.5, "tools": [WEATHER], "store": True}
    with LiveServer(ScriptedEngine(Say("x"))) as server, client_of(server) as client:
        response = create(client, tool_choice={"type": "function", "name": "get_weather"}, **fields)
        defaults = create(client)
    assert (response.instructions, response.metadata, response.temperature) == ("Be kind.", {"k": "v"}, 0.5)
    assert response.tool_choice.name == "get_weather"
    assert response.tools[0].name == "get_weather"
    assert response.to_dict()["store"] is False
    assert (defaults.tool_choice, defaults.tools, defaults.parallel_tool_calls) == ("auto", [], True)
    assert defaults.text.format.type == "text"


def test_only_the_allowed_tools_are_shown():
    engine = ScriptedEngine(Say("x"))
    other = {**WEATHER, "name": "get_time"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    with LiveServer(engine) as server, client_of(server) as client:
        create(client, tools=[WEATHER, other], tool_choice=choice)
    assert "get_time" in prompt_of(engine)
    assert "get_weather" not in prompt_of(engine)


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"extra_body": {"conversation": "conv_1"}}, "conversation", "keeps no responses"),
        ({"background": True}, "background", "nothing is kept"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "cannot be referred to"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "input_text"),
        ({"input": []}, "input", "input"),
        ({"temperature": 3}, "temperature", "temperature"),
        ({"max_output_tokens": 100_000}, "max_output_tokens", "at most"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "no tools of its own"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "name"),
        ({"tool_choice": "required"}, "tool_choice", "tools"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]},
            "input[0].call_id",
            "no function_call before it",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{"}], "instructions": "x"},
            "input[0].arguments",
            "JSON",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,YmFk"}]}]},
            "input[0].content[0].image_url",
            "cannot be decoded",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nonsense"}}}},
            "text.format.schema",
            "nonsense",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_refused_before_any_work(idle, fields, param, text, stream):
    engine, client = idle
    with pytest.raises(openai.BadRequestError, match=text) as caught:
        create(client, stream=stream, **fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert engine.submitted == []


def test_a_failure_in_the_engine():
    engine = ScriptedEngine(Say("a", end=FailureKind.INTERNAL))
    with LiveServer(engine) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="scripted failure"):
            create(client)
        seen = []
        with pytest.raises(openai.APIError, match="scripted failure"):
            seen.extend(create(client, stream=True))
    assert seen[-1].type == "response.failed"
    assert seen[-1].response.error.message == "a scripted failure"


def test_a_client_that_leaves_ends_its_request():
    engine = ScriptedEngine(Say("some words and no end", end=None))
    with LiveServer(engine) as server, client_of(server) as client:
        with create(client, stream=True) as stream:
            next(event for event in stream if event.type == "response.output_text.delta")
        assert engine.abort_seen.wait(10)
