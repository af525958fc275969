import base64
import io

import openai
import pytest
from PIL import Image

from server.messages import FailureKind, FinishReason
from tests.api.scripted import LiveServer, Say, ScriptedEngine, ids

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
