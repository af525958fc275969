"""What servers of this kind got wrong in public, one row each, through HTTP with what a model would emit.

Calls are in `test_tool_calls_over_http`, limits of parameters in `test_validation`, clients that leave in `test_disconnect`,
and clients that do not read in `test_slow_clients`.
"""

import asyncio
import dataclasses
import json

import pytest

from server.messages import FinishReason
from server.settings import ThinkingMode
from tests.api.scripted import CHAT, Say, ScriptedEngine, chat, http_client, ids, post, tiny_format
from tests.api.sse_client import calls_of, read, streamed, whole
from tests.api.tool_replies import CALL_PARIS, NS, PARIS, TOOLS

ENABLED, DISABLED, ADAPTIVE = ({"thinking": {"type": mode}} for mode in ("enabled", "disabled", "adaptive"))
WITH_TOOLS = {
    "tools": [{"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}} for tool in TOOLS],
}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}}
CALL = f"NS<tool_call>\n{CALL_PARIS}NS</tool_call>".replace("NS", NS)
FAMILY = "😀👨‍👩‍👧 漢字 é"


@dataclasses.dataclass(frozen=True)
class Trap:
    name: str
    text: str  # what the model emits
    fields: dict = dataclasses.field(default_factory=dict)
    content: str = ""
    reasoning: str = ""
    calls: tuple = ()
    end: FinishReason = FinishReason.STOP

    @property
    def finish_reason(self):
        return "length" if self.end is FinishReason.LENGTH else "tool_calls" if self.calls else "stop"


ONE_CALL = (("get_weather", json.dumps(PARIS)),)
TRAPS = [
    Trap("thinking stays out of the content", "why</mm:think>yes", ENABLED, "yes", "why"),
    Trap("a lone closer in adaptive mode", "</mm:think>yes", ADAPTIVE, "yes"),
    Trap("a repeated closer without thinking", "</mm:think>yes", DISABLED, "yes"),
    Trap("a repeated opener with thinking", "<mm:think>why</mm:think>yes", ENABLED, "yes", "why"),
    Trap("blanks before the opener", "\n<mm:think>why</mm:think>yes", ADAPTIVE, "yes", "why"),
    Trap("nothing but thinking", "why", ENABLED, "", "why", end=FinishReason.LENGTH),
    Trap("an answer that begins inside the thinking", "Ho</mm:think>la", ENABLED, "la", "Ho"),
    Trap("markers quoted in the answer", "a</mm:think>[<mm:think>b</mm:think>]", ENABLED, "[<mm:think>b</mm:think>]", "a"),
    Trap("markers quoted in JSON", 'w</mm:think>{"a": "<mm:think>"}', ENABLED | SCHEMA, '{"a": "<mm:think>"}', "w"),
    Trap("JSON behind optional thinking", '<mm:think>w</mm:think>{"a": 1}', ADAPTIVE | SCHEMA, '{"a": 1}', "w"),
    Trap("JSON without thinking", '{"a": 1}', DISABLED | SCHEMA, '{"a": 1}'),
    Trap("a text that ends like a marker", "[SILENCE]", ADAPTIVE, "[SILENCE]"),
    Trap("a text that ends like a marker, with tools", "[SILENCE]", WITH_TOOLS, "[SILENCE]"),
    Trap("a call behind thinking", f"why</mm:think>{CALL}", ENABLED | WITH_TOOLS, "", "why", ONE_CALL),
    Trap("a call inside thinking", f"why{CALL}", ENABLED | WITH_TOOLS, "", "why", ONE_CALL),
    Trap("a call at once", CALL, DISABLED | WITH_TOOLS, "", "", ONE_CALL),
    Trap("text behind a call", f"{CALL}done", DISABLED | WITH_TOOLS, "done", "", ONE_CALL),
    Trap("an unknown function", CALL.replace("get_weather", "nobody"), WITH_TOOLS, "", "", (("nobody", json.dumps(PARIS)),)),
    Trap("characters of several tokens", FAMILY, ADAPTIVE, FAMILY),
    Trap("characters of several tokens in thinking", f"{FAMILY}</mm:think>{FAMILY}", ENABLED, FAMILY, FAMILY),
    Trap("a stop string over several tokens", "abcDEFGHIJklm", {"stop": "DEFGHIJ"}, "abc"),
    Trap("a stop string inside a token", "one two three", {"stop": ["wo thr"]}, "one t"),
    Trap("the start of a stop string at the end", "abcDEFG", {"stop": "DEFGHIJ"}, "abcDEFG"),
    Trap("a stop string in the thinking", "9.8 or</mm:think>it is 9.8!", ENABLED | {"stop": "9.8"}, "it is ", "9.8 or"),
    Trap("a stop string that is kept", "abcSTOPd", {"stop": "STOP", "include_stop_str_in_output": True}, "abcSTOP"),
    Trap("special tokens are hidden", "a<fim_prefix>b", {}, "ab"),
    Trap("special tokens are shown", "a<fim_prefix>b", {"skip_special_tokens": False}, "a<fim_prefix>b"),
]


