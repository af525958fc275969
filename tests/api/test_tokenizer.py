import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import server.api.tokenizer as tokenizer_module
from server.api.checkpoint import CheckpointError
from server.api.tokenizer import Tokenizer
from tests.api.conversations import ADDED, NAIVE, TINY, naive_ids

TOKENIZER = Tokenizer.load(TINY)
DEFINITION: dict[str, Any] = json.loads((TINY / "tokenizer.json").read_text())
CHARACTERS = st.sampled_from(
    [
        *"abZ \n\r\t.,!'/[]<>019éß今が한😀",
        "'s",
        "  ",
        "    ",
        "\n\n",
        '"]}',
        "e\u0301",
        "か\u3099",
        "\u0301",
        "\u0338",
        "\u2028",
    ]
)
TOKEN_TEXTS = st.integers(0, TOKENIZER.num_tokens - 1).map(lambda index: TOKENIZER.token_bytes(index).decode(errors="ignore"))
TEXTS = st.lists(CHARACTERS | TOKEN_TEXTS, max_size=40).map("".join)


def whole_ids(text: str) -> list[int]:
    """The library's ids of a text in one piece, without added tokens."""
    ids: list[int] = TOKENIZER._bpe.encode(text, add_special_tokens=False).ids
    return ids


def test_plain_text_is_encoded_as_the_library_does() -> None:
    text = "Hello, world! It's 12345 o'clock.\n\n  def f():\r\n\treturn 今天 😀 Größe"
    assert TOKENIZER.encode(text) == naive_ids(text)
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))).decode() == text


def test_empty_text_has_no_ids() -> None:
    assert TOKENIZER.encode("") == []


def test_text_is_normalised() -> None:
    assert TOKENIZER.encode("e\u0301") == TOKENIZER.encode("é")


@settings(deadline=None)
@given(TEXTS, st.integers(1, 5))
def test_cutting_long_text_changes_no_token(text: str, piece_len: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "PIECE_LEN", piece_len)
        assert TOKENIZER.encode(text) == whole_ids(text)


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_text_behind_a_tail_changes_only_the_tail(text: str, suffix: str) -> None:
    head, tail = TOKENIZER.split_tail(text)
    assert head + tail == text
    assert TOKENIZER.encode(head) + TOKENIZER.encode(tail + suffix) == TOKENIZER.encode(text + suffix)


def test_long_text_is_cut() -> None:
    text = "some words here\n" * 30_000
    assert len(list(tokenizer_module._pieces(text))) > 3
    assert TOKENIZER.encode(text[:200_000]) == naive_ids(text[:200_000])


def test_encoding_stops_once_there_are_too_many_tokens() -> None:
    num_tokens = len(TOKENIZER.encode("word " * 500_000, max_tokens=10))
    assert 10 < num_tokens < 400_000


def test_bytes_of_every_token_are_those_that_the_library_decodes() -> None:
    for token_id in range(TOKENIZER.num_tokens):
        expected = NAIVE.decode([token_id], skip_special_tokens=False)
        assert TOKENIZER.token_bytes(token_id).decode(errors="replace") == expected


def test_every_byte_has_a_token() -> None:
    assert {bytes([byte]) for byte in range(256)} <= {TOKENIZER.token_bytes(index) for index in range(TOKENIZER.num_tokens)}


@pytest.mark.parametrize("token_id", [-1, TOKENIZER.num_tokens, 10**9])
def test_ids_without_a_token_have_no_bytes(token_id: int) -> None:
    assert TOKENIZER.token_bytes(token_id) == b""
    assert not TOKENIZER.is_special(token_id)


def test_seven_added_tokens_are_visible() -> None:
    visible = {text for text, token_id in ADDED.items() if not TOKENIZER.is_special(token_id)}
    assert visible == {"<think>", "</think>", "<tool_call>", "</tool_call>", "]<]minimax[>[", "<mm:think>", "</mm:think>"}


def test_added_tokens_that_an_export_repeats_in_the_vocabulary_are_still_not_encoded() -> None:
    model = {**DEFINITION["model"], "vocab": {**DEFINITION["model"]["vocab"], **ADDED}, "ignore_merges": True}
    repeated = Tokenizer({**DEFINITION, "model": model})
    for text, token_id in ADDED.items():
        assert token_id not in repeated.encode(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "byte-level"),
        ({"decoder": None}, "byte-level"),
        ({"added_tokens": [{"id": 1, "content": "<a>", "lstrip": True}]}, "strips"),
        ({"added_tokens": [{"id": "1", "content": "<a>"}]}, "no id"),
        ({"added_tokens": ["<a>"]}, "not an object"),
    ],
)
def test_other_kinds_of_tokenizers_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer({**DEFINITION, **change})
