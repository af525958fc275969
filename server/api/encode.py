"""Work on prompts that are not run: counting and showing tokens.

It holds a place among the open requests while it lasts, because rendering and tokenizing is work too.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from server.api.completions_schema import MAX_PROMPT_TOKENS
from server.api.content import convert
from server.api.disconnect import ClientGoneError, unless_client_gone
from server.api.exchange import CLIENT_GONE, body_of
from server.api.middleware import request_id
from server.api.prepare import Checker
from server.api.problems import from_bug
from server.api.prompt import EncodedPrompt, MediaLayout
from server.api.schema import ChatBody
from server.api.service import Service
from server.api.validate import make_chat_call
from server.errors import M3Error
from server.media.types import MediaSource

T = TypeVar("T")


class ShownPrompt(msgspec.Struct, frozen=True):
    """A prompt, and its pictures and clips in the order of their placeholders."""

    prompt: EncodedPrompt
    sources: tuple[MediaSource, ...] = ()


async def admitted(request: Request, work: Callable[[Service, bytes], Coroutine[Any, Any, T]]) -> T:
    """What `work` makes of the request's body.

    Raises:
        M3Error: what is wrong with the request or with the server.
    """
    service: Service = request.app.state.service
    place = service.admit()
    try:
        raw = await body_of(request, service.settings.body_timeout_s)
        return await unless_client_gone(request.receive, work(service, raw))
    except M3Error:
        raise
    except asyncio.CancelledError as error:
        raise place.reason(error) from None
    except (ClientGoneError, ClientDisconnect):
        gone = M3Error("the client left")
        gone.status = CLIENT_GONE
        raise gone from None
    except Exception as error:
        raise from_bug(error, request_id(request.scope)) from None
    finally:
        place.give_back()


def chat_prompt(checker: Checker, body: ChatBody, *, add_generation_prompt: bool = True) -> ShownPrompt:
    """The prompt of a chat, however much longer than the model's window it is. Runs in a thread.

    Raises:
        BadRequestError: it cannot be rendered.
    """
    chat = make_chat_call(body, checker.limits, checker.chat_format)
    conversation = convert(body.messages, checker.media_limits)
    prompt = checker.chat_format.encode_chat(
        conversation.messages,
        chat.tools.definitions,
        chat.thinking_mode,
        add_generation_prompt=add_generation_prompt,
        max_tokens=MAX_PROMPT_TOKENS,
    )
    return ShownPrompt(prompt, tuple(conversation.sources[index] for index in prompt.media_order))


async def expanded_ids(service: Service, shown: ShownPrompt) -> list[int]:
    """The ids of a prompt as the engine would get it. Pictures are looked at for their size, and not decoded.

    Raises:
        MediaError: a picture cannot be used.
    """
    if not shown.sources:
        return shown.prompt.token_ids
    plans = await service.media.plan(shown.sources)
    layouts = [MediaLayout(plan.kind, plan.grid_thw, plan.timestamps_s) for plan in plans]
    expanded = await service.in_thread(service.chat_format.expand_media, shown.prompt, layouts)
    return expanded.token_ids
