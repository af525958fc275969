"""Which tokens a sequence may not choose next: stop tokens before `min_tokens`, ids that are not allowed, the last token of a
bad word, and whatever its grammar does not continue with.

Only slots with such rules are kept; rows of the others cost a dictionary look-up. A row's rules follow from its own sequence
alone. It knows nothing of how a token is drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from server.grammars import GrammarError
from server.messages import SamplingParams
from server.model.grammar import GrammarCompiler, GrammarCursor, MaskMaker, open_cursor
from server.model.row_pool import RowPool
from server.model.sampling_slot import SamplingRow
from server.scheduler.plan import NewSequence

NO_GRAMMARS = "the checkpoint has no tokenizer, so it cannot follow grammars"


@dataclass(frozen=True)
class Limits:
    """What the rules of S rows forbid, apart from the masks of their slots.

    Attributes:
        forbidden: (row, token id).
        grammar_rows: row of `grammar_masks` for each of the S rows, -1 for none; empty without any.
        grammar_masks: [G, ceil(V / 32)] int32 on the host, see `MaskMaker`; None without any.
        faults: by row, why a sequence cannot go on.
        is_masked: whether the slot of a row has a mask.
    """

    forbidden: tuple[tuple[int, int], ...] = ()
    grammar_rows: tuple[int, ...] = ()
    grammar_masks: Tensor | None = None
    faults: dict[int, str] = field(default_factory=dict)
    is_masked: bool = False

    @property
    def change_logits(self) -> bool:
        """Whether anything is forbidden at all."""
        return bool(self.forbidden) or self.is_masked or self.grammar_masks is not None


@dataclass(slots=True)
class _Rules:
    """The rules of one slot.

    Attributes:
        num_prompt_tokens: where the output begins.
        min_tokens, stop_ids: no stop id among the first tokens; ids within the logits' width.
        mask_row: row of the mask of what may ever be chosen; None for everything.
        bad_words: those of two tokens or more.
        output: generated tokens, kept only for bad words.
        cursor: place in the grammar.
        fault: why it cannot be followed at all.
    """

    num_prompt_tokens: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    mask_row: int | None
    bad_words: tuple[tuple[int, ...], ...]
    output: list[int] = field(default_factory=list)
    cursor: GrammarCursor | None = None
    fault: str | None = None

    @property
    def has_history(self) -> bool:
        """Whether what is forbidden depends on the tokens before."""
        return self.cursor is not None or bool(self.bad_words)

    def banned_ids(self, position: int) -> set[int]:
        """What may not come next, apart from the mask of the slot and from the grammar's mask."""
        cursor = self.cursor
        ids = set(cursor.banned_ids()) if cursor else set()
        if position - self.num_prompt_tokens < self.min_tokens and not (cursor and cursor.must_end):
            ids.update(self.stop_ids)
        for word in self.bad_words:
            if tuple(self.output[1 - len(word) :]) == word[:-1]:
                ids.add(word[-1])
        return ids

    def advance(self, token_id: int) -> None:
        if self.bad_words:
            self.output.append(token_id)
        if self.cursor is not None:
            self.cursor.advance(token_id)


