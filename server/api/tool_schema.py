"""The JSON schemas of a request's functions, seen as what the wire text of a parameter may mean.

A `Shape` is one schema with `$ref`, `anyOf`, `oneOf` and `allOf` resolved and laid side by side. Shapes are made on demand
and kept, so a schema that refers to itself costs nothing until a value goes that deep. No schema is ever an error here:
what is not understood puts no constraint on the value.
"""

import enum
import functools
from collections.abc import Iterator
from urllib.parse import unquote

import msgspec

from server.api.conversation import JsonObject, JsonValue


class ToolFunction(msgspec.Struct, frozen=True):
    """A function that the model may call; `parameters` is its JSON schema as the client sent it, None for none."""

    name: str
    parameters: JsonValue = None


class Kind(enum.Enum):
    """The types of JSON schema."""

    STRING = "string"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "boolean"
    NULL = "null"
    OBJECT = "object"
    ARRAY = "array"


_KIND_OF_NAME = {kind.value: kind for kind in Kind}
_STRUCTURES = frozenset({Kind.OBJECT, Kind.ARRAY})


class Shape(msgspec.Struct, frozen=True, eq=False):
    """What a value may be.

    Attributes:
        kinds: the types it may have, in the schema's order; empty when the schema does not say.
        constants: members of an enum without a type that are not strings.
        properties: schemas of an object's members.
        additional: schema of the other members; None for any.
        prefix_items: schemas of an array's first elements.
        items: schema of the other elements; None for any.
    """

    kinds: tuple[Kind, ...] = ()
    constants: tuple[JsonValue, ...] = ()
    properties: dict[str, JsonValue] = {}
    additional: JsonValue = None
    prefix_items: tuple[JsonValue, ...] = ()
    items: JsonValue = None

    @property
    def is_leaf(self) -> bool:
        """Whether no value has parts, so that its text ends at the next tag."""
        return bool(self.kinds) and not _STRUCTURES.intersection(self.kinds)

    @property
    def is_nullable(self) -> bool:
        """Whether the text `null` means null."""
        return Kind.NULL in self.kinds

    @property
    def is_text(self) -> bool:
        """Whether every text but that of null is a string, so that it can be passed on before it is whole."""
        kinds = [kind for kind in self.kinds if kind is not Kind.NULL]
        return self.is_leaf and kinds[:1] == [Kind.STRING] and not self.constants


UNTYPED = Shape()


class SchemaIndex:
    """The shapes inside one function's parameters."""

    def __init__(self, root: JsonValue) -> None:
        self._root = root
        # The schema is kept beside its shape: its identity is the key for as long as it lives.
        self._shapes: dict[int, tuple[JsonValue, Shape]] = {}
        self.root = self.shape(root)

    def shape(self, schema: JsonValue) -> Shape:
        """The shape of a schema that is part of the root, or of any other whose references the root resolves."""
        if not isinstance(schema, dict):
            return UNTYPED
        known = self._shapes.get(id(schema))
        if known is None:
            known = self._shapes[id(schema)] = (schema, _combine(list(self.alternatives(schema))))
        return known[1]

    def member(self, shape: Shape, name: str) -> Shape:
        """The shape of an object's member."""
        return self.shape(shape.properties.get(name, shape.additional))

    def element(self, shape: Shape, position: int) -> Shape:
        """The shape of an array's element."""
        prefix = shape.prefix_items
        return self.shape(prefix[position] if position < len(prefix) else shape.items)

    def alternatives(self, schema: JsonValue) -> Iterator[JsonObject]:
        """The schema itself and whatever it refers to or is composed of, each once, outer before inner."""
        seen: set[int] = set()
        waiting = [schema]
        while waiting:
            node = waiting.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            yield node
            parts: list[JsonValue] = []
            if isinstance(reference := node.get("$ref"), str):
                parts.append(self.resolve(reference))
            for keyword in ("allOf", "anyOf", "oneOf"):
                if isinstance(branches := node.get(keyword), list):
                    parts.extend(branches)
            waiting.extend(reversed(parts))

    def resolve(self, reference: str) -> JsonValue:
        """What a local reference (`#/$defs/Name`) points to; None for any other and for one that points nowhere."""
        if not reference.startswith("#"):
            return None
        node = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(key)
            elif isinstance(node, list) and key.isdecimal() and key.isascii() and len(key) < 6 and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
        return node


class ToolSchemas(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The parameters of a request's functions. Shared by its choices; a name that is not among them puts no constraint."""

    functions: tuple[ToolFunction, ...]

    def of(self, name: str) -> SchemaIndex:
        """The schemas of a function."""
        return self._indices.get(name, self._unknown)

    @functools.cached_property
    def _indices(self) -> dict[str, SchemaIndex]:
        return {function.name: SchemaIndex(function.parameters) for function in self.functions}

    @functools.cached_property
    def _unknown(self) -> SchemaIndex:
        return SchemaIndex(None)


def _combine(nodes: list[JsonObject]) -> Shape:
    """One shape of all alternatives."""
    kinds = dict.fromkeys(kind for node in nodes for kind in kinds_of(node))
    constants = [value for node in nodes if "type" not in node for value in members_of(node) if not isinstance(value, str)]
    properties: dict[str, list[JsonValue]] = {}
    for node in nodes:
        if isinstance(declared := node.get("properties"), dict):
            for name, schema in declared.items():
                properties.setdefault(name, []).append(schema)
    prefixes = [prefix for node in nodes if isinstance(prefix := node.get("prefixItems"), list)]
    return Shape(
        kinds=tuple(kinds),
        constants=tuple(constants),
        properties={name: found[0] if len(found) == 1 else {"anyOf": found} for name, found in properties.items()},
        additional=_first_schema(nodes, "additionalProperties"),
        prefix_items=tuple(prefixes[0]) if prefixes else (),
        items=_first_schema(nodes, "items"),
    )


def kinds_of(node: JsonObject) -> list[Kind]:
    """The types that one schema names itself or implies by its other keywords."""
    named = node.get("type")
    names = named if isinstance(named, list) else [named]
    kinds = [_KIND_OF_NAME[name] for name in names if isinstance(name, str) and name in _KIND_OF_NAME]
    if not kinds:
        if isinstance(node.get("properties"), dict):
            kinds.append(Kind.OBJECT)
        if "items" in node or isinstance(node.get("prefixItems"), list):
            kinds.append(Kind.ARRAY)
        kinds.extend(_kind_of(value) for value in members_of(node))
    return [*kinds, Kind.NULL] if node.get("nullable") is True else kinds


def members_of(node: JsonObject) -> list[JsonValue]:
    """The values that a schema lists."""
    if "const" in node:
        return [node["const"]]
    return members if isinstance(members := node.get("enum"), list) else []


def _kind_of(value: JsonValue) -> Kind:
    match value:
        case None:
            return Kind.NULL
        case bool():
            return Kind.BOOLEAN
        case int():
            return Kind.INTEGER
        case float():
            return Kind.NUMBER
        case str():
            return Kind.STRING
        case list():
            return Kind.ARRAY
        case _:
            return Kind.OBJECT


def _first_schema(nodes: list[JsonObject], keyword: str) -> JsonValue:
    return next((schema for node in nodes if isinstance(schema := node.get(keyword), dict)), None)
