"""Fetching: what is refused before a connection is made, and how real answers of a server on this machine are taken."""

import asyncio
import contextlib
import socket
import ssl

import httpx
import pytest

from server.errors import MediaError
from server.media.addresses import is_public
from server.media.config import FetchConfig
from server.media.fetch import ByteBudget, Fetcher, is_remote, resolve
from tests.media.media_cards import run

PUBLIC = "93.184.216.34"


@contextlib.asynccontextmanager
async def web(handle):
    """A server on a loopback port; `handle(path, headers)` gives an answer in pieces; None waits until the client hangs up."""
    requests, connections = [], set()

    async def serve(reader, writer):
        connections.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            requests.append(head)
            answer = handle(head[0].split(" ")[1])
            for piece in answer if isinstance(answer, list) else [answer]:
                if piece is None:
                    await reader.read()
                else:
                    writer.write(piece)
                    await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], requests
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.gather(*connections)


def answer(body=b"picture", status="200 OK", **headers):
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{lines}Connection: close\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def fetching(resolver=resolve, **config):
    fetcher = Fetcher(FetchConfig(**{"allow_private": True, "timeout_s": 5.0, **config}), resolver)
    try:
        yield fetcher
    finally:
        await fetcher.close()


async def refused(fetcher, url, message, **options):
    with pytest.raises(MediaError, match=message) as caught:
        await fetcher.fetch(url, **{"max_bytes": 100, "param": "here", **options})
    assert caught.value.param == "here"
    assert "127.0.0.1" not in caught.value.message
    assert "Errno" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.88.99.1", "168.63.129.16"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:7f00:1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::10.0.0.1"),
        *("2002:7f00:1::", "2002:a00:1::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "100.100.100.200"),
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", [PUBLIC, "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_that_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1",
            "localhost",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "0177.0.0.1",
            "127.1",
            "0",
            "[::1]",
            "[::ffff:7f00:1]",
        ),
        *("[::ffff:127.0.0.1]", "LOCALHOST", "localhost.", "127。0。0。1", "①27.0.0.1"),
    ],
)
def test_no_spelling_of_this_machine_is_connected_to(host):
    async def main():
        async with web(lambda path: answer()) as (port, requests), fetching(allow_private=False) as fetcher:
            await refused(fetcher, f"http://{host}:{port}/a.png", "not on the public internet|cannot be found|not valid")
            assert requests == []

    run(main())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://example.com/a", "http, https or data"),
        ("gopher://example.com/a", "http, https or data"),
        ("http://", "no host|not valid"),
        ("http:///a.png", "no host|not valid"),
        ("http://user:secret@example.com/a", "user name"),
        ("http://example.com\\@127.0.0.1/a", "characters"),
        ("http://exam ple.com/a", "characters"),
        ("http://example.com/\r\nX: y", "characters"),
        ("http://example.com:99999/a", "not valid|cannot be fetched"),
        ("http://[::1/a", "not valid"),
        ("http://" + "a" * 9000, "longer than"),
    ],
)
def test_addresses_that_are_no_addresses(url, message):
    async def nothing(host, port):
        raise AssertionError("resolved")

    async def main():
        async with fetching(nothing) as fetcher:
            await refused(fetcher, url, message)

    run(main())


