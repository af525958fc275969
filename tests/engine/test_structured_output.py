"""Grammars through the real scheduler, runner and model: whatever a random model says, the text is in the language."""

import json
import re
from pathlib import Path

import pytest
import torch

from server.grammars import GrammarTokenizer
from server.messages import Failed, FinishReason, Grammar, GrammarKind, SamplingParams, Submit, ThinkingTokens
from server.model.config import M3Config
from server.model.grammar import GrammarCompiler
from server.model.m3 import M3Model
from server.model.progress import NoProgress
from tests.engine.serving import Server
from tests.oracle import save_checkpoint, tiny_config

TOKENIZER_DIR = Path(__file__).parents[2] / "server/model/tiny"
VOCAB = 1376
EOS, OPENER, CLOSER = 1320, 1359, 1360
PAGE = 16
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blå"]}, "minItems": 1, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {}, "additionalProperties": False}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
}
PATTERN = r"(\d{3}-){2}\d{4} [a-zåäö]{2,9}\.?"
CHOICES = ["yes", "yesterday", "no way", 'a "quoted" \\ one\n', "日本"]
JSON_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
REGEX = Grammar(GrammarKind.REGEX, PATTERN)
CHOICE = Grammar(GrammarKind.CHOICE, json.dumps(CHOICES))
LARK = Grammar(GrammarKind.LARK, 'start: item ("," item)* "."\nitem: "[" item "]" | /[a-f]{1,3}/')
HOT = [{"temperature": 0.0}, *({"temperature": 2.0, "seed": seed} for seed in range(4)), {"temperature": 1.0, "top_p": 0.8}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model with pages of 16 tokens and the bundled tokenizer's ids."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(tiny_config(block_size=PAGE, topk_blocks=4, vocab_size=VOCAB), folder)
    return M3Model.load(folder, M3Config.from_file(folder), torch.device("cpu"), torch.float32, progress=NoProgress())


@pytest.fixture(scope="module")
def tokenizer():
    return GrammarTokenizer(TOKENIZER_DIR, VOCAB)


@pytest.fixture
def server_on(model, tokenizer):
    """Builds a server with empty caches."""

    def build(**options):
        return Server(model, grammars=GrammarCompiler(tokenizer), **options)

    return build


@pytest.fixture
def text_of(tokenizer):
    """The text of an output, without the stop tokens at its end."""

    def text(token_ids):
        while token_ids and token_ids[-1] == EOS:
            token_ids = token_ids[:-1]
        return tokenizer.tokenizer.decode_bytes(token_ids).decode()

    return text


def request(name, grammar, *, max_tokens=300, prompt=(1, 2, 3), **sampling):
    params = {"temperature": 1.0, "stop_token_ids": (EOS,), **sampling}
    return Submit(name, list(prompt), SamplingParams(max_tokens=max_tokens, grammar=grammar, **params))


def is_list(text):
    while (shorter := re.sub(r"\[([a-f]{1,3})\]", r"\1", text)) != text:
        text = shorter
    return re.fullmatch(r"[a-f]{1,3}(,[a-f]{1,3})*\.", text) is not None


def is_instance(text):
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags", "next"]
    assert len(value["name"]) <= 12
    assert isinstance(value["age"], int)
    assert 0 <= value["age"] <= 150
    assert 1 <= len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"red", "green", "blå"}
    return value["next"] in (None, {})


LANGUAGES = [
    (JSON_SCHEMA, is_instance),
    (REGEX, lambda text: re.fullmatch(PATTERN, text)),
    (CHOICE, lambda text: text in CHOICES),
    (LARK, is_list),
]


@pytest.mark.parametrize(("grammar", "accepts"), LANGUAGES, ids=[grammar.kind.value for grammar, _ in LANGUAGES])
def test_the_text_is_in_the_language_at_any_temperature(server_on, text_of, grammar, accepts):
    server = server_on()
    outputs = server.serve([request(f"r{i}", grammar, prompt=(7 + i, 5), **sampling) for i, sampling in enumerate(HOT)])
    finished = 0
    for name, output in outputs.items():
        # The list's grammar has no longest text; what a limit cuts off cannot be judged.
        if server.end(name).reason is FinishReason.STOP:
            assert output[-1] == EOS
            assert accepts(text_of(output)), text_of(output)
            finished += 1
    assert finished >= (3 if grammar is LARK else len(HOT))
    assert len({tuple(output) for output in outputs.values()}) > 1


