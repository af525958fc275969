import asyncio
import threading

import httpx
import pytest

from tests.api.scripted import CHAT, Say, ScriptedEngine, chat, http_client


def test_health_and_metrics_have_a_port_of_their_own_without_a_key():
    async def run():
        async with asyncio.timeout(30), http_client(ScriptedEngine(Say("x")), admin_port=0, api_keys="k") as client:
            await client.post(CHAT, json=chat(), headers={"x-api-key": "k"})
            url = f"http://127.0.0.1:{client._transport.app.state.admin.port}"
            async with httpx.AsyncClient(base_url=url) as admin:
                found = {path: await admin.get(path) for path in ("/livez", "/readyz", "/health", "/metrics", "/version")}
                missing = [(await admin.get(path)).status_code for path in ("/v1/models", "/openapi.json", "/docs")]
            main = await client.get("/metrics", headers={"x-api-key": "k"})
            return found, missing, main, url

    found, missing, main, url = asyncio.run(run())
    assert {response.status_code for response in found.values()} == {200}
    assert 'm3_requests_total{status="200"} 1.0' in found["/metrics"].text
    assert missing == [404, 404, 404]
    assert main.status_code == 404
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/livez")


def test_probes_are_answered_while_the_main_loop_is_busy():
    async def run():
        async with asyncio.timeout(30), http_client(ScriptedEngine(Say("x")), admin_port=0) as client:
            url = f"http://127.0.0.1:{client._transport.app.state.admin.port}"
            answers = []

            def probe():
                answers.extend(httpx.get(url + path).status_code for path in ("/livez", "/readyz", "/metrics"))

            thread = threading.Thread(target=probe)
            thread.start()
            thread.join(20)  # the loop of the application stands still meanwhile
            return answers

    assert asyncio.run(run()) == [200, 200, 200]
