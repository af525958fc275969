import base64
import io
import json

import openai
import pydantic
import pytest
from PIL import Image

from server.messages import FailureKind, FinishReason
from tests.api.scripted import LiveServer, Say, ScriptedEngine, ids, tiny_format
from tests.api.tool_replies import NS

HELLO = [{"role": "user", "content": "hi"}]


def client_of(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


def picture(image_format):
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), "teal").save(buffer, image_format)
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{image_format.lower()};base64,{data}"}}


def test_chat_streamed_and_not():
    with LiveServer(ScriptedEngine(Say("<mm:think>hm</mm:think>Hello é 漢"))) as server, client_of(server) as client:
        whole = client.chat.completions.create(model="tiny", messages=HELLO)
        assert whole.choices[0].message.content == "Hello é 漢"
        assert whole.choices[0].message.reasoning_content == "hm"
        assert whole.choices[0].finish_reason == "stop"
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with client.chat.completions.create(model="tiny", messages=HELLO, **options) as stream:
            chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert client.models.list().data[0].id == "tiny"
        assert client.models.retrieve("tiny").id == "tiny"


def test_the_streaming_helper_sees_the_same_answer():
    with LiveServer(ScriptedEngine(Say("one"), Say("two"))) as server, client_of(server) as client:
        with client.chat.completions.stream(model="tiny", messages=HELLO, n=2, logprobs=True) as stream:
            completion = stream.until_done().get_final_completion()
        assert [choice.message.content for choice in completion.choices] == ["one", "two"]
        assert "".join(entry.token for entry in completion.choices[1].logprobs.content) == "two"


@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_picture(image_format, stream):
    engine = ScriptedEngine(Say("teal"))
    messages = [{"role": "user", "content": [{"type": "text", "text": "colour?"}, picture(image_format)]}]
    with LiveServer(engine) as server, client_of(server) as client:
        answer = client.chat.completions.create(model="tiny", messages=messages, stream=stream)
        text = (
            "".join(chunk.choices[0].delta.content or "" for chunk in answer) if stream else answer.choices[0].message.content
        )
    assert text == "teal"
    assert len(engine.submitted[0].media) == 1
    assert engine.submitted[0].prompt_token_ids.count(ids("]<]image[>[")[0]) == 4


def test_errors_are_the_clients_own_types():
    engine = ScriptedEngine(Say("a", end=FailureKind.INTERNAL), Say("a", end=FailureKind.INTERNAL), Say("x"))
    with LiveServer(engine) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError):
            client.chat.completions.create(model="tiny", messages=HELLO)
        with pytest.raises(openai.APIError, match="scripted failure"):
            list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=HELLO, temperature=3)
        assert (caught.value.param, caught.value.code, caught.value.type) == (
            "temperature",
            "invalid_value",
            "invalid_request_error",
        )
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=HELLO)
        assert client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content == "x"


def test_length_is_reported():
    with LiveServer(ScriptedEngine(Say("abc", end=FinishReason.LENGTH))) as server, client_of(server) as client:
        answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3)
    assert answer.choices[0].finish_reason == "length"


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]
TWO_CALLS = (
    '<mm:think>both</mm:think>Checking.NS<tool_call>\nNS<invoke name="get_weather">NS<city>ParisNS</city>NS<days>2NS</days>'
    'NS</invoke>\nNS<invoke name="get_weather">NS<city>OsloNS</city>NS<days>3NS</days>NS</invoke>\nNS</tool_call>'
).replace("NS", NS)
ARGUMENTS = [{"city": "Paris", "days": 2}, {"city": "Oslo", "days": 3}]


def test_tool_calls_and_the_turn_after_them():
    engine = ScriptedEngine(Say(TWO_CALLS), Say("Mild in both."))
    with LiveServer(engine) as server, client_of(server) as client:
        first = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "Checking."
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == ARGUMENTS
        results = [{"role": "tool", "tool_call_id": call.id, "content": "15C"} for call in reversed(message.tool_calls)]
        history = [*HELLO, message.model_dump(exclude_none=True), *results]
        second = client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)
    assert second.choices[0].message.content == "Mild in both."
    assert "<mm:think>both</mm:think>Checking." in tiny_format().decode(engine.submitted[1].prompt_token_ids)


def test_the_streaming_helper_adds_tool_calls_up():
    options = {"model": "tiny", "messages": HELLO, "tools": TOOLS}
    with (
        LiveServer(ScriptedEngine(Say(TWO_CALLS, group=2))) as server,
        client_of(server) as client,
        client.chat.completions.stream(**options) as stream,
    ):
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        completion = stream.get_final_completion()
    assert [event.parsed_arguments for event in done] == ARGUMENTS
    message = completion.choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == ARGUMENTS
    assert [call.function.name for call in message.tool_calls] == ["get_weather"] * 2
    assert completion.choices[0].finish_reason == "tool_calls"


class Answer(pydantic.BaseModel):
    place: str
    days: list[int]


def test_an_answer_is_parsed_into_the_clients_model():
    engine = ScriptedEngine(Say('<mm:think>hm</mm:think>{"place": "Oslo", "days": [1, 2]}'))
    with LiveServer(engine) as server, client_of(server) as client:
        parsed = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Answer)
        with client.chat.completions.stream(model="tiny", messages=HELLO, response_format=Answer) as stream:
            streamed = stream.get_final_completion()
    for completion in (parsed, streamed):
        assert completion.choices[0].message.parsed == Answer(place="Oslo", days=[1, 2])
    assert json.loads(engine.submitted[0].sampling.grammar.text)["properties"].keys() == {"place", "days"}


def test_a_key_is_asked_for_and_accepted():
    with LiveServer(ScriptedEngine(Say("x")), api_keys="right") as server:
        with client_of(server) as client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="tiny", messages=HELLO)
        with client_of(server).with_options(api_key="right") as client:
            assert client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content == "x"
