"""How the process ends. With real signals: tests/e2e/test_shutdown.py."""

import pytest
import uvicorn

from server.api import process
from server.api.process import EXIT_CUT, EXIT_FAILED, OwnProcess


@pytest.mark.parametrize(
    ("codes", "last"),
    [([0], None), ([EXIT_CUT], EXIT_CUT), ([EXIT_FAILED, 0], EXIT_FAILED), ([0, EXIT_FAILED], EXIT_FAILED)],
)
def test_a_drain_that_ends_well_does_not_hide_that_the_engine_failed_meanwhile(monkeypatch, codes, last):
    left, limits = [], []
    monkeypatch.setattr(process, "leave", left.append)
    monkeypatch.setattr(process, "leave_after", lambda _, code: limits.append(code))
    own = OwnProcess(pytest.fail)
    own._server = uvicorn.Server(uvicorn.Config("no:app"))
    for code in codes:
        own.stop_serving(code)
    own.end()
    assert own._server.should_exit
    assert left == ([] if last is None else [last])
    assert limits[-1] == (last or EXIT_FAILED)
