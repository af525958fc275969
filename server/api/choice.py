"""One choice's way from token ids to deltas: bytes, text, then reasoning, content and calls; stop strings, log-probabilities.

Stop strings apply to the content only. Log-probabilities are the content's too: a token's entry goes out with the delta that
carries the token's first character, so tokens of reasoning, of calls, of markers, of special texts and of what a stop string
cut off have none. No I/O and no engine in here: token events in, `ChunkChoice` out.
"""

from collections import deque
from typing import Protocol

import msgspec

from server.api.chat_format import ChatFormat
from server.api.delta_writer import DeltaWriter
from server.api.reply import ReplyParser
from server.api.reply_events import ContentDelta, ReasoningDelta, ReplyEvent, ToolArgumentsDelta, ToolCallStart
from server.api.stop import StopMatcher
from server.api.tokenizer import SpecialTokens
from server.api.tool_parser import ToolCallParser
from server.api.tool_schema import ToolSchemas
from server.api.wire import LOWEST_LOGPROB, ChunkChoice, Delta, TokenLogprob, TopLogprob
from server.messages import FinishReason, TokenLogprobs, Tokens
from server.settings import ThinkingMode

TOOL_CALLS = "tool_calls"


class ReplyRules(msgspec.Struct, frozen=True):
    """What a reply's text is made into; the same for all choices of a request.

    Attributes:
        thinking_mode: what the prompt was rendered with; None for text that has no form: all of it is content.
        stops: strings that end the content.
        keeps_stop: the stop string that ended the content is its last part.
        shows_special: special tokens are text, the end of the turn too.
        schemas: the functions that calls are read for; None where no call is wanted.
        max_calls: what comes behind the end of that many calls is dropped; None for no limit.
    """

    thinking_mode: ThinkingMode | None = None
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    shows_special: bool = False
    schemas: ToolSchemas | None = None
    max_calls: int | None = None


class Parser(Protocol):
    """What `ReplyParser` does."""

    @property
    def in_reasoning(self) -> bool:
        """Whether text that arrives now would be reasoning."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether nothing that comes later is part of the answer."""
        ...

    @property
    def settled_end(self) -> int:
        """A place in the raw text that content which is still to come begins behind."""
        ...

    def push(self, text: str) -> list[ReplyEvent]:
        """Take the next piece of the raw text."""
        ...

    def finish(self, truncated: bool) -> list[ReplyEvent]:
        """The text ended."""
        ...


class PlainParser:
    """The parser of text that has no form."""

    in_reasoning = False
    is_done = False
    settled_end = 0

    def __init__(self) -> None:
        self._end = 0

    def push(self, text: str) -> list[ReplyEvent]:
        """All of it is content."""
        start, self._end = self._end, self._end + len(text)
        return [ContentDelta(start, text)] if text else []

    def finish(self, truncated: bool) -> list[ReplyEvent]:
        """Nothing is held back."""
        return []


class _PendingToken(msgspec.Struct, frozen=True):
    """A token whose first character was not sent yet; `start` is that character's place in the reply's raw text."""

    start: int
    token_id: int
    logprobs: TokenLogprobs


