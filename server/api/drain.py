"""The end of a server's life: those who are inside may finish, until a deadline."""

from collections.abc import Callable
from typing import Final

from server.api.open_requests import OpenRequests

# For a last event to reach its client, and for a request that was not in the engine yet to be answered.
LAST_WORDS_S: Final = 2.0


async def drain(requests: OpenRequests, end_open: Callable[[], None], timeout_s: float) -> int:
    """Wait until all requests have ended, by themselves or at the deadline. New ones must be refused already.

    Args:
        requests: those inside.
        end_open: ends what the engine computes, as far as clients are concerned.
        timeout_s: the deadline.

    Returns:
        How many requests were ended by the deadline.
    """
    if await requests.emptied(timeout_s):
        return 0
    num_cut = len(requests)
    end_open()
    if not await requests.emptied(LAST_WORDS_S):
        requests.cut()
        await requests.emptied(LAST_WORDS_S)
    return num_cut
