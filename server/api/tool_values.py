"""Wire text and nested elements to JSON values, by schema.

The wire format carries no types: `5` is a number, a string or a member of an enum by what the schema says. A text that does not
fit its schema stays a string, so that no call is lost over it. Strings are verbatim: nothing is trimmed, no entity decoded.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn

from server.api.conversation import JsonValue
from server.api.tool_schema import Kind, SchemaIndex, Shape

LIST_TAG: Final = "item"
MAX_JSON_DEPTH: Final = 128
MAX_EXACT_INTEGER: Final = 2**53  # a float beyond it is not one integer

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class Element:
    """A value on the wire while it is read: its tag's name, the text in it, the elements in it.

    Attributes:
        is_blank: the text so far is nothing but blanks.
    """

    def __init__(self, name: str, shape: Shape) -> None:
        self.name = name
        self.shape = shape
        self.children: list[Element] = []
        self.is_blank = True
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        """Append to the text."""
        self._texts.append(text)
        self.is_blank = self.is_blank and text.isspace()

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def child(self, name: str, index: SchemaIndex) -> "Element":
        """A new element in this one; it must still be appended to `children` when it is whole."""
        shape = self.shape
        is_item = Kind.ARRAY in shape.kinds and (name == LIST_TAG or Kind.OBJECT not in shape.kinds)
        if is_item and name not in shape.properties:
            return Element(name, index.element(shape, len(self.children)))
        return Element(name, index.member(shape, name))

    @property
    def ends_at_tag(self) -> bool:
        """Whether any tag ends this value, because it has no parts or is text without a schema."""
        return self.shape.is_leaf or (not self.shape.kinds and not self.children and not self.is_blank)


def element_value(element: Element, index: SchemaIndex) -> JsonValue:
    """The value of an element that is whole; text between its children is dropped."""
    if not element.children:
        return text_value(element.text, element.shape, index)
    if _is_list(element):
        return [element_value(child, index) for child in element.children]
    members: dict[str, list[Element]] = {}
    for child in element.children:
        members.setdefault(child.name, []).append(child)
    return {
        name: merged_value([element_value(child, index) for child in same], same[0].shape) for name, same in members.items()
    }


def merged_value(values: Sequence[JsonValue], shape: Shape) -> JsonValue:
    """The value of a name that was given several times.

    Arrays are joined, values without a schema become a list; a scalar cannot be both, and the first one stands.
    """
    if len(values) == 1:
        return values[0]
    if Kind.ARRAY in shape.kinds:
        return [part for value in values for part in (value if isinstance(value, list) else [value])]
    return values[0] if shape.kinds else list(values)


def text_value(text: str, shape: Shape, index: SchemaIndex) -> JsonValue:
    """The value of an element without children: the first of the schema's types that the text fits, else the text itself."""
    stripped = text.strip()
    if shape.is_nullable and (text if Kind.STRING in shape.kinds else stripped) == "null":
        return None
    for constant in shape.constants:
        if stripped == json.dumps(constant):
            return constant
    for kind in shape.kinds:
        try:
            return _parse(kind, text, stripped)
        except ValueError:
            continue
    kinds = set(shape.kinds) - {Kind.NULL}
    element = index.element(shape, 0)
    if kinds == {Kind.ARRAY} and Kind.ARRAY not in element.kinds and not stripped.startswith("["):
        return [text_value(text, element, index)]  # a list of one, its `item` left out
    return text


def json_text(value: JsonValue) -> str:
    """JSON as Python spells it, non-ASCII kept; a lone surrogate is escaped, since UTF-8 has none."""
    return _escape_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def json_string_part(text: str) -> str:
    """`text` as it stands inside a JSON string; parts of a text give the parts of its result."""
    return _escape_surrogates(json.dumps(text, ensure_ascii=False)[1:-1])


def _is_list(element: Element) -> bool:
    kinds = element.shape.kinds
    if (Kind.ARRAY in kinds) != (Kind.OBJECT in kinds):
        return Kind.ARRAY in kinds
    return all(child.name == LIST_TAG for child in element.children) and LIST_TAG not in element.shape.properties


def _parse(kind: Kind, text: str, stripped: str) -> JsonValue:
    """The value of that type; ValueError when the text is none."""
    match kind:
        case Kind.STRING:
            return text
        case Kind.INTEGER:
            return _integer(stripped)
        case Kind.NUMBER:
            return int(stripped) if _INTEGER.fullmatch(stripped) else _finite(stripped)
        case Kind.BOOLEAN if stripped.lower() in _BOOLEANS:
            return _BOOLEANS[stripped.lower()]
        case Kind.OBJECT:
            value = _loads(stripped) if stripped else {}
            if isinstance(value, dict):
                return value
        case Kind.ARRAY:
            value = _loads(stripped) if stripped else []
            if isinstance(value, list):
                return value
    raise ValueError(kind)


def _integer(text: str) -> int:
    if _INTEGER.fullmatch(text):
        return int(text)
    value = _finite(text)
    if not value.is_integer() or abs(value) > MAX_EXACT_INTEGER:
        raise ValueError(text)
    return int(value)


def _finite(text: str) -> float:
    """A number that JSON can spell."""
    if not _NUMBER.fullmatch(text) or not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


def _loads(text: str) -> JsonValue:
    """Strict JSON of bounded depth."""
    try:
        value: JsonValue = json.loads(text, parse_float=_finite, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level: Iterable[JsonValue] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [part for node in level for part in _parts(node)]
        if not level:
            return value
    raise ValueError("nested too deeply")


def _parts(node: JsonValue) -> Iterable[JsonValue]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _escape_surrogates(text: str) -> str:
    return _SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
