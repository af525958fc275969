"""Deltas of the chat path to the events of an answer in Anthropic's shape, and to the whole answer that they add up to.

A pure state machine: one block is open at a time, and a delta of another kind ends it. An answer that is not streamed is the
state after the last event.
"""

import msgspec
from msgspec import UNSET
from pydantic_core import from_json

from server.api.messages_wire import (
    SIGNATURE,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    Stop,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    message_usage,
)
from server.api.wire import ChunkChoice, ToolCallDelta, Usage

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageStream:
    """One answer. `open` once, `push` every delta, `close` once; `message` is then the whole answer.

    Attributes:
        message: what is known of the answer so far, without the block that is open.
    """

    def __init__(self, message_id: str, model: str) -> None:
        self.message = Message(
            id=message_id, model=model, content=[], stop_reason=None, stop_sequence=None, usage=MessageUsage(0, 0)
        )
        self._blocks: list[Block] = []
        self._open: Block | None = None
        self._call_index = -1  # of the open block, when it is a call
        self._texts: list[str] = []  # of the open block
        self._stop = "end_turn"

    def open(self, num_prompt_tokens: int) -> list[Event]:
        """The first events. What the cache holds is not known yet, so all of the prompt counts as input."""
        self.message = msgspec.structs.replace(self.message, usage=MessageUsage(num_prompt_tokens, 0))
        return [MessageStart(self.message), Ping()]

    def push(self, chunk: ChunkChoice) -> list[Event]:
        """The events of one delta."""
        events: list[Event] = []
        delta = chunk.delta
        if delta.reasoning_content:
            self._continue(ThinkingBlock("", ""), events)
            self._add(delta.reasoning_content, ThinkingDelta(delta.reasoning_content), events)
        if delta.content:
            self._continue(TextBlock(""), events)
            self._add(delta.content, TextDelta(delta.content), events)
        for call in delta.tool_calls or ():
            self._call(call, events)
        if chunk.finish_reason is not None:
            self._stop = STOP_REASONS[chunk.finish_reason]
        return events

    def close(self, usage: Usage, stop_sequence: str | None, *, fills_window: bool = False) -> list[Event]:
        """The last events.

        Args:
            usage: what the request cost.
            stop_sequence: the client's string that ended the answer.
            fills_window: the answer was cut where the model's window ends, before the client's own limit.
        """
        events: list[Event] = []
        self._end_block(events)
        reason = self._stop
        if reason == "max_tokens" and fills_window:
            reason = "model_context_window_exceeded"
        if reason == "end_turn" and stop_sequence is not None:
            reason = "stop_sequence"
        stop = Stop(reason, stop_sequence if reason == "stop_sequence" else None)
        costs = message_usage(usage)
        self.message = msgspec.structs.replace(
            self.message,
            content=self._blocks,
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=costs,
        )
        return [*events, MessageDelta(stop, costs), MessageStop()]

    def _call(self, call: ToolCallDelta, events: list[Event]) -> None:
        if call.id is not UNSET and call.function.name is not UNSET:
            self._end_block(events)
            self._begin_block(ToolUseBlock(call.id, call.function.name, {}), events)
            self._call_index = call.index
        if call.function.arguments:
            assert call.index == self._call_index, "calls follow one another"
            self._add(call.function.arguments, InputDelta(call.function.arguments), events)

    def _continue(self, block: Block, events: list[Event]) -> None:
        """See that a block of this type is open."""
        if type(self._open) is not type(block):
            self._end_block(events)
            self._begin_block(block, events)

    def _begin_block(self, block: Block, events: list[Event]) -> None:
        self._open = block
        self._call_index = -1
        events.append(BlockStart(len(self._blocks), block))

    def _add(self, text: str, delta: TextDelta | ThinkingDelta | InputDelta, events: list[Event]) -> None:
        self._texts.append(text)
        events.append(BlockDelta(len(self._blocks), delta))

    def _end_block(self, events: list[Event]) -> None:
        block, self._open = self._open, None
        text = "".join(self._texts)
        self._texts.clear()
        index = len(self._blocks)
        match block:
            case None:
                return
            case ThinkingBlock():
                events.append(BlockDelta(index, SignatureDelta(SIGNATURE)))
                self._blocks.append(ThinkingBlock(text, SIGNATURE))
            case TextBlock():
                self._blocks.append(TextBlock(text))
            case ToolUseBlock():
                # Arguments that the token limit cut off are read as far as they go, as Anthropic's own clients do.
                arguments = from_json(text, allow_partial=True) if text else {}
                self._blocks.append(ToolUseBlock(block.id, block.name, arguments))
        events.append(BlockStop(index))
