import asyncio
import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.api.schema import ChatBody
from server.media.geometry import Size
from server.settings import ThinkingMode
from tests.api.scripted import CHAT, Say, ScriptedEngine, ScriptedMedia, chat, http_client, post, tiny_format, until

VOCAB = 300
PNG = "data:image/png;base64,aGVsbG8="


def part(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


def message(**fields):
    return {"messages": [{"role": "user", "content": "hi"}, fields]}


BAD = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "narrator", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (part(type="text"), "messages[0].content[0].text"),
    (part(type="text", text=1), "messages[0].content[0].text"),
    (part(type="input_audio", input_audio={}), "messages[0].content[0]"),
    (part(type="video_url"), "messages[0].content[0].video_url"),
    (part(type="video_url", video_url={"url": "ftp://example.com/a.mp4"}), "messages[0].content[0].video_url"),
    (part(type="video_url", video_url={"url": PNG, "fps": 100}), "messages[0].content[0].video_url.fps"),
    (part(type="video_url", video_url={"url": PNG, "fps": "fast"}), "messages[0].content[0].video_url.fps"),
    (part(type="video_url", video_url={"url": PNG, "max_frames": 0}), "messages[0].content[0].video_url.max_frames"),
    (part(type="video_url", video_url={"url": PNG}, fps=0.1), "messages[0].content[0].fps"),
    (part(type="image_url"), "messages[0].content[0].image_url"),
    (part(type="image_url", image_url={"url": 5}), "messages[0].content[0].image_url.url"),
    (part(type="image_url", image_url={"url": "ftp://example.com/a.png"}), "messages[0].content[0].image_url"),
    (part(type="image_url", image_url={"url": "data:image/png;base64,???"}), "messages[0].content[0].image_url"),
    (part(type="image_url", image_url={"url": PNG, "detail": "ultra"}), "messages[0].content[0].image_url.detail"),
    (
        part(type="image_url", image_url={"url": PNG, "max_long_side_pixel": 7}),
        "messages[0].content[0].image_url.max_long_side_pixel",
    ),
    (part(type="image_url", image_url={"url": PNG, "max_pixels": 3135}), "messages[0].content[0].image_url.max_pixels"),
    (part(), "messages[0].content[0]"),
    (part(type=[]), "messages[0].content[0]"),
    (part(type={}), "messages[0].content[0]"),
    (message(role="tool", content="x", tool_call_id="a"), "messages[1].role"),
    (
        message(role="assistant", tool_calls=[{"id": "a", "function": {"name": "f", "arguments": "{"}}]),
        "messages[1].tool_calls[0].function.arguments",
    ),
    (message(role="assistant", tool_calls=[{"id": "a"}]), "messages[1].tool_calls[0].function"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens="5"), "max_tokens"),
    (chat(max_tokens=True), "max_tokens"),
    (chat(max_tokens=2.5), "max_tokens"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    (chat(min_tokens=9, max_tokens=8), "min_tokens"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature=2.1), "temperature"),
    (chat(temperature="1"), "temperature"),
    (chat(temperature=True), "temperature"),
    (chat(top_p=0), "top_p"),
    (chat(top_p=1.1), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(top_k=True), "top_k"),
    (chat(min_p=-1), "min_p"),
    (chat(min_p=2), "min_p"),
    (chat(presence_penalty=2.5), "presence_penalty"),
    (chat(frequency_penalty=-2.5), "frequency_penalty"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(repetition_penalty=2.5), "repetition_penalty"),
    (chat(seed=2**63), "seed"),
    (chat(seed="1"), "seed"),
    (chat(n=0), "n"),
    (chat(n=17), "n"),
    (chat(stop=""), "stop"),
    (chat(stop=["a", ""]), "stop[1]"),
    (chat(stop=["a"] * 17), "stop"),
    (chat(stop="x" * 257), "stop"),
    (chat(stop=5), "stop"),
    (chat(stop_token_ids=[VOCAB]), "stop_token_ids"),
    (chat(stop_token_ids=[-1]), "stop_token_ids"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(top_logprobs=3), "top_logprobs"),
    (chat(logprobs=5), "logprobs"),
    (chat(logit_bias={str(VOCAB): 1}), "logit_bias"),
    (chat(logit_bias={"-1": 1}), "logit_bias"),
    (chat(logit_bias={"abc": 1}), "logit_bias"),
    (chat(logit_bias={"9" * 5000: 1}), "logit_bias"),
    (chat(logit_bias={"1": 101}), "logit_bias.1"),
    (chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options={"include_usage": "yes"}), "stream_options.include_usage"),
    (chat(priority=2**31), "priority"),
    (chat(priority=0.5), "priority"),
    (chat(chat_template_kwargs={"thinking_mode": "loud"}), "chat_template_kwargs.thinking_mode"),
    (chat(chat_template_kwargs={"enable_thinking": "no"}), "chat_template_kwargs.enable_thinking"),
    (chat(thinking={"type": "loud"}), "thinking.type"),
    (chat(reasoning_effort="huge"), "reasoning_effort"),
    (chat(chat_template="{{ 1 }}"), "chat_template"),
    (chat(functions=[{"name": "f"}]), "functions"),
    (chat(function_call={"name": "f"}), "function_call"),
    (chat(echo=True), "echo"),
    (chat(allowed_token_ids=[]), "allowed_token_ids"),
    (chat(allowed_token_ids=[VOCAB]), "allowed_token_ids"),
    (chat(allowed_token_ids=[-1]), "allowed_token_ids"),
    (chat(allowed_token_ids=[0] * 65_537), "allowed_token_ids"),
    (chat(allowed_token_ids=5), "allowed_token_ids"),
    (chat(stop_token_ids=[0] * 1025), "stop_token_ids"),
    (chat(stop_token_ids=[2**70]), "stop_token_ids"),
    (chat(bad_words=["x" * 257]), "bad_words[0]"),
    (chat(bad_words=[""]), "bad_words[0]"),
    (chat(bad_words=["x"] * 129), "bad_words"),
    (chat(bad_words="x"), "bad_words"),
    (chat(bad_words=["a", "information"]), "bad_words[1]"),
    (chat(prompt_logprobs=-1), "prompt_logprobs"),
    (chat(prompt_logprobs=21), "prompt_logprobs"),
    (chat(prompt_logprobs=1, stream=True), "prompt_logprobs"),
    (chat(cache_salt=""), "cache_salt"),
    (chat(cache_salt="x" * 257), "cache_salt"),
    (chat(cache_salt=5), "cache_salt"),
    (chat(include_stop_str_in_output="yes"), "include_stop_str_in_output"),
    (chat(skip_special_tokens=1), "skip_special_tokens"),
    (chat(logit_bias={"1": True}), "logit_bias.1"),
    (chat(logit_bias=[1]), "logit_bias"),
    (chat(stream=True, stream_options={"continuous_usage_stats": 1}), "stream_options.continuous_usage_stats"),
    (message(role="assistant", reasoning_details=[5]), "messages[1].reasoning_details[0]"),
    (message(role="assistant", reasoning_details=[{}] * 1025), "messages[1].reasoning_details"),
    ({"messages": [{"role": "user", "content": ""}] * 16_385}, "messages"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_a_bad_value_is_a_400_that_names_it_and_starts_nothing(body, param):
    engine, media = ScriptedEngine(Say("x"), vocab_size=VOCAB), ScriptedMedia()
    response = post(engine, body, media)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["code"]
    assert not engine.submitted
    assert not media.planned


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": ' + b"[" * 5000,
        json.dumps(chat()).encode() + b"x",
        b"null",
        b"[]",
    ],
)
def test_what_is_not_a_json_object_is_a_400(raw):
    response = post(ScriptedEngine(Say("x")), raw)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "literal"),
    [("temperature", "NaN"), ("top_p", "Infinity"), ("min_p", "-Infinity"), ("temperature", "1e999"), ("seed", "9" * 5000)],
)
def test_numbers_that_json_cannot_hold_are_refused(name, literal):
    raw = f'{{"messages": [{{"role": "user", "content": "hi"}}], "{name}": {literal}}}'.encode()
    response = post(ScriptedEngine(Say("x")), raw)
    assert response.status_code == 400


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=6), children, max_size=4),
    max_leaves=8,
)
NAMES = sorted(ChatBody.model_fields)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=st.dictionaries(st.sampled_from(NAMES), ANY_JSON, max_size=4))
def test_no_value_of_any_field_is_a_servers_error(fields):
    response = post(ScriptedEngine(Say("x")), chat() | fields)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_errors_do_not_echo_the_prompt():
    body = {"messages": [{"role": "user", "content": "my secret"}, {"role": "my other secret"}], "n": 0}
    assert "secret" not in post(ScriptedEngine(Say("x")), body).text


