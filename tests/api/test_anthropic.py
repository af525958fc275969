"""`/v1/messages` with Anthropic's own client, against a server whose engine is scripted."""

import asyncio
import base64
import io

import anthropic
import pytest
from PIL import Image
from pydantic import BaseModel

from server.api.messages_wire import SIGNATURE
from server.messages import FailureKind, FinishReason
from tests.api.scripted import LiveServer, Say, ScriptedEngine, ScriptedMedia, http_client, ids, tiny_format
from tests.api.tool_replies import NS

HELLO = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
CALL = (
    f'Checking.{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<city>Pa"ris{NS}</city>{NS}<days>2{NS}</days>'
    f"{NS}</invoke>\n{NS}</tool_call>"
)
BROKEN = {"type": "image", "source": {"type": "url", "url": "data:image/png;base64,YmFk"}}
ON = {"type": "enabled", "budget_tokens": 1024}


def client_of(server, **options):
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, **options)


def create(client, **fields):
    return client.messages.create(**{"model": "tiny", "max_tokens": 64, "messages": HELLO, **fields})


def streamed(client, **fields):
    with client.messages.stream(**{"model": "tiny", "max_tokens": 64, "messages": HELLO, **fields}) as stream:
        events = [event.type for event in stream]
        return events, stream.get_final_message()


def prompt_of(engine, index=-1):
    return b"".join(tiny_format().token_bytes(token_id) for token_id in engine.submitted[index].prompt_token_ids).decode()


def picture():
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), "teal").save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def same(whole, final):
    """Whether two answers differ in nothing but their ids."""

    def plain(message):
        blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
        return blocks, message.stop_reason, message.stop_sequence, message.usage

    return plain(whole) == plain(final)


@pytest.fixture(scope="module")
def idle():
    """An engine that nothing reaches, and a client of its server."""
    engine = ScriptedEngine(Say("x"))
    with LiveServer(engine) as server, client_of(server) as client:
        yield engine, client


@pytest.mark.parametrize("group", [1, 3, 1000])
def test_thinking_text_and_calls_are_the_same_streamed_and_whole(group):
    script = Say(f"I should look.</mm:think>{CALL}", group=group, num_cached=5)
    with LiveServer(ScriptedEngine(script)) as server, client_of(server) as client:
        whole = create(client, thinking=ON, tools=[WEATHER])
        events, final = streamed(client, thinking=ON, tools=[WEATHER])
    thinking, text, call = whole.content
    assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "I should look.", SIGNATURE)
    assert (text.type, text.text) == ("text", "Checking.")
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": 'Pa"ris', "days": 2})
    assert whole.stop_reason == "tool_use"
    assert same(whole, final)
    assert events[0] == "message_start"
    assert events[-2:] == ["message_delta", "message_stop"]
    assert events.count("content_block_start") == events.count("content_block_stop") == 3
    assert "signature" in events


def test_usage_tells_cached_and_reasoning_tokens():
    script = Say("hmm</mm:think>yes", num_cached=7)
    engine = ScriptedEngine(script)
    with LiveServer(engine) as server, client_of(server) as client:
        usage = create(client, thinking=ON).usage
        _, final = streamed(client, thinking=ON)
    num_prompt = len(engine.submitted[0].prompt_token_ids)
    assert usage.cache_read_input_tokens == 7
    assert usage.input_tokens == num_prompt - 7
    assert usage.output_tokens == len(script.token_ids)
    assert usage.output_tokens_details.thinking_tokens == len(ids("hmm"))
    assert final.usage == usage


def test_without_the_field_there_is_no_thinking():
    engine = ScriptedEngine(Say("plain"))
    with LiveServer(engine) as server, client_of(server) as client:
        answer = create(client)
    assert [block.type for block in answer.content] == ["text"]
    assert prompt_of(engine).endswith("</mm:think>")


@pytest.mark.parametrize(("kind", "end"), [("adaptive", "]~b]ai\n"), ("disabled", "</mm:think>"), ("enabled", "<mm:think>")])
def test_the_switch_reaches_the_template(kind, end):
    engine = ScriptedEngine(Say("x"))
    config = {"type": kind, "budget_tokens": 1024} if kind == "enabled" else {"type": kind}
    with LiveServer(engine) as server, client_of(server) as client:
        create(client, thinking=config)
    assert prompt_of(engine).endswith(end)


