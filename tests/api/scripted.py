"""An engine that says what a test tells it to, a media pool that decodes nothing, and ways to serve them over HTTP."""

import asyncio
import contextlib
import functools
import socket
import threading
from pathlib import Path

import httpx
import uvicorn

from server.api.app import create_app
from server.api.chat_format import ChatFormat
from server.api.engine_client import EngineState
from server.api.request_stream import RequestStream
from server.errors import BadRequestError, EngineUnavailableError, MediaError, OverloadedError
from server.grammars import GrammarError, GrammarTokenizer
from server.heartbeat import Heartbeat
from server.media.geometry import Size
from server.media.stats import MediaTotals
from server.media.types import MediaPlan
from server.messages import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Ready,
    SlabRef,
    Stats,
    TokenLogprobs,
    Tokens,
)
from server.settings import load_settings

TINY = Path(__file__).parents[2] / "server" / "model" / "tiny"
CHAT = "/v1/chat/completions"


@functools.cache
def tiny_format():
    return ChatFormat.load(TINY)


@functools.cache
def tiny_grammars():
    return GrammarTokenizer(TINY, tiny_format().vocab_size)


class InlineGrammars:
    """The interface of `GrammarChecker`, without a process: judges at once."""

    def __init__(self):
        self.checked = []

    def start(self):
        pass

    async def close(self):
        pass

    async def check(self, grammar, param):
        self.checked.append(grammar)
        try:
            tiny_grammars().compile(grammar)
        except GrammarError as error:
            raise BadRequestError(str(error), param=param, code="invalid_grammar") from None


def ids(text):
    """Token ids of a reply: markers and end-of-turn become their added tokens, as a model would emit them."""
    pieces = tiny_format()._tokenizer.added.split(text)
    return [i for piece in pieces for i in (tiny_format().encode_text(piece) if isinstance(piece, str) else [piece.id])]


class Say:
    """One sequence's script: groups of ids that arrive apart, then a terminal event; `None` as the end hangs."""

    def __init__(self, text="", *, token_ids=None, end=FinishReason.STOP, group=1, num_cached=0, with_logprobs=True):
        self.token_ids = ids(text) if token_ids is None else token_ids
        self.groups = [self.token_ids[i : i + group] for i in range(0, len(self.token_ids), group)]
        self.end = end
        self.num_cached = num_cached
        self.with_logprobs = with_logprobs

    def logprobs(self, token_ids, sampling):
        if sampling.num_logprobs is None:
            return []
        top_ids = tuple(range(sampling.num_logprobs))
        return [TokenLogprobs(-0.5, top_ids, (-1.0,) * len(top_ids)) for _ in token_ids]

    def prompt_logprobs(self, message):
        """One entry per token of the prompt but the first, as the engine gives them."""
        num = message.sampling.num_prompt_logprobs
        if num is None:
            return []
        return [TokenLogprobs(-0.25, tuple(range(num)), (-1.0,) * num) for _ in message.prompt_token_ids[1:]]