def sampling_of(**fields):
    engine = ScriptedEngine(Say("x"), vocab_size=VOCAB, max_model_len=2000)
    response = post(engine, chat(**fields))
    assert response.status_code == 200, response.text
    return engine.submitted[0]


def test_parameters_reach_the_engine():
    submit = sampling_of(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        seed=-(2**63),
        logit_bias={"3": -100, "299": 1.5},
        logprobs=True,
        top_logprobs=4,
        stop_token_ids=[7, 7],
        min_tokens=2,
        priority=-3,
        cache_salt="tenant é",
        allowed_token_ids=[5, 299, 5],
        bad_words=["a", " b"],
        prompt_logprobs=0,
    )
    sampling = submit.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (7, 0.5, 0.9, 5, 0.1)
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    assert penalties == (0.25, -0.5, 1.5)
    assert sampling.seed == -(2**63)
    assert sampling.logit_bias == ((3, -100.0), (299, 1.5))
    assert sampling.num_logprobs == 4
    assert sampling.stop_token_ids == (*tiny_format().eos_token_ids, 7)
    assert sampling.min_tokens == 2
    assert submit.priority == -3
    assert submit.cache_salt == "tenant é".encode()
    assert sampling.allowed_token_ids == (5, 299)
    assert sampling.num_prompt_logprobs == 0
    texts = [tiny_format().decode(word) for word in sampling.bad_words]
    assert texts == ["a", " a", " b"]


