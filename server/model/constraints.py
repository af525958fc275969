"""Which tokens a sequence may not choose next: stop tokens before `min_tokens`, ids that are not allowed, the last token of a
bad word, and whatever its grammar does not continue with.

Only slots with such rules are kept; rows of the others cost a dictionary look-up. A row's rules follow from its own sequence
alone. It knows nothing of how a token is drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from server.grammars import GrammarError
from server.kernels.sampling import keep_tokens
from server.messages import SamplingParams
from server.model.grammar import GrammarCompiler, GrammarCursor, MaskMaker, open_cursor
from server.model.sampling_slot import SamplingRow
from server.scheduler.plan import NewSequence

NO_GRAMMARS = "the checkpoint has no tokenizer, so it cannot follow grammars"


@dataclass(frozen=True)
class Constrained:
    """Logits of S rows after the rules.

    Attributes:
        logits: [S, V] fp32, -inf where a token is forbidden; the caller's own tensor when nothing is.
        has_choice: [S] bool, whether a row has a token left; None when no row was touched.
        faults: by row, why a sequence cannot go on.
    """

    logits: Tensor
    has_choice: Tensor | None
    faults: dict[int, str]


@dataclass(slots=True)
class _Rules:
    """The rules of one slot.

    Attributes:
        num_prompt_tokens: where the output begins.
        min_tokens, stop_ids: no stop id among the first tokens; ids within the logits' width.
        banned: [V] bool, what may never be chosen; None for nothing.
        bad_words: those of two tokens or more.
        output: generated tokens, kept only for bad words.
        cursor: place in the grammar.
        fault: why it cannot be followed at all.
    """

    num_prompt_tokens: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    banned: Tensor | None
    bad_words: tuple[tuple[int, ...], ...]
    output: list[int] = field(default_factory=list)
    cursor: GrammarCursor | None = None
    fault: str | None = None

    def banned_ids(self, position: int) -> set[int]:
        """What may not come next, apart from `banned` and from the grammar's mask."""
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

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, compiler: GrammarCompiler | None = None
    ) -> None:
        """Without a `compiler` every sequence with a grammar fails."""
        self._vocab_size = vocab_size
        self._device = device
        self._compiler = compiler
        self._rules: dict[int, _Rules] = {}
        self._masks = MaskMaker(max_num_seqs, vocab_size, pin_memory=device.type == "cuda") if compiler else None

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
            banned=self._banned(params.allowed_token_ids, [word[0] for word in bad_words if len(word) == 1]),
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
        self._rules.pop(slot, None)

    def apply(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Constrained:
        """Forbid what the rules of `rows` forbid; `logits` [S, V] fp32 are not changed."""
        limited = [(i, rules) for i, row in enumerate(rows) if (rules := self._rules.get(row.slot)) is not None]
        faults = {i: rules.fault for i, rules in limited if rules.fault is not None}
        banned = [(i, rules.banned) for i, rules in limited if rules.banned is not None]
        points = [(i, token_id) for i, rules in limited for token_id in rules.banned_ids(rows[i].position)]
        masked = [(i, rules.cursor) for i, rules in limited if rules.cursor is not None and rules.cursor.is_masked]
        if not (banned or points or masked):
            return Constrained(logits, None, faults)
        logits = logits.clone()
        if banned:
            index = self._index([i for i, _ in banned])
            logits[index] = logits[index].masked_fill(torch.stack([tensor for _, tensor in banned]), float("-inf"))
        if points:
            index = self._index(points)  # [n, 2]
            logits[index[:, 0], index[:, 1]] = float("-inf")
        if masked:
            faults |= self._apply_masks(logits, masked)
        return Constrained(logits, (logits > float("-inf")).any(dim=-1), faults)

    def need_history(self, rows: Sequence[SamplingRow]) -> bool:
        """Whether the rules of one of these rows depend on its earlier tokens."""
        rules = [self._rules.get(row.slot) for row in rows]
        return any(rule is not None and (rule.cursor is not None or bool(rule.bad_words)) for rule in rules)

    def follower(self, slot: int) -> Callable[[int], None]:
        """Takes the token that is chosen for the sequence in `slot`, even when the slot is another's by then."""
        rules = self._rules.get(slot)
        return _ignore if rules is None else rules.advance

    def _apply_masks(self, logits: Tensor, masked: Sequence[tuple[int, GrammarCursor]]) -> dict[int, str]:
        """Apply the grammars' masks in place; the faults that came up, by row."""
        assert self._masks is not None
        assert self._compiler is not None
        masks = self._masks.fill([cursor for _, cursor in masked]).to(self._device, non_blocking=True)
        index = self._index([i for i, _ in masked])
        logits[index] = keep_tokens(logits[index], masks)
        faults = {}
        for i, cursor in masked:
            if cursor.fault is not None:
                faults[i] = cursor.fault
                self._compiler.forget(cursor.grammar)
        return faults

    def _open_grammar(self, rules: _Rules, params: SamplingParams, output: Sequence[int]) -> None:
        if self._compiler is None:
            rules.fault = NO_GRAMMARS
            return
        try:
            rules.cursor = open_cursor(self._compiler, params, output)
        except GrammarError as error:
            rules.fault = str(error)

    def _banned(self, allowed_ids: Sequence[int], banned_ids: Sequence[int]) -> Tensor | None:
        """[V] bool."""
        if not allowed_ids and not banned_ids:
            return None
        banned = torch.zeros(self._vocab_size, dtype=torch.bool)
        if allowed_ids:
            banned.fill_(True)
            banned[torch.tensor(self._columns(allowed_ids), dtype=torch.int64)] = False
        banned[torch.tensor(banned_ids, dtype=torch.int64)] = True
        return banned.to(self._device)

    def _columns(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if 0 <= token_id < self._vocab_size]

    def _index(self, values: Sequence[int] | Sequence[tuple[int, int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)


def _ignore(token_id: int) -> None:
    """The follower of a sequence without rules."""