def test_every_address_of_a_name_must_be_public():
    async def main():
        for addresses in (["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["::ffff:7f00:1"]):

            async def resolver(host, port, addresses=addresses):
                return addresses

            async with fetching(resolver, allow_private=False) as fetcher:
                await refused(fetcher, "https://example.com/a.png", "not on the public internet")

    run(main())


def test_the_connection_goes_to_the_address_that_was_checked():
    """A name server that answers differently the second time is never asked a second time."""
    asked = []

    async def main():
        async with web(lambda path: answer()) as (port, requests):

            async def resolver(host, port):
                asked.append(host)
                return ["127.0.0.1"]

            async with fetching(resolver) as fetcher:
                assert await fetcher.fetch(f"http://cdn.example:{port}/a.png?x=1", max_bytes=100) == b"picture"
            assert asked == ["cdn.example"]
            assert requests[0][0] == "GET /a.png?x=1 HTTP/1.1"
            assert f"Host: cdn.example:{port}" in requests[0]
            assert any(line.startswith("User-Agent: m3-server/") for line in requests[0])

    run(main())


def test_redirects_are_followed_by_hand_and_checked_again():
    def handle(path):
        steps = {
            "/start": answer(b"", "302 Found", Location="/next"),
            "/next": answer(b"", "307 Temporary Redirect", Location="//other.example:{port}/end"),
            "/end": answer(b"end"),
            "/loop": answer(b"", "301 Moved", Location="/loop"),
            "/nowhere": answer(b"", "302 Found"),
            "/file": answer(b"", "302 Found", Location="file:///etc/passwd"),
            "/inside": answer(b"", "302 Found", Location="http://inside.example/"),
        }
        return steps[path].replace(b"{port}", str(handle.port).encode())

    async def resolver(host, port):
        if host == "inside.example":
            raise OSError
        return ["127.0.0.1"]

    async def main():
        async with web(handle) as (port, requests):
            handle.port = port
            async with fetching(resolver) as fetcher:
                assert await fetcher.fetch(f"http://one.example:{port}/start", max_bytes=100) == b"end"
                assert [request[0].split()[1] for request in requests] == ["/start", "/next", "/end"]
                await refused(fetcher, f"http://one.example:{port}/loop", "more than 5 times")
                await refused(fetcher, f"http://one.example:{port}/nowhere", "nowhere")
                await refused(fetcher, f"http://one.example:{port}/file", "http, https or data")
                await refused(fetcher, f"http://one.example:{port}/inside", "cannot be found")
            async with fetching(resolver, allowed_hosts=("one.example",)) as fetcher:
                await refused(fetcher, f"http://one.example:{port}/next", "list of allowed hosts")

    run(main())


def test_a_redirect_into_the_private_network_is_not_followed(monkeypatch):
    monkeypatch.setattr("server.media.fetch.is_public", lambda address: address == "127.0.0.1")

    async def resolver(host, port):
        return ["127.0.0.1" if host == "public.example" else "169.254.169.254"]

    async def main():
        redirect = answer(b"", "302 Found", Location="http://metadata.example/latest")
        async with web(lambda path: redirect) as (port, requests), fetching(resolver, allow_private=False) as fetcher:
            await refused(fetcher, f"http://public.example:{port}/", "not on the public internet")
            assert len(requests) == 1

    run(main())


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("example.com", True),
        ("EXAMPLE.com.", True),
        ("a.example.com", False),
        ("img.cdn.net", True),
        ("cdn.net", False),
        ("evilcdn.net", False),
        ("example.com.evil.org", False),
    ],
)
def test_the_list_of_allowed_hosts(host, allowed):
    async def resolver(host, port):
        return ["127.0.0.1"]

    async def main():
        hosts = ("example.com", ".cdn.net")
        async with web(lambda path: answer()) as (port, _), fetching(resolver, allowed_hosts=hosts) as fetcher:
            url = f"http://{host}:{port}/"
            if allowed:
                assert await fetcher.fetch(url, max_bytes=100) == b"picture"
            else:
                await refused(fetcher, url, "list of allowed hosts")

    run(main())


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (answer(status="404 Not Found"), "status 404"),
        (answer(status="500 Oops"), "status 500"),
        (answer(b"x" * 101), "limit of 100 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 300, "limit of 100 bytes"),
        (answer(Content_Encoding="gzip"), "compressed"),
        (answer(b""), "empty"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", "cannot be fetched"),
        (b"not http at all\r\n\r\n", "cannot be fetched"),
        (b"", "cannot be fetched"),
        (None, "timed out"),
    ],
    ids=["404", "500", "declared too large", "too large", "compressed", "empty", "cut", "no http", "hang up", "silent"],
)
def test_bad_answers(reply, message):
    async def main():
        async with web(lambda path: reply) as (port, _), fetching(timeout_s=0.5 if reply is None else 5.0) as fetcher:
            await refused(fetcher, f"http://127.0.0.1:{port}/a.png", message)
            assert fetcher.num_fetches == 1

    run(main())


