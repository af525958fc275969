"""The checkpoint's chat template: a Jinja program that is rendered in a sandbox.

The template comes with the weights and is trusted no further than that: no loaders, no attribute that Jinja's sandbox holds
to be unsafe, no change of what it is given. Knows nothing of tokens.
"""

import datetime
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.api.checkpoint import CheckpointError, read_optional_json
from server.api.conversation import JsonObject, JsonValue
from server.errors import BadRequestError, M3Error
from server.logs import frames_of
from server.settings import ThinkingMode

logger = logging.getLogger(__name__)

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class TemplateRefusalError(jinja2.TemplateError):
    """The template itself found the conversation wrong (`raise_exception`)."""


def to_json(
    value: JsonValue,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Python's `json.dumps`, which models were trained on: keys in order, nothing escaped for HTML as Jinja's filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    """What templates call `raise_exception`."""
    raise TemplateRefusalError(message)


def _now(pattern: str) -> str:
    """What templates call `strftime_now`: the local date and time."""
    return datetime.datetime.now().astimezone().strftime(pattern)


class ChatTemplate:
    """A compiled template. Immutable; may be used by several threads."""

    def __init__(self, source: str, named_tokens: Mapping[str, str] | None = None) -> None:
        """Compile `source`.

        Args:
            source: the template; blocks are trimmed as transformers does.
            named_tokens: `bos_token` and the like, which a template may print.

        Raises:
            CheckpointError: a syntax error.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
        )
        environment.filters["tojson"] = to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now, **(named_tokens or {}))
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from None

    @classmethod
    def load(cls, model_dir: Path) -> "ChatTemplate":
        """Read chat_template.jinja, or else the template inside tokenizer_config.json.

        Raises:
            CheckpointError: there is neither, or it does not compile.
        """
        config = read_optional_json(model_dir / "tokenizer_config.json")
        named = {name: text for name in NAMED_TOKENS if (text := _token_text(config.get(name))) is not None}
        path = model_dir / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
        if isinstance(source, list):  # named variants; the one for chats is called "default"
            variants = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = variants.get("default")
        if not isinstance(source, str):
            raise CheckpointError(f"{model_dir} has no chat_template.jinja and no chat_template in tokenizer_config.json")
        return cls(source, named)

    def render(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None,
        thinking_mode: ThinkingMode,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as one text.

        Args:
            messages: with `role`, `content`, `reasoning_content` and `tool_calls` as the template expects them.
            tools: as the client sent them; None for none.
            thinking_mode: the template's switch.
            add_generation_prompt: end with the head of the assistant's turn.

        Raises:
            BadRequestError: the template refused the conversation, or values nest too deeply.
            M3Error: the template failed; the log says why.
            MemoryError: it takes more than there is.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                thinking_mode=thinking_mode.value,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateRefusalError as error:
            raise BadRequestError(f"the chat template refused the conversation: {error}", param="messages") from None
        except RecursionError:
            raise BadRequestError("the conversation nests values too deeply", param="messages") from None
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            logger.error("the chat template failed with %s\n%s", type(error).__name__, frames_of(error))
            raise M3Error("the conversation could not be rendered") from error


def _token_text(value: JsonValue) -> str | None:
    """The text of a named token, which is a string or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
