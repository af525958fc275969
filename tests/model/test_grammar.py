from pathlib import Path

import pytest
import torch

import server
from server.grammars import GrammarError, GrammarTokenizer
from server.messages import Grammar, GrammarKind, SamplingParams, ThinkingTokens
from server.model.grammar import MAX_COMPILED, GrammarCompiler, MaskMaker, open_cursor

TINY = Path(server.__file__).parent / "model/tiny"
VOCAB = 1376
EOS, OPENER, CLOSER = 1320, 1359, 1360
A, B, C = 64, 65, 66


class CountingTokenizer(GrammarTokenizer):
    num_compiled = 0

    def compile(self, grammar):
        self.num_compiled += 1
        return super().compile(grammar)


@pytest.fixture(scope="module")
def tokenizer():
    return CountingTokenizer(TINY, VOCAB)


@pytest.fixture
def compiler(tokenizer):
    tokenizer.num_compiled = 0
    return GrammarCompiler(tokenizer)


@pytest.fixture
def cursor_of(compiler):
    def build(pattern, output=(), **params):
        params = {"stop_token_ids": (EOS,), **params}
        grammar = Grammar(GrammarKind.REGEX, pattern)
        return open_cursor(compiler, SamplingParams(max_tokens=9, grammar=grammar, **params), output)

    return build


def allowed(cursor, vocab_size=VOCAB):
    """The ids that the mask allows."""
    masks = MaskMaker(vocab_size, pin_memory=False).fill([cursor])
    assert masks.shape == (1, -(-vocab_size // 32))
    return [i for i in range(vocab_size) if int(masks[0, i // 32]) >> (i % 32) & 1]


def test_a_stop_token_is_allowed_exactly_where_the_text_is_complete(cursor_of):
    cursor = cursor_of("a(bc)?")
    seen = []
    for token_id in (A, B, C):
        assert cursor.is_masked
        seen.append(EOS in allowed(cursor))
        cursor.advance(token_id)
    assert seen == [False, True, False]
    assert allowed(cursor) == [EOS]
    assert cursor.must_end
    cursor.advance(EOS)
    assert allowed(cursor) == [EOS]
    assert cursor.fault is None


def test_the_clients_stop_tokens_replace_the_checkpoints(cursor_of):
    assert allowed(cursor_of("a", (A,), stop_token_ids=(7, 31, 1375))) == [7, 31, 1375]


def test_without_stop_tokens_only_a_text_that_cannot_go_on_ends(cursor_of):
    assert EOS not in allowed(cursor_of("a*", (A,), stop_token_ids=()))
    assert allowed(cursor_of("a", (A,), stop_token_ids=())) == [EOS]


def test_ids_beyond_the_logits_are_left_alone(compiler, cursor_of):
    assert allowed(cursor_of("a", (A,), stop_token_ids=(EOS, VOCAB + 5, 10**6))) == [EOS]


def test_free_text_ends_with_the_first_closer(cursor_of):
    cursor = cursor_of("abc", thinking=ThinkingTokens(CLOSER))
    for token_id in (A, OPENER, C, CLOSER):
        assert not cursor.is_masked
        assert EOS in cursor.banned_ids()
        assert not cursor.must_end
        cursor.advance(token_id)
    assert cursor.is_masked
    assert cursor.banned_ids() == ()
    assert A in allowed(cursor)
    assert CLOSER not in allowed(cursor)


@pytest.mark.parametrize(
    ("output", "is_masked", "next_ids"),
    [
        ((), True, {OPENER, CLOSER, A}),
        ((CLOSER,), True, {A}),
        ((OPENER,), False, None),
        ((OPENER, CLOSER), True, {A}),
        ((A,), True, {EOS}),
    ],
)
def test_free_text_may_be_optional(cursor_of, output, is_masked, next_ids):
    cursor = cursor_of("a", output, thinking=ThinkingTokens(CLOSER, OPENER))
    assert cursor.is_masked is is_masked
    if next_ids is not None:
        assert set(allowed(cursor)) == next_ids


def test_an_output_that_left_its_grammar_is_a_fault(cursor_of):
    with pytest.raises(GrammarError, match="cannot follow"):
        cursor_of("abc", (A, A))


def test_masks_are_made_together_and_do_not_mix(cursor_of):
    cursors = [cursor_of("a"), cursor_of("b"), cursor_of("c", (C,))]
    masks = MaskMaker(VOCAB, pin_memory=False).fill(cursors)
    words = torch.zeros_like(masks)
    for row, token_id in enumerate((A, B, EOS)):
        words[row, token_id // 32] = 1 << (token_id % 32)
    assert torch.equal(masks, words)


def test_a_grammar_is_compiled_once_and_the_oldest_are_forgotten(compiler, tokenizer):
    first = Grammar(GrammarKind.REGEX, "first")
    assert not compiler.has(first)
    one, other = compiler.matcher(first), compiler.matcher(first)
    assert tokenizer.num_compiled == 1
    one.consume_token(tokenizer.tokenizer.tokenize_str("f")[0])
    assert not other.is_error()
    assert other.compute_bitmask() != one.compute_bitmask()
    for i in range(MAX_COMPILED):
        compiler.matcher(Grammar(GrammarKind.REGEX, f"x{i}"))
    assert not compiler.has(first)
    assert compiler.has(Grammar(GrammarKind.REGEX, "x0"))


def test_a_grammar_that_cannot_be_used_is_not_kept(compiler):
    for _ in range(2):
        with pytest.raises(GrammarError):
            compiler.matcher(Grammar(GrammarKind.REGEX, "("))
    assert not compiler.has(Grammar(GrammarKind.REGEX, "("))


def test_a_lark_grammar_reaches_added_tokens_by_id_and_text_never_does(compiler):
    markup, begin, end = 1358, 1352, 1353
    text = f"start: <[{markup}]> <[{begin}]> TEXT <[{end}]>\nTEXT: /(.|\\n)*/"
    grammar = Grammar(GrammarKind.LARK, text)
    cursor = open_cursor(compiler, SamplingParams(max_tokens=9, grammar=grammar, stop_token_ids=(EOS,)), (markup,))
    assert allowed(cursor) == [begin]
    cursor.advance(begin)
    assert [i for i in allowed(cursor) if i >= 1300] == [end]
    assert {A, B, C} < set(allowed(cursor))
    cursor.advance(end)
    assert allowed(cursor) == [EOS]
