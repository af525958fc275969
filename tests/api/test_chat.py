import asyncio
import base64
import json

import pytest

from server.messages import FailureKind, FinishReason, MediaKind
from tests.api.scripted import CHAT, Say, ScriptedEngine, ScriptedMedia, chat, http_client, ids, post, tiny_format, until


def events_of(response):
    """The JSON of every event; asserts the framing and the last event."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def deltas_of(events, index=0):
    return [c["delta"] for e in events for c in e["choices"] if c["index"] == index]


def picture(data=b"png"):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def chat_with(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


def test_an_answer_has_openais_shape():
    engine = ScriptedEngine(Say("Hello there", end=FinishReason.STOP, num_cached=3))
    body = post(engine, chat(), served_model_name="m3").json()
    num_prompt, num_output = len(engine.submitted[0].prompt_token_ids), len(ids("Hello there"))
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "m3"
    assert isinstance(body["created"], int)
    message = {"role": "assistant", "content": "Hello there"}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stream_is_role_then_deltas_then_finish_then_usage():
    engine = ScriptedEngine(Say("<mm:think>hm</mm:think>Hello there"))
    events = events_of(post(engine, chat(stream=True, stream_options={"include_usage": True})))
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert len({(e["id"], e["created"], e["model"]) for e in events}) == 1
    first, *middle, last, usage = events
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    deltas = deltas_of(middle)
    kinds = [next(iter(delta)) for delta in deltas]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"reasoning_content", "content"}
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
    assert "".join(d.get("content", "") for d in deltas) == "Hello there"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert all(e["usage"] is None for e in events[:-1])


@pytest.mark.parametrize("fields", [{}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}])
def test_usage_is_streamed_only_when_asked_for(fields):
    events = events_of(post(ScriptedEngine(Say("x")), chat(stream=True, **fields)))
    assert all("usage" not in event and event["choices"] for event in events)


@pytest.mark.parametrize("n", [1, 3])
def test_the_json_answer_is_the_fold_of_the_stream(n):
    scripts = [Say("<mm:think>a é</mm:think>one 漢 STOP x"), Say("two", end=FinishReason.LENGTH), Say("👨‍👩‍👧", group=3)]
    fields = {"n": n, "logprobs": True, "top_logprobs": 2, "stop": "STOP"}
    whole = post(ScriptedEngine(*scripts), chat(**fields)).json()
    events = events_of(post(ScriptedEngine(*scripts), chat(stream=True, stream_options={"include_usage": True}, **fields)))
    for choice in whole["choices"]:
        deltas = deltas_of(events, choice["index"])
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(d.get("content", "") for d in deltas) == choice["message"]["content"]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == choice["message"].get("reasoning_content", "")
        assert [e for p in parts if p["logprobs"] for e in p["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [choice["finish_reason"]]
    assert len(whole["choices"]) == n
    assert events[-1]["usage"] == whole["usage"]


def test_several_choices_are_submissions_with_seeds_of_their_own():
    engine = ScriptedEngine(Say("a"), Say("b"), Say("c"))
    body = post(engine, chat(n=3, seed=2**63 - 1)).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a", "b", "c"]
    assert [submit.sampling.seed for submit in engine.submitted] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert len({submit.request_id for submit in engine.submitted}) == 3
    assert body["usage"]["prompt_tokens"] == len(engine.submitted[0].prompt_token_ids)
    assert body["usage"]["completion_tokens"] == len(ids("a")) + len(ids("b")) + len(ids("c"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_matched_stop_string_ends_the_engines_work(stream):
    engine = ScriptedEngine(Say("keep STOP " + "more " * 50, end=None))
    response = post(engine, chat(stop=["STOP"], stream=stream))
    assert engine.aborted == [engine.submitted[0].request_id]
    if stream:
        assert "".join(d.get("content", "") for d in deltas_of(events_of(response))) == "keep "
    else:
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("keep ", "stop")
        assert response.json()["usage"]["completion_tokens"] == len(ids("keep STOP"))


def test_logprobs_have_the_chat_shape():
    engine = ScriptedEngine(Say("ok", end=FinishReason.LENGTH))
    body = post(engine, chat(logprobs=True, top_logprobs=2)).json()
    entry = body["choices"][0]["logprobs"]["content"][0]
    assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
    assert bytes(entry["bytes"]).decode() == entry["token"]
    assert [set(top) for top in entry["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
    assert engine.submitted[0].sampling.num_logprobs == 2


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (FailureKind.NO_FIT, 400, "context_length_exceeded"),
        (FailureKind.INVALID, 400, "invalid_value"),
        (FailureKind.INTERNAL, 500, "request_failed"),
        (FailureKind.ENGINE_DEAD, 503, "engine_unavailable"),
    ],
)
def test_a_failure_in_the_engine_is_an_error_of_the_right_kind(kind, status, code):
    response = post(ScriptedEngine(Say("partial", end=kind)), chat())
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert ("retry-after" in response.headers) == (status == 503)


def test_a_failure_after_the_first_byte_is_the_streams_last_event():
    response = post(ScriptedEngine(Say("partial", end=FailureKind.INTERNAL)), chat(stream=True))
    assert response.status_code == 200
    last = response.text.split("\n\n")[-2]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_failed"
    assert "[DONE]" not in response.text


def test_a_failed_choice_ends_its_siblings():
    engine = ScriptedEngine(Say("", end=None), Say("x", end=FailureKind.INTERNAL))
    assert post(engine, chat(n=2)).status_code == 500
    assert engine.aborted == [engine.submitted[0].request_id]


def test_an_abort_that_nobody_asked_for_is_not_an_answer():
    assert post(ScriptedEngine(Say("x", end=FinishReason.ABORT)), chat()).status_code == 503


def test_pictures_go_to_the_engine_where_the_prompt_has_them():
    engine, media = ScriptedEngine(Say("nice")), ScriptedMedia()
    body = chat_with(picture(b"one"), {"type": "text", "text": "and"}, picture(b"two"), n=2)
    assert post(engine, body, media).status_code == 200
    submit = engine.submitted[0]
    assert [source.data for source in media.planned] == [b"one", b"two"]
    assert [item.kind for item in submit.media] == [MediaKind.IMAGE] * 2
    assert [item.content_hash.strip() for item in submit.media] == [b"one", b"two"]
    for item in submit.media:
        (span,) = item.ranges
        assert span.length == 4
        texts = [tiny_format().token_bytes(i) for i in submit.prompt_token_ids[span.offset - 1 : span.offset + 5]]
        assert texts == [b"]<]start of image[>[", *[b"]<]image[>["] * 4, b"]<]end of image[>["]
    assert media.num_leases == media.num_held == 0


@pytest.mark.parametrize("end", [FinishReason.STOP, FailureKind.INTERNAL])
def test_media_memory_is_given_back_however_the_request_ends(end):
    media = ScriptedMedia()
    post(ScriptedEngine(Say("x", end=end)), chat_with(picture(), n=3), media)
    assert media.num_leases == media.num_held == 0


def test_media_memory_is_given_back_when_the_engine_refuses_the_second_choice():
    engine, media = ScriptedEngine(Say("", end=None), max_open=1), ScriptedMedia()
    response = post(engine, chat_with(picture(), n=2), media)
    assert response.status_code == 429
    assert media.num_leases == media.num_held == 0
    assert engine.aborted == [engine.submitted[0].request_id]


def test_a_picture_that_cannot_be_decoded_is_a_400_that_names_it():
    engine = ScriptedEngine(Say("x"))
    response = post(engine, chat_with({"type": "text", "text": "look"}, picture(b"bad")))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[1].image_url"
    assert not engine.submitted


def test_too_many_pictures_are_refused_before_any_is_looked_at():
    media = ScriptedMedia()
    response = post(ScriptedEngine(Say("x")), chat_with(picture(), picture(), picture()), media, max_images=2)
    assert response.json()["error"]["param"] == "messages[0].content[2].image_url"
    assert not media.planned


def test_every_role_is_rendered():
    engine = ScriptedEngine(Say("x"))
    messages = [
        {"role": "system", "content": "rule one"},
        {"role": "developer", "content": [{"type": "text", "text": "rule two"}]},
        {"role": "user", "content": "riddle"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "pondering",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "alpha_call", "arguments": '{"x": 1}'}},
                {"id": "b", "type": "function", "function": {"name": "beta_call", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "b", "content": "result b"},
        {"role": "tool", "tool_call_id": "a", "content": "result a"},
        {"role": "assistant", "content": "my reply", "reasoning": "musing"},
        {"role": "user", "content": "once more"},
    ]
    assert post(engine, {"messages": messages}).status_code == 200
    prompt = b"".join(map(tiny_format().token_bytes, engine.submitted[0].prompt_token_ids)).decode()
    found = [
        "rule one",
        "rule two",
        "riddle",
        "pondering",
        "alpha_call",
        "beta_call",
        "result a",
        "result b",
        "musing",
        "my reply",
    ]
    places = [prompt.index(text) for text in [*found, "once more"]]
    assert places == sorted(places)


def test_special_texts_in_a_message_do_not_become_special_tokens():
    engine = ScriptedEngine(Say("x"))
    post(engine, chat("]<]image[>[ [e~[ </mm:think>"))
    post_ids = engine.submitted[0].prompt_token_ids
    assert ids("]<]image[>[")[0] not in post_ids


def test_a_full_server_answers_429_until_a_place_is_free():
    engine = ScriptedEngine(Say("", end=None), Say("", end=None), Say("x"))

    async def run():
        async with asyncio.timeout(30), http_client(engine, max_num_seqs=1, max_queued_requests=1) as client:
            waiting = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(2)]
            await until(lambda: len(engine.submitted) == 2)
            refused = await client.post(CHAT, json=chat())
            engine.end(engine.submitted[0].request_id)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)  # either may have been submitted first
            taken = await client.post(CHAT, json=chat())
            engine.end(engine.submitted[1].request_id)
            await asyncio.gather(*waiting)
            return refused, taken

    refused, taken = asyncio.run(run())
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "overloaded"
    assert int(refused.headers["retry-after"]) > 0
    assert taken.status_code == 200


def test_when_the_engine_dies_every_open_request_ends_with_an_error():
    engine = ScriptedEngine(Say("partial ", end=None))

    async def run():
        async with asyncio.timeout(30), http_client(engine) as client:
            waiting = [asyncio.create_task(client.post(CHAT, json=chat(stream=stream))) for stream in (False, True)]
            await until(lambda: len(engine.submitted) == 2)
            engine.die()
            answers = await asyncio.gather(*waiting)
            return answers, await client.get("/readyz"), await client.get("/livez"), await client.post(CHAT, json=chat())

    (whole, stream), ready, alive, late = asyncio.run(run())
    assert whole.status_code == 503
    assert '"code":"engine_unavailable"' in stream.text.split("\n\n")[-2]
    assert (ready.status_code, alive.status_code, late.status_code) == (503, 500, 503)
