"""Work that stops when its client leaves.

uvicorn tells a route that the client is gone only when the route asks, and never cancels it. Whatever has to be released is
released by the work's own `finally`, with plain functions: an await there could be cancelled once more.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads the answer."""


async def client_gone(receive: Receive) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_client_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves or the caller is cancelled.

    Raises:
        ClientGoneError: the client left before the work was done.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(client_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
