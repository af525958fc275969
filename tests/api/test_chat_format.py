import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from server.api.chat_format import ChatFormat
from server.api.checkpoint import CheckpointError
from server.api.conversation import JsonObject, Role, TemplateMessage, TextPart, ToolCall
from server.api.tokenizer import SpecialTokens
from server.errors import BadRequestError, ContextLengthError
from server.settings import ThinkingMode
from tests.api.conversations import ADDED, FORMAT, assistant, copy_tiny, naive_ids, raw_text, tool, user

NS = "]<]minimax[>["
WEATHER: JsonObject = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def render(*messages: TemplateMessage, tools: list[JsonObject] | None = None, mode: str = "adaptive") -> str:
    return raw_text(FORMAT.encode_chat(messages, tools, ThinkingMode(mode)).token_ids)


def turns(*messages: TemplateMessage, mode: str = "adaptive") -> str:
    """What follows the developer turn."""
    return render(*messages, mode=mode).partition("]~b]developer\n")[2].partition("[e~[\n")[2]


def test_head_has_identity_thinking_rules_and_instructions() -> None:
    text = render(TemplateMessage(Role.SYSTEM, "Be brief."), user("Hi"))
    assert text.startswith("]~!b[]~b]system\n")
    assert "\n\n<thinking_instructions>\n" in text
    assert text.endswith("</thinking_instructions>[e~[\n]~b]developer\nBe brief.[e~[\n]~b]user\nHi[e~[\n]~b]ai\n")
    assert text.count("<mm:think>") == 1
    assert text.count("</mm:think>") == 2


@pytest.mark.parametrize(("mode", "ending"), [("adaptive", ""), ("enabled", "<mm:think>"), ("disabled", "</mm:think>")])
def test_thinking_mode_decides_how_the_prompt_ends(mode: str, ending: str) -> None:
    assert turns(user("Hi"), mode=mode) == f"]~b]user\nHi[e~[\n]~b]ai\n{ending}"


def test_every_mode_has_its_own_line_in_the_head() -> None:
    heads = {render(user("Hi"), mode=mode).partition("</thinking_instructions>")[0] for mode in ThinkingMode}
    assert len(heads) == 3


def test_root_replaces_the_identity() -> None:
    text = render(TemplateMessage(Role.ROOT, "I am R."), TemplateMessage(Role.DEVELOPER, "D."), user("Hi"))
    assert text.startswith("]~!b[]~b]system\nI am R.\n\n<thinking")
    assert "]~b]developer\nD.[e~[\n" in text


def test_reasoning_of_all_turns_is_kept() -> None:
    text = turns(user("u1"), assistant("a1", "r1"), user("u2"), assistant("a2"), user("u3"))
    assert text == (
        "]~b]user\nu1[e~[\n]~b]ai\n<mm:think>r1</mm:think>a1[e~[\n]~b]user\nu2[e~[\n"
        "]~b]ai\n</mm:think>a2[e~[\n]~b]user\nu3[e~[\n]~b]ai\n"
    )


@pytest.mark.parametrize("content", ["<mm:think>\nr1\n</mm:think>\n\na1", "r1</mm:think>a1", "<think>r1</think>a1"])
def test_inline_reasoning_is_encoded_with_the_real_markers(content: str) -> None:
    inline = FORMAT.encode_chat([user("u1"), assistant(content), user("u2")], None, ThinkingMode.ADAPTIVE)
    beside = FORMAT.encode_chat([user("u1"), assistant("a1", "r1"), user("u2")], None, ThinkingMode.ADAPTIVE)
    assert inline == beside


def test_tools_are_dumped_as_they_came() -> None:
    function: JsonObject = {"name": "f", "description": "größer < & '\"", "parameters": {"b": 1, "a": None, "x": [True, 1.5]}}
    text = render(user("Hi"), tools=[{"type": "function", "function": function}])
    assert f"\n\n<tools>\n<tool>{json.dumps(function, ensure_ascii=False)}</tool>\n</tools>\n\n" in text
    assert "]~b]developer\nYou are a helpful assistant.\n\n# Tools\n" in text


def test_parallel_calls_and_results() -> None:
    first: JsonObject = {"city": "Paris", "opts": {"units": "C", "days": [1, 2]}, "verbose": True, "note": None}
    calls = (ToolCall("get_weather", json.dumps(first), "c1"), ToolCall("get_weather", {"city": "Oslo"}, "c2"))
    text = turns(user("u"), assistant("Checking.", "need both", *calls), tool("7C", "c2"), tool("18C", "c1"))
    assert text == (
        f"]~b]user\nu[e~[\n]~b]ai\n<mm:think>need both</mm:think>Checking.{NS}<tool_call>\n"
        f'{NS}<invoke name="get_weather">{NS}<city>Paris{NS}</city>{NS}<opts>{NS}<units>C{NS}</units>{NS}<days>'
        f"{NS}<item>1{NS}</item>{NS}<item>2{NS}</item>{NS}</days>{NS}</opts>{NS}<verbose>true{NS}</verbose>{NS}</invoke>\n"
        f'{NS}<invoke name="get_weather">{NS}<city>Oslo{NS}</city>{NS}</invoke>\n{NS}</tool_call>[e~[\n'
        "]~b]tool\n<response>18C</response>\n<response>7C</response>[e~[\n]~b]ai\n"
    )


