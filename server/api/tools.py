"""The functions of a request and whether they may, must or must not be called.

Names, numbers and sizes are checked here. A schema is never judged: whatever puts no understandable constraint on a value puts
none. Costs time in proportion to the schemas, so it runs off the event loop.
"""

import enum
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from server.api.chat_format import ChatFormat
from server.api.conversation import JsonObject, JsonValue
from server.api.schema import ChatBody, NamedTool
from server.api.structured import MAX_SCHEMA_DEPTH, depth_of
from server.api.tool_grammar import tool_call_grammar
from server.api.tool_schema import ToolFunction, ToolSchemas
from server.errors import BadRequestError
from server.messages import Grammar

# All functions together; about 300,000 tokens.
MAX_TOOLS_BYTES: Final = 1 << 20
# The wire has names between quotes inside angle brackets.
NAME: Final = re.compile(r"[^\s<>\"'\\\x00-\x1f\x7f\ud800-\udfff]{1,128}")


class CallMode(enum.Enum):
    """Whether a reply may hold calls."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class ToolUse(msgspec.Struct, frozen=True):
    """A request's functions.

    Attributes:
        definitions: as the client sent them, for the prompt; empty for no tools.
        functions: the same, read.
        schemas: made once, shared by the choices; None where no call is read.
        mode: whether there may be calls.
        name: the one function that must be called; None for any.
        parallel: whether there may be more calls than one.
    """

    definitions: tuple[JsonObject, ...] = ()
    functions: tuple[ToolFunction, ...] = ()
    schemas: ToolSchemas | None = None
    mode: CallMode = CallMode.NONE
    name: str | None = None
    parallel: bool = True

    @property
    def max_calls(self) -> int | None:
        """Calls that are read from a reply; None for no limit."""
        return None if self.parallel else 1

    def grammar(self, chat_format: ChatFormat) -> Grammar:
        """The replies that are nothing but calls."""
        return tool_call_grammar(self.functions, chat_format.markers, name=self.name, parallel=self.parallel)


NO_TOOLS: Final = ToolUse()


def requested_tools(body: ChatBody) -> ToolUse:
    """What a chat request says about tools.

    Raises:
        BadRequestError: `param` names the field.
    """
    choice = body.tool_choice
    mode = CallMode.REQUIRED if isinstance(choice, NamedTool) else CallMode(choice or "auto")
    name = choice.function.name if isinstance(choice, NamedTool) else None
    if body.tools is None and choice not in (None, "none"):
        raise BadRequestError("tool_choice needs tools", param="tool_choice")
    return tool_use(body.tools or (), mode, name, parallel=body.parallel_tool_calls is not False)


def tool_use(definitions: Sequence[JsonObject], mode: CallMode, name: str | None = None, *, parallel: bool = True) -> ToolUse:
    """Check functions in OpenAI's form, `{"type": "function", "function": {"name": ..., "parameters": ...}}`.

    Args:
        definitions: may be empty, unless a call is required.
        mode: whether there may be calls.
        name: the one function that must be called.
        parallel: whether there may be several calls.

    Raises:
        BadRequestError: `param` names the field.
    """
    if not definitions:
        if mode is CallMode.REQUIRED:
            raise BadRequestError("tool_choice requires a call and there are no tools", param="tool_choice")
        return NO_TOOLS
    functions = tuple(_function(definition, f"tools[{index}]") for index, definition in enumerate(definitions))
    if len(_encode(definitions)) > MAX_TOOLS_BYTES:
        raise BadRequestError(f"the tools together have more than {MAX_TOOLS_BYTES} bytes", param="tools")
    if name is not None and all(function.name != name for function in functions):
        raise BadRequestError("tool_choice names a function that is not in tools", param="tool_choice.function.name")
    schemas = None if mode is CallMode.NONE else ToolSchemas(functions)
    return ToolUse(tuple(definitions), functions, schemas, mode, name, parallel)


def _function(definition: JsonObject, param: str) -> ToolFunction:
    if definition.get("type", "function") != "function":
        raise BadRequestError("only tools of the type function are supported", param=f"{param}.type", code="unsupported_value")
    function = definition.get("function")
    if not isinstance(function, dict):
        raise BadRequestError(f"{param}.function must be an object", param=f"{param}.function")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        text = "a function's name must have 1 to 128 characters, none of them a blank, a quote, a backslash, < or >"
        raise BadRequestError(text, param=f"{param}.function.name")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise BadRequestError(f"{param}.function.parameters must be an object", param=f"{param}.function.parameters")
    if depth_of(definition) > MAX_SCHEMA_DEPTH:
        raise BadRequestError(f"{param} is nested more than {MAX_SCHEMA_DEPTH} levels deep", param=param)
    return ToolFunction(name, parameters)


def _encode(definitions: Sequence[JsonValue]) -> bytes:
    try:
        return msgspec.json.encode(definitions)
    except UnicodeEncodeError:
        raise BadRequestError("text must be valid Unicode; it has a lone surrogate", param="tools") from None
