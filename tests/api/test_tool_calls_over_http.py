import asyncio
import json

import pytest

from server.messages import FinishReason, GrammarKind
from server.settings import ThinkingMode
from tests.api.scripted import CHAT, InlineGrammars, Say, ScriptedEngine, chat, http_client, ids, post, tiny_format
from tests.api.sse_client import calls_of, read, streamed, whole
from tests.api.tool_replies import (
    CALL_OSLO,
    CALL_PARIS,
    NS,
    PARIS,
    REASONED,
    REPLIES,
    TOOLS,
    arguments_match,
)

CALL = f"NS<tool_call>\n{CALL_PARIS}NS</tool_call>".replace("NS", NS)
BOTH = f"NS<tool_call>\n{CALL_PARIS}{CALL_OSLO}NS</tool_call>".replace("NS", NS)


def tool(name, parameters=None, **rest):
    function = {"name": name, **rest}
    return {"type": "function", "function": function if parameters is None else function | {"parameters": parameters}}


DEFINITIONS = [tool(function.name, function.parameters) for function in TOOLS]
WEATHER = [tool("get_weather", TOOLS[0].parameters)]


def with_tools(tools=DEFINITIONS, **fields):
    return chat(tools=tools, **fields)


def ask(scenario, *scripts, **settings):
    async def run():
        engine = ScriptedEngine(*scripts)
        async with asyncio.timeout(60), http_client(engine, **settings) as client:
            return await scenario(client)

    return asyncio.run(run())


@pytest.mark.parametrize("reply", [*REPLIES, *REASONED], ids=lambda reply: reply.name)
def test_a_reply_means_the_same_streamed_or_not_and_however_its_tokens_arrive(reply):
    end = FinishReason.LENGTH if reply.truncated else FinishReason.STOP
    scripts = [Say(reply.text, end=end, group=group) for group in (1, 1, 3, 10_000)]
    body = with_tools(thinking={"type": reply.mode.value})

    async def scenario(client):
        return [*await whole(client, body), *[(await streamed(client, body))[0] for _ in range(3)]]

    for answer in ask(scenario, *scripts):
        assert answer.content == reply.content
        assert answer.reasoning == reply.reasoning
        assert [name for name, _ in calls_of(answer)] == [name for name, _ in reply.calls]
        for (_, fragments), (_, expected) in zip(calls_of(answer), reply.calls, strict=True):
            assert arguments_match(fragments, expected)
        assert answer.finish_reason == ("length" if reply.truncated else "tool_calls" if reply.calls else "stop")


def test_the_parts_of_a_stream_come_in_the_order_of_the_reply():
    text = f"<mm:think>hm</mm:think>Checking.{BOTH}"
    (answer,) = ask(lambda client: streamed(client, with_tools()), Say(text))
    assert answer.order == ["reasoning_content", "content", "tool_calls"]
    assert len({call["id"] for call in answer.calls}) == 2


def test_arguments_are_streamed_while_they_are_generated():
    text = f'NS<tool_call>\nNS<invoke name="save">NS<content>{"word " * 400}NS</content>NS</invoke>\nNS</tool_call>'
    (answer,) = ask(lambda client: streamed(client, with_tools()), Say(text.replace("NS", NS)))
    assert answer.num_fragments > 200
    assert json.loads(answer.calls[0]["arguments"]) == {"content": "word " * 400}


