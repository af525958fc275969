import pytest

from server.api.tool_markup import MAX_TAG_LEN, NAMESPACE, MarkupLexer, Tag, TagKind, Text

NS = NAMESPACE


def lex(*pieces):
    lexer = MarkupLexer()
    end = 0
    found = []
    for piece in pieces:
        found += lexer.push(piece, end)
        end += len(piece)
    return found + lexer.flush(end)


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        (f"{NS}<city>", TagKind.OPEN, "city"),
        (f"{NS}</city>", TagKind.CLOSE, "city"),
        (f"{NS} \n< / city >", TagKind.CLOSE, "city"),
        (f"{NS}<two words>", TagKind.OPEN, "two words"),
        (f"{NS}<invoke>", TagKind.OPEN, "invoke"),
        (f'{NS}<invoke name="a b">', TagKind.INVOKE, "a b"),
        (f"{NS}<invoke name='f'>", TagKind.INVOKE, "f"),
        (f"{NS}<invoke\nid=3 name=f>", TagKind.INVOKE, "f"),
        (f"{NS}<invoke f>", TagKind.INVOKE, ""),
        (f"{NS}<invoke name=''>", TagKind.INVOKE, ""),
        (f'{NS}invoke name="f">', TagKind.INVOKE, "f"),
        (f"{NS} tool_call>", TagKind.OPEN, "tool_call"),
        (f"{NS}/tool_call>", TagKind.CLOSE, "tool_call"),
        (f"{NS}/invoke>", TagKind.CLOSE, "invoke"),
        (f"{NS}<city", TagKind.CUT, ""),
        (f"{NS}invo", TagKind.CUT, ""),
        (NS, TagKind.CUT, ""),
    ],
)
def test_a_tag_is_one_piece(text, kind, name):
    assert lex(text) == lex(*text) == [Tag(0, text, kind, name)]


@pytest.mark.parametrize(
    "rest",
    ["x", "<>", "</>", "<a<", "city>", "invoke>", "invoke f>", "invoke name='f'<", "invoked", "<" + "x" * MAX_TAG_LEN + ">"],
)
def test_a_namespace_without_a_tag_stands_alone(rest):
    assert lex(NS + rest) == [Tag(0, NS, TagKind.BARE), Text(len(NS), rest)]


def test_pieces_know_their_place():
    assert lex(f"ab{NS}<c>d{NS}x") == [
        Text(0, "ab"),
        Tag(2, f"{NS}<c>", TagKind.OPEN, "c"),
        Text(18, "d"),
        Tag(19, NS, TagKind.BARE),
        Text(32, "x"),
    ]


def test_half_a_namespace_at_the_end_is_text():
    assert lex("a" + NS[:-1]) == [Text(0, "a"), Text(1, NS[:-1])]


def test_a_namespace_that_begins_in_another_ones_beginning_is_found():
    assert lex(f"]<]{NS}<a>")[1] == Tag(3, f"{NS}<a>", TagKind.OPEN, "a")
