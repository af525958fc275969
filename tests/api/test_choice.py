import random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from server.api.choice import ChoiceAssembler, ReplyRules
from server.api.fold import Fold
from server.api.tokenizer import SpecialTokens
from server.api.tool_schema import ToolSchemas
from server.messages import FinishReason, TokenLogprobs, Tokens
from server.settings import ThinkingMode
from tests.api.scripted import ids, tiny_format
from tests.api.tool_replies import NS, TOOLS

ADAPTIVE = ThinkingMode.ADAPTIVE
CANDIDATES = ["<mm:think>", "</mm:think>", "STOP", "ST", "OP", " ", "é", "漢", "👨‍👩‍👧", "ab", "\n", "]", "x"]
STOPS = ("STOP", "漢x", "ab\n")


def fold(deltas):
    folded = Fold()
    folded.add(deltas)
    return folded.choices()


def logprobs_of(token_ids, with_logprobs):
    return [TokenLogprobs(-0.25, (5,), (float("-inf"),)) for _ in token_ids] if with_logprobs else []


def assemble(groups, *, mode=ADAPTIVE, stops=(), with_logprobs=False, reason=FinishReason.LENGTH, index=0):
    """All deltas of one choice."""
    choice = ChoiceAssembler(index, tiny_format(), ReplyRules(thinking_mode=mode, stops=stops))
    deltas = [choice.open()]
    for group in groups:
        deltas += choice.push(Tokens("r", group, logprobs_of(group, with_logprobs)))
    return deltas + choice.finish(reason), choice


def answer(groups, **options):
    deltas, _ = assemble(groups, **options)
    return fold(deltas)[0]


def partition(token_ids, seed):
    rng = random.Random(seed)
    groups, start = [], 0
    while start < len(token_ids):
        length = rng.randint(1, 4)
        groups.append(token_ids[start : start + length])
        start += length
    return groups


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(CANDIDATES), max_size=12),
    seed=st.integers(0, 1000),
    mode=st.sampled_from(list(ThinkingMode)),
    with_logprobs=st.booleans(),
)
def test_the_answer_does_not_depend_on_how_tokens_arrive(pieces, seed, mode, with_logprobs):
    token_ids = ids("".join(pieces))
    options = {"mode": mode, "stops": STOPS, "with_logprobs": with_logprobs}
    whole = answer([token_ids] if token_ids else [], **options)
    assert answer([[i] for i in token_ids], **options) == whole
    assert answer(partition(token_ids, seed), **options) == whole
    assert not any(stop in whole.message.content for stop in STOPS)


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, 300), max_size=20), seed=st.integers(0, 1000))
def test_any_bytes_give_the_same_text_whatever_the_cuts(token_ids, seed):
    whole = answer([token_ids] if token_ids else [], with_logprobs=True)
    deltas, _ = assemble(partition(token_ids, seed), with_logprobs=True)
    assert fold(deltas)[0] == whole
    shown = b"".join(tiny_format().token_bytes(i) for i in token_ids if tiny_format().is_shown(i, SpecialTokens.HIDDEN))
    assert shown.decode(errors="replace") == whole.message.content
    if whole.logprobs is not None:
        assert b"".join(bytes(entry.bytes) for entry in whole.logprobs.content) == shown


def test_no_delta_breaks_a_character():
    deltas, _ = assemble([[i] for i in ids("aé漢👨‍👩‍👧z")])
    texts = [d.delta.content for d in deltas if d.delta.content is not UNSET]
    assert "".join(texts) == "aé漢👨‍👩‍👧z"
    assert not any("�" in text for text in texts)


def test_a_stop_string_over_several_tokens_never_leaks():
    token_ids = ids("keep ") + ids("ST") + ids("O") + ids("P") + ids("lost")
    deltas, choice = assemble([[i] for i in token_ids], stops=("STOP",))
    assert fold(deltas)[0].message.content == "keep "
    assert fold(deltas)[0].finish_reason == "stop"
    assert choice.stopped
    assert choice.num_tokens == len(token_ids) - len(ids("lost"))