def test_a_call_cut_off_by_the_token_limit_is_no_reason_to_call():
    (answer,) = ask(lambda client: whole(client, with_tools()), Say(CALL[:-40], end=FinishReason.LENGTH))
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_choices_have_parsers_of_their_own(stream):
    scripts = [Say(BOTH), Say("no call"), Say(f"<mm:think>x</mm:think>{CALL}", group=2)]
    one, two, three = ask(lambda client: (streamed if stream else whole)(client, with_tools(n=3)), *scripts)
    assert [name for name, _ in calls_of(one)] == ["get_weather"] * 2
    assert (two.content, two.calls, two.finish_reason) == ("no call", [], "stop")
    assert (three.reasoning, len(three.calls), three.finish_reason) == ("x", 1, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_reply_ends_with_the_first(stream):
    engine = ScriptedEngine(Say(BOTH + "tail " * 30, end=None))
    response = post(engine, with_tools(parallel_tool_calls=False, stream=stream))
    if stream:
        ((answer,), _) = read(response)
        assert (calls_of(answer), answer.content) == ([("get_weather", json.dumps(PARIS))], "")
    else:
        choice = response.json()["choices"][0]
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"
    assert engine.aborted == [engine.submitted[0].request_id]


def test_with_tool_choice_none_no_call_is_read_and_none_can_be_written():
    engine = ScriptedEngine(Say(CALL))
    message = post(engine, with_tools(tool_choice="none")).json()["choices"][0]["message"]
    assert message["content"] == CALL
    assert "tool_calls" not in message
    assert engine.submitted[0].sampling.bad_words == ((tiny_format().markers.namespace,),)
    assert "get_weather" in tiny_format().decode(engine.submitted[0].prompt_token_ids)


def test_without_tools_markup_is_text():
    assert post(ScriptedEngine(Say(CALL)), chat()).json()["choices"][0]["message"]["content"] == CALL


@pytest.mark.parametrize("mode", ["enabled", "adaptive", "disabled"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_required_call_is_a_grammar_behind_the_reasoning(choice, mode):
    engine = ScriptedEngine(Say(CALL))
    response = post(engine, with_tools(tool_choice=choice, thinking={"type": mode}))
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    sampling = engine.submitted[0].sampling
    assert sampling.grammar.kind is GrammarKind.LARK
    assert ("save" in sampling.grammar.text) == (choice == "required")
    assert sampling.thinking == tiny_format().thinking(ThinkingMode(mode))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_the_finish_reason_tells_whether_there_are_calls_and_not_what_was_asked_for(choice):
    assert post(ScriptedEngine(Say("no")), with_tools(tool_choice=choice)).json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tool_choice": "none"}])
def test_an_empty_list_of_tools_is_no_tools(fields):
    engine = ScriptedEngine(Say("x"))
    assert post(engine, chat(tools=[], **fields)).status_code == 200
    assert "<tools>" not in tiny_format().decode(engine.submitted[0].prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": WEATHER, "tool_choice": "any"}, "tool_choice"),
        ({"tools": WEATHER, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": WEATHER, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"tools": "get_weather"}, "tools"),
        ({"tools": ["get_weather"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "browser", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [*WEATHER, tool("")]}, "tools[1].function.name"),
        ({"tools": [tool('a"b')]}, "tools[0].function.name"),
        ({"tools": [tool("a<b")]}, "tools[0].function.name"),
        ({"tools": [tool("a" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool(5)]}, "tools[0].function.name"),
        ({"tools": [tool("f", "schema")]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", json.loads('{"a":' * 70 + "1" + "}" * 70))]}, "tools[0]"),
        ({"tools": [tool("f", description="x" * (1 << 20))]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(1025)]}, "tools"),
        ({"tools": WEATHER, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_tools_that_cannot_be_used_are_refused_before_the_stream_opens(fields, param, stream):
    engine = ScriptedEngine(Say("x"))
    response = post(engine, chat(stream=stream, **fields))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not engine.submitted


ODD_SCHEMAS = [
    None,
    {},
    {"type": "object", "properties": {"a": True, "b": {"default": 5}, "c": {"anyOf": [{"type": "null"}, {"type": "string"}]}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
    {"type": "array"},
    {"properties": {"a": {"type": "string", "pattern": "("}}},
    {"type": ["object", "null"], "properties": {"名": {"enum": ["a", 1, None]}}},
    {"oneOf": [{"type": "object"}, {"type": "object", "properties": {"x": {"type": "number"}}}]},
    {"type": "object", "properties": [], "required": "a"},
]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("schema", ODD_SCHEMAS, ids=range(len(ODD_SCHEMAS)))
def test_any_json_schema_is_accepted(schema, choice):
    response = post(ScriptedEngine(Say(CALL)), with_tools([tool("get_weather", schema)], tool_choice=choice))
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_the_prompt_shows_functions_in_the_clients_own_words():
    function = {"strict": True, "name": "f", "parameters": {"b": 1, "a": [True, None, 1.50]}, "description": "<é & 'ü'>"}
    engine = ScriptedEngine(Say("x"))
    post(engine, chat(tools=[{"type": "function", "function": function}]))
    assert json.dumps(function, ensure_ascii=False) in tiny_format().decode(engine.submitted[0].prompt_token_ids)


def test_stop_strings_end_the_content_and_not_a_call():
    texts = [CALL.replace("Paris", "STOP"), f"a STOP b {CALL}", f"a ST{CALL}"]

    async def scenario(client):
        return [(await streamed(client, with_tools(stop="STOP")))[0] for _ in texts]

    inside, before, half = ask(scenario, *[Say(text) for text in texts])
    assert json.loads(inside.calls[0]["arguments"]) == {"city": "STOP"}
    assert (before.content, before.calls, before.finish_reason) == ("a ", [], "stop")
    assert (half.content, len(half.calls), half.finish_reason) == ("a ST", 1, "tool_calls")


def test_logprobs_are_those_of_the_content_around_calls():
    text = f"<mm:think>w</mm:think>ab {CALL} cd"
    for group in (1, 1000):
        (answer,) = ask(lambda client: streamed(client, with_tools(logprobs=True)), Say(text, group=group))
        assert "".join(entry["token"] for entry in answer.logprobs) == answer.content == "ab  cd"


def test_calls_and_their_results_can_be_sent_back():
    history = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "need it",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(PARIS)}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "15C"}]},
    ]
    engine = ScriptedEngine(Say("<mm:think>ok</mm:think>Mild."))

    async def scenario(client):
        return (await client.post(CHAT, json={"messages": history, "tools": WEATHER})).json()

    async def run():
        async with asyncio.timeout(30), http_client(engine) as client:
            return await scenario(client)

    message = asyncio.run(run())["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Mild.", "ok")
    prompt = tiny_format().decode(engine.submitted[0].prompt_token_ids)
    assert f"<mm:think>need it</mm:think>{CALL}" in prompt
    assert "<response>15C</response>" in prompt
    assert engine.submitted[0].prompt_token_ids.count(ids(NS)[0]) > 4


def test_a_required_call_of_many_functions_is_judged_before_the_engine_sees_it():
    grammars = InlineGrammars()
    engine = ScriptedEngine(Say(CALL))
    assert post(engine, with_tools(tool_choice="required"), grammars=grammars).status_code == 200
    assert grammars.checked == [engine.submitted[0].sampling.grammar]
