"""What the chat template is given: messages and tools as plain JSON, client text guarded.

The keys are those that chat templates in transformers' convention look up.
"""

from collections.abc import Sequence

from server.api.added_tokens import AddedTokens
from server.api.conversation import ArrangedMessage, JsonObject, JsonValue, NumberedMedia, Role, TextPart


class TemplateInput:
    """Guards the client text of one request.

    Args:
        added: the tokens that client text must not become.
        mark: see `AddedTokens.guard`.
    """

    def __init__(self, added: AddedTokens, mark: str) -> None:
        self._added = added
        self._mark = mark

    def message(self, message: ArrangedMessage) -> JsonObject:
        """A message. Its content is a string unless it has media."""
        turn: JsonObject = {"role": message.role.value, "content": self._content(message.content)}
        if message.role is Role.ASSISTANT:
            turn["reasoning_content"] = self._guard(message.reasoning)
        if message.calls:
            turn["tool_calls"] = [
                {
                    "id": self._guard(call.id or ""),
                    "type": "function",
                    "function": {"name": self._guard(call.name), "arguments": self._value(call.arguments)},
                }
                for call in message.calls
            ]
        return turn

    def tool(self, tool: JsonObject) -> JsonObject:
        """A tool. Templates look its keys and its type up, and print them as JSON, in quotes."""
        guarded = {self._guard(key, edges=False): self._value(value, key_edges=False) for key, value in tool.items()}
        if isinstance(kind := tool.get("type"), str):
            guarded["type"] = self._guard(kind, edges=False)
        return guarded

    def _content(self, parts: Sequence[TextPart | NumberedMedia]) -> JsonValue:
        """Text, or a list of parts when there are media among them."""
        if any(isinstance(part, NumberedMedia) for part in parts):
            return [
                {"type": "text", "text": self._guard(part.text)} if isinstance(part, TextPart) else {"type": part.kind.value}
                for part in parts
            ]
        return "".join(self._guard(part.text) for part in parts if isinstance(part, TextPart))

    def _value(self, value: JsonValue, *, key_edges: bool = True) -> JsonValue:
        """A JSON value with every string and key guarded; `key_edges` is what `edges` is for keys."""
        if isinstance(value, str):
            return self._guard(value)
        if isinstance(value, list):
            return [self._value(inner, key_edges=key_edges) for inner in value]
        if isinstance(value, dict):
            return {self._guard(key, edges=key_edges): self._value(inner, key_edges=key_edges) for key, inner in value.items()}
        return value

    def _guard(self, text: str, *, edges: bool = True) -> str:
        return self._added.guard(text, self._mark, edges=edges)
