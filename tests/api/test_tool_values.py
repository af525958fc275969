import json

import pytest

from server.api.tool_schema import Kind, SchemaIndex
from server.api.tool_values import Element, element_value, json_string_part, json_text, text_value

STRING, INTEGER, NUMBER, BOOLEAN, OBJECT, ARRAY = (
    {"type": name} for name in ("string", "integer", "number", "boolean", "object", "array")
)
ARRAY_OF_INTEGERS = {"type": "array", "items": INTEGER}


def value(schema, text, root=None):
    index = SchemaIndex(schema if root is None else root)
    return text_value(text, index.shape(schema), index)


def element(schema, content, index=None, name="x"):
    """An element of nested (name, content) pairs or of text, with the shapes that the schema gives."""
    index = index or SchemaIndex(schema)
    return index, fill(Element(name, index.shape(schema)), content, index)


def fill(node, content, index):
    if isinstance(content, str):
        node.add(content)
        return node
    for name, inner in content:
        node.children.append(fill(node.child(name, index), inner, index))
    return node


def nested(schema, content):
    index, node = element(schema, content)
    return element_value(node, index)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        *[(STRING, text, text) for text in ("02134", "true", "1e5", "null", "", " a \n", "&lt;", "[1]")],
        (INTEGER, "42", 42),
        (INTEGER, " -7\n", -7),
        (INTEGER, "5.0", 5),
        (INTEGER, "5.5", "5.5"),
        (INTEGER, "1_000", "1_000"),
        (INTEGER, "\u0665", "\u0665"),
        (INTEGER, "1e300", "1e300"),
        (INTEGER, "9" * 5000, "9" * 5000),
        (INTEGER, "many", "many"),
        (NUMBER, "2.50", 2.5),
        (NUMBER, "3", 3),
        (NUMBER, "1e3", 1000.0),
        (NUMBER, "1e999", "1e999"),
        (NUMBER, "NaN", "NaN"),
        (NUMBER, "Infinity", "Infinity"),
        (BOOLEAN, "True", True),
        (BOOLEAN, "false", False),
        (BOOLEAN, "1", True),
        (BOOLEAN, "0", False),
        (BOOLEAN, "maybe", "maybe"),
        (OBJECT, "", {}),
        (OBJECT, '{"a": [1, null]}', {"a": [1, None]}),
        (OBJECT, '{"a": NaN}', '{"a": NaN}'),
        (OBJECT, "[1]", "[1]"),
        (OBJECT, "[" * 5000, "[" * 5000),
        (OBJECT, '{"a":' + "[" * 500 + "]" * 500 + "}", '{"a":' + "[" * 500 + "]" * 500 + "}"),
        (ARRAY, "", []),
        (ARRAY, '[1, "a"]', [1, "a"]),
        (ARRAY, "a", ["a"]),
        (ARRAY, '["a", ', '["a", '),
        (ARRAY_OF_INTEGERS, "7", [7]),
        ({"type": "array", "items": {"$ref": "#"}}, "7", "7"),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"type": ["integer", "null"]}, " null ", None),
        ({"type": ["string", "null"]}, "weather", "weather"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, " null", " null"),
        ({"type": ["string", "null"]}, "none", "none"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": ["integer", "string"]}, "7", 7),
        ({"type": ["string", "integer"]}, "7", "7"),
        ({"type": ["integer", "string"]}, "x", "x"),
        ({"enum": ["1", "nil"]}, "1", "1"),
        ({"enum": ["a", 1, None, True]}, "1", 1),
        ({"enum": ["a", 1, None, True]}, "null", None),
        ({"enum": ["a", 1, None, True]}, "true", True),
        ({"enum": ["a", 1, None, True]}, "a", "a"),
        ({"const": 5}, "5", 5),
        ({"anyOf": [INTEGER, BOOLEAN]}, "true", True),
        ({"oneOf": [{"type": "null"}, NUMBER]}, "1.5", 1.5),
        ({"allOf": [{"description": "n"}, INTEGER]}, "1", 1),
        ({"anyOf": [STRING, {"type": "null"}]}, "null", None),
        ({}, "1", "1"),
        (True, "null", "null"),
        (None, "1", "1"),
        ({"type": "float"}, "1", "1"),
        ({"type": 5, "enum": 7, "anyOf": "x", "properties": []}, "1", "1"),
    ],
)
def test_text_becomes_what_the_schema_says(schema, text, expected):
    actual = value(schema, text)
    assert actual == expected
    assert type(actual) is type(expected)


