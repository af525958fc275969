"""The tiny checkpoint's chat format and short ways to write conversations for it."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from server.api.chat_format import ChatFormat
from server.api.conversation import MediaPart, Role, TemplateMessage, TextPart, ToolCall

TINY = Path(__file__).parents[2] / "server" / "model" / "tiny"
FORMAT = ChatFormat.load(TINY)
NAIVE = Tokenizer.from_file(str(TINY / "tokenizer.json"))  # takes added tokens out of any text
ADDED = {entry["content"]: entry["id"] for entry in json.loads((TINY / "tokenizer.json").read_text())["added_tokens"]}


def user(content: str | tuple[TextPart | MediaPart, ...]) -> TemplateMessage:
    return TemplateMessage(Role.USER, content)


def assistant(content: str | None, reasoning: str | None = None, *calls: ToolCall) -> TemplateMessage:
    return TemplateMessage(Role.ASSISTANT, content, reasoning, calls)


def tool(content: str | tuple[TextPart | MediaPart, ...], call_id: str | None = None) -> TemplateMessage:
    return TemplateMessage(Role.TOOL, content, tool_call_id=call_id)


def raw_text(token_ids: list[int]) -> str:
    """The text of all tokens, special ones too."""
    return b"".join(FORMAT.token_bytes(token_id) for token_id in token_ids).decode()


def added_ids(token_ids: list[int]) -> list[int]:
    return [token_id for token_id in token_ids if token_id in ADDED.values()]


def naive_ids(text: str) -> list[int]:
    """What an encoder that trusts all of `text` makes of it."""
    ids: list[int] = NAIVE.encode(text, add_special_tokens=False).ids
    return ids


def copy_tiny(directory: Path) -> None:
    """Copy what a chat format reads."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (directory / name).write_bytes((TINY / name).read_bytes())
