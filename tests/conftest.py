"""What all tests share: one torch thread each, as parallel processes share the cores, and `gpu` tests only on a GPU."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


def choose_gpu() -> None:
    """Leave a worker of xdist one GPU; where there are several, not the first, which is for tests that need one to themselves.

    They are counted without CUDA, which reads the variable when it is first asked.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    if len(gpus) > 1:
        shared = gpus[1:]
        os.environ["CUDA_VISIBLE_DEVICES"] = shared[int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % len(shared)]


if "PYTEST_XDIST_WORKER" in os.environ and "ONE_GPU_PER_WORKER" in os.environ:
    choose_gpu()
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, so before any import of ours


def patch_triton_once() -> None:
    """Make `triton.language` Python functions for the life of this process, as Triton's interpreter does.

    It looks through the whole language for what to patch at every launch and at every call of a device function, which is
    half of the time that an interpreted kernel takes.
    """
    from triton import language
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()


if os.environ.get("TRITON_INTERPRET") == "1":
    patch_triton_once()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without the tests that `-m` asks for first: every worker would import all of them."""
    first = config.option.markexpr.split(" ")[0]
    is_few = first in ("gpu", "e2e", "alone")
    if is_few and collection_path.suffix == ".py" and f"mark.{first}" not in collection_path.read_text():
        return True
    return None


def put_slow_ones_first(items: list[pytest.Item], num_workers: int) -> None:
    """Let each slow test of a GPU begin one of the runs of neighbours that `--dist worksteal` gives to workers."""
    slow = [item for item in items if item.get_closest_marker("slow") and item.get_closest_marker("gpu")]
    others = [item for item in items if item not in slow]
    start = 0
    for worker, item in enumerate(slow):
        others.insert(start, item)
        start += (len(items) - start) // max(1, num_workers - worker)
    items[:] = others


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several workers begin with what takes long; tests marked `gpu` are skipped where no Hopper GPU is."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    put_slow_ones_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device of compute capability 9.0"))
