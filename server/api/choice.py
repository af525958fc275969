"""One choice's way from token ids to deltas: bytes to text, reasoning apart from content, stop strings, log-probabilities.

Stop strings apply to the content only. Log-probabilities are the content's too: a token's entry goes out with the delta that
carries the token's first character, so tokens of reasoning, of markers, of special texts and of what a stop string cut off
have none. No I/O and no engine in here: token events in, `ChunkChoice` out.
"""

from collections import deque

import msgspec

from server.api.chat_format import ChatFormat
from server.api.reasoning import Channel, ReasoningSplitter, Segment
from server.api.stop import StopMatcher
from server.api.wire import LOWEST_LOGPROB, ChoiceLogprobs, ChunkChoice, Delta, TokenLogprob, TopLogprob
from server.messages import FinishReason, TokenLogprobs, Tokens
from server.settings import ThinkingMode


class _PendingToken(msgspec.Struct, frozen=True):
    """A token whose first character was not sent yet; `start` is that character's place in the reply's raw text."""

    start: int
    token_id: int
    logprobs: TokenLogprobs


class ChoiceAssembler:
    """The text side of one choice.

    Attributes:
        index: the choice's number.
        stopped: a stop string matched; nothing that comes later is part of the answer.
        num_tokens: generated tokens up to the end of the answer, a stop token included.
        num_reasoning_tokens: how many of them left the reply inside its reasoning.
    """

    def __init__(self, index: int, chat_format: ChatFormat, mode: ThinkingMode, stops: tuple[str, ...]) -> None:
        self.index = index
        self.stopped = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._format = chat_format
        self._detokenizer = chat_format.detokenizer()
        self._splitter = ReasoningSplitter(mode)
        self._matcher = StopMatcher(stops)
        self._pending: deque[_PendingToken] = deque()
        self._raw_len = 0  # characters that the detokenizer gave
        self._split_len = 0  # characters that the splitter decided on
        self._content_start: int | None = None  # where the content begins in the raw text
        self._content_len = 0  # characters of content that were sent

    def open(self) -> ChunkChoice:
        """The first delta."""
        return ChunkChoice(self.index, Delta(role="assistant", content=""))

    def push(self, tokens: Tokens) -> list[ChunkChoice]:
        """Take the next tokens; returns the deltas that are decided, reasoning before content."""
        reasoning: list[str] = []
        content: list[str] = []
        for position, token_id in enumerate(tokens.token_ids):
            if self.stopped:
                break
            if tokens.logprobs and not self._format.is_special(token_id):
                self._pending.append(_PendingToken(self._raw_len, token_id, tokens.logprobs[position]))
            self._take(self._detokenizer.push([token_id]), reasoning, content)
            self.num_tokens += 1
            self.num_reasoning_tokens += self._splitter.in_reasoning
        return self._deltas(reasoning, content)

    def finish(self, reason: FinishReason) -> list[ChunkChoice]:
        """Release what was held back and close the choice with OpenAI's finish reason."""
        reasoning: list[str] = []
        content: list[str] = []
        if not self.stopped:
            self._take(self._detokenizer.flush(), reasoning, content)
            self._sort(self._splitter.flush(), reasoning, content)
        if not self.stopped:
            self._send(self._matcher.flush(), content)
        finish_reason = FinishReason.STOP if self.stopped else reason
        return [*self._deltas(reasoning, content), ChunkChoice(self.index, Delta(), None, finish_reason.value)]

    def _take(self, text: str, reasoning: list[str], content: list[str]) -> None:
        self._raw_len += len(text)
        self._sort(self._splitter.push(text), reasoning, content)

    def _sort(self, segments: list[Segment], reasoning: list[str], content: list[str]) -> None:
        for segment in segments:
            if segment.channel is Channel.REASONING:
                reasoning.append(segment.text)
            elif segment.channel is Channel.CONTENT and not self.stopped:
                if self._content_start is None:
                    self._content_start = self._split_len
                emit, self.stopped = self._matcher.push(segment.text)
                self._send(emit, content)
            self._split_len += len(segment.text)

    def _send(self, text: str, content: list[str]) -> None:
        if text:
            content.append(text)
            self._content_len += len(text)

    def _deltas(self, reasoning: list[str], content: list[str]) -> list[ChunkChoice]:
        entries = self._released()
        deltas = []
        if reasoning:
            deltas.append(ChunkChoice(self.index, Delta(reasoning_content="".join(reasoning))))
        if content:
            logprobs = ChoiceLogprobs(entries) if entries else None
            deltas.append(ChunkChoice(self.index, Delta(content="".join(content)), logprobs))
        return deltas

    def _released(self) -> list[TokenLogprob]:
        """Entries of the tokens whose first character has been sent; tokens before the content are dropped."""
        begin = self._split_len if self._content_start is None else self._content_start
        entries: list[TokenLogprob] = []
        while self._pending and self._pending[0].start < begin:
            self._pending.popleft()
        while self._pending and self._pending[0].start < begin + self._content_len:
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
