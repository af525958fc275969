import http.client
import json
import socket

import httpx

from tests.api.scripted import CHAT, LiveServer, Say, ScriptedEngine, ScriptedMedia, chat
from tests.e2e.server_process import wait_until

BUFFER_BYTES = 4096
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
BODY = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
PICTURE_BODY = BODY.replace(b'"hi"', b'[{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}]')
WORDS = "word " * 20_000


class Sloth:
    """A client that asks for a stream and reads nothing until it is told to."""

    def __init__(self, server, body=BODY):
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.socket.connect(("127.0.0.1", server.port))
        self.socket.sendall(HEAD % (len(body), body))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def read_all(self):
        """The content of the whole stream, and the number of its events."""
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        blocks = response.read().decode().split("\n\n")
        assert blocks[-2:] == ["data: [DONE]", ""]
        deltas = [json.loads(block.removeprefix("data: "))["choices"][0]["delta"] for block in blocks[:-2]]
        return "".join(delta.get("content", "") for delta in deltas), len(deltas)


def serve(*scripts, media=None, **settings):
    server = LiveServer(ScriptedEngine(*scripts), media, **settings)
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return server


def test_a_client_that_does_not_read_stalls_neither_the_engine_nor_others():
    with serve(Say(WORDS), Say("quick")) as server, Sloth(server) as sloth:
        wait_until(lambda: server.engine.submitted, 20)
        answer = httpx.post(server.url + CHAT, json=chat(), timeout=20)
        assert answer.json()["choices"][0]["message"]["content"] == "quick"
        wait_until(lambda: server.engine.num_open == 0, 20)
        assert server.num_requests == 1  # the stream is still open
        content, num_events = sloth.read_all()
    assert content == WORDS
    assert num_events < 10_000  # what was not read in time was merged


def test_a_client_that_does_not_read_keeps_no_pictures_in_memory():
    media = ScriptedMedia()
    with serve(Say(WORDS), media=media) as server, Sloth(server, PICTURE_BODY) as sloth:
        wait_until(lambda: server.engine.submitted, 20)
        wait_until(lambda: server.engine.num_open == 0, 20)
        assert server.num_requests == 1  # the stream is still open
        assert media.num_leases == 0
        sloth.read_all()


def test_a_client_that_never_reads_is_given_up():
    with serve(Say(WORDS + "x", end=None), slow_client_timeout_s=0.3) as server, Sloth(server):
        wait_until(lambda: server.engine.submitted, 20)
        wait_until(lambda: server.num_requests == 0, 20)
        assert server.engine.aborted == [server.engine.submitted[0].request_id]
