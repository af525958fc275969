import langchain_openai
import pydantic
import pytest

from tests.api.scripted import LiveServer, Say, ScriptedEngine
from tests.api.test_openai_client import ARGUMENTS, TWO_CALLS


class Place(pydantic.BaseModel):
    """A place."""

    name: str


def get_weather(city: str, days: int) -> str:
    """Weather of the next days."""
    return f"{city} {days}"


def model_of(server, **options):
    return langchain_openai.ChatOpenAI(base_url=server.url + "/v1", api_key="unused", model="tiny", max_retries=0, **options)


def test_an_answer_streamed_and_not():
    with LiveServer(ScriptedEngine(Say("<mm:think>hm</mm:think>Hello é 漢"))) as server:
        model = model_of(server, stream_usage=True)
        whole = model.invoke("hi")
        chunks = list(model.stream("hi"))
    assert whole.content == "".join(chunk.content for chunk in chunks) == "Hello é 漢"
    total = sum((chunk for chunk in chunks[1:]), chunks[0])
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"] > 0


def test_tools_streamed_and_not():
    with LiveServer(ScriptedEngine(Say(TWO_CALLS, group=3))) as server:
        model = model_of(server).bind_tools([get_weather])
        whole = model.invoke("hi")
        chunks = list(model.stream("hi"))
    total = sum((chunk for chunk in chunks[1:]), chunks[0])
    for answer in (whole, total):
        assert [call["args"] for call in answer.tool_calls] == ARGUMENTS
        assert not answer.invalid_tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(method):
    call = '{NS}<tool_call>\n{NS}<invoke name="Place">{NS}<name>Oslo{NS}</name>{NS}</invoke>\n{NS}</tool_call>'
    reply = '{"name": "Oslo"}' if method == "json_schema" else call.replace("{NS}", "]<]minimax[>[")
    with LiveServer(ScriptedEngine(Say(reply))) as server:
        answer = model_of(server).with_structured_output(Place, method=method).invoke("where?")
    assert answer == Place(name="Oslo")