def test_an_answer_goes_back_as_it_came():
    engine = ScriptedEngine(Say(f"I should look.</mm:think>{CALL}"), Say("done</mm:think>Sunny."))
    with LiveServer(engine) as server, client_of(server) as client:
        first = create(client, thinking=ON, tools=[WEATHER])
        result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": "18C"}
        history = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = create(client, thinking=ON, tools=[WEATHER], messages=history)
    assert second.content[-1].text == "Sunny."
    assert "<mm:think>I should look.</mm:think>Checking." in prompt_of(engine)
    assert f'{NS}<city>Pa"ris{NS}</city>' in prompt_of(engine)
    assert "<response>18C</response>" in prompt_of(engine)


def test_pictures_of_the_user_and_of_a_result():
    engine, media = ScriptedEngine(Say("teal")), ScriptedMedia()
    call = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "see"}, picture()]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "colour?"}, picture()]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    with LiveServer(engine, media) as server, client_of(server) as client:
        answer = create(client, messages=messages, tools=[WEATHER])
        num_counted = client.messages.count_tokens(model="tiny", messages=messages, tools=[WEATHER]).input_tokens
    assert answer.content[0].text == "teal"
    assert len(engine.submitted) == 1, "counting runs nothing"
    assert len(engine.submitted[0].media) == 2
    assert engine.submitted[0].prompt_token_ids.count(ids("]<]image[>[")[0]) == 8
    assert num_counted == len(engine.submitted[0].prompt_token_ids)
    assert media.num_leases == 0


def test_a_prompt_that_is_too_long_can_be_counted():
    long = [{"role": "user", "content": "word " * 5000}]
    with LiveServer(ScriptedEngine(Say("x"))) as server, client_of(server) as client:
        assert client.messages.count_tokens(model="tiny", messages=long).input_tokens > 4096
        with pytest.raises(anthropic.BadRequestError, match="tokens"):
            create(client, messages=long)


def test_stop_sequences_name_the_one_that_matched():
    with LiveServer(ScriptedEngine(Say("one, two; three"))) as server, client_of(server) as client:
        answer = create(client, stop_sequences=[";", "three"])
        _, final = streamed(client, stop_sequences=[";", "three"])
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one, two", "stop_sequence", ";")
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", ";")


def test_limits_end_an_answer():
    engine = ScriptedEngine(Say("abc", end=FinishReason.LENGTH))
    num_tokens = len(ids("abc"))
    with LiveServer(engine) as server, client_of(server) as client:
        own = create(client, max_tokens=num_tokens)
        window = create(client, max_tokens=100_000, timeout=30)
    assert own.stop_reason == "max_tokens"
    assert window.stop_reason == "model_context_window_exceeded"
    assert engine.submitted[1].sampling.max_tokens == 4096 - len(engine.submitted[1].prompt_token_ids)


def test_a_call_that_was_cut_off_keeps_what_it_has():
    cut = f'{NS}<tool_call>\n{NS}<invoke name="get_weather">{NS}<days>2{NS}</days>{NS}<city>Par'
    with LiveServer(ScriptedEngine(Say(cut, end=FinishReason.LENGTH))) as server, client_of(server) as client:
        whole = create(client, tools=[WEATHER], max_tokens=len(ids(cut)))
        _, final = streamed(client, tools=[WEATHER], max_tokens=len(ids(cut)))
    assert whole.content[0].input["days"] == 2
    assert whole.stop_reason == "max_tokens"
    assert same(whole, final)


def test_tool_choices():
    engine = ScriptedEngine(Say(CALL))
    with LiveServer(engine) as server, client_of(server) as client:
        create(client, tools=[WEATHER], tool_choice={"type": "any"})
        create(client, tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True})
        silent = create(client, tools=[WEATHER], tool_choice={"type": "none"})
    assert engine.submitted[0].sampling.grammar is not None
    assert engine.submitted[1].sampling.grammar is not None
    assert all(block.type == "text" for block in silent.content)


def test_a_schema_for_the_answer():
    class City(BaseModel):
        name: str

    engine = ScriptedEngine(Say('{"name": "Oslo"}'))
    with LiveServer(engine) as server, client_of(server) as client:
        answer = client.messages.parse(model="tiny", max_tokens=64, messages=HELLO, output_format=City)
    assert answer.parsed_output == City(name="Oslo")
    assert "name" in engine.submitted[0].sampling.grammar.text


