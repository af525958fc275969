"""Imports point one way, and nothing in the server imports what is for development only."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "server"
LEAVES = {"server.messages", "server.settings", "server.errors", "server.logs", "server.heartbeat"}
ALLOWED = {
    "api": {"api", "media", "metrics"},
    "metrics": {"metrics"},
    "media": {"media"},
    "scheduler": {"scheduler", "kvcache"},
    "kvcache": {"kvcache"},
    "model": {"model", "kernels", "kvcache", "scheduler"},
    "kernels": {"kernels"},
}
NO_TORCH = ("scheduler", "api", "metrics")
FORBIDDEN = {"transformers", "openai", "pickle", "multiprocessing.pool", "concurrent.futures.process"}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_point_one_way(path):
    parts = path.relative_to(ROOT).parts
    folder = parts[0] if len(parts) > 1 else None
    found = imports(path)
    assert not {name for name in found if name.split(".")[0] in FORBIDDEN or name in FORBIDDEN}
    if folder in ALLOWED:
        ours = {name.split(".")[1] for name in found if name.startswith("server.")}
        folders = {name for name in ours if (ROOT / name).is_dir()}
        assert folders <= ALLOWED[folder], f"{folder} imports {folders - ALLOWED[folder]}"
    if folder in NO_TORCH:
        assert not {name for name in found if name.split(".")[0] in {"torch", "triton"}}
    module = "server." + path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    if module in LEAVES:
        assert not {name for name in found if name.startswith("server.")}
