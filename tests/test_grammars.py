import json
import shutil
from pathlib import Path

import pytest

import server
from server.grammars import JSON_BLANKS, GrammarError, GrammarTokenizer
from server.messages import Grammar, GrammarKind

TINY = Path(server.__file__).parent / "model/tiny"
VOCAB = 1376


@pytest.fixture(scope="module")
def tokenizer():
    return GrammarTokenizer(TINY, VOCAB)


def accepts(tokenizer, grammar, text):
    matcher = tokenizer.compile(grammar)
    token_ids = tokenizer.tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
TEXTS = [
    (SCHEMA, '{"a":1}', True),
    (SCHEMA, '{\n    "a": 1,\n    "b": [true, null]\n}', True),
    (SCHEMA, '{"a":1.5}', False),
    (SCHEMA, '{"b":1}', False),
    (SCHEMA, '{"a":' + " " * 64 + "1}", True),
    (SCHEMA, '{"a":' + " " * 65 + "1}", False),
    (Grammar(GrammarKind.JSON_OBJECT), '{"x": {"y": []}}', True),
    (Grammar(GrammarKind.JSON_OBJECT), "[]", False),
    (Grammar(GrammarKind.REGEX, "a.c"), "abc", True),
    (Grammar(GrammarKind.REGEX, "a.c"), "abcd", False),
    (Grammar(GrammarKind.REGEX, "^(|.*)$"), "anything", True),
    (Grammar(GrammarKind.CHOICE, '["yes","yesterday"]'), "yes", True),
    (Grammar(GrammarKind.CHOICE, '["yes","yesterday"]'), "yester", False),
    (Grammar(GrammarKind.CHOICE, json.dumps(['"\\\n/%|\u2028 é😀'])), '"\\\n/%|\u2028 é😀', True),
    (Grammar(GrammarKind.LARK, 'start: "a" start "b" | "-"'), "aa-bb", True),
    (Grammar(GrammarKind.LARK, 'start: "a" start "b" | "-"'), "aa-b", False),
]


@pytest.mark.parametrize(("grammar", "text", "expected"), TEXTS)
def test_a_grammar_accepts_its_language(tokenizer, grammar, text, expected):
    assert accepts(tokenizer, grammar, text) is expected


REFUSED = [
    (GrammarKind.JSON_SCHEMA, "[]", "malformed"),
    (GrammarKind.JSON_SCHEMA, '{"type":', "malformed"),
    (GrammarKind.JSON_SCHEMA, '{"type":7}', "type"),
    (GrammarKind.JSON_SCHEMA, '{"required":"a"}', "required"),
    (GrammarKind.JSON_SCHEMA, '{"pattern":"(","type":"string"}', "unclosed group"),
    (GrammarKind.JSON_SCHEMA, '{"type":"string","minLength":5,"maxLength":2}', "minLength"),
    (GrammarKind.JSON_SCHEMA, '{"if":{"type":"string"}}', "if"),
    (GrammarKind.JSON_SCHEMA, '{"$ref":"#/$defs/none"}', "none"),
    (GrammarKind.JSON_SCHEMA, '{"$ref":"http://169.254.169.254/x.json"}', "does not fetch"),
    (GrammarKind.JSON_SCHEMA, '{"$ref":"#"}', "matches no text"),
    (GrammarKind.JSON_SCHEMA, '{"items":' * 500 + "{}" + "}" * 500, "recursion limit"),
    (GrammarKind.REGEX, "(", "unclosed group"),
    (GrammarKind.REGEX, "(?=a)b", "look-around"),
    (GrammarKind.REGEX, r"[^\s\S]", "matches no text"),
    (GrammarKind.CHOICE, "[1]", "malformed"),
    (GrammarKind.CHOICE, "[]", "must be a choice"),
    (GrammarKind.CHOICE, '[""]', "empty"),
    (GrammarKind.LARK, "", "Empty grammar"),
    (GrammarKind.LARK, 'start: "a"\nstart: "b"', "duplicate rule"),
    (GrammarKind.LARK, "start: <[99999]>", "99999"),
    (GrammarKind.LARK, "start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "deeply nested"),
]


@pytest.mark.parametrize(("kind", "text", "said"), REFUSED)
def test_a_grammar_that_cannot_be_used_is_refused_with_the_reason(tokenizer, kind, text, said):
    with pytest.raises(GrammarError, match=said.replace("$", r"\$")) as caught:
        tokenizer.compile(Grammar(kind, text))
    assert len(str(caught.value)) <= 600
    assert accepts(tokenizer, SCHEMA, '{"a":1}'), "what comes later is in order"


def test_draft_07_arrays_and_recursion_are_understood(tokenizer):
    pair = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","items":[{"type":"integer"}]}')
    assert accepts(tokenizer, pair, "[1]")
    tree = {"$defs": {"n": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}}}
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({**tree, "$ref": "#/$defs/n"}))
    assert accepts(tokenizer, grammar, '{"c":[{"c":[]},{}]}')


def test_a_schema_cannot_lift_the_limit_on_blanks(tokenizer):
    assert "64" in JSON_BLANKS
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","x-guidance":{"whitespace_pattern":"[ ]+"}}')
    assert accepts(tokenizer, grammar, "[ 1]")
    assert not accepts(tokenizer, grammar, "[" + " " * 65 + "1]")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"added_tokens": 5}', '{"added_tokens": []}'])
def test_a_tokenizer_that_cannot_be_used_is_an_error_that_says_so(tmp_path, content):
    shutil.copy(TINY / "generation_config.json", tmp_path)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(GrammarError, match="tokenizer"):
        GrammarTokenizer(tmp_path, VOCAB)


@pytest.mark.parametrize(("files", "expected"), [({"generation_config.json": [5, 6]}, (5, 6)), ({"config.json": 7}, (7,))])
def test_what_ends_a_turn_comes_from_the_checkpoint(tmp_path, files, expected):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    assert GrammarTokenizer(tmp_path, VOCAB).eos_token_ids == expected


def test_without_an_end_of_turn_there_are_no_grammars(tmp_path):
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    with pytest.raises(GrammarError, match="eos_token_id"):
        GrammarTokenizer(tmp_path, VOCAB)
