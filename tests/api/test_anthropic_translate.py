import pytest
from pydantic import ValidationError

from server.api.messages_schema import MessagesBody
from server.api.messages_translate import chat_body
from server.api.schema import ChatBody
from server.errors import BadRequestError

PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
AS_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def body_of(messages, **fields):
    return MessagesBody.model_validate({"max_tokens": 8, "messages": messages, **fields})


def translated(messages, **fields):
    """The chat body, which must be one that the chat endpoint takes."""
    translation = chat_body(body_of(messages, **fields))
    ChatBody.model_validate(translation.body)
    return translation


def messages_of(*messages):
    return translated([*messages, {"role": "user", "content": "go on"}]).body["messages"][:-1]


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def text(value):
    return {"type": "text", "text": value}


def test_an_assistants_blocks_become_one_message():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "whatever"},
        {"type": "redacted_thinking", "data": "sealed"},
        text("a"),
        text("b"),
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": [1, None]}},
        {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
    ]
    assert messages_of(user(text("q")), assistant(*blocks))[1] == {
        "role": "assistant",
        "content": "ab",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None]}}},
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
        ],
    }


def test_text_that_looks_like_reasoning_stays_text():
    message = messages_of(user(text("q")), assistant(text("<think>a</think>b")))[1]
    assert (message["content"], message["reasoning_content"]) == ("<think>a</think>b", "")


def test_results_come_before_the_rest_of_the_turn():
    calls = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in ("c1", "c2")]
    results = [
        text("meanwhile"),
        {"type": "tool_result", "tool_use_id": "c2", "content": "two", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c1", "content": [text("one"), PICTURE]},
        PICTURE,
        {"type": "video", "source": {"type": "url", "url": "https://x.test/a.mp4"}},
    ]
    messages = translated([user(text("q")), assistant(*calls), user(*results)]).body["messages"]
    as_clip = {"type": "video_url", "video_url": {"url": "https://x.test/a.mp4"}}
    assert messages[2:] == [
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "tool", "tool_call_id": "c1", "content": [text("one"), AS_PART]},
        {"role": "user", "content": [text("meanwhile"), AS_PART, as_clip]},
    ]


def test_a_result_may_be_empty():
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    messages = translated([user(text("q")), assistant(call), user({"type": "tool_result", "tool_use_id": "c1"})]).body[
        "messages"
    ]
    assert messages[2] == {"role": "tool", "tool_call_id": "c1", "content": None}


def test_adjacent_messages_of_one_role_are_one_turn():
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    messages = translated(
        [
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c"},
            assistant(call),
            {"role": "user", "content": "d"},
            user({"type": "tool_result", "tool_use_id": "c1", "content": "e"}),
        ]
    ).body["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert messages[0]["content"] == [text("a"), text("b")]
    assert messages[1]["content"] == "c"
    assert len(messages[1]["tool_calls"]) == 1


def test_a_result_must_answer_a_call_of_the_turn_before():
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "x"}
    later = [user(text("q")), assistant(call), user(result), {"role": "assistant", "content": "ok"}, user(text("a"), result)]
    with pytest.raises(BadRequestError) as caught:
        chat_body(body_of(later))
    assert caught.value.param == "messages[4].content[1].tool_use_id"


def test_tools_and_choices():
    tools = [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    chat = translated([user(text("q"))], tools=tools, tool_choice=choice).body
    function = {"name": "f", "parameters": {"type": "object"}, "description": "d"}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == "required"
    assert chat["parallel_tool_calls"] is False
    named = translated([user(text("q"))], tools=tools, tool_choice={"type": "tool", "name": "f"}).body
    assert named["tool_choice"] == {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("thinking", "mode"),
    [
        (None, "disabled"),
        ({"type": "disabled"}, "disabled"),
        ({"type": "enabled", "budget_tokens": 2048}, "enabled"),
        ({"type": "adaptive", "display": "omitted"}, "adaptive"),
        ({"type": "between_tools"}, "adaptive"),
    ],
)
def test_thinking(thinking, mode):
    assert translated([user(text("q"))], thinking=thinking).body["thinking"] == {"type": mode}


def test_sampling_fields_carry_over_and_the_rest_is_left_out():
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "priority": -1, "stream": True}
    chat = translated([user(text("q"))], stop_sequences=["x"], metadata={"user_id": "u"}, **fields).body
    assert {name: chat[name] for name in fields} == fields
    assert chat["stop"] == ["x"]
    assert set(chat) == {"messages", "thinking", "max_tokens", "stop", *fields}


@pytest.mark.parametrize(
    ("chat", "origin"),
    [
        ("messages[0].content", "system"),
        ("messages[1].content[1].image_url", "messages[0].content[1].source"),
        ("messages[1]", "messages[0].content[0]"),
        ("messages[2].tool_calls[0].function.arguments", "messages[1].content[1].function.arguments"),
        ("messages[3].content[0].image_url", "messages[2].content[0].content[0].source"),
        ("tools[0].function.parameters", "tools[0].input_schema"),
        ("tools[0].function.name", "tools[0].name"),
        ("stop[3]", "stop_sequences[3]"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("top_k", "top_k"),
    ],
)
def test_errors_name_the_clients_own_fields(chat, origin):
    call = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
    messages = [
        user(text("q"), PICTURE),
        assistant(text("a"), call),
        user({"type": "tool_result", "tool_use_id": "c1", "content": [PICTURE]}),
    ]
    places = translated(messages, system="s", tools=[{"name": "f", "input_schema": {}}]).places
    error = BadRequestError(f"{chat} is wrong", param=chat)
    places.rename(error)
    assert (error.param, error.message) == (origin, f"{origin} is wrong")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": []}],
        [{"role": "user"}],
        [user({"type": "thinking", "thinking": "x"})],
        [assistant(PICTURE)],
        [user({"type": "text", "text": 5})],
        [user({"type": "image", "source": {"type": "file", "file_id": "f"}})],
        [user("text")],
        ["text"],
        [{"role": {}, "content": "x"}],
        [user({"type": []})],
        [user({"type": "image", "source": {"type": {}}})],
    ],
)
def test_malformed_messages_are_refused(messages):
    with pytest.raises(ValidationError):
        body_of(messages)
