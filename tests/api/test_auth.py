import asyncio

import pytest

from server.settings import SettingsError
from tests.api.scripted import CHAT, Say, ScriptedEngine, chat, http_client, make_app, settings_of

KEYS = {"api_keys": "first-key, second-key"}


def ask(scenario, **settings):
    async def run():
        async with asyncio.timeout(30), http_client(ScriptedEngine(Say("x")), **settings) as client:
            return await scenario(client)

    return asyncio.run(run())


def status_with(headers, **settings):
    return ask(lambda client: client.post(CHAT, json=chat(), headers=headers), **settings)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key"},
        {"authorization": "bearer second-key"},
        {"authorization": "Bearer  second-key "},
        {"x-api-key": "second-key"},
    ],
)
def test_any_of_the_keys_opens_the_server(headers):
    assert status_with(headers, **KEYS).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": "Bearer first-ke"},
        {"authorization": "Bearer first-key2"},
        {"authorization": "Bearer first-key, second-key"},
        {"authorization": "Basic first-key"},
        {"authorization": "first-key"},
        {"x-api-key": ""},
        {"authorization": "Bearer wrong", "x-api-key": "first-key"},
        {"authorization": b"Bearer \xff\xfe"},
    ],
)
def test_anything_else_is_a_401_in_the_error_shape(headers):
    response = status_with(headers, **KEYS)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert "first-key" not in response.text


def test_every_route_but_health_needs_a_key():
    async def scenario(client):
        paths = ["/openapi.json", *client._transport.app.openapi()["paths"]]
        paths += ["/nope", "/v1/models/x", "/health/", "//health", "/health/../metrics", "/HEALTH"]
        return {path: (await client.get(path)).status_code for path in paths}

    statuses = ask(scenario, **KEYS)
    assert {path for path, status in statuses.items() if status != 401} == {"/health", "/livez", "/readyz"}
    assert {CHAT, "/metrics", "/v1/models", "/openapi.json", "/version"} <= set(statuses)


def test_a_refused_body_is_not_read():
    num_sent = 0

    async def chunks():
        nonlocal num_sent
        for _ in range(100):
            num_sent += 1
            yield b" " * 100

    assert ask(lambda client: client.post(CHAT, content=chunks()), **KEYS).status_code == 401
    assert num_sent <= 1


def test_without_keys_the_server_is_open():
    assert status_with({}).status_code == 200


def test_keys_come_from_a_file_too(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\n\nfile-key\n other-key \n")
    settings = {"api_keys_file": path, "api_keys": "first-key"}
    for key in ("file-key", "other-key", "first-key"):
        assert status_with({"x-api-key": key}, **settings).status_code == 200
    assert status_with({"x-api-key": "# ours"}, **settings).status_code == 401


@pytest.mark.parametrize("keys", ["", " , ", "with blank", "schlüssel"])
def test_keys_that_nobody_can_send_stop_the_start(keys):
    with pytest.raises(SettingsError):
        make_app(ScriptedEngine(Say("x")), api_keys=keys)


def test_a_key_file_that_cannot_be_read_stops_the_start(tmp_path):
    for content in (None, "# nothing\n"):
        path = tmp_path / "keys"
        if content is not None:
            path.write_text(content)
        with pytest.raises(SettingsError):
            make_app(ScriptedEngine(Say("x")), api_keys_file=path)


def test_settings_never_show_the_keys():
    settings = settings_of(**KEYS)
    assert "first-key" not in repr(settings) + settings.model_dump_json()
