import itertools

import pytest

from server.api.reply import ReplyParser
from server.api.reply_events import ContentDelta, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from server.api.tool_parser import ToolCallParser
from server.api.tool_schema import ToolSchemas
from tests.api.tool_replies import ENABLED, NS, REASONED, REPLIES, TOOLS, arguments_match

SCHEMAS = ToolSchemas(TOOLS)
CASES = [*REASONED, *REPLIES]
IDS = [reply.name for reply in CASES]


def parse(pieces, mode, truncated=False, *, with_tools=True):
    parser = ReplyParser(mode, ToolCallParser(SCHEMAS) if with_tools else None)
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish(truncated)


def meaning(events):
    reasoning, content, calls = "", "", []
    for event in events:
        match event:
            case ReasoningDelta(_, text):
                assert not content
                assert not calls, "reasoning comes first"
                reasoning += text
            case ContentDelta(_, text):
                content += text
            case ToolCallStart(index, name):
                assert index == len(calls), "calls are counted from 0, whatever came before"
                calls.append((name, ""))
            case ToolArgumentsDelta(index, fragment):
                calls[index] = (calls[index][0], calls[index][1] + fragment)
    return reasoning, content, calls


@pytest.mark.parametrize("reply", CASES, ids=IDS)
def test_a_reply_is_sorted_and_the_cuts_do_not_matter(reply):
    text = reply.text
    reasoning, content, calls = whole = meaning(parse([text], reply.mode, reply.truncated))
    assert (reasoning, content) == (reply.reasoning, reply.content)
    assert [name for name, _ in calls] == [name for name, _ in reply.calls]
    for (_, arguments), (_, expected) in zip(calls, reply.calls, strict=True):
        assert arguments_match(arguments, expected), arguments
    assert meaning(parse(list(text), reply.mode, reply.truncated)) == whole
    for at in range(len(text) + 1):
        assert meaning(parse([text[:at], text[at:]], reply.mode, reply.truncated)) == whole, at


@pytest.mark.parametrize("reply", REASONED, ids=[reply.name for reply in REASONED])
def test_a_delta_of_text_is_the_text_at_its_start(reply):
    for pieces in ([reply.text], list(reply.text)):
        for event in parse(pieces, reply.mode):
            if isinstance(event, ContentDelta | ReasoningDelta):
                assert reply.text[event.start : event.start + len(event.text)] == event.text != ""


def test_a_reasoned_reply_may_be_cut_at_any_two_places():
    for reply in REASONED[:3]:
        text = reply.text
        whole = meaning(parse([text], reply.mode))
        for a, b in itertools.combinations(range(0, len(text), 3), 2):
            assert meaning(parse([text[:a], text[a:b], text[b:]], reply.mode)) == whole


def test_a_block_ends_the_reasoning_for_the_count_too():
    parser = ReplyParser(ENABLED, ToolCallParser(SCHEMAS))
    parser.push("why")
    assert parser.in_reasoning
    parser.push(f"{NS}<tool_call>")
    assert not parser.in_reasoning


def test_without_tools_markup_is_text():
    text = f'a{NS}<tool_call></mm:think>b{NS}<invoke name="now">{NS}</invoke>'
    reasoning, content, calls = meaning(parse(list(text), ENABLED, with_tools=False))
    assert (reasoning, content, calls) == (f"a{NS}<tool_call>", text.partition("</mm:think>")[2], [])


def test_the_reply_is_done_with_its_last_wanted_call():
    parser = ReplyParser(ENABLED, ToolCallParser(SCHEMAS, max_calls=1))
    events = parser.push(f'</mm:think>{NS}<invoke name="now">')
    assert not parser.is_done
    events += parser.push(f"{NS}</invoke>")
    assert parser.is_done
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["now"]
