"""Where a sequence stands in its grammar, and the compiled grammars that sequences share.

A `GrammarCursor` follows one sequence token by token: through the free text before the grammar, through the grammar's text, to
its end. What may come next is a bit mask over the vocabulary, made on the CPU. It knows neither logits nor slots.
"""

import enum
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import llguidance
import torch
from torch import Tensor

from server.grammars import GrammarError, GrammarTokenizer, reason
from server.messages import Grammar, SamplingParams, ThinkingTokens

MAX_COMPILED = 64


class GrammarCompiler:
    """Compiled grammars: the last ones used, and those that open requests will use. Thread-safe."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._num_holders: Counter[Grammar] = Counter()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """What ends a turn of this checkpoint."""
        return self._tokenizer.eos_token_ids

    def has(self, grammar: Grammar) -> bool:
        """Whether `matcher` returns at once."""
        with self._lock:
            return grammar in self._compiled

    def hold(self, grammar: Grammar) -> None:
        """Keep `grammar` once it is compiled, however many others are, until it is let go as often as it was held."""
        with self._lock:
            self._num_holders[grammar] += 1

    def let_go(self, grammar: Grammar) -> None:
        """Undo one `hold`."""
        with self._lock:
            self._num_holders[grammar] -= 1
            if not self._num_holders[grammar]:
                del self._num_holders[grammar]
                self._evict()

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher of the caller's own, at the beginning. The first one of a grammar takes 1 ms, up to 100 for large ones.

        Raises:
            GrammarError: the grammar cannot be used.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = self._tokenizer.compile(grammar)
            with self._lock:
                self._compiled[grammar] = compiled
                self._evict()
        return compiled.deep_copy()

    def forget(self, grammar: Grammar) -> None:
        """Compile anew next time: sequences share a grammar's lexer states, and one of them may have used them up."""
        with self._lock:
            self._compiled.pop(grammar, None)

    def _evict(self) -> None:
        """Forget the least recently used ones that nobody holds; those that are held may be more than `MAX_COMPILED`."""
        num_excess = len(self._compiled) - MAX_COMPILED
        if num_excess > 0:
            idle = (grammar for grammar in self._compiled if grammar not in self._num_holders)
            for grammar in list(islice(idle, num_excess)):
                del self._compiled[grammar]


class _Phase(enum.Enum):
    START = enum.auto()  # the first token decides whether there is free text
    FREE = enum.auto()
    INSIDE = enum.auto()


class GrammarCursor:
    """One sequence's place.

    Attributes:
        grammar: what is followed.
        matcher: where it stands inside the grammar; only read by `fill_masks`.
        fault: why the sequence cannot go on; None while it can.
    """

    def __init__(self, matcher: llguidance.LLMatcher, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        """Begin before the first token.

        Args:
            matcher: at the beginning, not shared.
            params: with a grammar.
            eos_token_ids: stop tokens of the checkpoint; they end the grammar's text when `params` has no stop token.
        """
        assert params.grammar is not None
        self.grammar: Grammar = params.grammar
        self.matcher = matcher
        self.fault: str | None = None
        self._thinking: ThinkingTokens | None = params.thinking
        self._ends = tuple(dict.fromkeys(params.stop_token_ids or eos_token_ids))
        self._stops_at_will = bool(params.stop_token_ids)
        self._all_ends = tuple(dict.fromkeys((*self._ends, *eos_token_ids)))
        if params.thinking is None:
            self._phase = _Phase.INSIDE
        else:
            self._phase = _Phase.FREE if params.thinking.opener is None else _Phase.START

    @property
    def is_masked(self) -> bool:
        """Whether the matcher's mask applies to the next token; otherwise only `banned_ids` are out."""
        return self._phase is not _Phase.FREE

    @property
    def must_end(self) -> bool:
        """Whether only a stop token can come next, so that nothing may hold it back."""
        return self._phase is _Phase.INSIDE and self.matcher.is_stopped()

    def banned_ids(self) -> tuple[int, ...]:
        """Where no mask applies: the sequence must not end before the grammar's text."""
        return () if self.is_masked else self._all_ends

    def exceptions(self) -> Iterator[tuple[int, bool]]:
        """Tokens whose bit in the mask is not the matcher's to decide: (id, allowed)."""
        can_end = self.matcher.is_accepting() and (self._stops_at_will or self.matcher.is_stopped())
        for token_id in self._all_ends:
            yield token_id, can_end and token_id in self._ends
        if self._phase is _Phase.START and self._thinking is not None and self._thinking.opener is not None:
            yield self._thinking.opener, True
            yield self._thinking.closer, True

    def check(self) -> None:
        """Note what went wrong in the matcher, if anything did."""
        if self.fault is None and self.matcher.is_error():
            self.fault = f"the output cannot follow its grammar: {reason(self.matcher)}"

    def advance(self, token_id: int) -> None:
        """Take the next token of the sequence."""
        if self._phase is _Phase.INSIDE or not self._take_marker(token_id):
            self._consume(token_id)

    def _take_marker(self, token_id: int) -> bool:
        """Before the grammar's text; False when `token_id` is the first token of it."""
        thinking = self._thinking
        if thinking is not None and token_id == thinking.closer:
            self._phase = _Phase.INSIDE
        elif self._phase is _Phase.START:
            is_opener = thinking is not None and token_id == thinking.opener
            self._phase = _Phase.FREE if is_opener else _Phase.INSIDE
            return is_opener
        return True

    def _consume(self, token_id: int) -> None:
        # A stop token is not part of the text; one that does not end the sequence (min_tokens) is followed by more of them.
        if token_id in self._ends and self.matcher.is_accepting():
            return
        if not self.matcher.consume_token(token_id):
            self.check()


def open_cursor(compiler: GrammarCompiler, params: SamplingParams, output: Iterable[int]) -> GrammarCursor:
    """The cursor of a sequence that has generated `output` already.

    Raises:
        GrammarError: the grammar cannot be used, or `output` does not follow it.
    """
    assert params.grammar is not None
    cursor = GrammarCursor(compiler.matcher(params.grammar), params, compiler.eos_token_ids)
    for token_id in output:
        cursor.advance(token_id)
    if cursor.fault is not None:
        raise GrammarError(cursor.fault)
    return cursor


class MaskMaker:
    """Fills the masks of a step, several at a time when there are cores."""

    def __init__(self, vocab_size: int, *, pin_memory: bool) -> None:
        """`pin_memory`: for a copy to a GPU that the host does not wait for."""
        self._executor = llguidance.LLExecutor()
        self._num_words = -(-vocab_size // 32)
        self._pin_memory = pin_memory

    def fill(self, cursors: Sequence[GrammarCursor]) -> Tensor:
        """What each cursor allows next, [G, ceil(V / 32)] int32; bit i of word w is token 32 w + i.

        A cursor with a fault, old or new, has an undefined mask.
        """
        num_words = self._num_words
        masks = torch.empty((len(cursors), num_words), dtype=torch.int32, pin_memory=self._pin_memory)
        matchers = [(cursor.matcher, row) for row, cursor in enumerate(cursors)]
        self._executor.unsafe_compute_mask_ptr(matchers, masks.data_ptr(), num_words * masks.element_size(), len(cursors))
        words = masks.numpy()
        for row, cursor in enumerate(cursors):
            cursor.check()
            for token_id, is_allowed in cursor.exceptions():
                word, bit = divmod(token_id, 32)
                if word < num_words:
                    flag = 1 << bit if bit < 31 else -(1 << 31)
                    words[row, word] = words[row, word] | flag if is_allowed else words[row, word] & ~flag
        return masks