@pytest.mark.parametrize("arguments", ["", "null", '"null"', "{}", None])
def test_call_without_arguments(arguments: str | None) -> None:
    text = turns(user("u"), assistant(None, None, ToolCall("now", arguments)), tool((TextPart("12"), TextPart(":30"))))
    assert f'{NS}<invoke name="now">{NS}</invoke>\n' in text
    assert "<response>12:30</response>" in text


def test_harmless_prompts_are_encoded_as_the_whole_text_would_be() -> None:
    messages = [
        TemplateMessage(Role.SYSTEM, "  Be brief, \n\n"),
        user("\n\n  Größe? [a] <b> 今天 😀\n"),
        assistant("x > y]", "hm.\n", ToolCall("get_weather", {"city": " São Paulo"})),
        tool("[18]"),
    ]
    token_ids = FORMAT.encode_chat(messages, [WEATHER], ThinkingMode.ENABLED).token_ids
    assert token_ids == naive_ids(raw_text(token_ids))


def test_too_long_prompts_are_given_up() -> None:
    with pytest.raises(ContextLengthError, match="more than 1000 tokens") as raised:
        FORMAT.encode_chat([user("word " * 1_000_000)], None, ThinkingMode.ADAPTIVE, max_tokens=1000)
    assert raised.value.param == "messages"
    with pytest.raises(ContextLengthError, match="more than 3 tokens"):
        FORMAT.encode_text("a b c d e f", max_tokens=3)


@pytest.mark.parametrize("build", [user, lambda text: assistant("", None, ToolCall("f", {"k": text}))])
def test_lone_surrogates_are_refused(build: Callable[[str], TemplateMessage]) -> None:
    with pytest.raises(BadRequestError, match="surrogate"):
        FORMAT.encode_chat([user("u"), build("a\ud800b")], None, ThinkingMode.ADAPTIVE)


def test_deep_arguments_are_refused() -> None:
    nested = "[" * 900 + "]" * 900
    with pytest.raises(BadRequestError, match="deeply"):
        FORMAT.encode_chat([user("u"), assistant("", None, ToolCall("f", f'{{"k": {nested}}}'))], None, ThinkingMode.ADAPTIVE)


def test_threads_get_the_same_ids() -> None:
    messages = [user("The weather in Paris, please. " * 50), assistant("x", "y"), user("]~b]")]
    expected = FORMAT.encode_chat(messages, [WEATHER], ThinkingMode.ENABLED)
    results: list[object] = []
    threads = [
        threading.Thread(target=lambda: results.append(FORMAT.encode_chat(messages, [WEATHER], ThinkingMode.ENABLED)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 8


def test_facts_of_the_checkpoint() -> None:
    assert FORMAT.eos_token_ids == (ADDED["[e~["],)
    assert FORMAT.vocab_size == max(ADDED.values()) + 1
    assert not FORMAT.is_shown(ADDED["[e~["], SpecialTokens.HIDDEN)
    assert FORMAT.is_shown(ADDED[NS], SpecialTokens.HIDDEN)
    assert FORMAT.token_bytes(FORMAT.vocab_size) == b""
    assert (FORMAT.defaults.temperature, FORMAT.defaults.top_p, FORMAT.defaults.top_k) == (1.0, 0.95, 0)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("config.json", "image_token_index", 7, "disagree"),
        ("config.json", "video_token_index", None, "video_token_index"),
        ("generation_config.json", "eos_token_id", None, "eos_token_id"),
        ("generation_config.json", "eos_token_id", ["x"], "eos_token_id"),
        ("generation_config.json", "top_p", "high", "top_p"),
        ("generation_config.json", "top_p", 2.0, "range"),
        ("tokenizer.json", "decoder", {"type": "Metaspace"}, "byte-level"),
    ],
)
def test_unusable_checkpoints_are_named(tmp_path: Path, name: str, key: str, value: object, message: str) -> None:
    copy_tiny(tmp_path)
    content = json.loads((tmp_path / name).read_text())
    (tmp_path / name).write_text(json.dumps({**content, key: value}))
    with pytest.raises(CheckpointError, match=message):
        ChatFormat.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    copy_tiny(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        ChatFormat.load(tmp_path)
