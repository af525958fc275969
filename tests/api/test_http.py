import asyncio
import json
import re
import threading

import httpx
import pytest

from server import __version__
from tests.api.scripted import CHAT, Say, ScriptedEngine, ScriptedMedia, chat, http_client, make_app, tiny_format


def ask(scenario, engine=None, **settings):
    """Run `scenario(client)` against an application of its own."""

    async def run():
        async with asyncio.timeout(30), http_client(engine or ScriptedEngine(Say("x")), **settings) as client:
            return await scenario(client)

    return asyncio.run(run())


def test_before_the_model_is_loaded_the_server_lives_and_is_not_ready():
    engine = ScriptedEngine(Say("x"), ready=False)

    async def scenario(client):
        paths = ["/livez", "/readyz", "/health", "/v1/models", "/metrics"]
        before = [(await client.get(path)).status_code for path in paths]
        refused = await client.post(CHAT, json=chat())
        engine.become_ready()
        while True:
            await asyncio.sleep(0)
            if (await client.get("/readyz")).status_code == 200:
                break
        return before, refused, await client.post(CHAT, json=chat())

    before, refused, answered = ask(scenario, engine)
    assert before == [200, 503, 503, 200, 200]
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert int(refused.headers["retry-after"]) > 0
    assert answered.status_code == 200


def test_a_part_that_fails_to_stop_does_not_keep_the_others():
    engine, media = ScriptedEngine(Say("x")), ScriptedMedia()
    closed = []

    async def fail():
        raise RuntimeError("cannot stop")

    async def close():
        closed.append(media)

    engine.close, media.close = fail, close
    with pytest.raises(RuntimeError, match="cannot stop"):
        ask(lambda client: client.get("/livez"), engine, media=media)
    assert closed == [media]


def test_models_and_version():
    async def scenario(client):
        paths = ["/v1/models", "/v1/models/org/m3", "/v1/models/other", "/version"]
        return [await client.get(path) for path in paths]

    models, model, other, version = ask(scenario, served_model_name="org/m3")
    (entry,) = models.json()["data"]
    assert models.json()["object"] == "list"
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("org/m3", "model", 4096)
    assert model.json() == entry
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    assert version.json() == {"version": __version__}


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/messages/nope", 404), ("GET", "/v1/messages", 405)])
def test_under_messages_also_the_framework_s_errors_have_anthropic_s_shape(method, path, status):
    response = ask(lambda client: client.request(method, path))
    assert response.status_code == status
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] in ("not_found_error", "invalid_request_error")
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", CHAT, 405), ("POST", "/health", 405)])
def test_unknown_routes_and_methods_have_the_error_shape(method, path, status):
    response = ask(lambda client: client.request(method, path))
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("declares_length", [True, False])
def test_a_body_over_the_limit_is_a_413(declares_length):
    num_sent = 0

    async def chunks():
        nonlocal num_sent
        for _ in range(1000):
            num_sent += 1
            yield b" " * 100

    content = b" " * 2000 if declares_length else chunks()
    response = ask(lambda client: client.post(CHAT, content=content), max_body_bytes=1000)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"
    assert num_sent < 20


def test_a_body_at_the_limit_is_read():
    raw = b'{"messages": [{"role": "user", "content": "hi"}]}'
    response = ask(lambda client: client.post(CHAT, content=raw), max_body_bytes=len(raw))
    assert response.status_code == 200


@pytest.mark.parametrize(("given", "is_kept"), [("abc-1.2:3_4", True), ("", False), ("a b", False), ("x" * 129, False)])
def test_the_request_id_is_the_clients_or_a_new_one(given, is_kept):
    response = ask(lambda client: client.get("/nope", headers={"x-request-id": given}))
    answered = response.headers["x-request-id"]
    assert (answered == given) == is_kept
    assert answered


def test_the_same_request_id_twice_at_once_is_no_conflict():
    async def scenario(client):
        headers = {"x-request-id": "same"}
        return await asyncio.gather(*(client.post(CHAT, json=chat(), headers=headers) for _ in range(2)))

    assert [response.status_code for response in ask(scenario)] == [200, 200]


def test_a_bug_is_a_500_that_says_and_logs_nothing_of_the_request(caplog):
    engine = ScriptedEngine(Say("x"))
    content = "very secret prompt"

    def submit(message, on_end=None):
        raise KeyError(content)

    engine.submit = submit
    response = ask(lambda client: client.post(CHAT, json=chat(), headers={"x-request-id": "id-1"}), engine)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert "secret" not in caplog.text
    assert "id-1 failed with KeyError" in caplog.text
    assert "in submit" in caplog.text


def test_a_bug_outside_the_chat_route_has_the_error_shape_too():
    app = make_app(ScriptedEngine(Say("x")))

    async def broken(request):
        raise KeyError("x")

    app.add_route("/broken", broken)

    async def run():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/broken")

    response = asyncio.run(run())
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


def test_the_openapi_document_describes_the_chat_body():
    document = ask(lambda client: client.get("/openapi.json")).json()
    schema = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schemas = document["components"]["schemas"]
    assert "messages" in schemas[schema["$ref"].rpartition("/")[2]]["properties"]
    names = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
    assert set(names) <= set(schemas)
    assert '"#/$defs' not in json.dumps(document)


def test_health_answers_while_a_long_prompt_is_prepared():
    started, may_go_on = threading.Event(), threading.Event()

    class SlowFormat:
        def __getattr__(self, name):
            return getattr(tiny_format(), name)

        def encode_chat(self, *args, **kwargs):
            started.set()
            assert may_go_on.wait(30)
            return tiny_format().encode_chat(*args, **kwargs)

    async def run():
        async with http_client(ScriptedEngine(Say("x")), chat_format=SlowFormat()) as client:
            answer = asyncio.create_task(client.post(CHAT, json=chat()))
            await asyncio.to_thread(started.wait, 30)
            health = await client.get("/health")
            assert not answer.done()
            may_go_on.set()
            return health, await answer

    health, answer = asyncio.run(run())
    assert (health.status_code, answer.status_code) == (200, 200)
