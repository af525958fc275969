"""Media from the server's own disk, under the one directory that the operator names."""

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from server.errors import MediaError


def read_local(url: str, root: Path | None, max_bytes: int) -> bytes:
    """The bytes of a `file:///` address; blocks.

    Args:
        url: the address, percent-encoded.
        root: everything outside of it is refused, symbolic links followed; None refuses everything.
        max_bytes: largest file.

    Raises:
        MediaError: not allowed, not a file, not readable, or too large. Whether a file outside of `root` exists is not told.
    """
    if root is None:
        raise MediaError("Local files are not served by this server.")
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.scheme.lower() != "file" or parts.netloc.lower() not in ("", "localhost") or parts.query or parts.fragment:
        raise MediaError("The file URL is not valid.")
    refusal = MediaError("The file URL does not name a readable file in the directory for local media.")
    if not path.startswith("/") or "\0" in path:
        raise refusal
    resolved_root = os.path.realpath(root)
    try:
        resolved = os.path.realpath(path, strict=True)
        if not Path(resolved).is_relative_to(resolved_root):
            raise refusal
        fd = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise refusal from None
    try:
        # A directory on the way may have become a link since it was resolved; what was opened is asked itself.
        opened = os.readlink(f"/proc/self/fd/{fd}")
        status = os.fstat(fd)
        if not Path(opened).is_relative_to(resolved_root) or not stat.S_ISREG(status.st_mode):
            raise refusal
        if status.st_size > max_bytes:
            raise MediaError(f"The file has {status.st_size} bytes; the limit is {max_bytes}.")
        with open(fd, "rb", closefd=False) as file:
            return file.read(max_bytes)
    finally:
        os.close(fd)