def test_instructions_reach_the_prompt():
    engine = ScriptedEngine(Say("x"))
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Rhyme."}]
    with LiveServer(engine) as server, client_of(server) as client:
        create(client, system=system)
        create(client, system="Be kind.")
    assert "]~b]developer\nBe brief.\n\nRhyme.[e~[" in prompt_of(engine, 0)
    assert "]~b]developer\nBe kind.[e~[" in prompt_of(engine, 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"extra_body": {"temperature": 3}}, "temperature"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role is user, assistant or system"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"messages\[0\].content\[0\].*text, image"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "So"}]}, "last message must be the user's"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type.*custom"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\].input_schema is required"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, r"tools\[0\].name"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}]},
            r"messages\[0\].content\[0\].*no tool_use",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {
                        "role": "user",
                        "content": [BROKEN],
                    },
                ]
            },
            r"messages\[2\].content\[0\].source.*cannot be decoded",
        ),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "output_config.format.schema"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_refused_before_any_work(idle, fields, text, stream):
    engine, client = idle
    with pytest.raises(anthropic.BadRequestError, match=text) as caught:
        create(client, stream=stream, **fields)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.request_id == caught.value.body["request_id"]
    assert engine.submitted == []


def test_errors_are_the_clients_own_types():
    engine = ScriptedEngine(Say("a", end=FailureKind.INTERNAL), Say("a", end=FailureKind.INTERNAL), Say("x"))
    with LiveServer(engine) as server, client_of(server) as client:
        with pytest.raises(anthropic.InternalServerError, match="scripted failure"):
            create(client)
        with pytest.raises(anthropic.APIStatusError, match="scripted failure"):
            streamed(client)
        with pytest.raises(anthropic.NotFoundError):
            create(client, model="other")
        with pytest.raises(anthropic.NotFoundError):
            client.messages.count_tokens(model="other", messages=HELLO)
        assert create(client).content[0].text == "x"


def test_a_body_that_is_too_large_is_refused_in_the_same_shape():
    async def run():
        async with asyncio.timeout(30), http_client(ScriptedEngine(Say("x")), max_body_bytes=512) as client:
            return await client.post("/v1/messages", json={"max_tokens": 8, "messages": HELLO, "system": "x" * 600})

    response = asyncio.run(run())
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "request_too_large"


def test_a_server_that_is_not_ready_says_so_in_the_same_shape():
    engine = ScriptedEngine(Say("x"), ready=False)
    with LiveServer(engine) as server, client_of(server) as client:
        for call in (lambda: create(client), lambda: client.messages.count_tokens(model="tiny", messages=HELLO)):
            with pytest.raises(anthropic.APIStatusError) as caught:
                call()
            assert caught.value.status_code == 503
            assert caught.value.body["error"]["type"] == "overloaded_error"


def test_keys_are_asked_for_in_the_same_shape():
    with LiveServer(ScriptedEngine(Say("x")), api_keys="right") as server:
        with client_of(server) as client, pytest.raises(anthropic.AuthenticationError) as caught:
            create(client)
        assert caught.value.body["error"]["type"] == "authentication_error"
        with anthropic.Anthropic(base_url=server.url, api_key="right", max_retries=0) as client:
            assert create(client).content[0].text == "x"


def test_a_client_that_leaves_ends_its_request():
    engine = ScriptedEngine(Say("some words and no end", end=None))
    with LiveServer(engine) as server, client_of(server) as client:
        with client.messages.stream(model="tiny", max_tokens=64, messages=HELLO) as stream:
            next(iter(stream.text_stream))
        assert engine.abort_seen.wait(10)


def test_silence_is_filled_with_pings(monkeypatch):
    monkeypatch.setattr("server.api.generate.HEARTBEAT_S", 0.01)
    engine = ScriptedEngine(Say("", end=None))
    body = {"model": "tiny", "max_tokens": 8, "messages": HELLO, "stream": True}
    with LiveServer(engine) as server, client_of(server) as client:
        with client._client.stream("POST", f"{server.url}/v1/messages", json=body) as response:
            names = (line for line in response.iter_lines() if line.startswith("event: "))
            first = [next(names) for _ in range(5)]
        assert engine.abort_seen.wait(10)
    assert first == ["event: message_start", *["event: ping"] * 4]
