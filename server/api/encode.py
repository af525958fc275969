"""Work on prompts that are not run: counting and showing tokens.

It holds a place among the open requests while it lasts, because rendering and tokenizing is work too.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from server.api.body import RequestBody, body_of
from server.api.disconnect import ClientGoneError, unless_client_gone
from server.api.exchange import CLIENT_GONE
from server.api.middleware import request_id
from server.api.prepare import Prompts
from server.api.problems import from_bug
from server.api.prompt import MediaLayout
from server.api.service import Service
from server.errors import M3Error

T = TypeVar("T")


async def admitted(request: Request, work: Callable[[Service, RequestBody], Coroutine[Any, Any, T]]) -> T:
    """What `work` makes of the request's body.

    Raises:
        M3Error: what is wrong with the request or with the server.
    """
    service: Service = request.app.state.service
    place = service.admit()
    body: RequestBody | None = None
    try:
        body = await body_of(request, service.bodies, service.settings.body_timeout_s)
        return await unless_client_gone(request.receive, work(service, body))
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
        if body is not None:
            body.close()
        place.give_back()


async def expanded_ids(service: Service, shown: Prompts) -> list[int]:
    """The ids of a prompt as the engine would get it. Pictures are looked at for their size, and not decoded.

    Raises:
        MediaError: a picture cannot be used.
    """
    if not shown.sources:
        return shown.prompt.token_ids
    plans = await service.media.plan(shown.sources)
    service.media.forget(plans)  # nothing is decoded
    layouts = [MediaLayout(plan.kind, plan.grid_thw, plan.timestamps_s) for plan in plans]
    expanded = await service.in_thread(service.chat_format.expand_media, shown.prompt, layouts)
    return expanded.token_ids
