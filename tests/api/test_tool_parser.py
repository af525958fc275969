import itertools
import json
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.reasoning import num_held_back
from server.api.reply_events import ContentDelta, ToolArgumentsDelta, ToolCallEnd, ToolCallStart
from server.api.tool_parser import ToolCallParser
from server.api.tool_schema import ToolFunction, ToolSchemas
from tests.api.tool_replies import CANONICAL, NS, REPLIES, TOOLS, arguments_match

SCHEMAS = ToolSchemas(TOOLS)
REPEATED = re.compile(r"<x>1(?!.*<y>)")  # a value that may still become a list
IDS = [reply.name for reply in REPLIES]


def parse(pieces, truncated=False, schemas=SCHEMAS, max_calls=None):
    parser = ToolCallParser(schemas, max_calls)
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish(truncated)


def content_of(events):
    return "".join(event.text for event in events if isinstance(event, ContentDelta))


def calls_of(events):
    """Names and arguments, after checking that every call's events are in order."""
    calls = []
    is_open = False
    for event in events:
        match event:
            case ToolCallStart(index, name):
                assert index == len(calls)
                assert not is_open
                is_open = True
                calls.append([name, ""])
            case ToolArgumentsDelta(index, fragment):
                assert is_open
                assert index == len(calls) - 1
                assert fragment
                calls[-1][1] += fragment
            case ToolCallEnd(index):
                assert is_open
                assert index == len(calls) - 1
                is_open = False
    return [tuple(call) for call in calls], is_open


def meaning(events):
    return content_of(events), *calls_of(events)


@pytest.mark.parametrize("reply", REPLIES, ids=IDS)
def test_a_reply_means_what_it_should(reply):
    content, calls, is_open = meaning(parse([reply.text], reply.truncated))
    assert content == reply.content
    assert [name for name, _ in calls] == [name for name, _ in reply.calls]
    for (_, arguments), (_, expected) in zip(calls, reply.calls, strict=True):
        assert arguments_match(arguments, expected), arguments
    assert is_open == any(isinstance(expected, str) for _, expected in reply.calls)


@pytest.mark.parametrize("reply", REPLIES, ids=IDS)
def test_the_meaning_does_not_depend_on_the_cuts(reply):
    text = reply.text
    whole = meaning(parse([text], reply.truncated))
    for at in range(len(text) + 1):
        assert meaning(parse([text[:at], text[at:]], reply.truncated)) == whole, at
    rng = random.Random(text)
    splits = [list(text)]
    for _ in range(30):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 12)))
        splits.append([text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])])
    for pieces in splits:
        assert meaning(parse(pieces, reply.truncated)) == whole, pieces


@pytest.mark.parametrize("reply", REPLIES, ids=IDS)
def test_a_content_delta_is_the_text_at_its_start(reply):
    for pieces in ([reply.text], list(reply.text)):
        for event in parse(pieces, reply.truncated):
            if isinstance(event, ContentDelta):
                assert reply.text[event.start : event.start + len(event.text)] == event.text != ""


FRAGMENTS = [
    NS,
    *("<tool_call>", "</tool_call>", '<invoke name="save">', "<invoke>", "</invoke>", "invoke name=now>", "<content>"),
    *(
        "</content>",
        "<opts>",
        "</opts>",
        "<item>",
        "</item>",
        "<tags>",
        "</tags>",
        "<tool_call",
        "<",
        ">",
        "]",
        " ",
        "\n",
        "null",
        "7",
    ),
    *('{"a": [NaN]}', "]<]mini", "\ud83d", "\udca9", "x"),
]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40), st.booleans(), st.randoms(use_true_random=False))
def test_any_mixture_of_markup_is_taken_and_cut_anywhere(fragments, truncated, rng):
    text = "".join(fragments)
    whole = meaning(parse([text], truncated))
    for _ in range(4):
        cuts = sorted(rng.choices(range(len(text) + 1), k=5))
        assert meaning(parse([text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])], truncated)) == whole
    content, calls, is_open = whole
    for _, arguments in calls[: len(calls) - is_open]:
        assert isinstance(json.loads(arguments), dict)
        arguments.encode()
    assert NS not in content or not calls


def test_the_name_is_known_when_the_header_is_whole():
    parser = ToolCallParser(SCHEMAS)
    assert parser.push(f'{NS}<tool_call>\n{NS}<invoke name="save"') == []
    assert parser.push(">") == [ToolCallStart(0, "save")]


def test_a_string_goes_out_as_it_grows():
    parser = ToolCallParser(SCHEMAS)
    parser.push(f'{NS}<invoke name="save">{NS}<content>')
    assert parser.push('say "') == [ToolArgumentsDelta(0, '"say \\"')]
    assert parser.push("hi]") == [ToolArgumentsDelta(0, "hi")]
    assert parser.push("\n") == [ToolArgumentsDelta(0, "]\\n")]
    assert parser.push(f"{NS}</content>") == [ToolArgumentsDelta(0, '"')]
    assert parser.push(f"{NS}</invoke>") == [ToolArgumentsDelta(0, "}"), ToolCallEnd(0)]


