"""Where in a client's body the parts of the chat body made from it came from, so that errors name the client's own fields."""

import contextlib
from collections.abc import Iterator

import msgspec

from server.errors import M3Error


class Places(msgspec.Struct):
    """Pairs of a place in the chat body and the place in the client's body that it was made from.

    Attributes:
        origins: the latter by the former.
    """

    origins: dict[str, str] = {}

    def add(self, chat: str, origin: str) -> None:
        """Whatever is wrong at `chat`, or inside it, is wrong at `origin`."""
        self.origins[chat] = origin

    def origin(self, param: str) -> str:
        """The client's spelling of a place; a place inside a known one keeps its own tail, an unknown one is itself."""
        known = param
        while known and known not in self.origins:
            known = known[: max(known.rfind("."), known.rfind("["), 0)]
        return self.origins[known] + param[len(known) :] if known else param

    def rename(self, error: M3Error) -> None:
        """Let an error speak of the client's fields, in its `param` and where its message repeats it."""
        if error.param is None:
            return
        origin = self.origin(error.param)
        error.message = error.message.replace(error.param, origin)
        error.param = origin

    @contextlib.contextmanager
    def renaming(self) -> Iterator[None]:
        """`rename` whatever error leaves the block."""
        try:
            yield
        except M3Error as error:
            self.rename(error)
            raise
