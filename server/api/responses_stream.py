"""Deltas of the chat path to the events of the Responses API, and to the response that they add up to.

A pure state machine: one item is open at a time, and a delta of another kind ends it. An answer that is not streamed is the
response after the last event.
"""

import secrets

import msgspec
from msgspec import UNSET

from server.api.responses_wire import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    Echo,
    ErrorEvent,
    Event,
    Failed,
    FunctionCallItem,
    Incomplete,
    IncompleteDetails,
    InProgress,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputItem,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    TextDelta,
    TextDone,
    response_usage,
)
from server.api.wire import ChunkChoice, TokenLogprob, ToolCallDelta, Usage
from server.errors import M3Error


class ResponseStream:
    """One response. `open` once, `push` every delta, then `close` or `fail` once.

    Attributes:
        response: what is known so far; it lists the items that have ended.
    """

    def __init__(self, response_id: str, created_at: int, model: str, echo: Echo) -> None:
        self.response = Response(
            id=response_id, created_at=created_at, status=IN_PROGRESS, model=model, **msgspec.structs.asdict(echo)
        )
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._call_index = -1  # of the open item, when it is a call
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[TokenLogprob] = []  # of the open item
        self._is_cut = False
        self._num_events = 0

    def open(self) -> list[Event]:
        """The first events."""
        return [Created(self._next(), self.response), InProgress(self._next(), self.response)]

    def push(self, chunk: ChunkChoice) -> list[Event]:
        """The events of one delta."""
        events: list[Event] = []
        delta = chunk.delta
        if delta.reasoning_content:
            self._reasoning(delta.reasoning_content, events)
        if delta.content:
            self._content(delta.content, tuple(chunk.logprobs.content) if chunk.logprobs else (), events)
        for call in delta.tool_calls or ():
            self._call(call, events)
        if chunk.finish_reason is not None:
            self._is_cut = chunk.finish_reason == "length"
        return events

    def close(self, usage: Usage) -> list[Event]:
        """The last events."""
        events: list[Event] = []
        self._end_item(events, INCOMPLETE if self._is_cut else COMPLETED)
        self.response = msgspec.structs.replace(
            self.response,
            status=INCOMPLETE if self._is_cut else COMPLETED,
            incomplete_details=IncompleteDetails("max_output_tokens") if self._is_cut else None,
            usage=response_usage(usage),
        )
        if self._is_cut:
            return [*events, Incomplete(self._next(), self.response)]
        return [*events, Completed(self._next(), self.response)]

    def fail(self, error: M3Error) -> list[Event]:
        """The last events of a response that failed; an item that was open stays as it was."""
        failure = ResponseError(error.code or error.type, error.message)
        self.response = msgspec.structs.replace(self.response, status=FAILED, error=failure)
        body = error.body()["error"]
        return [
            Failed(self._next(), self.response),
            ErrorEvent(self._next(), error.code, error.message, error.param, body),
        ]

    def _next(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _reasoning(self, text: str, events: list[Event]) -> None:
        if not isinstance(self._open, ReasoningItem):
            self._end_item(events, COMPLETED)
            item = ReasoningItem(_item_id("rs"), IN_PROGRESS)
            self._begin_item(item, events)
            events.append(PartAdded(self._next(), item.id, len(self._items), 0, ReasoningText("")))
        else:
            item = self._open
        self._texts.append(text)
        events.append(ReasoningDelta(self._next(), item.id, len(self._items), 0, text))

    def _content(self, text: str, logprobs: tuple[TokenLogprob, ...], events: list[Event]) -> None:
        if not isinstance(self._open, MessageItem):
            self._end_item(events, COMPLETED)
            item = MessageItem(_item_id("msg"), IN_PROGRESS)
            self._begin_item(item, events)
            events.append(PartAdded(self._next(), item.id, len(self._items), 0, OutputText("")))
        else:
            item = self._open
        self._texts.append(text)
        self._logprobs += logprobs
        events.append(TextDelta(self._next(), item.id, len(self._items), 0, text, logprobs))

    def _call(self, call: ToolCallDelta, events: list[Event]) -> None:
        if call.id is not UNSET and call.function.name is not UNSET:
            self._end_item(events, COMPLETED)
            self._begin_item(FunctionCallItem(_item_id("fc"), IN_PROGRESS, call.id, call.function.name, ""), events)
            self._call_index = call.index
        if arguments := call.function.arguments:
            assert self._open is not None
            assert call.index == self._call_index, "calls follow one another"
            self._texts.append(arguments)
            events.append(ArgumentsDelta(self._next(), self._open.id, len(self._items), arguments))

    def _begin_item(self, item: OutputItem, events: list[Event]) -> None:
        self._open = item
        self._call_index = -1
        events.append(ItemAdded(self._next(), len(self._items), item))

    def _end_item(self, events: list[Event], status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        text, logprobs, index = "".join(self._texts), tuple(self._logprobs), len(self._items)
        self._texts.clear()
        self._logprobs.clear()
        done: OutputItem
        match item:
            case ReasoningItem():
                thought = ReasoningText(text)
                events.append(ReasoningDone(self._next(), item.id, index, 0, text))
                events.append(PartDone(self._next(), item.id, index, 0, thought))
                done = msgspec.structs.replace(item, status=status, content=(thought,))
            case MessageItem():
                part = OutputText(text, logprobs=logprobs)
                events.append(TextDone(self._next(), item.id, index, 0, text, logprobs))
                events.append(PartDone(self._next(), item.id, index, 0, part))
                done = msgspec.structs.replace(item, status=status, content=(part,))
            case FunctionCallItem():
                events.append(ArgumentsDone(self._next(), item.id, index, item.name, text))
                done = msgspec.structs.replace(item, status=status, arguments=text)
        self._items.append(done)
        self.response = msgspec.structs.replace(self.response, output=tuple(self._items))
        events.append(ItemDone(self._next(), index, done))


def _item_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
