import itertools

from hypothesis import given
from hypothesis import strategies as st

from server.api.detokenizer import Detokenizer
from tests.api.conversations import ADDED, FORMAT, NAIVE

IDS = st.lists(st.integers(0, FORMAT.vocab_size - 1), max_size=40)
CUTS = st.lists(st.integers(0, 40), max_size=8)


def decode_in_pieces(token_ids: list[int], cuts: list[int]) -> str:
    detokenizer = FORMAT.detokenizer()
    bounds = sorted({0, len(token_ids), *[cut for cut in cuts if cut < len(token_ids)]})
    pieces = [detokenizer.push(token_ids[start:end]) for start, end in itertools.pairwise(bounds)]
    return "".join(pieces) + detokenizer.flush()


@given(IDS, CUTS)
def test_cuts_between_tokens_do_not_change_the_text(token_ids: list[int], cuts: list[int]) -> None:
    assert decode_in_pieces(token_ids, cuts) == decode_in_pieces(token_ids, [])


@given(IDS)
def test_text_of_any_ids_is_the_librarys(token_ids: list[int]) -> None:
    assert decode_in_pieces(token_ids, list(range(40))) == NAIVE.decode(token_ids)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_the_way_through_ids(text: str) -> None:
    token_ids = FORMAT.encode_text(text)
    assert decode_in_pieces(token_ids, list(range(40))) == NAIVE.normalizer.normalize_str(text)


def test_a_character_is_shown_when_it_is_whole() -> None:
    detokenizer = Detokenizer([bytes([byte]) for byte in range(256)])
    family = "👩‍👩‍👧".encode()
    shown = [detokenizer.push([byte]) for byte in family]
    assert [len(text) for text in shown[:4]] == [0, 0, 0, 1]
    assert "".join(shown) == family.decode()
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    detokenizer = Detokenizer([bytes([byte]) for byte in range(256)])
    assert detokenizer.push("é😀".encode()[:-1]) == "é"
    assert detokenizer.flush() == "\ufffd"


def test_bytes_that_are_no_character_are_replaced_at_once() -> None:
    detokenizer = Detokenizer([bytes([byte]) for byte in range(256)])
    assert detokenizer.push(b"a\xff\x80b\xe4") == "a\ufffd\ufffdb"
    assert detokenizer.push(b"c") == "\ufffdc"


def test_special_tokens_are_skipped_and_visible_ones_are_not() -> None:
    token_ids = [ADDED["]~b]"], *FORMAT.encode_text("Hi"), ADDED["<mm:think>"], ADDED["]<]minimax[>["], ADDED["[e~["]]
    assert FORMAT.decode(token_ids) == "Hi<mm:think>]<]minimax[>["


def test_special_token_inside_a_character_does_not_break_it() -> None:
    first, *rest = [index for byte in "é".encode() for index in range(256) if FORMAT.token_bytes(index) == bytes([byte])]
    assert FORMAT.decode([first, ADDED["[e~["], *rest]) == "é"


def test_rows_of_the_logits_without_a_token_add_nothing() -> None:
    assert FORMAT.decode([FORMAT.vocab_size, FORMAT.vocab_size + 100]) == ""
