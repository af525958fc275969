"""A server that ends: what clients see of it. Signals and exit codes are in tests/e2e/test_shutdown.py."""

import asyncio

import pytest

from server.api.drain import drain
from server.api.open_requests import OpenRequests
from server.errors import ShuttingDownError
from tests.api.scripted import CHAT, Say, ScriptedEngine, ScriptedMedia, chat, http_client, until

PROMPT = {"model": "tiny", "prompt": "hi"}
MESSAGE = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(30):
            return await coroutine

    return asyncio.run(bounded())


def life_of(client):
    return client._transport.app.state.service._life


def test_new_requests_are_refused_in_the_shape_of_their_endpoint():
    async def scenario():
        async with http_client(ScriptedEngine(Say("x"))) as client:
            life_of(client).is_draining = True
            openai = [await client.post(path, json=body) for path, body in ((CHAT, chat()), ("/v1/completions", PROMPT))]
            other = [await client.post("/tokenize", json=PROMPT), await client.post("/v1/responses", json={"input": "hi"})]
            return [*openai, *other], await client.post("/v1/messages", json=MESSAGE), await client.get("/metrics")

    openai, anthropic, metrics = run(scenario())
    for response in (*openai, anthropic):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0
        assert response.headers["connection"] == "close"
    assert {response.json()["error"]["code"] for response in openai} == {"shutting_down"}
    assert anthropic.json()["error"]["type"] == "overloaded_error"
    assert 'm3_requests_total{status="503"} 4.0' in metrics.text, "tokenizing is not generating"


def test_probes_tell_a_server_that_drains():
    async def scenario():
        async with http_client(ScriptedEngine(Say("x"))) as client:
            life_of(client).is_draining = True
            return [await client.get(path) for path in ("/readyz", "/health", "/livez")]

    ready, health, alive = run(scenario())
    assert (ready.status_code, ready.json()) == (503, {"state": "draining"})
    assert (health.status_code, health.json()) == (503, {"status": "not ready"})
    assert (alive.status_code, alive.json()) == (200, {"state": "alive"})


def test_a_drain_without_requests_is_over_at_once_and_one_with_waits_for_the_last():
    async def scenario():
        requests = OpenRequests()
        assert await drain(requests, pytest.fail, 0) == 0
        places = [requests.enter(), requests.enter()]
        draining = asyncio.create_task(drain(requests, pytest.fail, 60))
        for place in places:
            await asyncio.sleep(0)
            assert not draining.done()
            place.give_back()
            place.give_back()
        return await draining

    assert run(scenario()) == 0


def test_the_deadline_ends_streams_with_an_event_and_others_with_an_answer():
    engine, media = ScriptedEngine(Say("partial ", end=None)), ScriptedMedia(hang=True)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}

    async def scenario():
        async with http_client(engine, media) as client:
            requests = life_of(client).requests
            bodies = [chat(), chat(stream=True), {"messages": [{"role": "user", "content": [image]}]}]
            waiting = [asyncio.create_task(client.post(CHAT, json=body)) for body in bodies]
            others = {"/v1/messages": MESSAGE, "/v1/responses": {"input": "hi"}, "/v1/completions": PROMPT}
            for path, body in others.items():
                waiting.append(asyncio.create_task(client.post(path, json=body | {"stream": True})))
            await until(lambda: len(engine.submitted) == 5 and media.loading.is_set())
            num_cut = await drain(requests, engine.end_open, 0)
            answers = await asyncio.gather(*waiting)
            return num_cut, answers, len(requests), (await client.get("/metrics")).text

    num_cut, (whole, stream, preparing, message, response, completion), num_left, metrics = run(scenario())
    assert (num_cut, num_left) == (6, 0)
    assert [whole.status_code, preparing.status_code] == [503, 503]
    assert {answer.json()["error"]["code"] for answer in (whole, preparing)} == {"shutting_down"}
    *_, streamed, _ = stream.text.split("\n\n")
    assert '"code":"shutting_down"' in streamed
    assert completion.text.split("\n\n")[-2] == streamed
    assert message.text.split("\n\n")[-2].startswith("event: error\n")
    *_, failed, error, _ = response.text.split("\n\n")
    assert [event.partition("\n")[0] for event in (failed, error)] == ["event: response.failed", "event: error"]
    assert 'm3_requests_total{status="503"} 6.0' in metrics
    assert 'm3_requests_aborted_total{reason="client"} 0.0' in metrics


def test_a_cancellation_that_is_no_shutdown_stays_one():
    async def scenario():
        place = OpenRequests().enter()
        error = asyncio.CancelledError()
        assert place.reason(error) is error
        place.cut()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        assert isinstance(place.reason(error), ShuttingDownError)
        assert asyncio.current_task().cancelling() == 0

    run(scenario())
