"""The parts that requests share, and their life from start to stop.

Owns the media pool, the engine's client, the chat format, the threads and the metrics. A request finds here whether the server
is ready; it never sees how it became so.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

import msgspec

from server.api.address import listening_url
from server.api.chat_format import ChatFormat
from server.api.checkpoint import CheckpointError
from server.api.content import KindLimit, MediaLimits
from server.api.engine_client import EngineClient, EngineState
from server.api.grammar_checker import GrammarChecker
from server.api.prepare import Checker
from server.api.sampling import Limits
from server.errors import EngineUnavailableError, OverloadedError
from server.media.config import MediaConfig
from server.media.pipeline import MediaPipeline
from server.messages import Ready
from server.metrics import EngineSnapshot, Metrics
from server.settings import Settings

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# Rendering and tokenizing. More would only fight for the interpreter's lock; fewer would let two long prompts hold up all.
NUM_THREADS: Final = 4
# An orderly end after the engine died is given up then: a client that does not read must not keep the process.
EXIT_DEADLINE_S: Final = 8.0
EXIT_CODE: Final = 1
# Prompts of that many whole windows may wait when the operator does not say; more would wait for minutes.
NUM_QUEUED_WINDOWS: Final = 8


class Service:
    """See the module. `start` and `stop` frame its life; everything else is for requests in between.

    Attributes:
        settings: the operator's.
        engine, media: the two children.
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
        exits_with_engine: bool,
    ) -> None:
        """`exits_with_engine`: the process ends with a non-zero code when the engine cannot start or dies."""
        self.settings = settings
        self.media = media or MediaPipeline(MediaConfig.from_settings(settings))
        self.metrics = Metrics(settings.model_name, self._snapshot)
        self._engine = engine
        self._chat_format = chat_format
        self._grammars = grammars
        self._exits_with_engine = exits_with_engine
        self._has_failed = False
        self._admin_port: int | None = None
        self._num_requests = 0
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
    def is_ready(self) -> bool:
        """Whether chat requests are taken."""
        return self._checker is not None and self.engine.state is EngineState.READY

    @property
    def is_alive(self) -> bool:
        """Whether waiting for readiness makes sense."""
        return not self._has_failed

    @property
    def checker(self) -> Checker:
        """What requests are checked against, once the service is ready."""
        assert self._checker is not None
        return self._checker

    def admit(self) -> None:
        """Count a request in; `discharge` counts it out.

        Raises:
            EngineUnavailableError: not ready.
            OverloadedError: as many requests as may run and wait are there already, whatever they are waiting for.
        """
        if not self.is_ready:
            is_starting = self.engine.state in (EngineState.STARTING, EngineState.READY) and not self._has_failed
            raise EngineUnavailableError("the model is being loaded" if is_starting else "the engine is not running")
        if max(self._num_requests, self.engine.num_open) >= self.settings.max_num_seqs + self.settings.max_queued_requests:
            raise OverloadedError("too many requests are open; retry later")
        self._num_requests += 1

    def discharge(self) -> None:
        """A request that was admitted has ended."""
        self._num_requests -= 1

    def queue(self, num_tokens: int) -> None:
        """Count a prompt in that waits for its first token; `unqueue` counts it out. An empty queue takes any prompt.

        Raises:
            OverloadedError: too many tokens wait already.
        """
        limit = self.settings.max_queued_tokens or NUM_QUEUED_WINDOWS * self.max_model_len
        if self._num_queued_tokens and self._num_queued_tokens + num_tokens > limit:
            raise OverloadedError("too many prompt tokens wait; retry later")
        self._num_queued_tokens += num_tokens

    def unqueue(self, num_tokens: int) -> None:
        """That many tokens do not wait any more."""
        self._num_queued_tokens -= num_tokens

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def start(self, admin_port: int | None = None) -> None:
        """Start the children; returns before the model is loaded. `admin_port` listens too, and not for clients."""
        self._admin_port = admin_port
        await self.media.start()
        if self._engine is None:
            self._engine = EngineClient(self.settings, self.media.slab_name)
        await self.engine.start()
        self._tasks.append(asyncio.create_task(self._supervise(), name="supervisor"))

    async def stop(self) -> None:
        """Stop the children. Does not return when the process has to end because of the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with contextlib.AsyncExitStack() as children:  # one that fails to stop does not keep the others
                children.callback(self._threads.shutdown, wait=False, cancel_futures=True)
                if self._grammars is not None:
                    children.push_async_callback(self._grammars.close)
                children.push_async_callback(self.media.close)
                if self._engine is not None:
                    children.push_async_callback(self._engine.close)
        finally:
            if self._has_failed and self._exits_with_engine:
                leave()

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
        self._has_failed = True
        if self._exits_with_engine:
            # uvicorn's orderly end: no new connections, open ones get their error, then `stop`.
            asyncio.get_running_loop().call_later(EXIT_DEADLINE_S, leave)
            os.kill(os.getpid(), signal.SIGTERM)

    async def _become_ready(self) -> None:
        if self._chat_format is None:
            self._chat_format = await self.in_thread(ChatFormat.load, self.settings.model)
        self._ready = ready = await self.engine.wait_ready()
        if self._grammars is None:
            self._grammars = GrammarChecker(self.settings.model, ready.vocab_size)
        self._grammars.start()
        self._checker = Checker(
            limits=Limits(
                model_name=self.settings.model_name,
                max_model_len=ready.max_model_len,
                vocab_size=ready.vocab_size,
                eos_token_ids=tuple(self._chat_format.eos_token_ids),
                thinking_mode=self.settings.thinking_mode,
            ),
            media_limits=MediaLimits(
                image=KindLimit(self.settings.max_images, self.settings.max_image_bytes),
                video=KindLimit(self.settings.max_videos, self.settings.max_video_bytes),
            ),
            chat_format=self._chat_format,
        )
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

    def _snapshot(self) -> EngineSnapshot:
        stats = None if self._engine is None else self._engine.stats
        return EngineSnapshot(
            is_up=self._engine is not None and self.is_ready,
            num_open=0 if self._engine is None else self._engine.num_open,
            num_queued_tokens=self._num_queued_tokens,
            page_size=None if self._ready is None else self._ready.page_size,
            stats={} if stats is None else msgspec.structs.asdict(stats),
        )


def leave() -> None:
    """End the process at once with a non-zero code. Interpreter shutdown could wait for a thread or hide the code."""
    logging.shutdown()
    os._exit(EXIT_CODE)
