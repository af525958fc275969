"""The whole choices that a stream's deltas add up to. An answer that is not streamed is made here and nowhere else."""

from collections.abc import Iterable

from msgspec import UNSET

from server.api.wire import (
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    FunctionCall,
    Message,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)


class _FoldedCall:
    """What one call's deltas have added up to so far."""

    def __init__(self, first: ToolCallDelta) -> None:
        assert first.id is not UNSET, "a call begins with its id"
        assert first.function.name is not UNSET, "a call begins with its name"
        self.id = first.id
        self.name = first.function.name
        self.arguments: list[str] = []

    def call(self) -> ToolCall:
        return ToolCall(id=self.id, function=FunctionCall(self.name, "".join(self.arguments)))


class _FoldedChoice:
    """What one choice's deltas have added up to so far."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.role = ""
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: dict[int, _FoldedCall] = {}
        self.logprobs: list[TokenLogprob] | None = None
        self.finish_reason = ""

    def add(self, chunk: ChunkChoice) -> None:
        delta = chunk.delta
        if delta.role is not UNSET:
            self.role = delta.role
        if delta.reasoning_content is not UNSET:
            self.reasoning.append(delta.reasoning_content)
        if delta.content is not UNSET:
            self.content.append(delta.content)
        for part in delta.tool_calls or ():
            if part.index not in self.calls:
                self.calls[part.index] = _FoldedCall(part)
            self.calls[part.index].arguments.append(part.function.arguments)
        if chunk.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += chunk.logprobs.content
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason

    def choice(self) -> Choice:
        reasoning = "".join(self.reasoning) or UNSET
        calls = [call.call() for call in self.calls.values()] or UNSET
        content = "".join(self.content) or ("" if calls is UNSET else None)
        message = Message(self.role, content, reasoning, reasoning, calls)
        logprobs = None if self.logprobs is None else ChoiceLogprobs(self.logprobs)
        return Choice(self.index, message, logprobs, self.finish_reason)


class Fold:
    """Adds up deltas as they come, in whatever way the choices are interleaved."""

    def __init__(self) -> None:
        self._choices: dict[int, _FoldedChoice] = {}

    def add(self, chunks: Iterable[ChunkChoice]) -> None:
        """Take the next deltas."""
        for chunk in chunks:
            if chunk.index not in self._choices:
                self._choices[chunk.index] = _FoldedChoice(chunk.index)
            self._choices[chunk.index].add(chunk)

    def choices(self) -> list[Choice]:
        """The choices, which must all have finished, by index."""
        return [self._choices[index].choice() for index in sorted(self._choices)]
