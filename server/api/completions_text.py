"""One choice of a completion: deltas of the chat path to pieces of text, with log-probabilities in columns.

Pure: no engine and no wire in here. The pieces, joined, are the whole choice.
"""

import codecs
from collections.abc import Sequence

import msgspec

from server.api.chat_format import ChatFormat
from server.api.completions_wire import CompletionChoice, CompletionLogprobs
from server.api.wire import LOWEST_LOGPROB, ChunkChoice, TokenLogprob
from server.messages import TokenLogprobs


class Spelled(msgspec.Struct, frozen=True):
    """A token with its log-probability and those of the best alternatives; None for what nothing predicts."""

    data: bytes
    logprob: float | None
    top: dict[str, float] | None


class CompletionText:
    """The text of one choice. `begin` once if the prompt is echoed, then `push` every delta."""

    def __init__(self, index: int, *, with_logprobs: bool, hides_output: bool) -> None:
        """Args: hides_output: only the end of the choice is told, as if the limit had ended it at once."""
        self._index = index
        self._with_logprobs = with_logprobs
        self._hides_output = hides_output
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def begin(self, text: str, tokens: Sequence[Spelled]) -> CompletionChoice:
        """The piece with the prompt."""
        return CompletionChoice(self._index, text, self._columns(tokens), None)

    def push(self, chunk: ChunkChoice) -> CompletionChoice | None:
        """The piece of a delta, if it has any."""
        if self._hides_output:
            return None if chunk.finish_reason is None else CompletionChoice(self._index, "", None, "length")
        text = chunk.delta.content or ""
        if not text and chunk.finish_reason is None:
            return None
        tokens = [] if chunk.logprobs is None else [_spelled_entry(entry) for entry in chunk.logprobs.content]
        return CompletionChoice(self._index, text, self._columns(tokens) if text else None, chunk.finish_reason)

    def _columns(self, tokens: Sequence[Spelled]) -> CompletionLogprobs | None:
        if not self._with_logprobs:
            return None
        columns = CompletionLogprobs([], [], [], [])
        for token in tokens:
            columns.tokens.append(spelled(token.data))
            columns.token_logprobs.append(token.logprob)
            columns.top_logprobs.append(token.top)
            columns.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(token.data))
        return columns


def joined(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    """The choice that pieces, at least one, add up to."""
    found = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    logprobs = None
    if found:
        logprobs = CompletionLogprobs(
            [token for columns in found for token in columns.tokens],
            [logprob for columns in found for logprob in columns.token_logprobs],
            [top for columns in found for top in columns.top_logprobs],
            [offset for columns in found for offset in columns.text_offset],
        )
    return CompletionChoice(pieces[0].index, "".join(piece.text for piece in pieces), logprobs, pieces[-1].finish_reason)


def spelled_prompt(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], chat_format: ChatFormat) -> list[Spelled]:
    """A prompt's tokens; `entries` are those of all but the first, which nothing predicts."""
    prompt = [Spelled(chat_format.token_bytes(token_ids[0]), None, None)]
    for token_id, entry in zip(token_ids[1:], entries, strict=True):
        data = chat_format.token_bytes(token_id)
        top = {
            spelled(chat_format.token_bytes(best_id)): max(logprob, LOWEST_LOGPROB)
            for best_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        }
        logprob = max(entry.logprob, LOWEST_LOGPROB)
        prompt.append(Spelled(data, logprob, _with_chosen(top, data, logprob)))
    return prompt


def spelled(data: bytes) -> str:
    """A token's text; one that is a part of a character is spelled in bytes, as OpenAI does, so that none look the same."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _spelled_entry(entry: TokenLogprob) -> Spelled:
    """A generated token."""
    data = bytes(entry.bytes)
    top = {spelled(bytes(best.bytes)): best.logprob for best in entry.top_logprobs}
    return Spelled(data, entry.logprob, _with_chosen(top, data, entry.logprob))


def _with_chosen(top: dict[str, float], data: bytes, logprob: float) -> dict[str, float]:
    """The alternatives, with the token that was chosen among them."""
    top.setdefault(spelled(data), logprob)
    return top
