"""The parts that requests share, and their life from start to stop.

Owns the media pool, the engine's client, the chat format, the threads and the metrics. A request finds here whether the server
is ready; it never sees how it became so.
"""

import asyncio
import contextlib
import enum
import gc
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

import msgspec

from server.api.address import listening_url
from server.api.body import TOO_MUCH_RECEIVED, RequestBody
from server.api.chat_format import ChatFormat
from server.api.checkpoint import CheckpointError
from server.api.content import KindLimit, MediaLimits
from server.api.engine_client import EngineClient, EngineState
from server.api.engine_view import engine_view
from server.api.grammar_checker import GrammarChecker
from server.api.lifecycle import Lifecycle
from server.api.open_requests import Place
from server.api.prepare import Checker, Job
from server.api.prepare_pool import PreparePool
from server.api.prepare_protocol import Setup
from server.api.sampling import Limits
from server.errors import EngineUnavailableError, OverloadedError, ShuttingDownError
from server.held_bytes import HeldBytes
from server.media.config import MediaConfig
from server.media.pipeline import MediaPipeline
from server.messages import Ready
from server.metrics.registry import Metrics
from server.metrics.snapshot import Snapshot
from server.settings import Settings

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=msgspec.Struct)

# Rendering and tokenizing. More would only fight for the interpreter's lock; fewer would let two long prompts hold up all.
NUM_THREADS: Final = 4
# Larger bodies are prepared in a process of their own. In a thread, a body of this size competes for the interpreter's lock for
# 0.1 to 0.3 s, in turns of up to 5 ms.
MAX_THREAD_BYTES: Final = 256 << 10
# Prompts of that many whole windows may wait when the operator does not say; more would wait for minutes.
NUM_QUEUED_WINDOWS: Final = 8


