"""The checkpoint's way to write conversations as tokens, and to read tokens as text."""

from server.api.conversation import ContentPart, JsonObject, JsonValue, MediaPart, Role, TemplateMessage, TextPart, ToolCall

__all__ = [
    "ContentPart",
    "JsonObject",
    "JsonValue",
    "MediaPart",
    "Role",
    "TemplateMessage",
    "TextPart",
    "ToolCall",
]
