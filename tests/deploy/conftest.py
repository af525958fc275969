"""Everything here needs the programs that `.ci/install-deploy-tools` installs, so all of it is marked `deploy`."""

from pathlib import Path

import pytest

from tests.deploy.tools import TOOLS


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("deploy")


@pytest.fixture(scope="session", autouse=True)
def home():
    """Helm and others keep their caches here, not in the developer's home."""
    (TOOLS / "home").mkdir(parents=True, exist_ok=True)
