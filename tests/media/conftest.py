"""One fork server for all tests of this folder: starting one imports torch."""

import asyncio

import pytest

from server.media.spawner import Spawner


@pytest.fixture(scope="session")
def fork_server():
    spawner = Spawner()
    yield spawner
    asyncio.run(spawner.close())


@pytest.fixture
def spawner(fork_server):
    """The shared fork server, for one event loop."""
    fork_server._turn = asyncio.Lock()
    return fork_server
