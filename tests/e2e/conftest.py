import pytest

from tests.e2e.server_process import ServerProcess


@pytest.fixture(scope="session")
def server():
    """One with default settings, for tests that leave it as it was; `xdist_group("server")` brings them to one worker."""
    with ServerProcess() as process:
        yield process