def ask(scenario, *scripts, **settings):
    async def run():
        async with asyncio.timeout(60), http_client(ScriptedEngine(*scripts), **settings) as client:
            return await scenario(client)

    return asyncio.run(run())


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_a_reply_is_split_the_same_way_in_every_form(trap):
    scripts = [Say(trap.text, end=trap.end, group=group) for group in (1, 1, 4, 1000)]

    async def scenario(client):
        return [
            *await whole(client, chat(**trap.fields)),
            *[(await streamed(client, chat(**trap.fields)))[0] for _ in range(3)],
        ]

    for answer in ask(scenario, *scripts):
        assert (answer.content, answer.reasoning) == (trap.content, trap.reasoning)
        assert tuple(calls_of(answer)) == trap.calls
        assert answer.finish_reason == trap.finish_reason


@pytest.mark.parametrize("mode", list(ThinkingMode))
def test_a_format_holds_behind_the_thinking(mode):
    engine = ScriptedEngine(Say("{}"))
    post(engine, chat(thinking={"type": mode.value}, **SCHEMA))
    sampling = engine.submitted[0].sampling
    assert json.loads(sampling.grammar.text) == {"type": "object"}
    opener, closer = ids("<mm:think></mm:think>")
    thinking = {ThinkingMode.ENABLED: (closer, None), ThinkingMode.ADAPTIVE: (closer, opener), ThinkingMode.DISABLED: None}
    found = sampling.thinking
    assert (None if found is None else (found.closer, found.opener)) == thinking[mode]


def assistant(**fields):
    return {"role": "assistant", **fields}


def call(arguments, **rest):
    return {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}, **rest}


USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "15C"}
EMPTY_CALL = f'{NS}<invoke name="get_weather">{NS}</invoke>'
HISTORIES = [
    ([USER, assistant(content=None, tool_calls=[call("{}")]), RESULT], EMPTY_CALL, "None"),
    ([USER, assistant(tool_calls=[call("")]), RESULT], EMPTY_CALL, "None"),
    ([USER, assistant(content="", tool_calls=[call("null")]), RESULT], EMPTY_CALL, "null"),
    ([USER, assistant(tool_calls=[call(json.dumps(PARIS))]), RESULT], f"{NS}<city>Paris{NS}</city>", '"city"'),
    ([USER, assistant(tool_calls=[call(PARIS)]), RESULT], f"{NS}<city>Paris{NS}</city>", '"city"'),
    ([USER, assistant(content="hm", tool_calls=[]), USER], "</mm:think>hm[e~[", "<invoke"),
    ([USER, assistant(content="a"), assistant(content="b"), USER], "b[e~[", "None"),
    ([USER, assistant(tool_calls=[call("{}")]), RESULT | {"content": [{"type": "text", "text": "15C"}]}], "15C", "type"),
    ([{"role": "developer", "content": "Be brief."}, USER], "developer\nBe brief.", "None"),
    ([{"role": "system", "content": "A"}, {"role": "system", "content": "B"}, USER], "A\n\nB", "None"),
    ([USER, assistant(reasoning_content="deep", content="x"), USER], "<mm:think>deep</mm:think>x", "None"),
    ([USER, assistant(reasoning="deep", content="x"), USER], "<mm:think>deep</mm:think>x", "None"),
    (
        [USER, assistant(reasoning_details=[{"type": "t", "text": "de"}, {"text": "ep"}, {}], content="x"), USER],
        "<mm:think>deep</mm:think>x",
        "None",
    ),
    ([USER, assistant(content="<mm:think>deep</mm:think>x"), USER], "<mm:think>deep</mm:think>x", "None"),
    ([USER, assistant(content="<think>deep</think>x"), USER], "<mm:think>deep</mm:think>x", "None"),
    ([USER, assistant(content="x"), USER], "]~b]ai\n</mm:think>x", "None"),
    ([assistant(content="only me")], "only me", "None"),
]