def test_a_long_string_arrives_in_as_many_fragments_as_it_came():
    pieces = ['line \\ of "code"\n'] * 1000
    parser = ToolCallParser(SCHEMAS)
    parser.push(f'{NS}<tool_call>\n{NS}<invoke name="save">{NS}<content>')
    assert all(parser.push(piece) for piece in pieces)
    events = parse([f'{NS}<invoke name="save">{NS}<content>', *pieces, f"{NS}</content>{NS}</invoke>"])
    _, calls, _ = meaning(events)
    assert json.loads(calls[0][1]) == {"content": "".join(pieces)}


@pytest.mark.parametrize("reply", CANONICAL, ids=[reply.name for reply in CANONICAL])
def test_what_the_token_limit_cuts_off_is_missing_and_nothing_else(reply):
    _, whole, _ = meaning(parse([reply.text]))
    for at in range(len(reply.text)):
        if not REPEATED.search(reply.text[:at]) and not num_held_back(reply.text[:at], NS):
            _, calls, _ = meaning(parse([reply.text[:at]], truncated=True))
            for (_, arguments), (_, expected) in zip(calls, whole, strict=False):
                assert expected.startswith(arguments)


def test_other_scalars_go_out_at_their_closing_tag():
    parser = ToolCallParser(SCHEMAS)
    parser.push(f'{NS}<invoke name="task">')
    assert parser.push(f"{NS}<count>4") == []
    assert parser.push("2") == []
    assert parser.push(f"{NS}</count>") == [ToolArgumentsDelta(0, '{"count": 42')]


def test_content_is_held_back_only_while_it_may_be_markup():
    parser = ToolCallParser(SCHEMAS)
    assert parser.push("ab]") == [ContentDelta(0, "ab")]
    assert parser.push("<") == []
    assert parser.push("c") == [ContentDelta(2, "]<c")]


def test_everything_behind_the_last_wanted_call_is_dropped():
    call = f'{NS}<invoke name="now">{NS}</invoke>\n'
    text = f"a{NS}<tool_call>\n{call}{call}{NS}</tool_call>b"
    parser = ToolCallParser(SCHEMAS, max_calls=1)
    events = parser.push(text) + parser.finish(truncated=False)
    assert meaning(events) == ("a", [("now", "{}")], False)
    assert parser.is_done
    assert meaning(parse(list(text), max_calls=2)) == ("a", [("now", "{}")] * 2, False)


def test_choices_do_not_share_state():
    first, second = ToolCallParser(SCHEMAS), ToolCallParser(SCHEMAS)
    first.push(f'{NS}<invoke name="save">{NS}<content>a')
    assert second.push("b") == [ContentDelta(0, "b")]


@pytest.mark.parametrize("inner", ["", f"{NS}<a>", f"{NS}<item>"], ids=["text", "nested", "list"])
def test_a_recursive_schema_and_deep_nesting_end(inner):
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/$defs/loop"}, "item": {"type": "array", "items": {"$ref": "#"}}},
        "$defs": {"loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"allOf": [{"$ref": "#/$defs/loop"}]}]}},
    }
    schemas = ToolSchemas([ToolFunction("f", schema)])
    text = f'{NS}<invoke name="f">{NS}<b>x{NS}</b>' + (inner * 5000) + "x"
    _, calls, _ = meaning(parse([text], schemas=schemas))
    assert "b" in json.loads(calls[0][1])


@pytest.mark.parametrize(
    "text",
    [
        f'{NS}<invoke name="save">{NS}<content>' + "word" * 250_000,
        f'{NS}<invoke name="unknown">{NS}<content>' + "word" * 250_000 + f"{NS}</content>",
        f'{NS}<invoke name="get_weather">{NS}<opts>' + f"{NS}<x>1{NS}</x>" * 25_000,
        f'{NS}<invoke name="save">{NS}<content>' + "]<]minimax[>" * 80_000,
        f'{NS}<invoke name="save">{NS}<content>' + f"{NS}<" * 60_000,
        f"{NS}<tool_call>" + "word" * 250_000,
        "\n" * 1_000_000,
    ],
    ids=["string", "untyped", "children", "half namespaces", "half tags", "no call", "blanks"],
)
def test_a_megabyte_in_small_pieces_takes_linear_time(text):
    began = time.process_time()
    parse([text[at : at + 4] for at in range(0, len(text), 4)])
    assert time.process_time() - began < 15, "a quadratic parser takes minutes"


def test_a_megabyte_in_one_piece_takes_linear_time():
    began = time.process_time()
    parse([f'{NS}<invoke name="get_weather">' + f"{NS}<x>1{NS}</x>" * 25_000])
    assert time.process_time() - began < 15, "a quadratic parser takes minutes"


@pytest.mark.parametrize("reply", REPLIES, ids=IDS)
def test_content_stands_behind_what_is_settled(reply):
    parser = ToolCallParser(SCHEMAS)
    settled_end = 0
    for character in reply.text:
        events = parser.push(character)
        assert all(event.start >= settled_end for event in events if isinstance(event, ContentDelta))
        assert settled_end <= parser.settled_end
        settled_end = parser.settled_end
    assert all(event.start >= settled_end for event in parser.finish(reply.truncated) if isinstance(event, ContentDelta))
