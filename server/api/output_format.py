"""What a reply's text must match, from all the fields that can ask for it: structured output, required calls, or both.

Says what the grammar is and which field it came from; `structured` checks shapes and sizes, `grammar_checker` judges it.
"""

import json
from collections.abc import Iterator
from typing import Final

import msgspec

from server.api.chat_format import ChatFormat
from server.api.conversation import JsonValue
from server.api.sampling_schema import ResponseFormat, SamplingBody, StructuredOutputs
from server.api.structured import choice_grammar, json_object_grammar, json_schema_grammar, lark_grammar, regex_grammar
from server.api.tools import CallMode, ToolUse
from server.errors import BadRequestError
from server.grammars import JSON_BLANKS
from server.messages import Grammar, GrammarKind

ANY_OBJECT: Final = '{"type":"object"}'


class OutputFormat(msgspec.Struct, frozen=True):
    """A grammar, and the field that a fault in it is reported for."""

    grammar: Grammar
    param: str


def requested_format(body: SamplingBody) -> OutputFormat | None:
    """The structured output that a body asks for.

    Raises:
        BadRequestError: a malformed one, or more than one.
    """
    found = [*_from_response_format(body.response_format), *_from_extensions(body.structured_outputs), *_guided(body)]
    if len(found) > 1:
        raise BadRequestError("only one kind of structured output can be asked for", param=found[1].param)
    return found[0] if found else None


def reply_format(wanted: OutputFormat | None, tools: ToolUse, chat_format: ChatFormat) -> OutputFormat | None:
    """What a reply must match when there may also be calls: a required call leaves no room for other content.

    Raises:
        BadRequestError: the format cannot stand beside calls.
    """
    if tools.mode is CallMode.REQUIRED:
        return OutputFormat(tools.grammar(chat_format), "tools")
    if wanted is None or tools.mode is CallMode.NONE:
        return wanted
    calls = tools.grammar(chat_format).text.replace("start:", "calls:", 1)
    return OutputFormat(Grammar(GrammarKind.LARK, f"start: answer | calls\nanswer: {_inline(wanted)}\n{calls}"), wanted.param)


def _from_response_format(given: ResponseFormat | None) -> Iterator[OutputFormat]:
    if given is None or given.type == "text":
        return
    param = "response_format"
    if given.type == "json_object":
        yield OutputFormat(json_object_grammar(), param)
        return
    if given.json_schema is None:
        raise BadRequestError("response_format.json_schema is required", param="response_format.json_schema")
    param = "response_format.json_schema.schema"
    schema = given.json_schema.json_schema
    yield OutputFormat(json_object_grammar() if schema is None else json_schema_grammar(schema, param), param)


def _from_extensions(given: StructuredOutputs | None) -> Iterator[OutputFormat]:
    if given is None:
        return
    if given.json_object:
        yield OutputFormat(json_object_grammar(), "structured_outputs.json_object")
    yield from _extensions("structured_outputs.", given.json_text, given.regex, given.choice, given.grammar)


def _guided(body: SamplingBody) -> Iterator[OutputFormat]:
    yield from _extensions("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)


def _extensions(
    prefix: str, schema: JsonValue, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[OutputFormat]:
    if schema is not None:
        yield OutputFormat(json_schema_grammar(_parsed(schema, f"{prefix}json"), f"{prefix}json"), f"{prefix}json")
    if regex is not None:
        yield OutputFormat(regex_grammar(regex, f"{prefix}regex"), f"{prefix}regex")
    if choice is not None:
        yield OutputFormat(choice_grammar(choice, f"{prefix}choice"), f"{prefix}choice")
    if grammar is not None:
        yield OutputFormat(lark_grammar(grammar, f"{prefix}grammar"), f"{prefix}grammar")


def _parsed(schema: JsonValue, param: str) -> JsonValue:
    """A schema that some clients send as JSON text."""
    if not isinstance(schema, str):
        return schema
    try:
        parsed: JsonValue = json.loads(schema)
    except (ValueError, RecursionError):
        raise BadRequestError("the schema is not valid JSON", param=param) from None
    return parsed


def _inline(wanted: OutputFormat) -> str:
    """The body of a Lark rule for an answer."""
    match wanted.grammar.kind:
        case GrammarKind.JSON_OBJECT | GrammarKind.JSON_SCHEMA:
            schema = json.loads(wanted.grammar.text or ANY_OBJECT)
            return "%json " + json.dumps(schema | {"x-guidance": {"whitespace_pattern": JSON_BLANKS}})
        case GrammarKind.CHOICE:
            return " | ".join(json.dumps(choice) for choice in json.loads(wanted.grammar.text))
    text = "regular expressions and grammars cannot be combined with tools, unless tool_choice is none or requires a call"
    raise BadRequestError(text, param=wanted.param, code="unsupported_value")