def test_defaults_come_from_the_checkpoint():
    sampling = sampling_of().sampling
    defaults = tiny_format().defaults
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (defaults.temperature, defaults.top_p, defaults.top_k)
    assert sampling.stop_token_ids == tiny_format().eos_token_ids
    assert sampling.num_logprobs is None
    assert sampling.seed is None


def test_the_default_max_tokens_fills_the_window():
    submit = sampling_of()
    assert len(submit.prompt_token_ids) + submit.sampling.max_tokens == 2000


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": None, "max_completion_tokens": None, "n": None, "stop": None, "stream_options": None}, None),
    ],
)
def test_max_completion_tokens_wins_and_null_means_absent(fields, expected):
    submit = sampling_of(**fields)
    assert submit.sampling.max_tokens == (expected or 2000 - len(submit.prompt_token_ids))


@pytest.mark.parametrize(("given", "expected"), [(-1, 0), (0, 0), (1, 1), (VOCAB, 0), (10**30, 0)])
def test_top_k_minus_one_zero_and_more_than_there_are_turn_it_off(given, expected):
    assert sampling_of(top_k=given).sampling.top_k == expected


def test_ignore_eos_leaves_only_the_clients_stop_tokens():
    assert sampling_of(ignore_eos=True, stop_token_ids=[9]).sampling.stop_token_ids == (9,)


def test_harmless_and_unknown_fields_are_ignored():
    sampling_of(
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        store=False,
        metadata={"a": 1},
        user="me",
        chat_template_kwargs={"unknown": [1]},
    )


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, ThinkingMode.ADAPTIVE),
        ({"chat_template_kwargs": {"thinking_mode": "enabled"}}, ThinkingMode.ENABLED),
        ({"chat_template_kwargs": {"thinking_mode": "disabled"}, "thinking": {"type": "enabled"}}, ThinkingMode.DISABLED),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ThinkingMode.ENABLED),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, ThinkingMode.DISABLED),
        ({"thinking": {"type": "adaptive"}}, ThinkingMode.ADAPTIVE),
        ({"thinking": {"type": "enabled"}}, ThinkingMode.ENABLED),
        ({"thinking": {"type": "disabled"}}, ThinkingMode.DISABLED),
        ({"reasoning_effort": "none"}, ThinkingMode.DISABLED),
        ({"reasoning_effort": "low"}, ThinkingMode.ENABLED),
    ],
)
def test_every_spelling_of_the_thinking_switch_reaches_the_template_and_the_parser(fields, mode):
    engine = ScriptedEngine(Say("a</mm:think>b"))
    message = post(engine, chat(**fields)).json()["choices"][0]["message"]
    prompt = tiny_format().decode(engine.submitted[0].prompt_token_ids[-4:])
    expected = {
        ThinkingMode.ENABLED: ("<mm:think>", "b", "a"),
        ThinkingMode.DISABLED: ("</mm:think>", "a</mm:think>b", None),
        ThinkingMode.ADAPTIVE: ("", "a</mm:think>b", None),
    }
    ending, content, reasoning = expected[mode]
    assert prompt.endswith(ending or "ai\n")
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)


