"""One chat request from its body to its last delta, and everything it holds on the way.

`Generation` owns the request's engine streams and media memory. `close` gives all of it back; it is a plain function, may be
called at any moment and more than once, and whoever made the generation calls it from a `finally`.
"""

import asyncio
import secrets
import time
from typing import Final

import msgspec

from server.api.chat_format import MediaLayout
from server.api.choice import ChoiceAssembler
from server.api.prepare import Prepared, fit
from server.api.request_stream import RequestStream
from server.api.service import Service
from server.api.wire import ChunkChoice, CompletionDetails, PromptDetails, Usage
from server.errors import BadRequestError, ContextLengthError, EngineUnavailableError, M3Error, MediaError, RequestFailedError
from server.media.pipeline import MediaLease
from server.messages import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    MediaItem,
    RequestEvent,
    SamplingParams,
    Submit,
    Tokens,
)

# Proxies commonly close a connection that was silent for 30 s or more.
HEARTBEAT_S: Final = 10.0


class SharedLease:
    """A media lease with several holders; the last one to drop it releases it."""

    def __init__(self, lease: MediaLease) -> None:
        self._lease = lease
        self._num_holders = 1

    def hold(self) -> None:
        """Add a holder."""
        self._num_holders += 1

    def drop(self) -> None:
        """Remove a holder."""
        self._num_holders -= 1
        if self._num_holders == 0:
            self._lease.release()


