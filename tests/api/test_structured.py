import json

import pytest

from server.api.structured import (
    MAX_CHOICES,
    MAX_CHOICES_LEN,
    MAX_LARK_LEN,
    MAX_PATTERN_LEN,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from server.errors import BadRequestError
from server.messages import Grammar, GrammarKind


def nested(depth):
    schema = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_equal_requests_give_equal_grammars():
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": "ä"}}}
    grammar = json_schema_grammar(schema, "p")
    assert grammar == json_schema_grammar(json.loads(json.dumps(schema)), "p")
    assert json.loads(grammar.text) == schema
    assert grammar.text.index('"b"') < grammar.text.index('"a"'), "the order of properties is the schema's"
    assert regex_grammar("a+", "p") == Grammar(GrammarKind.REGEX, "a+")
    assert lark_grammar('start: "a"', "p") == Grammar(GrammarKind.LARK, 'start: "a"')
    assert json_object_grammar() == Grammar(GrammarKind.JSON_OBJECT)


def test_choices_are_listed_once_each():
    grammar = choice_grammar(["b", "a", "b"], "p")
    assert (grammar.kind, json.loads(grammar.text)) == (GrammarKind.CHOICE, ["b", "a"])


def test_what_is_just_within_the_limits_passes():
    json_schema_grammar(nested(MAX_SCHEMA_DEPTH), "p")
    json_schema_grammar({"description": "x" * (MAX_SCHEMA_BYTES - len('{"description":""}'))}, "p")
    regex_grammar("a" * MAX_PATTERN_LEN, "p")
    lark_grammar("a" * MAX_LARK_LEN, "p")
    choice_grammar([f"{i}" for i in range(MAX_CHOICES)], "p")
    choice_grammar(["a" * MAX_CHOICES_LEN], "p")


REFUSED = [
    (json_schema_grammar, [], "JSON object"),
    (json_schema_grammar, True, "JSON object"),
    (json_schema_grammar, None, "JSON object"),
    (json_schema_grammar, "{}", "JSON object"),
    (json_schema_grammar, nested(MAX_SCHEMA_DEPTH + 1), "levels deep"),
    (json_schema_grammar, nested(5000), "levels deep"),
    (json_schema_grammar, {"enum": [[[]] * 10]} | {"x": nested(MAX_SCHEMA_DEPTH)}, "levels deep"),
    (json_schema_grammar, {"description": "x" * MAX_SCHEMA_BYTES}, "bytes"),
    (json_schema_grammar, {"const": "\ud800"}, "surrogate"),
    (regex_grammar, "", "empty"),
    (regex_grammar, "a" * (MAX_PATTERN_LEN + 1), "characters"),
    (regex_grammar, "\udfff", "surrogate"),
    (lark_grammar, "", "empty"),
    (lark_grammar, "a" * (MAX_LARK_LEN + 1), "characters"),
    (choice_grammar, [], "at least one"),
    (choice_grammar, ["a", ""], "empty"),
    (choice_grammar, [f"{i}" for i in range(MAX_CHOICES + 1)], "choices"),
    (choice_grammar, ["a" * MAX_CHOICES_LEN, "b"], "longer"),
    (choice_grammar, ["\ud800"], "surrogate"),
]


@pytest.mark.parametrize(("build", "value", "said"), REFUSED)
def test_what_is_too_large_or_of_the_wrong_shape_names_its_field(build, value, said):
    with pytest.raises(BadRequestError, match=said) as caught:
        build(value, "response_format.json_schema")
    assert caught.value.param == "response_format.json_schema"