def test_the_servers_default_thinking_mode_holds_without_a_switch():
    response = post(ScriptedEngine(Say("a</mm:think>b")), chat(), thinking_mode="enabled")
    assert response.json()["choices"][0]["message"]["reasoning_content"] == "a"


def test_prompts_that_wait_have_a_limit_of_tokens():
    engine = ScriptedEngine(Say("x", end=None), Say("", end=None), Say("y"))

    async def run():
        async with asyncio.timeout(30), http_client(engine, max_queued_tokens=100) as client:

            def ask(num_words):
                return asyncio.create_task(client.post(CHAT, json=chat("word " * num_words)))

            running = ask(300)  # an empty queue takes any prompt
            await until(lambda: len(engine.submitted) == 1)
            await until(lambda: "m3_queued_prompt_tokens 0.0" in metrics_of(client))
            waiting = ask(300)
            await until(lambda: len(engine.submitted) == 2)
            refused = await ask(1)
            for submit in engine.submitted:
                engine.end(submit.request_id)
            await asyncio.gather(running, waiting)
            return refused, await ask(1)

    refused, taken = asyncio.run(run())
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "overloaded"
    assert int(refused.headers["retry-after"]) > 0
    assert taken.status_code == 200


class LargePictures(ScriptedMedia):
    async def plan(self, sources):
        return tuple(dataclasses.replace(plan, size=Size(560, 560)) for plan in await super().plan(sources))


def test_pictures_that_wait_count_with_all_their_tokens():
    engine = ScriptedEngine(Say("", end=None))
    picture = [{"type": "image_url", "image_url": {"url": "data:;base64,aGVsbG8h"}}]

    async def run():
        async with asyncio.timeout(30), http_client(engine, LargePictures(), max_queued_tokens=400) as client:
            alone = asyncio.create_task(client.post(CHAT, json=chat(picture)))  # an empty queue takes any prompt
            await until(lambda: len(engine.submitted) == 1)
            assert f"m3_queued_prompt_tokens {len(engine.submitted[0].prompt_token_ids)}.0" in metrics_of(client)
            engine.end(engine.submitted[0].request_id)
            assert (await alone).status_code == 200
            waiting = asyncio.create_task(client.post(CHAT, json=chat("hi")))
            await until(lambda: len(engine.submitted) == 2)
            refused = await client.post(CHAT, json=chat(picture))
            engine.end(engine.submitted[1].request_id)
            await waiting
            return refused, metrics_of(client)

    refused, metrics = asyncio.run(run())
    assert refused.status_code == 429
    assert "m3_queued_prompt_tokens 0.0" in metrics


def metrics_of(client):
    return client._transport.app.state.service.metrics.render().decode()


def test_another_model_is_a_404():
    response = post(ScriptedEngine(Say("x")), chat(model="gpt-4o"))
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_a_prompt_that_does_not_fit_is_refused_before_the_stream_opens():
    engine, media = ScriptedEngine(Say("x"), max_model_len=200), ScriptedMedia()
    picture = {"type": "image_url", "image_url": {"url": PNG}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "word " * 500}, picture]}], "stream": True}
    response = post(engine, body, media)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not media.planned


def test_a_prompt_and_max_tokens_that_do_not_fit_together_are_refused_with_the_numbers():
    engine = ScriptedEngine(Say("x"), max_model_len=200)
    error = post(engine, chat(max_tokens=199)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    assert "199" in error["message"]
    assert "200" in error["message"]
