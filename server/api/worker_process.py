"""What processes that the front starts for one purpose have in common."""

import os
from pathlib import Path

import server


def worker_environment(**more: str) -> dict[str, str]:
    """What it takes to find Python and this package, and `more`; no secret of the server's."""
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG") if name in os.environ}
    root = str(Path(server.__file__).parents[1])
    return env | {"PYTHONPATH": os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))} | more
