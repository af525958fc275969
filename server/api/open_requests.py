"""The requests that hold a place in the server, whatever they are waiting for. All methods belong to one event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

from server.errors import ShuttingDownError


class Place:
    """One request's place.

    Attributes:
        is_cut: the server ended the request, because it leaves.
    """

    def __init__(self, on_return: Callable[["Place"], None], task: "asyncio.Task[Any] | None") -> None:
        """`task` serves the request."""
        self.is_cut = False
        self._task = task
        self._on_return = on_return

    def keep_task(self) -> None:
        """The answer has begun: from here on the request ends with an event, not with its task."""
        self._task = None

    def cut(self) -> None:
        """End the request by its task, which finds the reason in `reason`."""
        if self._task is not None:
            self.is_cut = True
            self._task.cancel()

    def reason(self, error: asyncio.CancelledError) -> BaseException:
        """What to raise for a cancellation: the client's error if it came from `cut`."""
        if not self.is_cut or self._task is None:
            return error
        self._task.uncancel()
        return ShuttingDownError("the server is shutting down")

    def give_back(self) -> None:
        """The request has ended. Idempotent and synchronous."""
        self._on_return(self)


class OpenRequests:
    """Who is inside; `len` says how many."""

    def __init__(self) -> None:
        self._places: set[Place] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._places)

    def enter(self) -> Place:
        """Give a place to the request that the current task serves."""
        place = Place(self._give_back, asyncio.current_task())
        self._places.add(place)
        self._is_empty.clear()
        return place

    async def emptied(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; False when somebody still is after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True

    def cut(self) -> None:
        """End all who are inside and have not begun to answer."""
        for place in self._places:
            place.cut()

    def _give_back(self, place: Place) -> None:
        self._places.discard(place)
        if not self._places:
            self._is_empty.set()