class ChoiceAssembler:
    """The text side of one choice.

    Attributes:
        index: the choice's number.
        stopped: a stop string matched or all wanted calls are whole; nothing that comes later is part of the answer.
        num_tokens: generated tokens up to the end of the answer, a stop token included.
        num_reasoning_tokens: how many of them left the reply inside its reasoning.
    """

    def __init__(self, index: int, chat_format: ChatFormat, rules: ReplyRules) -> None:
        self.index = index
        self.stopped = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._format = chat_format
        self._rules = rules
        self._special = _special_tokens(rules)
        self._detokenizer = chat_format.detokenizer(self._special)
        self._parser = _parser(rules)
        self._matcher = StopMatcher(rules.stops)
        self._writer = DeltaWriter(index)
        self._pending: deque[_PendingToken] = deque()
        self._spans: deque[ContentDelta] = deque()  # content that the matcher was given and did not give back
        self._num_calls = 0  # calls that were sent
        self._raw_len = 0  # characters that the detokenizer gave

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the content."""
        return self._matcher.matched

    def open(self) -> ChunkChoice:
        """The first delta."""
        return ChunkChoice(self.index, Delta(role="assistant", content=""))

    def push(self, tokens: Tokens) -> list[ChunkChoice]:
        """Take the next tokens; returns the deltas that are decided, in the order of the reply's text."""
        for position, token_id in enumerate(tokens.token_ids):
            if self.stopped:
                break
            if tokens.logprobs and self._format.is_shown(token_id, self._special):
                self._pending.append(_PendingToken(self._raw_len, token_id, tokens.logprobs[position]))
            self._take(self._detokenizer.push([token_id]))
            self.num_tokens += 1
            self.num_reasoning_tokens += self._parser.in_reasoning
        return self._writer.take()

    def finish(self, reason: FinishReason) -> list[ChunkChoice]:
        """Release what was held back and close the choice with OpenAI's finish reason."""
        if not self.stopped:
            self._take(self._detokenizer.flush())
        if not self.stopped:
            self._handle(self._parser.finish(truncated=reason is FinishReason.LENGTH))
        self._release_content()
        return [*self._writer.take(), ChunkChoice(self.index, Delta(), None, self._finish_reason(reason))]

    def _finish_reason(self, reason: FinishReason) -> str:
        if reason is FinishReason.LENGTH and not self.stopped:
            return reason.value
        return TOOL_CALLS if self._num_calls else FinishReason.STOP.value

    def _take(self, text: str) -> None:
        self._raw_len += len(text)
        if text:
            self._handle(self._parser.push(text))
            self._forget(self._parser.settled_end)
            if self._parser.is_done:
                self._release_content()
                self.stopped = True

    def _handle(self, events: list[ReplyEvent]) -> None:
        for event in events:
            if self.stopped:
                break
            match event:
                case ReasoningDelta():
                    self._forget(event.start + len(event.text))
                    self._writer.reasoning(event.text)
                case ContentDelta():
                    self._match(event)
                case ToolCallStart():
                    self._release_content()
                    self._num_calls += 1
                    self._writer.call(event.index, event.name)
                case ToolArgumentsDelta():
                    self._writer.arguments(event.index, event.fragment)

    def _match(self, content: ContentDelta) -> None:
        self._spans.append(content)
        text, self.stopped = self._matcher.push(content.text)
        if self.stopped and self._rules.keeps_stop:
            text += self._matcher.matched or ""
        self._send(text)

    def _release_content(self) -> None:
        """Send what may no longer become a stop string, because other things follow."""
        if self.stopped:
            return
        if held := self._matcher.flush():
            self._send(held)
            self._matcher = StopMatcher(self._rules.stops)

    def _send(self, text: str) -> None:
        """Send the next characters of what the matcher was given, with the entries of the tokens that begin in them."""
        entries: list[TokenLogprob] = []
        num_left = len(text)
        while num_left:
            span = self._spans.popleft()
            length = min(num_left, len(span.text))
            if length < len(span.text):
                self._spans.appendleft(ContentDelta(span.start + length, span.text[length:]))
            entries += self._released(span.start, span.start + length)
            num_left -= length
        self._writer.content(text, entries)

    def _forget(self, end: int) -> None:
        """Drop the tokens that begin in the raw text before `end`: those of a long reasoning or call would take much memory."""
        while self._pending and self._pending[0].start < end:
            self._pending.popleft()

    def _released(self, begin: int, end: int) -> list[TokenLogprob]:
        """Entries of the tokens that begin in a piece of content that is being sent; those before it are no content."""
        self._forget(begin)
        entries: list[TokenLogprob] = []
        while self._pending and self._pending[0].start < end:
            entries.append(self._entry(self._pending.popleft()))
        return entries

    def _entry(self, token: _PendingToken) -> TokenLogprob:
        text, data = self._spell(token.token_id)
        chosen = token.logprobs
        top = [
            TopLogprob(*self._spell_with(token_id, logprob))
            for token_id, logprob in zip(chosen.top_ids, chosen.top_logprobs, strict=True)
        ]
        return TokenLogprob(text, max(chosen.logprob, LOWEST_LOGPROB), data, top)

    def _spell(self, token_id: int) -> tuple[str, list[int]]:
        data = self._format.token_bytes(token_id)
        return data.decode(errors="replace"), list(data)

    def _spell_with(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        text, data = self._spell(token_id)
        return text, max(logprob, LOWEST_LOGPROB), data


def _special_tokens(rules: ReplyRules) -> SpecialTokens:
    """Parameters may be tagged with special tokens that look like tags."""
    if rules.shows_special:
        return SpecialTokens.ALL
    return SpecialTokens.HIDDEN if rules.schemas is None else SpecialTokens.TAGS


def _parser(rules: ReplyRules) -> Parser:
    if rules.thinking_mode is None:
        return PlainParser()
    tools = None if rules.schemas is None else ToolCallParser(rules.schemas, rules.max_calls)
    return ReplyParser(rules.thinking_mode, tools)