def test_the_deadline_is_for_the_whole_download():
    async def main():
        stuck = [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", None]
        async with web(lambda path: stuck) as (port, _), fetching(timeout_s=0.3) as fetcher:
            await refused(fetcher, f"http://127.0.0.1:{port}/", "timed out")

    run(main())


def test_a_host_that_cannot_be_reached_or_found():
    async def main():
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            async with fetching() as fetcher:
                await refused(fetcher, f"http://127.0.0.1:{port}/", "cannot be fetched")

        async def unknown(host, port):
            raise socket.gaierror

        async with fetching(unknown) as fetcher:
            await refused(fetcher, "http://no.such.host/", "cannot be found")

    run(main())


def test_a_client_that_leaves_during_a_stuck_handshake_leaves_no_connection_behind():
    async def main():
        closed = asyncio.Event()

        async def serve(reader, writer):
            await reader.read()
            writer.close()
            closed.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with fetching(timeout_s=0.5) as fetcher:
            leaving = asyncio.create_task(fetcher.fetch(f"https://127.0.0.1:{port}/", max_bytes=9))
            while not fetcher._sending:  # noqa: ASYNC110
                await asyncio.sleep(0)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
        await closed.wait()
        server.close()

    run(main())


def test_clients_who_ask_and_leave_do_not_pile_up_connections(monkeypatch):
    async def main():
        num_sent, hangs_up = 0, asyncio.Event()

        async def silent(request, **options):
            nonlocal num_sent
            num_sent += 1
            await hangs_up.wait()
            raise httpx.ReadError("closed")

        async def resolver(host, port):
            return [host]

        async with fetching(resolver, max_concurrent=2) as fetcher:
            monkeypatch.setattr(fetcher._client, "send", silent)
            for _ in range(8):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(fetcher.fetch("http://127.0.0.1/", max_bytes=9), 0.05)
            assert num_sent == 2
            hangs_up.set()
            await refused(fetcher, "http://127.0.0.1/", "cannot be fetched")
            assert num_sent == 3

    run(main())


def test_the_next_address_is_tried_when_one_does_not_answer():
    async def main():
        async with web(lambda path: answer()) as (port, _):

            async def resolver(host, port):
                return ["::1", "127.0.0.1"]

            async with fetching(resolver) as fetcher:
                assert await fetcher.fetch(f"http://two.example:{port}/", max_bytes=100) == b"picture"

    run(main())


def test_the_certificate_is_asked_for_by_name(monkeypatch):
    names = []

    async def resolver(host, port):
        return ["127.0.0.1"]

    async def main():
        async with web(lambda path: answer()) as (port, _), fetching(resolver, timeout_s=0.5) as fetcher:
            send = fetcher._client.send

            async def note(request, **options):
                names.append((request.url.host, request.extensions["sni_hostname"]))
                return await send(request, **options)

            monkeypatch.setattr(fetcher._client, "send", note)
            await refused(fetcher, f"https://secure.example:{port}/", "timed out|cannot be fetched")
            assert names == [("127.0.0.1", "secure.example")]
            context = fetcher._client._transport._pool._ssl_context
            assert context.verify_mode is ssl.CERT_REQUIRED
            assert context.check_hostname

    run(main())


def test_the_environment_and_other_clients_leave_no_trace(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    cookie = answer(Set_Cookie="who=first")

    async def main():
        async with web(lambda path: cookie) as (port, requests), fetching() as fetcher:
            for _ in range(2):
                await fetcher.fetch(f"http://127.0.0.1:{port}/", max_bytes=100)
            assert not any("cookie" in line.lower() for request in requests for line in request)

    run(main())


def test_the_downloads_of_a_request_end_when_their_budget_is_spent():
    async def main():
        silent = [answer(b"x" * 60)[:-1], None]  # 59 of 60 bytes, then nothing
        async with web(lambda path: silent if path == "/silent" else answer(b"y" * 50)) as (port, _), fetching() as fetcher:
            budget = ByteBudget(100)
            url = f"http://127.0.0.1:{port}/"
            assert await fetcher.fetch(url, max_bytes=60, budget=budget) == b"y" * 50
            await refused(fetcher, f"{url}silent", "bytes together", max_bytes=60, budget=budget)

    run(main())


def test_downloads_are_bounded_and_counted():
    async def main():
        async with web(lambda path: answer()) as (port, _), fetching(max_concurrent=2) as fetcher:
            url = f"http://127.0.0.1:{port}/"
            assert await asyncio.gather(*(fetcher.fetch(url, max_bytes=7) for _ in range(9))) == [b"picture"] * 9
            assert (fetcher.num_fetches, fetcher.num_bytes) == (9, 63)
            assert fetcher.seconds > 0

    run(main())


class TestLocalFiles:
    @pytest.fixture
    def root(self, tmp_path):
        root = tmp_path / "media"
        root.mkdir()
        (root / "a b.png").write_bytes(b"inside")
        (root / "big").write_bytes(bytes(101))
        (tmp_path / "secret").write_bytes(b"outside")
        (root / "link").symlink_to(tmp_path / "secret")
        (root / "good link").symlink_to(root / "a b.png")
        (tmp_path / "media-other").mkdir()
        (tmp_path / "media-other" / "x").write_bytes(b"sibling")
        return root

    def test_files_under_the_root(self, root):
        async def main():
            async with fetching(local_root=root) as fetcher:
                for name in ("a%20b.png", "good%20link"):
                    assert await fetcher.fetch(f"file://{root}/{name}", max_bytes=100) == b"inside"
                assert await fetcher.fetch(f"FILE://localhost{root}/a%20b.png", max_bytes=100) == b"inside"

        run(main())

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("file://{root}/../secret", "readable file in the directory"),
            ("file://{root}/%2e%2e/secret", "readable file in the directory"),
            ("file://{root}/link", "readable file in the directory"),
            ("file://{root}-other/x", "readable file in the directory"),
            ("file://{root}/missing", "readable file in the directory"),
            ("file://{root}", "readable file in the directory"),
            ("file:///etc/passwd", "readable file in the directory"),
            ("file:///proc/self/environ", "readable file in the directory"),
            ("file://{root}/a%00.png", "readable file in the directory"),
            ("file:relative", "readable file in the directory"),
            ("file://elsewhere{root}/a%20b.png", "not valid"),
            ("file://{root}/a?x", "not valid"),
            ("file://{root}/big", "101 bytes; the limit is 100"),
        ],
    )
    def test_everything_else_is_refused(self, root, url, message):
        async def main():
            async with fetching(local_root=root) as fetcher:
                await refused(fetcher, url.format(root=root), message)

        run(main())

    def test_without_a_root_there_are_no_local_files(self, root):
        async def main():
            async with fetching() as fetcher:
                await refused(fetcher, f"file://{root}/a%20b.png", "not served")

        run(main())


def test_what_counts_as_an_address():
    assert all(map(is_remote, ("http://a", " HTTPS://a", "file:///a", "Http:a")))
    assert not any(map(is_remote, ("data:image/png;base64,", "ftp://a", "a.png", "", "httpx://a")))
    assert httpx.URL("http://example.com").raw_host == b"example.com"