class Generation:
    """One request. Call `start`, then `next` until `finished`, then read `usage`; `close` in any case.

    Attributes:
        finished: every choice has its finish reason.
    """

    def __init__(self, service: Service) -> None:
        self.finished = False
        self._service = service
        self._arrival_s = time.monotonic()
        self._lease: SharedLease | None = None
        self._streams: list[RequestStream] = []
        self._choices: list[ChoiceAssembler] = []
        self._pending: dict[asyncio.Task[RequestEvent], int] = {}
        self._last_token_s: dict[int, float] = {}
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._opened = False

    async def start(self, raw: bytes) -> Prepared:
        """Check the request, bring its pictures into shared memory and hand it to the engine.

        Raises:
            M3Error: what is wrong with the request or with the server.
        """
        service = self._service
        prepared = await service.in_thread(service.checker.prepare, raw)
        items, token_ids = await self._place_media(prepared)
        self._num_prompt_tokens = len(token_ids)
        sampling = fit(prepared.call, len(token_ids), service.max_model_len)
        # The engine's work starts only now; nothing awaits from here on.
        identity = secrets.token_hex(12)
        for index in range(prepared.call.num_choices):
            self._submit(f"{identity}-{index}", token_ids, items, sampling, prepared, index)
        return prepared

    async def next(self) -> list[ChunkChoice]:
        """The next deltas, at least one; none at all when there was nothing to say for `HEARTBEAT_S`.

        Raises:
            M3Error: the request failed in the engine, or the engine died.
        """
        if not self._opened:
            self._opened = True
            self._pending = {self._event_of(index): index for index in range(len(self._streams))}
            return [choice.open() for choice in self._choices]
        deltas: list[ChunkChoice] = []
        deadline_s = time.monotonic() + HEARTBEAT_S
        # Tokens whose text is held back give no delta.
        while self._pending and not deltas:
            timeout_s = max(0.0, deadline_s - time.monotonic())
            done, _ = await asyncio.wait(self._pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            deltas = self._take(done)
        self.finished = not self._pending
        return deltas

    @property
    def usage(self) -> Usage:
        """What the request cost, the prompt counted once."""
        num_output_tokens = sum(choice.num_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=self._num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptDetails(self._num_cached_tokens),
            completion_tokens_details=CompletionDetails(sum(choice.num_reasoning_tokens for choice in self._choices)),
        )

    def close(self) -> None:
        """Abort what still runs and let the media go, as soon as the engine does not read them any more."""
        for stream in self._streams:
            stream.abort()
        for task in self._pending:
            task.cancel()
        self._pending.clear()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.drop()

    def elapsed_s(self) -> float:
        """Time since the request arrived."""
        return time.monotonic() - self._arrival_s

    async def _place_media(self, prepared: Prepared) -> tuple[tuple[MediaItem, ...], list[int]]:
        """Plan the pictures, expand their placeholders, check the length, decode them."""
        if not prepared.sources:
            return (), prepared.prompt.token_ids
        service = self._service
        try:
            plans = await service.media.plan(prepared.sources)
            layouts = [MediaLayout(plan.kind, plan.grid_thw) for plan in plans]
            prompt = await service.in_thread(service.chat_format.expand_media, prepared.prompt, layouts)
            fit(prepared.call, len(prompt.token_ids), service.max_model_len)
            lease = await service.media.load(plans)
        except MediaError:
            service.metrics.media_refused()
            raise
        self._lease = SharedLease(lease)
        service.metrics.media_loaded(len(plans))
        items = tuple(
            MediaItem(plan.kind, plan.content_hash, plan.grid_thw, ranges, ref)
            for plan, ranges, ref in zip(plans, prompt.ranges, lease.refs, strict=True)
        )
        return items, prompt.token_ids

    def _submit(
        self,
        request_id: str,
        token_ids: list[int],
        items: tuple[MediaItem, ...],
        sampling: SamplingParams,
        prepared: Prepared,
        index: int,
    ) -> None:
        call = prepared.call
        if call.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=nth_seed(call.seed, index))
        message = Submit(request_id, token_ids, sampling, items, call.priority)
        lease = self._lease
        if lease is None:
            stream = self._service.engine.submit(message)
        else:
            lease.hold()
            try:
                stream = self._service.engine.submit(message, lease.drop)
            except BaseException:
                lease.drop()
                raise
        self._streams.append(stream)
        self._choices.append(ChoiceAssembler(index, self._service.chat_format, call.thinking_mode, call.stops))

    def _take(self, done: set[asyncio.Task[RequestEvent]]) -> list[ChunkChoice]:
        """The deltas of the events that arrived, in the order of the choices."""
        deltas: list[ChunkChoice] = []
        for task in sorted(done, key=self._pending.__getitem__):
            index = self._pending.pop(task)
            event = task.result()
            deltas += self._on_event(index, event)
            if isinstance(event, Tokens):
                self._pending[self._event_of(index)] = index
        return deltas

    def _event_of(self, index: int) -> asyncio.Task[RequestEvent]:
        return asyncio.ensure_future(anext(self._streams[index]))

    def _on_event(self, index: int, event: RequestEvent) -> list[ChunkChoice]:
        choice = self._choices[index]
        match event:
            case Tokens():
                self._observe(index, len(event.token_ids))
                deltas = choice.push(event)
                if choice.stopped:
                    self._streams[index].abort()
                return deltas
            case Finished():
                if event.reason is FinishReason.ABORT and not choice.stopped:
                    raise EngineUnavailableError("the server is shutting down")
                if index == 0:
                    self._num_cached_tokens = event.num_cached_tokens
                deltas = choice.finish(event.reason)
                self._service.metrics.choice_finished(str(deltas[-1].finish_reason))
                return deltas
            case Failed():
                if choice.stopped:
                    return choice.finish(FinishReason.STOP)
                raise failure(event)

    def _observe(self, index: int, num_tokens: int) -> None:
        now_s = time.monotonic()
        if not self._last_token_s:
            self._service.metrics.first_token(now_s - self._arrival_s)
        if index in self._last_token_s:
            self._service.metrics.next_tokens(now_s - self._last_token_s[index], num_tokens)
        self._last_token_s[index] = now_s


def failure(event: Failed) -> M3Error:
    """The client's error for a failed sequence."""
    errors: dict[FailureKind, type[M3Error]] = {
        FailureKind.NO_FIT: ContextLengthError,
        FailureKind.INVALID: BadRequestError,
        FailureKind.INTERNAL: RequestFailedError,
        FailureKind.ENGINE_DEAD: EngineUnavailableError,
    }
    return errors[event.kind](event.message)


def nth_seed(seed: int, index: int) -> int:
    """The seed of a choice: the next int64 for every choice, wrapping around."""
    return (seed + index + 2**63) % 2**64 - 2**63