class Constraints:
    """The rules of all slots."""

    def __init__(self, vocab_size: int, device: torch.device, compiler: GrammarCompiler | None = None) -> None:
        """Without a `compiler` every sequence with a grammar fails."""
        self._vocab_size = vocab_size
        self._compiler = compiler
        self._rules: dict[int, _Rules] = {}
        self._maker = MaskMaker(vocab_size, pin_memory=device.type == "cuda") if compiler else None
        self._masks = RowPool(-(-vocab_size // 32), torch.int32, device)

    def admit(self, sequence: NewSequence) -> None:
        """Take the rules of a new or resumed sequence, if it has any."""
        params = sequence.sampling
        stop_ids = tuple(self._columns(params.stop_token_ids)) if params.min_tokens else ()
        bad_words = [word for word in params.bad_words if word and 0 <= word[-1] < self._vocab_size]
        if not (stop_ids or bad_words or params.allowed_token_ids or params.grammar):
            return
        rules = _Rules(
            num_prompt_tokens=sequence.num_prompt_tokens,
            min_tokens=params.min_tokens,
            stop_ids=stop_ids,
            mask_row=self._mask_row(params.allowed_token_ids, [word[0] for word in bad_words if len(word) == 1]),
            bad_words=tuple(word for word in bad_words if len(word) > 1),
        )
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        if rules.bad_words:
            rules.output = list(output)
        if params.grammar is not None:
            self._open_grammar(rules, params, output)
        self._rules[sequence.slot] = rules

    def release(self, slot: int) -> None:
        """Forget a slot; one without rules is ignored."""
        rules = self._rules.pop(slot, None)
        if rules is not None and rules.mask_row is not None:
            self._masks.give_back(rules.mask_row)

    @property
    def masks(self) -> Tensor:
        """[M, ceil(V / 32)] int32 on the device; bit i of word w allows token 32 w + i."""
        return self._masks.tensor

    def mask_row(self, slot: int) -> int | None:
        """Row of the slot's mask; None when it has none."""
        rules = self._rules.get(slot)
        return rules.mask_row if rules is not None else None

    def limits(self, rows: Sequence[SamplingRow]) -> Limits:
        """What the rules of `rows` forbid."""
        limited = [(i, rules) for i, row in enumerate(rows) if (rules := self._rules.get(row.slot)) is not None]
        if not limited:
            return Limits()
        faults = {i: rules.fault for i, rules in limited if rules.fault is not None}
        forbidden = [(i, token_id) for i, rules in limited for token_id in sorted(rules.banned_ids(rows[i].position))]
        masked = [(i, rules.cursor) for i, rules in limited if rules.cursor is not None and rules.cursor.is_masked]
        is_masked = any(rules.mask_row is not None for _, rules in limited)
        if not masked:
            return Limits(tuple(forbidden), faults=faults, is_masked=is_masked)
        masks, new_faults = self._grammar_masks(masked)
        grammar_rows = [-1] * len(rows)
        for number, (i, _) in enumerate(masked):
            grammar_rows[i] = number
        return Limits(tuple(forbidden), tuple(grammar_rows), masks, faults | new_faults, is_masked)

    def follower(self, slot: int) -> Callable[[int], None] | None:
        """Takes the token that is chosen for the sequence in `slot`, even when the slot is another's by then.

        None when its rules do not depend on it.
        """
        rules = self._rules.get(slot)
        return rules.advance if rules is not None and rules.has_history else None

    def _grammar_masks(self, masked: Sequence[tuple[int, GrammarCursor]]) -> tuple[Tensor, dict[int, str]]:
        """The masks of these rows' grammars, and the faults that came up, by row."""
        assert self._maker is not None
        assert self._compiler is not None
        masks = self._maker.fill([cursor for _, cursor in masked])
        faults = {}
        for i, cursor in masked:
            if cursor.fault is not None:
                faults[i] = cursor.fault
                self._compiler.forget(cursor.grammar)
        return masks, faults

    def _open_grammar(self, rules: _Rules, params: SamplingParams, output: Sequence[int]) -> None:
        if self._compiler is None:
            rules.fault = NO_GRAMMARS
            return
        try:
            rules.cursor = open_cursor(self._compiler, params, output)
        except GrammarError as error:
            rules.fault = str(error)

    def _mask_row(self, allowed_ids: Sequence[int], banned_ids: Sequence[int]) -> int | None:
        if not allowed_ids and not banned_ids:
            return None
        allowed = np.full(-(-self._vocab_size // 32) * 32, not allowed_ids)
        allowed[self._columns(allowed_ids)] = True
        allowed[self._columns(banned_ids)] = False
        words = np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)
        return self._masks.take(torch.from_numpy(words))

    def _columns(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if 0 <= token_id < self._vocab_size]
