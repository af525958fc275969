import hypothesis
import pytest
import schemathesis

from tests.api.scripted import LiveServer, Say, ScriptedEngine, make_app

DOCUMENT = make_app(ScriptedEngine(Say("x"))).openapi()
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def url():
    with LiveServer(ScriptedEngine(Say("hello"))) as server:
        yield server.url


SETTINGS = hypothesis.settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


@schema.parametrize()
@SETTINGS
def test_nothing_that_the_document_allows_or_forbids_is_a_servers_error(case, url):
    response = case.call(base_url=url)
    assert response.status_code < 500, (response.status_code, response.text)
    if response.status_code >= 400 and response.headers["content-type"] == "application/json":
        assert "error" in response.json()