def test_any_json_object_parses(server_on, text_of):
    # A bias towards what closes, or a random model would hardly ever come to an end.
    closing = tuple((token_id, 6.0) for token_id in (1, 60, 92, EOS))
    server = server_on()
    requests = [
        request(f"r{seed}", Grammar(GrammarKind.JSON_OBJECT), max_tokens=1500, seed=seed, temperature=0.7, logit_bias=closing)
        for seed in range(4)
    ]
    outputs = server.serve(requests)
    finished = [name for name in outputs if server.end(name).reason is FinishReason.STOP]
    assert finished
    assert all(isinstance(json.loads(text_of(outputs[name])), dict) for name in finished)


def test_max_tokens_cuts_a_text_and_says_so(server_on, text_of):
    server = server_on()
    (output,) = server.serve([request("r", JSON_SCHEMA, max_tokens=6)]).values()
    assert len(output) == 6
    assert server.end("r").reason is FinishReason.LENGTH
    assert re.match(r"\{\s*", text_of(output))


def test_min_tokens_lengthens_a_text_that_can_go_on(server_on, text_of):
    server = server_on()
    requests = [request(f"r{seed}", Grammar(GrammarKind.REGEX, "[ab]*"), min_tokens=30, seed=seed) for seed in range(3)]
    for name, output in server.serve(requests).items():
        assert EOS not in output[:30]
        assert re.fullmatch("[ab]*", text_of(output))
        assert server.end(name).reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_min_tokens_pads_a_text_that_is_complete(server_on, text_of):
    server = server_on()
    (output,) = server.serve([request("r", Grammar(GrammarKind.CHOICE, '["yes"]'), min_tokens=20)]).values()
    assert text_of(output) == "yes"
    assert len(output) == 21
    assert server.end("r").reason is FinishReason.STOP


def test_without_a_stop_token_a_complete_text_is_padded_to_the_limit(server_on, text_of):
    server = server_on()
    (output,) = server.serve([request("r", CHOICE, stop_token_ids=(), max_tokens=40)]).values()
    assert text_of(output) in CHOICES
    assert server.end("r").reason is FinishReason.LENGTH


def test_a_stop_token_of_the_clients_ends_a_complete_text_only(server_on, text_of):
    letter = 65  # "b"
    server = server_on()
    grammar = Grammar(GrammarKind.REGEX, "[abc]{3}(b[abc]*)?")
    for name, output in server.serve([request(f"r{s}", grammar, seed=s, stop_token_ids=(letter,)) for s in range(5)]).items():
        assert output[-1] == letter
        assert re.fullmatch(grammar.text, text_of(output[:-1]))
        assert server.end(name).reason is FinishReason.STOP


@pytest.mark.parametrize("thinking", [ThinkingTokens(CLOSER), ThinkingTokens(CLOSER, OPENER)], ids=["enabled", "adaptive"])
def test_the_grammar_begins_behind_the_closer(server_on, text_of, thinking):
    server = server_on()
    bias = ((CLOSER, 6.0), (OPENER, 8.0), (EOS, 6.0))
    requests = [
        request(f"r{seed}", JSON_SCHEMA, max_tokens=1000, seed=seed, thinking=thinking, logit_bias=bias) for seed in range(6)
    ]
    num_thoughts = []
    for name, output in server.serve(requests).items():
        assert server.end(name).reason is FinishReason.STOP
        begin = output.index(CLOSER) + 1 if CLOSER in output else 0
        if begin > 1 and thinking.opener is not None:
            assert output[0] == OPENER
        assert EOS not in output[:begin]
        assert is_instance(text_of(output[begin:]))
        num_thoughts.append(begin)
    assert len(set(num_thoughts)) > 1


def test_an_adaptive_answer_may_skip_its_thoughts(server_on, text_of):
    away = ((CLOSER, -100.0), (OPENER, -100.0))
    thinking = ThinkingTokens(CLOSER, OPENER)
    (output,) = server_on().serve([request("r", JSON_SCHEMA, thinking=thinking, logit_bias=away)]).values()
    assert is_instance(text_of(output))


def test_markers_are_never_part_of_a_grammars_text(server_on):
    bias = tuple((token_id, 50.0) for token_id in range(1300, VOCAB) if token_id != EOS)
    (output,) = server_on().serve([request("r", JSON_SCHEMA, logit_bias=bias, seed=1)]).values()
    assert [token_id for token_id in output if token_id >= 1300] == [EOS]


