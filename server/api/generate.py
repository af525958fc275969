"""One request from its body to its last delta, and everything it holds on the way, whatever endpoint it came to.

`Generation` owns the request's engine streams and media memory. `close` gives all of it back; it is a plain function, may be
called at any moment and more than once, and whoever made the generation calls it from a `finally`.
"""

import asyncio
import secrets
import time
from typing import Final

import msgspec

from server.api.choice import ChoiceAssembler
from server.api.prepare import Prepared, fit
from server.api.prompt import MediaLayout
from server.api.request_stream import RequestStream
from server.api.service import Service
from server.api.timeline import Timeline
from server.api.validate import Call
from server.api.wire import ChunkChoice, CompletionDetails, PromptDetails, Usage
from server.errors import (
    BadRequestError,
    ContextLengthError,
    EngineUnavailableError,
    M3Error,
    MediaError,
    RequestFailedError,
    ShuttingDownError,
)
from server.media.pipeline import MediaLease
from server.media.types import MediaPlan
from server.messages import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    MediaItem,
    RequestEvent,
    SamplingParams,
    Submit,
    TerminalEvent,
    TokenLogprobs,
    Tokens,
)

# Proxies commonly close a connection that was silent for 30 s or more.
HEARTBEAT_S: Final = 10.0
# Tokens that become text without a pause; a client that was slow may find many more at once.
MAX_TOKENS_PER_TURN: Final = 256


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
        timeline: when what happened to it.
        hit_limit: a choice ended because it had no more tokens left.
        prompts: the token ids of the expanded prompts, once started; the choices of each stand together, in this order.
        prompt_logprobs: for each prompt, one entry per token but the first, once a choice of it has said anything; empty
            unless asked for.
    """

    def __init__(self, service: Service) -> None:
        self.finished = False
        self.timeline = Timeline(service.metrics.front)
        self.hit_limit = False
        self.prompts: list[list[int]] = []
        self.prompt_logprobs: list[list[TokenLogprobs]] = []
        self._service = service
        self._id = secrets.token_hex(12)
        self._lease: SharedLease | None = None
        self._streams: list[RequestStream] = []
        self._choices: list[ChoiceAssembler] = []
        self._pending: dict[asyncio.Task[RequestEvent], int] = {}
        self._num_choices = 1  # of each prompt
        self._max_tokens = 0
        self._num_cached_tokens = 0
        self._num_queued_tokens = 0  # counted in at the service
        self._opened = False

    async def start(self, prepared: Prepared) -> None:
        """Check the request's grammar, bring its pictures into shared memory and hand it to the engine.

        Raises:
            M3Error: what is wrong with the request or with the server.
        """
        service, call = self._service, prepared.call
        if call.sampling.grammar is not None:
            await service.grammars.check(call.sampling.grammar, call.format_param)
        num_tokens = sum(len(token_ids) for token_ids in (prepared.prompt.token_ids, *prepared.more_prompts))
        self._queue(num_tokens * call.num_choices)
        items, token_ids = await self._place_media(prepared)
        self.prompts = [token_ids, *prepared.more_prompts]
        self.prompt_logprobs = [[] for _ in self.prompts]
        self._num_choices = call.num_choices
        samplings = [fit(call, len(prompt), service.max_model_len) for prompt in self.prompts]
        # The engine's work starts only now; nothing awaits from here on.
        for prompt, sampling in zip(self.prompts, samplings, strict=True):
            for _ in range(call.num_choices):
                self._submit(prompt, items, sampling, call)
            items = ()
        self._max_tokens = samplings[0].max_tokens
        self.timeline.submitted()
        self._drop_media()  # the engine's from here on: what the client does with the answer cannot keep them

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
            deltas = await self._take(done)
        self.finished = not self._pending
        return deltas

    @property
    def usage(self) -> Usage:
        """What the request cost, every prompt counted once."""
        num_prompt_tokens = sum(map(len, self.prompts))
        num_output_tokens = sum(choice.num_tokens for choice in self._choices)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
            prompt_tokens_details=PromptDetails(self._num_cached_tokens),
            completion_tokens_details=CompletionDetails(sum(choice.num_reasoning_tokens for choice in self._choices)),
        )

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the first choice's content."""
        return self._choices[0].stop_string

    def close(self) -> None:
        """Abort what still runs and let the media go, as soon as the engine does not read them any more."""
        for stream in self._streams:
            stream.abort()
        for task in self._pending:
            task.cancel()
        self._pending.clear()
        self._unqueue()
        self._drop_media()

    @property
    def is_submitted(self) -> bool:
        """Whether it reached the engine."""
        return bool(self._streams)

    def answered(self) -> None:
        """The client has the whole answer."""
        usage = self.usage
        self.timeline.answered(usage.completion_tokens, len(self._choices))
        self._service.metrics.front.asked(usage.prompt_tokens, self._max_tokens)

    async def _place_media(self, prepared: Prepared) -> tuple[tuple[MediaItem, ...], list[int]]:
        """Plan the pictures, expand their placeholders, check the length, decode them."""
        if not prepared.sources:
            return (), prepared.prompt.token_ids
        service = self._service
        plans: tuple[MediaPlan, ...] = ()
        try:
            plans = await service.media.plan(prepared.sources)
            layouts = [MediaLayout(plan.kind, plan.grid_thw, plan.timestamps_s) for plan in plans]
            prompt = await service.in_thread(service.chat_format.expand_media, prepared.prompt, layouts)
            fit(prepared.call, len(prompt.token_ids), service.max_model_len)
            num_more_tokens = len(prompt.token_ids) - len(prepared.prompt.token_ids)
            self._queue(num_more_tokens * prepared.call.num_choices)
            lease = await service.media.load(plans)
        except MediaError:
            service.metrics.front.media_refused()
            raise
        finally:
            service.media.forget(plans)
        self._lease = SharedLease(lease)
        items = tuple(
            MediaItem(plan.kind, plan.content_hash, plan.grid_thw, ranges, ref)
            for plan, ranges, ref in zip(plans, prompt.ranges, lease.refs, strict=True)
        )
        return items, prompt.token_ids

    def _submit(self, token_ids: list[int], items: tuple[MediaItem, ...], sampling: SamplingParams, call: Call) -> None:
        """Start the next choice."""
        index = len(self._choices)
        if call.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=nth_seed(call.seed, index % self._num_choices))
        message = Submit(f"{self._id}-{index}", token_ids, sampling, items, call.priority, call.cache_salt)
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
        self._choices.append(ChoiceAssembler(index, self._service.chat_format, call.rules))

    def _drop_media(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.drop()

    def _queue(self, num_tokens: int) -> None:
        self._service.queue(num_tokens, num_own=self._num_queued_tokens)
        self._num_queued_tokens += num_tokens

    def _unqueue(self) -> None:
        num_tokens, self._num_queued_tokens = self._num_queued_tokens, 0
        self._service.unqueue(num_tokens)

    async def _take(self, done: set[asyncio.Task[RequestEvent]]) -> list[ChunkChoice]:
        """The deltas of the events that arrived, in the order of the choices."""
        deltas: list[ChunkChoice] = []
        for task in sorted(done, key=self._pending.__getitem__):
            index = self._pending.pop(task)
            event = task.result()
            if isinstance(event, Tokens):
                deltas += await self._on_tokens(index, event)
            else:
                deltas += self._on_end(index, event)
            if isinstance(event, Tokens):
                self._pending[self._event_of(index)] = index
        return deltas

    def _event_of(self, index: int) -> asyncio.Task[RequestEvent]:
        return asyncio.ensure_future(anext(self._streams[index]))

    async def _on_tokens(self, index: int, tokens: Tokens) -> list[ChunkChoice]:
        self._unqueue()
        self.timeline.tokens(index, len(tokens.token_ids), self._streams[index].started_s)
        if tokens.prompt_logprobs:  # the same from every choice
            self.prompt_logprobs[index // self._num_choices] = tokens.prompt_logprobs
        choice = self._choices[index]
        deltas: list[ChunkChoice] = []
        for start in range(0, len(tokens.token_ids), MAX_TOKENS_PER_TURN):
            if start:
                await asyncio.sleep(0)
            end = start + MAX_TOKENS_PER_TURN
            deltas += choice.push(Tokens(tokens.request_id, tokens.token_ids[start:end], tokens.logprobs[start:end]))
        if choice.stopped:
            self._streams[index].abort()
        return deltas

    def _on_end(self, index: int, event: TerminalEvent) -> list[ChunkChoice]:
        choice = self._choices[index]
        if isinstance(event, Failed) and not choice.stopped:
            raise failure(event)
        reason = FinishReason.STOP
        if isinstance(event, Finished):
            if event.reason is FinishReason.ABORT and not choice.stopped:
                raise ShuttingDownError("the server is shutting down")
            reason = event.reason
            if index % self._num_choices == 0:
                self._num_cached_tokens += event.num_cached_tokens
        deltas = choice.finish(reason)
        self.hit_limit = self.hit_limit or reason is FinishReason.LENGTH
        self._service.metrics.front.choice_finished(str(deltas[-1].finish_reason))
        return deltas


def failure(event: Failed) -> M3Error:
    """The client's error for a failed sequence."""
    errors: dict[FailureKind, type[M3Error]] = {
        FailureKind.NO_FIT: ContextLengthError,
        FailureKind.INVALID: BadRequestError,
        FailureKind.INTERNAL: RequestFailedError,
        FailureKind.ENGINE_DEAD: EngineUnavailableError,
        FailureKind.SHUTDOWN: ShuttingDownError,
    }
    return errors[event.kind](event.message)


def nth_seed(seed: int, index: int) -> int:
    """The seed of a choice: the next int64 for every choice, wrapping around."""
    return (seed + index + 2**63) % 2**64 - 2**63
