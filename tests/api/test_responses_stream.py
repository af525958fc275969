"""The event machines of the Responses API and of Anthropic's messages, fed with every cut of the same reply."""

import msgspec
import pytest

from server.api.choice import ChoiceAssembler, ReplyRules
from server.api.messages_stream import MessageStream
from server.api.messages_wire import BlockDelta, BlockStart, BlockStop
from server.api.responses_stream import ResponseStream
from server.api.responses_wire import Echo, ItemAdded, ItemDone
from server.api.tool_schema import ToolFunction, ToolSchemas
from server.api.wire import CompletionDetails, PromptDetails, Usage
from server.errors import RequestFailedError
from server.messages import FinishReason, Tokens
from server.settings import ThinkingMode
from tests.api.scripted import ids, tiny_format
from tests.api.tool_replies import NS

USAGE = Usage(10, 5, 15, PromptDetails(4), CompletionDetails(2))
ECHO = Echo(None, None, {}, True, {}, 1.0, {}, "auto", [], 0, 1.0, None)
SCHEMAS = ToolSchemas((ToolFunction("f", {"type": "object", "properties": {"s": {"type": "string"}}}), ToolFunction("now")))
FIRST = f'{NS}<invoke name="f">{NS}<s>a "b" 漢{NS}</s>{NS}</invoke>\n'
SECOND = f'{NS}<invoke name="now">{NS}</invoke>\n'
REPLY = f"think é</mm:think>text{NS}<tool_call>\n{FIRST}{SECOND}{NS}</tool_call>after"


def deltas(group):
    """The chat path's deltas for the reply, whose tokens come in groups."""
    choice = ChoiceAssembler(0, tiny_format(), ReplyRules(ThinkingMode.ENABLED, schemas=SCHEMAS))
    token_ids = ids(REPLY)
    found = [choice.open()]
    for start in range(0, len(token_ids), group):
        found += choice.push(Tokens("r", token_ids[start : start + group]))
    return [*found, *choice.finish(FinishReason.STOP)]


def plain(value):
    """JSON objects without ids that are drawn anew."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in {"id", "call_id"}}
    return value


def message_run(group):
    machine = MessageStream("msg_1", "tiny")
    events = machine.open(10)
    for delta in deltas(group):
        events += machine.push(delta)
    return events + machine.close(USAGE, None), machine.message


def response_run(group):
    machine = ResponseStream("resp_1", 0, "tiny", ECHO)
    events = machine.open()
    for delta in deltas(group):
        events += machine.push(delta)
    return events + machine.close(USAGE), machine.response


NUM_TOKENS = len(ids(REPLY))


@pytest.mark.parametrize("group", [*range(2, 9), NUM_TOKENS])
def test_the_cuts_do_not_change_the_answer(group):
    for run in (message_run, response_run):
        assert plain(msgspec.to_builtins(run(group)[1])) == plain(msgspec.to_builtins(run(1)[1]))


def test_a_message_holds_everything_in_order():
    blocks = msgspec.to_builtins(message_run(1)[1].content)
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert blocks[0]["thinking"] == "think é"
    assert blocks[2]["input"] == {"s": 'a "b" 漢'}
    assert blocks[3]["input"] == {}
    assert blocks[4]["text"] == "after"


@pytest.mark.parametrize("group", [1, 3, NUM_TOKENS])
def test_one_block_is_open_at_a_time(group):
    open_index, num_blocks = None, 0
    for event in message_run(group)[0]:
        match event:
            case BlockStart():
                assert open_index is None
                assert event.index == num_blocks
                open_index, num_blocks = event.index, num_blocks + 1
            case BlockDelta():
                assert event.index == open_index
            case BlockStop():
                assert event.index == open_index
                open_index = None
    assert open_index is None


def test_a_message_without_content_still_begins_and_ends():
    machine = MessageStream("msg_1", "tiny")
    tags = [event.__struct_config__.tag for event in [*machine.open(1), *machine.close(USAGE, None)]]
    assert tags == ["message_start", "ping", "message_delta", "message_stop"]
    assert machine.message.content == []
    assert machine.message.usage.input_tokens == 6
    assert machine.message.usage.cache_read_input_tokens == 4


@pytest.mark.parametrize("group", [1, 3, NUM_TOKENS])
def test_one_item_is_open_at_a_time(group):
    events, response = response_run(group)
    open_item = None
    for event in events:
        if isinstance(event, ItemAdded):
            assert open_item is None
            open_item = event.item.id
        elif isinstance(event, ItemDone):
            assert event.item.id == open_item
            assert response.output[event.output_index] == event.item
            open_item = None
        elif hasattr(event, "item_id"):
            assert event.item_id == open_item
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.__struct_config__.tag for item in response.output] == [
        *("reasoning", "message", "function_call", "function_call", "message")
    ]
    assert response.output[3].arguments == "{}"


def test_a_failed_response_keeps_what_was_whole():
    machine = ResponseStream("resp_1", 0, "tiny", ECHO)
    machine.open()
    for delta in deltas(1)[:-1]:
        machine.push(delta)
    failed, error = machine.fail(RequestFailedError("broken"))
    assert failed.response.status == "failed"
    assert failed.response.error.message == "broken"
    assert len(failed.response.output) == 4, "the text behind the calls was still open"
    assert error.error["message"] == error.message == "broken"