def test_a_stop_string_that_stays_unfinished_is_text():
    choice = answer([[i] for i in ids("keep STO")], stops=("STOP",))
    assert choice.message.content == "keep STO"
    assert choice.finish_reason == "length"


def test_stop_strings_do_not_end_the_reasoning():
    choice = answer([ids("<mm:think>a STOP b</mm:think>c STOP d")], stops=("STOP",))
    assert choice.message.reasoning_content == "a STOP b"
    assert choice.message.content == "c "


def test_logprobs_are_the_contents_own():
    token_ids = ids("<mm:think>why</mm:think>") + ids("yes") + ids(" STOP no")
    choice = answer([[i] for i in token_ids], stops=(" STOP",), with_logprobs=True)
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == "yes"
    assert entries[0].logprob == -0.25
    assert entries[0].top_logprobs[0].logprob == -9999.0
    assert bytes(entries[0].top_logprobs[0].bytes) == tiny_format().token_bytes(5)


def test_the_bytes_of_a_broken_character_are_the_tokens_own():
    token_ids = ids("漢")
    assert len(token_ids) > 1
    choice = answer([token_ids[:1]], with_logprobs=True)
    assert choice.message.content == "�"
    assert bytes(choice.logprobs.content[0].bytes) == tiny_format().token_bytes(token_ids[0])


def test_reasoning_tokens_are_counted():
    _, choice = assemble([ids("<mm:think>a b c</mm:think>d")])
    num_thoughts = len(ids("<mm:think>")) + len(ids("a b c"))
    assert choice.num_reasoning_tokens == num_thoughts
    _, choice = assemble([ids("  d e")])
    assert choice.num_reasoning_tokens == 0


def test_the_end_of_turn_is_counted_and_not_shown():
    token_ids = [*ids("bye"), tiny_format().eos_token_ids[0]]
    deltas, choice = assemble([token_ids], with_logprobs=True, reason=FinishReason.STOP)
    assert fold(deltas)[0].message.content == "bye"
    assert choice.num_tokens == len(token_ids)
    assert "".join(entry.token for entry in fold(deltas)[0].logprobs.content) == "bye"


def test_choices_are_folded_apart():
    first, _ = assemble([ids("one")], index=0)
    second, _ = assemble([ids("two")], index=1)
    mixed = [delta for pair in zip(second, first, strict=False) for delta in pair]
    assert [choice.message.content for choice in fold(mixed)] == ["one", "two"]


def test_log_probabilities_of_reasoning_are_not_kept():
    choice = ChoiceAssembler(0, tiny_format(), ReplyRules(thinking_mode=ThinkingMode.ENABLED))
    thought = ids("why " * 1000)
    choice.push(Tokens("r", thought, logprobs_of(thought, True)))
    assert len(choice._pending) <= 1
    rest = ids("</mm:think>yes")
    entries = [entry for delta in choice.push(Tokens("r", rest, logprobs_of(rest, True))) for entry in delta.logprobs.content]
    assert "".join(entry.token for entry in entries) == "yes"


def test_log_probabilities_of_a_call_are_not_kept_and_those_of_the_content_around_it_are():
    rules = ReplyRules(thinking_mode=ThinkingMode.DISABLED, schemas=ToolSchemas(TOOLS))
    choice = ChoiceAssembler(0, tiny_format(), rules)
    call = f'{NS}<tool_call>{NS}<invoke name="save">{NS}<content>{{}}{NS}</content>{NS}</invoke>{NS}</tool_call>'
    before, behind = call.split("{}")
    deltas, num_pending = [], []
    for text in ("One.", before, "long " * 1000, behind, "Two."):
        for token_id in ids(text):
            deltas += choice.push(Tokens("r", [token_id], logprobs_of([token_id], True)))
            num_pending.append(len(choice._pending))
    deltas += choice.finish(FinishReason.STOP)
    (answer,) = fold(deltas)
    assert "".join(entry.token for entry in answer.logprobs.content) == answer.message.content == "One.Two."
    assert len(answer.message.tool_calls[0].function.arguments) > 5000
    assert max(num_pending) < 200