class ServiceState(enum.StrEnum):
    """What `/readyz` says."""

    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Service:
    """See the module. `start` and `stop` frame its life; everything else is for requests in between.

    Attributes:
        settings: the operator's.
        engine, media: the two children.
        bodies: bytes of the requests that are being read.
        metrics: what the front counts.
    """

    def __init__(
        self,
        settings: Settings,
        engine: EngineClient | None,
        media: MediaPipeline | None,
        chat_format: ChatFormat | None,
        grammars: GrammarChecker | None,
        *,
        owns_process: bool,
    ) -> None:
        """`owns_process`: signals drain the server, the process ends with a code that says how it went, and what only some
        requests need is started ahead.
        """
        self.settings = settings
        self.media = media or MediaPipeline(MediaConfig.from_settings(settings))
        self.bodies = HeldBytes(max(settings.max_bodies_bytes, settings.max_body_bytes), TOO_MUCH_RECEIVED)
        self.metrics = Metrics(settings.model_name, self._snapshot)
        self._engine = engine
        self._chat_format = chat_format
        self._grammars = grammars
        self._large_bodies: PreparePool | None = None
        self._owns_process = owns_process
        self._life = Lifecycle(settings, self.metrics.front.shut_down, owns_process=owns_process)
        self._admin_port: int | None = None
        self._num_queued_tokens = 0
        self._ready: Ready | None = None
        self._checker: Checker | None = None
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prepare")
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def engine(self) -> EngineClient:
        """The engine's client; exists from `start` on."""
        assert self._engine is not None
        return self._engine

    @property
    def chat_format(self) -> ChatFormat:
        """The checkpoint's template and tokenizer; exist once the service is ready."""
        assert self._chat_format is not None
        return self._chat_format

    @property
    def grammars(self) -> GrammarChecker:
        """The judge of grammars, once the service is ready."""
        assert self._grammars is not None
        return self._grammars

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, once the service is ready."""
        assert self._ready is not None
        return self._ready.max_model_len

    @property
    def state(self) -> ServiceState:
        """Where the server is in its life. Load does not change it."""
        engine = self._engine
        if not self.is_alive or (engine is not None and engine.state is EngineState.DEAD):
            return ServiceState.FAILED
        if self._life.is_draining or (engine is not None and engine.state is EngineState.CLOSED):
            return ServiceState.DRAINING
        if engine is None:
            return ServiceState.LOADING
        if self._checker is not None and engine.state is EngineState.READY:
            return ServiceState.READY
        pulse = engine.heartbeat.pulse()
        is_loaded = pulse.is_serving or 0 < pulse.num_bytes_to_load <= pulse.num_loaded_bytes
        return ServiceState.WARMING if is_loaded else ServiceState.LOADING

    @property
    def is_ready(self) -> bool:
        """Whether chat requests are taken."""
        return self.state is ServiceState.READY

    @property
    def is_alive(self) -> bool:
        """Whether waiting makes sense: the engine has not failed, and nothing hangs."""
        return self._life.is_alive

    @property
    def checker(self) -> Checker:
        """What requests are checked against, once the service is ready."""
        assert self._checker is not None
        return self._checker

    def admit(self) -> Place:
        """A place for the request that the current task serves; whoever gets it gives it back.

        Raises:
            ShuttingDownError: the server drains.
            EngineUnavailableError: not ready.
            OverloadedError: as many requests as may run and wait are there already, whatever they are waiting for.
        """
        state = self.state
        if state is ServiceState.DRAINING:
            raise ShuttingDownError("the server is shutting down")
        if state is not ServiceState.READY:
            has_failed = state is ServiceState.FAILED
            raise EngineUnavailableError("the engine is not running" if has_failed else "the model is being loaded")
        if (
            max(len(self._life.requests), self.engine.num_open)
            >= self.settings.max_num_seqs + self.settings.max_queued_requests
        ):
            raise OverloadedError("too many requests are open; retry later")
        return self._life.requests.enter()

    def queue(self, num_tokens: int, *, num_own: int = 0) -> None:
        """Count a prompt in that waits for its first token; `unqueue` counts it out. An empty queue takes any prompt.

        Args:
            num_tokens: of the prompt.
            num_own: how many of it were counted in before.

        Raises:
            OverloadedError: too many tokens wait already.
        """
        limit = self.settings.max_queued_tokens or NUM_QUEUED_WINDOWS * self.max_model_len
        if self._num_queued_tokens > num_own and self._num_queued_tokens + num_tokens > limit:
            raise OverloadedError("too many prompt tokens wait; retry later")
        self._num_queued_tokens += num_tokens

    def unqueue(self, num_tokens: int) -> None:
        """That many tokens do not wait any more."""
        self._num_queued_tokens -= num_tokens

    async def prepare(self, job: Job[R], body: RequestBody) -> R:
        """What `job` makes of a body, whose bytes are dropped.

        Raises:
            M3Error: what is wrong with the request.
        """
        assert self._large_bodies is not None
        try:
            if body.num_bytes > MAX_THREAD_BYTES:
                return await self._large_bodies.run(job, body.pieces)
            return await self.in_thread(lambda: job.run(self.checker, b"".join(body.pieces)))
        finally:
            body.drop()

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def start(self, admin_port: int | None = None) -> None:
        """Start the children; returns before the model is loaded. `admin_port` listens too, and not for clients."""
        self._admin_port = admin_port
        self._life.start()
        await self.media.make_slab()
        if self._engine is None:
            self._engine = EngineClient(self.settings, self.media.slab_name)
        await self.engine.start()
        self._life.watch(self.engine)
        await self.media.start()  # while the engine loads
        self._tasks.append(asyncio.create_task(self._supervise(), name="supervisor"))

    async def stop(self) -> None:
        """Stop the children. Does not return when the process has to end with a code of its own."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._life.stopping(), contextlib.AsyncExitStack() as children:  # all are stopped, also after a failure
            children.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            if self._grammars is not None:
                children.push_async_callback(self._grammars.close)
            if self._large_bodies is not None:
                children.push_async_callback(self._large_bodies.close)
            children.push_async_callback(self.media.close)
            if self._engine is not None:
                children.push_async_callback(self._engine.close)

    async def _supervise(self) -> None:
        """Become ready, then wait for the engine's death."""
        try:
            await self._become_ready()
            await self.engine.died.wait()
            logger.critical("the engine died; the server ends")
        except EngineUnavailableError as error:
            logger.critical("the engine cannot start: %s", error.message)
        except CheckpointError as error:
            logger.critical("the checkpoint cannot be used: %s", error)
        except Exception:
            logger.critical("the server cannot start", exc_info=True)
        self._life.fail()

    async def _become_ready(self) -> None:
        if self._chat_format is None:
            self._chat_format = await self.in_thread(ChatFormat.load, self.settings.model)
        self._ready = ready = await self.engine.wait_ready()
        if self._grammars is None:
            self._grammars = GrammarChecker(self.settings.model, ready.vocab_size)
        self._grammars.start()
        limits = Limits(
            model_name=self.settings.model_name,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            eos_token_ids=tuple(self._chat_format.eos_token_ids),
            thinking_mode=self.settings.thinking_mode,
        )
        media_limits = MediaLimits(
            image=KindLimit(self.settings.max_images, self.settings.max_image_bytes),
            video=KindLimit(self.settings.max_videos, self.settings.max_video_bytes),
        )
        setup = Setup(str(self.settings.model), limits, media_limits, self.settings.prepare_niceness)
        self._large_bodies = PreparePool(setup, num_workers=self.settings.prepare_workers)
        if self._owns_process:
            self._large_bodies.start()
            # What is there by now stays: a full collection would walk over it, and hold up every stream for 40 ms.
            gc.collect()
            gc.freeze()
        self._checker = Checker(limits, media_limits, self._chat_format)
        logger.info("ready: %s, sequences of up to %d tokens", self.settings.model_name, ready.max_model_len)
        self._tasks.append(asyncio.create_task(self._show_example(), name="example"))

    async def _show_example(self) -> None:
        """Print a command that gets an answer from this server."""
        url = await listening_url(self._admin_port)
        has_keys = self.settings.api_keys is not None or self.settings.api_keys_file is not None
        key = " -H 'authorization: Bearer YOUR_KEY'" if has_keys else ""
        body = '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}'
        command = f"curl {url}/v1/chat/completions{key} -H 'content-type: application/json' -d '{body}'"
        print(f"\nReady. Try it:\n{command}\n", file=sys.stderr, flush=True)

    def _snapshot(self) -> Snapshot:
        engine, ready = self._engine, self._ready
        stats = None if engine is None else engine.stats
        return Snapshot(
            state=self.state.value,
            states=tuple(ServiceState),
            num_requests=len(self._life.requests),
            num_sequences=0 if engine is None else engine.num_open,
            num_queued_tokens=self._num_queued_tokens,
            page_size=None if ready is None else ready.page_size,
            lane_page_bytes={} if ready is None else ready.lane_page_bytes,
            stats={} if stats is None else msgspec.structs.asdict(stats),
            engine=None if engine is None else engine_view(engine.heartbeat.pulse()),
            media=msgspec.structs.asdict(self.media.stats()),
        )
