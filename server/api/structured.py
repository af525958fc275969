"""What clients ask for as structured output, made into grammars.

Shapes and sizes are checked here; whether a grammar means anything is for `grammar_checker`. Schemas cost time in proportion
to their size, so this runs off the event loop. Equal requests give equal grammars, which are compiled once.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from server.api.conversation import JsonValue
from server.errors import BadRequestError
from server.messages import Grammar, GrammarKind

# A schema of 75 kB with 1,000 properties compiles in 65 ms; the largest we met in public collections has about as many.
MAX_SCHEMA_BYTES: Final = 256 << 10
MAX_SCHEMA_DEPTH: Final = 64
MAX_PATTERN_LEN: Final = 16 << 10
MAX_LARK_LEN: Final = 64 << 10
MAX_CHOICES: Final = 1024
MAX_CHOICES_LEN: Final = 64 << 10

_encoder = msgspec.json.Encoder()


def json_object_grammar() -> Grammar:
    """Any JSON object."""
    return Grammar(GrammarKind.JSON_OBJECT)


def json_schema_grammar(schema: JsonValue, param: str) -> Grammar:
    """JSON that a schema accepts. The order of the properties is the schema's, so it is kept.

    Raises:
        BadRequestError: `schema` is not an object, or too deep or large.
    """
    if not isinstance(schema, dict):
        raise BadRequestError("the schema must be a JSON object", param=param)
    if depth_of(schema) > MAX_SCHEMA_DEPTH:
        raise BadRequestError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep", param=param)
    text = _encode(schema, param)
    if len(text) > MAX_SCHEMA_BYTES:
        raise BadRequestError(f"the schema has {len(text)} bytes; at most {MAX_SCHEMA_BYTES} are allowed", param=param)
    return Grammar(GrammarKind.JSON_SCHEMA, text.decode())


def regex_grammar(pattern: str, param: str) -> Grammar:
    """Text that a regular expression matches as a whole; no look-around and no back-references.

    Raises:
        BadRequestError: it is empty or too long.
    """
    return Grammar(GrammarKind.REGEX, _checked(pattern, "regular expression", MAX_PATTERN_LEN, param))


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """One of some texts.

    Raises:
        BadRequestError: there is none, one is empty, or there are too many or too long ones.
    """
    if not choices or not all(choices):
        raise BadRequestError("there must be at least one choice, and none may be empty", param=param)
    if len(choices) > MAX_CHOICES:
        raise BadRequestError(f"there are {len(choices)} choices; at most {MAX_CHOICES} are allowed", param=param)
    if sum(map(len, choices)) > MAX_CHOICES_LEN:
        raise BadRequestError(f"the choices together are longer than {MAX_CHOICES_LEN} characters", param=param)
    return Grammar(GrammarKind.CHOICE, _encode(list(dict.fromkeys(choices)), param).decode())


def lark_grammar(text: str, param: str) -> Grammar:
    """Text of a grammar in llguidance's dialect of Lark.

    Raises:
        BadRequestError: it is empty or too long.
    """
    return Grammar(GrammarKind.LARK, _checked(text, "grammar", MAX_LARK_LEN, param))


def _checked(text: str, what: str, max_len: int, param: str) -> str:
    if not text:
        raise BadRequestError(f"the {what} is empty", param=param)
    if len(text) > max_len:
        raise BadRequestError(f"the {what} has {len(text)} characters; at most {max_len} are allowed", param=param)
    _encode(text, param)
    return text


def _encode(value: JsonValue | list[str], param: str) -> bytes:
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        raise BadRequestError("text must be valid Unicode; it has a lone surrogate", param=param) from None


def depth_of(value: JsonValue) -> int:
    """Levels of nesting, counted up to one more than is allowed; not recursive, because `value` may be deep."""
    level: list[JsonValue] = [value]
    for depth in range(MAX_SCHEMA_DEPTH + 2):
        if not level:
            return depth
        children: list[JsonValue] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
            elif isinstance(item, list):
                children.extend(item)
        level = children
    return MAX_SCHEMA_DEPTH + 2