@pytest.mark.parametrize(
    ("schema", "content", "expected"),
    [
        ({}, [("a", "1"), ("b", [("c", "2")])], {"a": "1", "b": {"c": "2"}}),
        ({}, [("item", "1"), ("item", "2")], ["1", "2"]),
        ({}, [("a", "1"), ("a", "2")], {"a": ["1", "2"]}),
        (ARRAY_OF_INTEGERS, [("item", "1"), ("whatever", "2")], [1, 2]),
        ({"type": "array", "prefixItems": [INTEGER, STRING]}, [("item", "1"), ("item", "2"), ("item", "3")], [1, "2", "3"]),
        ({"type": "object", "properties": {"a": INTEGER, "b": BOOLEAN}}, [("a", "1"), ("b", "true")], {"a": 1, "b": True}),
        ({"type": "object", "properties": {"a": INTEGER}}, [("a", "1"), ("a", "2")], {"a": 1}),
        ({"properties": {"a": ARRAY_OF_INTEGERS}}, [("a", "1"), ("a", [("item", "2")])], {"a": [1, 2]}),
        ({"type": "object", "additionalProperties": NUMBER}, [("k", "1.5")], {"k": 1.5}),
        ({"anyOf": [ARRAY_OF_INTEGERS, {"properties": {"a": INTEGER}}]}, [("a", "1")], {"a": 1}),
        ({"anyOf": [ARRAY_OF_INTEGERS, {"properties": {"a": INTEGER}}]}, [("item", "1")], [1]),
        ({"anyOf": [INTEGER, ARRAY_OF_INTEGERS]}, [("item", "1")], [1]),
        ({"anyOf": [{"properties": {"a": INTEGER}}, {"properties": {"a": BOOLEAN}}]}, [("a", "true")], {"a": True}),
        ({"type": "object", "properties": {"item": INTEGER}}, [("item", "1")], {"item": 1}),
    ],
)
def test_nested_elements_become_what_the_schema_says(schema, content, expected):
    assert nested(schema, content) == expected


@pytest.mark.parametrize("reference", ["#/$defs/n", "#/$defs/a~1b", "#/$defs/list/0", "#/%24defs/n", "#/$defs/alias"])
def test_a_local_reference_is_followed(reference):
    root = {"$defs": {"n": INTEGER, "a/b": INTEGER, "list": [INTEGER], "alias": {"$ref": "#/$defs/n"}}}
    assert value({"$ref": reference}, "7", root) == 7


@pytest.mark.parametrize(
    "reference", ["#/nowhere", "#/$defs/list/9", "http://host/schema", "#/$defs/loop", "#a", "#/$defs/n/type/x"]
)
def test_a_reference_that_leads_nowhere_puts_no_constraint(reference):
    root = {"$defs": {"n": INTEGER, "list": [INTEGER], "loop": {"$ref": "#/$defs/loop"}}}
    assert value({"$ref": reference}, "7", root) == "7"


def test_a_recursive_schema_types_every_level():
    tree = {"type": "object", "properties": {"size": INTEGER, "next": {"$ref": "#"}}}
    assert nested(tree, [("size", "1"), ("next", [("size", "2"), ("next", [("size", "3")])])]) == {
        "size": 1,
        "next": {"size": 2, "next": {"size": 3}},
    }


def test_parameters_that_are_a_reference_have_its_members():
    index = SchemaIndex({"$ref": "#/$defs/p", "$defs": {"p": {"type": "object", "properties": {"n": INTEGER}}}})
    assert index.member(index.root, "n").kinds == (Kind.INTEGER,)


def test_a_deep_composition_does_not_exhaust_the_stack():
    schema = INTEGER
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    assert value(schema, "7") == 7


def test_the_types_of_alternatives_keep_their_order():
    shape = SchemaIndex({"anyOf": [{"oneOf": [NUMBER]}, {"type": ["null", "string"]}]}).root
    assert shape.kinds == (Kind.NUMBER, Kind.NULL, Kind.STRING)


def test_parts_of_a_string_give_the_parts_of_its_json():
    text = 'a"\\\n\u0000é\U0001f600\ud83d\ude00\ud800'
    assert "".join(json_string_part(character) for character in text) == json_string_part(text)
    assert json.loads(f'"{json_string_part(text)}"') == json.loads(json.dumps(text))
    json_string_part(text).encode()


def test_a_lone_surrogate_from_json_text_can_be_sent():
    assert json_text(value(OBJECT, '{"a": "\\ud800"}')).encode() == b'{"a": "\\ud800"}'
