import pytest
from pydantic import ValidationError

from server.api.responses_schema import ResponsesBody
from server.api.responses_translate import chat_body
from server.api.schema import ChatBody
from server.errors import BadRequestError

PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
AS_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "high"}}
AS_CLIP = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA", "fps": 2.0, "max_frames": 8}}


def translated(items, **fields):
    """The chat body, which must be one that the chat endpoint takes."""
    translation = chat_body(ResponsesBody.model_validate({"input": items, **fields}))
    ChatBody.model_validate(translation.body)
    return translation


def messages_of(items, **fields):
    return translated(items, **fields).body["messages"]


def reasoning(value):
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": value}]}


def call(call_id, arguments="{}"):
    return {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": "f", "arguments": arguments}


def output(call_id, value):
    return {"type": "function_call_output", "call_id": call_id, "output": value}


def answer(value):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": value, "annotations": []}]}


def test_a_text_is_the_users():
    assert messages_of("hi", instructions="Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
    ]


def test_an_assistants_items_become_one_message():
    items = [{"role": "user", "content": "q"}, reasoning("hm"), answer("a"), call("c1", '{"x": 1}'), call("c2")]
    items += [output("c2", "two"), output("c1", "one"), reasoning("so"), answer("done")]
    assert messages_of(items)[1:] == [
        {
            "role": "assistant",
            "content": "a",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
                {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "assistant", "content": "done", "reasoning_content": "so"},
    ]


def test_options_of_a_picture_stand_beside_its_address():
    options = {"max_long_side_pixel": 700, "max_pixels": 500_000}
    (message,) = messages_of([{"role": "user", "content": [PICTURE | options]}])
    assert message["content"] == [AS_PART | {"image_url": AS_PART["image_url"] | options}]


def test_parts_of_every_kind():
    parts = [{"type": "input_text", "text": "a"}, PICTURE, {"type": "text", "text": "b"}]
    clip = {"type": "input_video", "video_url": "data:video/mp4;base64,AAAA", "fps": 2.0, "max_frames": 8}
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    messages = messages_of([{"role": "developer", "content": "d"}, {"role": "user", "content": [*parts, clip]}, refusal])
    assert messages[0] == {"role": "developer", "content": "d"}
    assert messages[1]["content"] == [{"type": "text", "text": "a"}, AS_PART, {"type": "text", "text": "b"}, AS_CLIP]
    assert messages[2]["content"] == "no"


def test_a_summary_stands_in_for_reasoning_that_is_sealed():
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "sealed"}
    assert messages_of([{"role": "user", "content": "q"}, item, answer("a")])[1]["reasoning_content"] == "short"


def test_fields_carry_over_under_the_chats_names():
    body = translated(
        "hi",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=1,
        cache_salt="s",
        stream=True,
        parallel_tool_calls=False,
        top_logprobs=2,
        reasoning={"effort": "none", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}, "verbosity": "low"},
        truncation="auto",
        service_tier="auto",
    ).body
    del body["messages"]
    assert body == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 1,
        "cache_salt": "s",
        "stream": True,
        "parallel_tool_calls": False,
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "none",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    }


def test_the_templates_own_switch_is_taken_too():
    body = translated("hi", chat_template_kwargs={"thinking_mode": "enabled"}, thinking={"type": "adaptive"}).body
    assert body["chat_template_kwargs"] == {"thinking_mode": "enabled"}
    assert body["thinking"] == {"type": "adaptive"}


@pytest.mark.parametrize(
    ("choice", "expected", "num_tools"),
    [
        ("required", "required", 2),
        ({"type": "function", "name": "g"}, {"type": "function", "function": {"name": "g"}}, 2),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}, "required", 1),
    ],
)
def test_tools_and_choices(choice, expected, num_tools):
    tools = [{"type": "function", "name": name, "parameters": {}, "strict": True} for name in "fg"]
    body = translated("hi", tools=tools, tool_choice=choice).body
    assert body["tool_choice"] == expected
    assert len(body["tools"]) == num_tools
    assert body["tools"][-1] == {"type": "function", "function": {"name": "g", "parameters": {}}}


@pytest.mark.parametrize(
    ("chat", "origin"),
    [
        ("messages[0].content", "instructions"),
        ("messages[1].content[1].image_url", "input[0].content[1].image_url"),
        ("messages[1].content[1].image_url.max_long_side_pixel", "input[0].content[1].max_long_side_pixel"),
        ("messages[1].content[1].image_url.max_pixels", "input[0].content[1].max_pixels"),
        ("messages[2].tool_calls[0].function.arguments", "input[2].arguments"),
        ("messages[3]", "input[3]"),
        ("messages[3].content[0].image_url", "input[3].output[0].image_url"),
        ("messages", "input"),
        ("tools[0].function.name", "tools[1].name"),
        ("max_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("temperature", "temperature"),
    ],
)
def test_errors_name_the_clients_own_fields(chat, origin):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, PICTURE]},
        reasoning("hm"),
        call("c1"),
        output("c1", [PICTURE]),
    ]
    tools = [{"type": "function", "name": name} for name in "fg"]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    places = translated(items, instructions="s", tools=tools, tool_choice=choice).places
    assert places.origin(chat) == origin


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([output("c1", "x")], "input[0].call_id"),
        ([{"role": "assistant", "content": [PICTURE]}], "input[0].content[0]"),
    ],
)
def test_what_a_chat_cannot_say_is_refused(items, param):
    with pytest.raises(BadRequestError) as caught:
        translated(items)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "items",
    [
        5,
        [],
        ["hi"],
        [{"role": "tool", "content": "x"}],
        [{"type": "custom_tool_call"}],
        [{"type": {}, "role": "user", "content": "x"}],
        [{"role": "user", "content": [{"type": []}]}],
        [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}],
        [{"type": "function_call", "call_id": "c", "name": "f"}],
    ],
)
def test_malformed_input_is_refused(items):
    with pytest.raises(ValidationError):
        ResponsesBody.model_validate({"input": items})
