"""A grammar, in llguidance's Lark syntax, of the replies that a required or named tool choice allows.

Behind its reasoning the reply is one block of calls in MiniMax-M3's own format, canonically spelled: parameters in the
schema's order, required ones present, scalars by their types and enums, structures as nested elements. What the wire cannot
spell, or no grammar of this kind can say (patterns, ranges, lengths), is left open; that a schema has no finite value is not
noticed. Markers are tokens, given by id, and cannot be spelled by other tokens, since no text of the grammar contains the
namespace. Knows nothing of how a grammar is run.
"""

import json
from collections.abc import Sequence
from typing import Final

import msgspec

from server.api.conversation import JsonValue
from server.api.tool_markup import MAX_TAG_LEN, NAMESPACE
from server.api.tool_schema import Kind, SchemaIndex, Shape, ToolFunction, kinds_of, members_of
from server.messages import Grammar, GrammarKind

# Larger schemas are cut: values behind the last rule may be anything. It bounds the time that a grammar takes to compile.
MAX_RULES: Final = 4096

# Digits are bounded: a model held to a number can fall into repeating one, and the value must fit JSON's readers.
_TERMINALS: Final = r"""
TEXT: /(?s:.*)/ & ~/(?s:.*)\]<\]minimax\[>\[(?s:.*)/
KEY: /[^<>\s\/]([^<>\r\n]{0,62}[^<>\s])?/
INTEGER: /-?(0|[1-9][0-9]{0,17})/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/
"""
_TERMINAL_OF_KIND: Final = {
    Kind.STRING: "TEXT",
    Kind.INTEGER: "INTEGER",
    Kind.NUMBER: "NUMBER",
    Kind.BOOLEAN: '"true" | "false"',
    Kind.NULL: '"null"',
}


class MarkerIds(msgspec.Struct, frozen=True):
    """Ids of the added tokens `]<]minimax[>[`, `<tool_call>` and `</tool_call>`."""

    namespace: int
    block_open: int
    block_close: int


def tool_call_grammar(
    tools: Sequence[ToolFunction],
    markers: MarkerIds,
    *,
    name: str | None = None,
    parallel: bool = True,
) -> Grammar:
    """The grammar of replies with at least one call, from the first token behind the reasoning.

    Args:
        tools: the request's functions; not empty. Their names were checked: no quotes, no angle brackets.
        markers: of the checkpoint's tokenizer.
        name: the one function that may be called; None for any.
        parallel: whether there may be more calls than one.

    Raises:
        ValueError: no function of that name.
    """
    allowed = [tool for tool in tools if name is None or tool.name == name]
    if not allowed:
        raise ValueError("no function to call")
    writer = _Writer()
    calls = [writer.call(number, tool) for number, tool in enumerate(allowed)]
    rules = [
        f'start: ns <[{markers.block_open}]> "\\n" (call "\\n"){"+" if parallel else ""} ns <[{markers.block_close}]>',
        f"call: {' | '.join(calls)}",
        f"ns: <[{markers.namespace}]>",
        "any: TEXT | element+",
        'element: ns "<" KEY ">" any ns "</" KEY ">"',
    ]
    return Grammar(GrammarKind.LARK, "\n".join([*rules, *writer.rules]) + _TERMINALS)


class _Writer:
    """Collects the rules of the functions' values."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._names: dict[int, str] = {}  # by the identity of a schema; the request keeps its schemas alive
        self._waiting: list[JsonValue] = []
        self._num_values = 0

    def call(self, number: int, tool: ToolFunction) -> str:
        """Write the rules of one function; returns the name of its call's."""
        index = SchemaIndex(tool.parameters)
        header = _literal(f'<invoke name="{tool.name}">')
        self._names.clear()
        inner = self._members(tool.parameters, index.root, index)
        self.rules.append(f'call{number}: ns {header} {inner} ns "</invoke>"')
        while self._waiting:
            schema = self._waiting.pop()
            self.rules.append(f"{self._names[id(schema)]}: {self._alternatives(schema, index)}")
        return f"call{number}"

    def _value(self, schema: JsonValue) -> str:
        """The name of the rule of a value; it is written later."""
        if not isinstance(schema, dict):
            return "any"
        known = self._names.get(id(schema))
        if known is None:
            if self._num_values >= MAX_RULES:
                return "any"
            known = self._names[id(schema)] = f"v{self._num_values}"
            self._num_values += 1
            self._waiting.append(schema)
        return known

    def _alternatives(self, schema: JsonValue, index: SchemaIndex) -> str:
        """The body of a value's rule."""
        found: dict[str, None] = {}
        for node in index.alternatives(schema):
            members = members_of(node)
            literals = [_literal(spelled) for member in members if (spelled := _spell(member)) is not None]
            found.update(dict.fromkeys(literals))
            if not members:
                found.update({_TERMINAL_OF_KIND[kind]: None for kind in kinds_of(node) if kind in _TERMINAL_OF_KIND})
        shape = index.shape(schema)
        if Kind.OBJECT in shape.kinds:
            found[self._members(schema, shape, index)] = None
        if Kind.ARRAY in shape.kinds:
            found[self._elements(shape)] = None
        return " | ".join(found) or "any"

    def _elements(self, shape: Shape) -> str:
        prefix = "".join(f"({self._element('item', self._value(schema))} " for schema in shape.prefix_items)
        rest = f"({self._element('item', self._value(shape.items))})*"
        return f"{prefix}{rest}" + ")?" * len(shape.prefix_items)

    def _members(self, schema: JsonValue, shape: Shape, index: SchemaIndex) -> str:
        """An object's elements, in the schema's order."""
        required = _required(schema, index)
        elements = [
            f"({self._element(key, self._value(declared))}){'' if key in required else '?'}"
            for key, declared in shape.properties.items()
            if _is_key(key)
        ]
        if shape.additional is not None:
            elements.append(f'(ns "<" KEY ">" {self._value(shape.additional)} ns "</" KEY ">")*')
        elif not elements and not shape.properties:
            elements.append("element*")
        return " ".join(elements) or '""'

    def _element(self, key: str, value: str) -> str:
        return f"ns {_literal(f'<{key}>')} {value} ns {_literal(f'</{key}>')}"


def _required(schema: JsonValue, index: SchemaIndex) -> set[str]:
    """The members that must be there; none where the schema has alternatives, which are laid side by side."""
    nodes = list(index.alternatives(schema))
    if any("anyOf" in node or "oneOf" in node for node in nodes):
        return set()
    return {key for node in nodes if isinstance(keys := node.get("required"), list) for key in keys if isinstance(key, str)}


def _spell(member: JsonValue) -> str | None:
    """A member of an enum as the wire has it; None where it cannot be told from other text or is a structure."""
    if isinstance(member, str):
        return member if NAMESPACE not in member and _is_unicode(member) else None
    return None if isinstance(member, list | dict) else json.dumps(member)


def _is_key(key: str) -> bool:
    """Whether a tag can have that name."""
    is_plain = key == key.strip() != "" and not key.startswith("/") and not set(key) & {"<", ">"}
    return is_plain and len(key) < MAX_TAG_LEN - 8 and _is_unicode(key)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
