"""Fetching the media that requests name by address, without becoming anybody's way into a private network.

One parser (httpx's) reads an address for the checks and for the connection. A name is resolved here, every address that it
has is checked, and the connection is made to the checked address itself, so a second, different answer of a name server
changes nothing. Redirects are followed by hand and pass the same checks. Bytes, time, redirects and concurrency are bounded.
What a client hears of a failure is its kind: no address, no text of a library.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

from server import __version__
from server.errors import MediaError
from server.held_bytes import HeldBytes
from server.media.addresses import is_public
from server.media.config import FetchConfig
from server.media.local_file import read_local

TOO_MUCH_FETCHED = "too many bytes of media are being fetched; retry later"
MAX_REDIRECTS = 5
MAX_URL_CHARS = 8192
MAX_CONNECT_S = 10.0
SCHEMES = ("http", "https")
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_HEADERS = {
    "User-Agent": f"m3-server/{__version__}",  # some public hosts refuse requests without one
    "Accept": "image/*, video/*;q=0.9, */*;q=0.5",
    "Accept-Encoding": "identity",  # a compressed answer could grow beyond every limit
}

Resolver = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, in the system's order of preference."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _RefusedError(Exception):
    """The text for the client."""


class ByteBudget:
    """What the downloads of one request may have together; once it is overdrawn, each of them ends at its next bytes.

    Attributes:
        num_spent: what has arrived.
    """

    def __init__(self, max_bytes: int, all_requests: HeldBytes | None = None) -> None:
        """Args: all_requests: counts what this budget spends, until it is given back there; None for a request alone."""
        self.num_spent = 0
        self._max_bytes = max_bytes
        self._all_requests = all_requests or HeldBytes(max_bytes, TOO_MUCH_FETCHED)

    def spend(self, num_bytes: int) -> None:
        """Take what has arrived off the budget.

        Raises:
            MediaError: it does not cover that.
            OverloadedError: all requests together have too much.
        """
        if self.num_spent + num_bytes > self._max_bytes:
            raise MediaError("The request's media exceed the limit of a request's bytes together.")
        self._all_requests.take(num_bytes)
        self.num_spent += num_bytes


class Fetcher:
    """Downloads media; one per pipeline.

    Attributes:
        num_fetches, num_bytes, seconds: of all downloads, also failed ones.
    """

    def __init__(self, config: FetchConfig, resolver: Resolver = resolve) -> None:
        self._config = config
        self._resolve = resolver
        self._turns = asyncio.Semaphore(config.max_concurrent)
        self._sending_turns = asyncio.Semaphore(config.max_concurrent)  # also for what was abandoned
        # No proxies or netrc from the environment, and no cookies that one client could leave for another.
        self._client = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(config.timeout_s, connect=min(MAX_CONNECT_S, 0.8 * config.timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._sending: set[asyncio.Task[httpx.Response] | asyncio.Task[None]] = set()
        self.num_fetches = 0
        self.num_bytes = 0
        self.seconds = 0.0

    async def close(self) -> None:
        """Close the connections, as soon as what was abandoned has ended."""
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._client.aclose()

    async def fetch(self, url: str, *, max_bytes: int, budget: ByteBudget | None = None, param: str | None = None) -> bytes:
        """The bytes at an http, https or file address, at most `max_bytes` and what `budget` has left.

        Raises:
            MediaError: the address is not allowed, cannot be reached, does not answer with a file in time, or the file is too
                large; `param` is set.
            OverloadedError: all requests together have downloaded too much.
        """
        start_s = time.monotonic()
        budget = budget or ByteBudget(max_bytes)
        self.num_fetches += 1
        data = b""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                if url[:16].lstrip()[:5].lower() == "file:":
                    found = await asyncio.to_thread(read_local, url.strip(), self._config.local_root, max_bytes)
                    budget.spend(len(found))
                    data = found
                else:
                    async with self._turns:
                        data = await self._download(url.strip(), max_bytes, budget)
        except MediaError as error:
            raise MediaError(error.message, param=param) from None
        except _RefusedError as error:
            raise MediaError(str(error), param=param) from None
        except (TimeoutError, httpx.TimeoutException):
            raise MediaError("The media URL timed out.", param=param) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
            raise MediaError("The media URL cannot be fetched.", param=param) from None
        finally:
            self.num_bytes += len(data)
            self.seconds += time.monotonic() - start_s
        if not data:
            raise MediaError("The media URL gave an empty file.", param=param)
        return data

    async def _download(self, text: str, max_bytes: int, budget: ByteBudget) -> bytes:
        url = parse(text)
        for _ in range(MAX_REDIRECTS + 1):
            async with self._answer(url) as response:
                if response.status_code not in _REDIRECTS:
                    return await _body(response, max_bytes, budget)
                location = response.headers.get("location", "")
            url = parse(str(url.join(parse_reference(location))))
        raise _RefusedError(f"The media URL redirects more than {MAX_REDIRECTS} times.")

    @contextlib.asynccontextmanager
    async def _answer(self, url: httpx.URL) -> AsyncIterator[httpx.Response]:
        """The response to a GET of `url`, from an address that was checked."""
        port = url.port or (443 if url.scheme == "https" else 80)
        last_error: Exception | None = None
        for address in await self._addresses(url, port):
            request = self._client.build_request(
                "GET",
                url.copy_with(host=address),
                headers={**_HEADERS, "Host": url.netloc.decode("ascii")},
                # The certificate must be that of the name, although the connection is made to an address.
                extensions={"sni_hostname": url.raw_host.decode("ascii")},
            )
            try:
                response = await self._send(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                last_error = error
                continue
            try:
                yield response
            finally:
                await response.aclose()
                self._client.cookies.clear()
            return
        raise last_error or _RefusedError("The media URL's host cannot be found.")

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """The head of the answer. Not cancelled with the caller: httpcore leaves its socket open when it is cancelled in the
        middle of a TLS handshake. What was abandoned ends by its own time limits and is closed; until then it keeps its turn,
        so that clients who ask and leave cannot pile up connections.
        """
        await self._sending_turns.acquire()
        sending = asyncio.create_task(self._client.send(request, stream=True))
        sending.add_done_callback(lambda _: self._sending_turns.release())
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            closing = asyncio.create_task(_close_late(sending))
            self._sending.add(closing)
            closing.add_done_callback(self._sending.discard)
            raise

    async def _addresses(self, url: httpx.URL, port: int) -> list[str]:
        """Where `url` may be connected to.

        Raises:
            _RefusedError: the host is not on the list, or any of its addresses is not public.
        """
        host = url.raw_host.decode("ascii").lower().rstrip(".")
        allowed = self._config.allowed_hosts
        if allowed and not any(host == entry or (entry[:1] == "." and host.endswith(entry)) for entry in allowed):
            raise _RefusedError("The media URL's host is not on this server's list of allowed hosts.")
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            raise _RefusedError("The media URL's host cannot be found.") from None
        if not self._config.allow_private and not all(is_public(address) for address in addresses):
            raise _RefusedError("The media URL's host is not on the public internet.")
        return addresses


async def _close_late(sending: asyncio.Task[httpx.Response]) -> None:
    with contextlib.suppress(httpx.HTTPError, OSError):
        await (await sending).aclose()


def parse(text: str) -> httpx.URL:
    """An http or https address.

    Raises:
        _RefusedError: it is none, or one that other parsers may read differently.
    """
    if len(text) > MAX_URL_CHARS:
        raise _RefusedError(f"The media URL is longer than {MAX_URL_CHARS} characters.")
    # A backslash is a slash to browsers and a part of the host to others; blanks and controls are dropped by some.
    if "\\" in text or any(character.isspace() or ord(character) < 0x20 or ord(character) == 0x7F for character in text):
        raise _RefusedError("The media URL has characters that are not allowed in one.")
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError, UnicodeError):
        raise _RefusedError("The media URL is not valid.") from None
    if url.scheme not in SCHEMES:
        raise _RefusedError("The media URL must be an http, https or data address.")
    if url.port is not None and not 0 < url.port < 1 << 16:
        raise _RefusedError("The media URL is not valid.")
    if not url.raw_host:
        raise _RefusedError("The media URL has no host.")
    if url.userinfo:
        raise _RefusedError("The media URL must not hold a user name or password.")
    return url


def parse_reference(location: str) -> str:
    """A redirect's target, relative or not.

    Raises:
        _RefusedError: there is none.
    """
    if not location or "\\" in location:
        raise _RefusedError("The media URL redirects to nowhere.")
    return location


async def _body(response: httpx.Response, max_bytes: int, budget: ByteBudget) -> bytes:
    if response.status_code != httpx.codes.OK:
        raise _RefusedError(f"The media URL answered with status {response.status_code}.")
    if response.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise _RefusedError("The media URL answered with compressed data.")
    too_large = _RefusedError(f"The media at the URL exceed the limit of {max_bytes} bytes.")
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > max_bytes:
        raise too_large
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > max_bytes:
            raise too_large
        budget.spend(len(piece))
    return bytes(data)


def is_remote(url: str) -> bool:
    """Whether `url` is something that `Fetcher.fetch` may know how to get: http, https or file, in any case."""
    return url[:16].lstrip().lower().startswith(("http:", "https:", "file:"))
