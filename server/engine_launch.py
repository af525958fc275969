"""What the front tells a new engine process: one line of JSON on its standard input.

The front keeps that pipe open for as long as it lives; its end tells the engine that the front is gone.
"""

from pathlib import Path

from pydantic import BaseModel

from server.settings import Settings


class EngineLaunch(BaseModel, frozen=True):
    """First line of the engine's standard input.

    Attributes:
        settings: the server's settings, complete: the engine's environment adds nothing.
        address: directory of the sockets, see `server.transport`.
        slab_name: name of the shared-memory media slab; None in a server without media.
        heartbeat_fd: descriptor of the memory of `server.heartbeat`, inherited; -1 when nobody looks at it.
    """

    settings: Settings
    address: Path
    slab_name: str | None = None
    heartbeat_fd: int = -1