ALL = [
    request("plain", None, max_tokens=40, temperature=0.0),
    request("schema", JSON_SCHEMA, seed=3, max_tokens=60),
    request("regex", REGEX, seed=4, top_k=20, prompt=range(3, 40), max_tokens=60),
    request("thinking", CHOICE, seed=5, thinking=ThinkingTokens(CLOSER), logit_bias=((CLOSER, 4.0),), max_tokens=70),
    request("padded", Grammar(GrammarKind.CHOICE, '["yes", "no"]'), seed=6, min_tokens=50, max_tokens=60),
    request("words", LARK, seed=7, bad_words=((64, 65), (66,)), max_tokens=60),
    request("allowed", None, seed=8, allowed_token_ids=tuple(range(40, 60)), max_tokens=50),
]


def test_outputs_do_not_depend_on_batch_mates_chunks_or_preemption(server_on):
    alone = {each.request_id: server_on().serve([each])[each.request_id] for each in ALL}
    assert server_on().serve(ALL) == alone
    assert server_on(max_num_batched_tokens=9).serve(ALL) == alone
    tight = server_on(num_pages=9, enable_prefix_caching=True)
    assert tight.serve(ALL) == alone
    assert tight.scheduler.stats().preemptions_total > 2


def test_equal_grammars_of_several_choices_do_not_share_their_place(server_on, text_of):
    server = server_on()
    outputs = server.serve([request(f"choice {i}", JSON_SCHEMA, seed=i, temperature=1.5) for i in range(8)])
    assert len(set(map(tuple, outputs.values()))) > 1
    assert all(is_instance(text_of(output)) for output in outputs.values())


BROKEN = {
    "malformed": {"grammar": Grammar(GrammarKind.REGEX, "(")},
    "without a text": {"grammar": Grammar(GrammarKind.REGEX, r"[^\s\S]")},
    "at odds with the allowed ids": {"grammar": REGEX, "allowed_token_ids": (64, 65, 66)},
    "at odds with a bad word": {"grammar": Grammar(GrammarKind.REGEX, "a"), "bad_words": ((64,),)},
}


@pytest.mark.parametrize("fault", BROKEN.values(), ids=BROKEN.keys())
def test_a_grammar_that_cannot_be_followed_fails_its_request_alone(server_on, fault):
    mates = [each for each in ALL if each.request_id in ("plain", "schema", "allowed")]
    expected = server_on().serve(mates)
    server = server_on()
    server.submit(request("bad", **fault))
    assert server.serve(mates) == expected
    assert isinstance(server.end("bad"), Failed)
    # And what it used is in order for the next one.
    assert server.serve([request("after", REGEX)])["after"][-1] == EOS


def test_an_output_that_outgrows_the_limits_fails_alone_and_later_ones_start_afresh(model):
    compiler = GrammarCompiler(GrammarTokenizer(TOKENIZER_DIR, VOCAB, max_lexer_states=200))
    server = Server(model, grammars=compiler)
    long = Grammar(GrammarKind.REGEX, "[ab]{0,3}|[cd]{500}")
    server.submit(request("bad", long, logit_bias=((66, 50.0),)))
    assert len(server.serve([request("plain", None, max_tokens=210)])["plain"]) == 210
    end = server.end("bad")
    assert isinstance(end, Failed)
    assert "cannot follow its grammar" in end.message
    assert server.serve([request("short", long, logit_bias=((64, 50.0),))])["short"] == [64, 64, 64, EOS]


def test_without_a_tokenizer_only_requests_with_a_grammar_fail(model):
    server = Server(model)
    server.submit(request("grammar", REGEX))
    assert len(server.serve([request("plain", None, max_tokens=5)])["plain"]) == 5
    assert isinstance(server.end("grammar"), Failed)


def test_allowed_ids_and_bad_words_hold(server_on):
    allowed = tuple(range(40, 44))
    requests = [
        request(
            f"r{seed}", None, seed=seed, max_tokens=80, allowed_token_ids=allowed, bad_words=((40,), (41, 42), (43, 43, 43))
        )
        for seed in range(4)
    ]
    for output in server_on().serve(requests).values():
        assert set(output) == {41, 42, 43}
        text = " ".join(map(str, output))
        assert "41 42" not in text
        assert "43 43 43" not in text
        assert "43 43" in text