class ScriptedEngine:
    """The interface of `EngineClient`; every submission takes the next script, the last one repeats."""

    def __init__(self, *scripts, ready=True, num_pages=100, max_model_len=4096, vocab_size=None, max_open=64):
        self.scripts = list(scripts)
        lanes = {"dense": 10, "index": 20, "sparse": 30}
        self.limits = Ready(num_pages, 128, max_model_len, vocab_size or tiny_format().vocab_size, lanes)
        self.max_open = max_open
        self.submitted = []
        self.aborted = []
        self.abort_seen = threading.Event()
        self.emitted = threading.Event()
        self.state = EngineState.STARTING
        self.ready = None
        self.stats = Stats(1, 2, num_pages, num_pages - 30, 10, 5, 6, 7, 8, 9, 3, 12, 11)
        self.heartbeat = Heartbeat()
        self.died = asyncio.Event()
        self._starts_ready = ready
        self._open = {}
        self._tasks = set()
        self._may_be_ready = asyncio.Event()

    @property
    def num_open(self):
        return len(self._open)

    async def start(self):
        if self._starts_ready:
            self.become_ready()

    def become_ready(self):
        self.state, self.ready = EngineState.READY, self.limits
        self._may_be_ready.set()

    async def wait_ready(self):
        await self._may_be_ready.wait()
        return self.ready

    def submit(self, message, on_end=None):
        if self.state is not EngineState.READY:
            raise EngineUnavailableError("not ready")
        if self.num_open >= self.max_open:
            raise OverloadedError("full")
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.submitted.append(message)
        stream = RequestStream(message.request_id, self._abort)
        self._open[message.request_id] = (stream, message, on_end)
        task = asyncio.get_running_loop().create_task(self._play(message, script, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _play(self, message, script, stream):
        num_tokens = 0
        prompt_logprobs = script.prompt_logprobs(message)
        for group in script.groups:
            await asyncio.sleep(0)
            if message.request_id not in self._open:
                return
            num_tokens += len(group)
            stream.put(Tokens(message.request_id, list(group), script.logprobs(group, message.sampling), prompt_logprobs))
            prompt_logprobs = []
            self.emitted.set()
        await asyncio.sleep(0)
        if isinstance(script.end, FailureKind):
            self._end(Failed(message.request_id, script.end, "a scripted failure"))
        elif script.end is not None:
            prompt_len = len(message.prompt_token_ids)
            self._end(Finished(message.request_id, script.end, prompt_len, script.num_cached, num_tokens))
        self.emitted.set()

    def _end(self, event):
        if (entry := self._open.pop(event.request_id, None)) is not None:
            stream, _, on_end = entry
            stream.put(event)
            if on_end is not None:
                on_end()

    def end(self, request_id):
        """End a hanging request as if it had reached its limit."""
        self._end(Finished(request_id, FinishReason.LENGTH, 1, 0, 0))

    def _abort(self, request_id):
        self.aborted.append(request_id)
        self._end(Finished(request_id, FinishReason.ABORT, 1, 0, 0))
        self.abort_seen.set()

    def die(self):
        self.state = EngineState.DEAD
        for request_id in list(self._open):
            self._end(Failed(request_id, FailureKind.ENGINE_DEAD, "the engine died"))
        self.died.set()

    def end_open(self):
        for request_id in list(self._open):
            self._end(Failed(request_id, FailureKind.SHUTDOWN, "the server is shutting down"))

    async def close(self):
        self.state = EngineState.CLOSED
        self.end_open()


class ScriptedMedia:
    """The interface of `MediaPipeline`: every picture is 2 x 2 features; data that starts with b"bad" cannot be decoded."""

    slab_name = "none"

    def __init__(self, *, hang=False):
        self.num_leases = 0
        self.totals = MediaTotals()
        self.num_held = 0
        self.planned = []
        self.loading = threading.Event()
        self.load_ended = threading.Event()
        self._hang = hang

    async def make_slab(self):
        pass

    async def start(self):
        pass

    async def close(self):
        pass

    def stats(self):
        return self.totals.snapshot(None, None, None)

    async def plan(self, sources):
        self.planned += sources
        for source in sources:
            if source.data.startswith(b"bad"):
                raise MediaError("cannot be decoded", param=source.param)
        self.num_held += len(sources)
        return tuple(MediaPlan(s.kind, s.data[:32].ljust(32), Size(56, 56), (0,), None, s) for s in sources)

    def forget(self, plans):
        self.num_held -= len(plans)

    async def load(self, plans):
        self.loading.set()
        try:
            if self._hang:
                await asyncio.Event().wait()
        finally:
            self.load_ended.set()
        self.num_leases += 1
        for plan in plans:
            self.totals.loaded(plan)
        return ScriptedLease(self, len(plans))


class ScriptedLease:
    def __init__(self, media, num_items):
        self.refs = tuple(SlabRef(i, 1, 1) for i in range(num_items))
        self._media = media
        self._released = False

    def release(self):
        if not self._released:
            self._released = True
            self._media.num_leases -= 1


async def until(condition):
    """Let the event loop work until `condition()` holds."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


def settings_of(**values):
    return load_settings({"model": TINY, "prepare_niceness": 0, **values}, environ={})


def make_app(engine, media=None, chat_format=None, grammars=None, **settings):
    chat_format = chat_format or tiny_format()
    return create_app(
        settings_of(**settings),
        engine=engine,
        media=media or ScriptedMedia(),
        chat_format=chat_format,
        grammars=grammars or InlineGrammars(),
    )


@contextlib.asynccontextmanager
async def http_client(engine, media=None, chat_format=None, grammars=None, **settings):
    """A client of an application in this event loop."""
    app = make_app(engine, media, chat_format, grammars, **settings)
    async with app.router.lifespan_context(app):
        await until(lambda: engine.ready is None or app.state.service.is_ready)
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


def post(engine, body, media=None, grammars=None, **settings):
    """One request to a fresh application: the response."""

    async def run():
        async with asyncio.timeout(30), http_client(engine, media, grammars=grammars, **settings) as client:
            if isinstance(body, bytes):
                return await client.post(CHAT, content=body)
            return await client.post(CHAT, json=body)

    return asyncio.run(run())


def chat(text="hi", **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


class LiveServer:
    """uvicorn in a thread, on a free port; `call` runs a function in its event loop."""

    def __init__(self, engine, media=None, **settings):
        self.engine = engine
        self._app = make_app(engine, media, **settings)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = uvicorn.Server(uvicorn.Config(self._app, log_level="warning", timeout_graceful_shutdown=2))
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        asyncio.run(self._serve())

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._socket])

    def __enter__(self):
        self._thread.start()
        with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as client:
            assert client.get(self.url + "/livez").status_code == 200
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def num_requests(self):
        """Requests that hold a place."""
        return len(self._app.state.service._life.requests)

    def call(self, function):
        self.loop.call_soon_threadsafe(function)
