import json

import pytest

from server.messages import GrammarKind
from tests.api.scripted import InlineGrammars, Say, ScriptedEngine, chat, ids, post, tiny_grammars
from tests.api.tool_replies import CALL_OSLO, NS

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}, "required": ["z"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}}]


def response_format(schema=None, **rest):
    inner = {"name": "answer"} if schema is None else {"name": "answer", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": inner | rest}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, ""),
        (response_format(SCHEMA, strict=True), GrammarKind.JSON_SCHEMA, SCHEMA),
        (response_format(), GrammarKind.JSON_OBJECT, ""),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, ""),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarKind.CHOICE, ["a", "b"]),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, GrammarKind.LARK, 'start: "a"'),
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA),
        ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"guided_choice": ["a", "b"]}, GrammarKind.CHOICE, ["a", "b"]),
        ({"guided_grammar": 'start: "a"'}, GrammarKind.LARK, 'start: "a"'),
    ],
)
def test_every_spelling_reaches_the_engine_as_a_grammar(fields, kind, text):
    engine, grammars = ScriptedEngine(Say("x")), InlineGrammars()
    assert post(engine, chat(**fields), grammars=grammars).status_code == 200
    grammar = engine.submitted[0].sampling.grammar
    assert grammar.kind is kind
    assert grammar.text == (text if isinstance(text, str) else json.dumps(text, separators=(",", ":")))
    assert grammars.checked == [grammar]


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_no_format_is_no_grammar(fields):
    engine = ScriptedEngine(Say("x"))
    assert post(engine, chat(**fields)).status_code == 200
    assert engine.submitted[0].sampling.grammar is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (response_format("no schema"), "response_format.json_schema.schema"),
        (response_format({"type": "nonsense"}), "response_format.json_schema.schema"),
        (response_format({"pattern": "(", "type": "string"}), "response_format.json_schema.schema"),
        (response_format({"type": "array", "items": [{}]} | {"$ref": "#/nowhere"}), "response_format.json_schema.schema"),
        (response_format(json.loads('{"not":' * 70 + "{}" + "}" * 70)), "response_format.json_schema.schema"),
        (response_format({"enum": ["x" * 1000] * 300}), "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"grammar": "start: start2"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_grammar": "start: /(/"}, "guided_grammar"),
        ({"guided_regex": "a", "tools": TOOLS}, "guided_regex"),
        ({"guided_grammar": 'start: "a"', "tools": TOOLS}, "guided_grammar"),
    ],
)
def test_a_bad_format_is_refused_before_the_engine_sees_it(fields, param, stream):
    engine = ScriptedEngine(Say("x"))
    response = post(engine, chat(stream=stream, **fields))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not engine.submitted


def grammar_of(**fields):
    engine = ScriptedEngine(Say("x"))
    response = post(engine, chat(**fields))
    assert response.status_code == 200, response.text
    return tiny_grammars().compile(engine.submitted[0].sampling.grammar)


def matches(grammar, text):
    """Whether a text is complete under a grammar."""
    token_ids, cursor = ids(text), grammar.deep_copy()
    return cursor.validate_tokens(token_ids) == len(token_ids) and cursor.consume_tokens(token_ids) and cursor.is_accepting()


CALL = f"NS<tool_call>\n{CALL_OSLO}NS</tool_call>".replace("NS", NS)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (response_format(SCHEMA), '{"z": 1,\n "a": "x"}', '{"a": "x"}'),
        ({"response_format": {"type": "json_object"}}, '{"any": []}', "[]"),
        ({"guided_choice": ['yes "x"', "no"]}, 'yes "x"', "yes"),
    ],
)
def test_with_tools_the_reply_is_an_answer_of_the_format_or_calls(fields, good, bad):
    grammar = grammar_of(tools=TOOLS, **fields)
    assert matches(grammar, good)
    assert matches(grammar, CALL)
    assert not matches(grammar, bad)
    assert not matches(grammar, "free text")


def test_a_required_call_leaves_no_room_for_an_answer():
    grammar = grammar_of(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})
    assert matches(grammar, CALL)
    assert not matches(grammar, "{}")


def test_without_calls_the_format_stands_alone():
    grammar = grammar_of(tools=TOOLS, tool_choice="none", guided_regex="a+")
    assert matches(grammar, "aaa")
    assert not matches(grammar, CALL)