@pytest.mark.parametrize(("messages", "shown", "absent"), HISTORIES, ids=range(len(HISTORIES)))
def test_a_history_that_clients_send_is_understood(messages, shown, absent):
    engine = ScriptedEngine(Say("x"))
    response = post(engine, {"messages": messages})
    assert response.status_code == 200, response.text
    prompt = "".join(tiny_format().token_bytes(i).decode(errors="replace") for i in engine.submitted[0].prompt_token_ids)
    head, _, conversation = prompt.partition("]~b]developer")
    assert shown in conversation or shown in "developer" + conversation
    assert absent not in conversation
    assert head.startswith("]~!b[")


@pytest.mark.parametrize("text", ["[e~[", "]<]image[>[", NS, "<tool_call>", "<mm:think>", "]~b]ai\n", "]~!b["])
def test_a_special_text_of_the_client_is_no_special_token(text):
    plain, special = ScriptedEngine(Say("x")), ScriptedEngine(Say("x"))
    post(plain, chat("say it"))
    assert post(special, chat(f"say {text} it")).status_code == 200
    token_id = ids(text)[0]
    assert plain.submitted[0].prompt_token_ids.count(token_id) == special.submitted[0].prompt_token_ids.count(token_id)


def test_log_probabilities_need_no_alternatives():
    entry = post(ScriptedEngine(Say("ok")), chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"][0]
    assert entry["top_logprobs"] == []


def test_alternatives_are_text_with_their_true_bytes():
    token_id = next(i for i in range(tiny_format().vocab_size) if tiny_format().token_bytes(i) == b" the")

    class Alternatives(Say):
        def logprobs(self, token_ids, sampling):
            return [with_top(entry) for entry in super().logprobs(token_ids, sampling)]

    def with_top(entry):
        return type(entry)(entry.logprob, (token_id,), (-1.0,))

    body = post(ScriptedEngine(Alternatives("ok")), chat(logprobs=True, top_logprobs=1)).json()
    (top,) = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert (top["token"], bytes(top["bytes"])) == (" the", b" the")


def test_usage_is_the_same_in_every_form():
    fields = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "stream": True}

    async def scenario(client):
        plain = await client.post(CHAT, json=chat())
        return plain.json()["usage"], read(await client.post(CHAT, json=chat(**fields)))[1]

    usage, events = ask(scenario, Say("<mm:think>a b</mm:think>c d", num_cached=2))
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == usage
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == usage["completion_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(ids("<mm:think>a b"))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


def test_the_log_probabilities_of_a_prompt_have_one_entry_per_token():
    engine = ScriptedEngine(Say("ok"))
    body = post(engine, chat(prompt_logprobs=2)).json()
    token_ids = engine.submitted[0].prompt_token_ids
    first, *rest = body["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(token_ids) - 1
    for token_id, place in zip(token_ids[1:], rest, strict=True):
        assert {"0", "1", str(token_id)} == set(place)
        assert place["1"] == {"logprob": -1.0, "rank": 2, "decoded_token": tiny_format().token_bytes(1).decode()}
    assert "prompt_logprobs" not in post(ScriptedEngine(Say("ok")), chat()).json()


def test_choices_with_a_seed_differ_and_requests_with_a_seed_do_not():
    engine = ScriptedEngine(Say("x"))

    async def run():
        async with asyncio.timeout(30), http_client(engine) as client:
            for _ in range(2):
                await client.post(CHAT, json=chat(n=2, seed=7))

    asyncio.run(run())
    assert [submit.sampling.seed for submit in engine.submitted] == [7, 8, 7, 8]


@pytest.mark.parametrize(
    "fields", [{"reasoning_split": True}, {"user": "u"}, {"store": True}, {"verbosity": "low"}, {"x": [1]}]
)
def test_unknown_fields_are_ignored(fields):
    assert post(ScriptedEngine(Say("x")), chat(**fields)).status_code == 200


def test_model_output_is_never_a_servers_error():
    pieces = [NS, "<tool_call>", "</tool_call>", '<invoke name="', "<mm:think>", "</mm:think>", '">', "</", "<", "\x00", "�"]
    texts = ["".join(pieces[(start + step * k) % len(pieces)] for k in range(12)) for start in range(6) for step in (1, 2, 3)]
    bodies = [chat(**mode, **WITH_TOOLS) for mode in (ENABLED, DISABLED, ADAPTIVE)]

    async def scenario(client):
        for _ in texts:
            for body in bodies:
                await streamed(client, body)
                await whole(client, body)

    ask(scenario, *[Say(text) for text in texts for _ in range(6)])
