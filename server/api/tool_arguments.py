"""One call's arguments as JSON text that only ever grows, made while the call's tags arrive.

Nothing that was given out is taken back, so a value goes out when it cannot change any more: a string character by
character, another scalar at its closing tag. A name given several times in a row may add up to a list; an array, and a value
without a schema, therefore waits for the tag behind it. When a name comes back later, or its value is a scalar, the first
value stands. Arguments that the token limit cut off are left unfinished on purpose: closed, they would be a valid call that
the model never made.
"""

from typing import Final

from server.api.conversation import JsonValue
from server.api.tool_schema import SchemaIndex, Shape
from server.api.tool_values import Element, element_value, json_string_part, json_text, merged_value

# Deeper elements are left out; it bounds the recursion over values.
MAX_ELEMENT_DEPTH: Final = 64
_NULL: Final = "null"


class ArgumentsStream:
    """State machine of one call. Every method returns the JSON text that it decided, perhaps empty."""

    def __init__(self, index: SchemaIndex) -> None:
        self._index = index
        self._stack: list[Element] = []  # open elements, outermost first
        self._loose: list[str] = []  # text outside all elements since the last tag
        self._has_bare = False  # a bare namespace stands before it
        self._written: set[str] = set()
        self._waiting: _Waiting | None = None
        self._string: _GrowingString | None = None  # the value of the outermost element, if it goes out as it grows

    def is_open(self, name: str) -> bool:
        """Whether a closing tag of that name ends an element."""
        return any(element.name == name for element in self._stack)

    def may_open(self, name: str) -> bool:
        """Whether the schema has an element of that name here."""
        shape = self._stack[-1].shape if self._stack else self._index.root
        return name in shape.properties

    def text(self, text: str) -> str:
        """Text between two tags."""
        if not self._stack:
            self._loose.append(text)
            return ""
        if self._string is not None:
            return self._string.push(text)
        self._stack[-1].add(text)
        return ""

    def bare(self, raw: str) -> str:
        """A namespace without a tag: data inside a value; outside, what is left of a lost opening tag."""
        if self._stack:
            return self.text(raw)
        self._loose, self._has_bare = [], True
        return ""

    def open(self, name: str) -> str:
        """An element begins."""
        fragment = self._close_top() if self._stack and self._stack[-1].ends_at_tag else ""
        if not self._stack:
            return fragment + self._open_parameter(name)
        if len(self._stack) < MAX_ELEMENT_DEPTH:
            self._stack.append(self._stack[-1].child(name, self._index))
        return fragment

    def close(self, name: str) -> str:
        """An element ends, with all that are open in it.

        A closing tag that fits no open element ends a value that any tag ends; outside all elements it names the text before
        it, whose opening tag was lost.
        """
        for position in range(len(self._stack) - 1, -1, -1):
            if self._stack[position].name == name:
                return self._close_to(position)
        if self._stack:
            return self._close_top() if self._stack[-1].ends_at_tag else ""
        loose, has_bare = "".join(self._loose), self._has_bare
        self._loose, self._has_bare = [], False
        if not has_bare and (not loose or loose.isspace()):
            return ""
        return self._open_parameter(name) + self.text(loose) + self._close_top()

    def end(self) -> str:
        """The call ends; what is still open ends with it."""
        fragment = self._close_to(0) + self._write_waiting()
        return fragment + ("}" if self._written else "{}")

    def cut(self) -> str:
        """The token limit ended the reply inside the call: only values that are whole still go out."""
        return self._write_waiting()

    def _open_parameter(self, name: str) -> str:
        self._loose, self._has_bare = [], False
        fragment = "" if self._waiting is not None and self._waiting.name == name else self._write_waiting()
        shape = self._index.member(self._index.root, name)
        self._stack.append(Element(name, shape))
        if shape.is_text and name not in self._written:
            self._string = _GrowingString(shape.is_nullable)
            fragment += self._key(name)
        return fragment

    def _close_to(self, position: int) -> str:
        """End the open elements from the innermost to the one at `position`."""
        fragment = ""
        while len(self._stack) > position:
            fragment += self._close_top()
        return fragment

    def _close_top(self) -> str:
        element = self._stack.pop()
        if self._stack:
            self._stack[-1].children.append(element)
            return ""
        if self._string is not None:
            string, self._string = self._string, None
            return string.end()
        if element.name in self._written:
            return ""
        value = element_value(element, self._index)
        if element.shape.is_leaf:
            return self._key(element.name) + json_text(value)
        if self._waiting is None:
            self._waiting = _Waiting(element.name, element.shape)
        self._waiting.values.append(value)
        return ""

    def _write_waiting(self) -> str:
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return ""
        return self._key(waiting.name) + json_text(merged_value(waiting.values, waiting.shape))

    def _key(self, name: str) -> str:
        start = ", " if self._written else "{"
        self._written.add(name)
        return f"{start}{json_text(name)}: "


class _Waiting:
    """A parameter that is whole, but may be given again."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name = name
        self.shape = shape
        self.values: list[JsonValue] = []


class _GrowingString:
    """A string value, quotes included; one that may be null is held back while it could still be that word."""

    def __init__(self, is_nullable: bool) -> None:
        self._held: str | None = "" if is_nullable else None
        self._is_begun = False

    def push(self, text: str) -> str:
        """The JSON text that more of the string decides."""
        if self._held is not None:
            text, self._held = self._held + text, None
            if _NULL.startswith(text):
                self._held = text
                return ""
        return self._begin() + json_string_part(text)

    def end(self) -> str:
        """The rest."""
        if self._held == _NULL:
            return _NULL
        return self._begin() + json_string_part(self._held or "") + '"'

    def _begin(self) -> str:
        start = "" if self._is_begun else '"'
        self._is_begun = True
        return start
