"""Where this process listens: read from its own sockets, because no setting of ours says it."""

import asyncio
import os
import socket
from typing import Final

DEFAULT_URL: Final = "http://127.0.0.1:8000"
DESCRIPTORS: Final = "/dev/fd"
# uvicorn binds right after the application has started, so a ready server may have to wait a moment.
NUM_ATTEMPTS: Final = 20
PAUSE_S: Final = 0.1


async def listening_url(admin_port: int | None = None) -> str:
    """The base URL of the first listening TCP socket, as a client on this machine reaches it; not that of the admin port."""
    for _ in range(NUM_ATTEMPTS):
        for host, port in _listening():
            if port != admin_port:
                return _url(host, port)
        await asyncio.sleep(PAUSE_S)
    return DEFAULT_URL


def _listening() -> list[tuple[str, int]]:
    """Host and port of every TCP socket of this process that accepts connections."""
    addresses: list[tuple[str, int]] = []
    try:
        descriptors = sorted(int(name) for name in os.listdir(DESCRIPTORS))
    except OSError:
        return addresses
    for descriptor in descriptors:
        try:
            found = socket.socket(fileno=descriptor)
        except OSError:
            continue  # not a socket
        try:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                addresses.append(found.getsockname()[:2])
        finally:
            found.detach()  # it is somebody else's
    return addresses


def _url(host: str, port: int) -> str:
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  (compared, not bound)
    return f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"
