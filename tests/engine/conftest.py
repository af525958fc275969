"""Fixtures of the engine's tests. Those on a GPU do without `tests.oracle`, as importing transformers takes long."""

import pytest
import torch

from server.model.config import M3Config
from server.model.m3 import M3Model
from server.model.progress import NoProgress


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory):
    """A random model with pages of 16 tokens, of which a query selects 4: beyond 64 tokens it drops some."""
    from tests.oracle import save_checkpoint, tiny_config

    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(tiny_config(block_size=16, topk_blocks=4), folder)
    return folder


@pytest.fixture(scope="package")
def model(checkpoint):
    config = M3Config.from_file(checkpoint)
    return M3Model.load(checkpoint, config, torch.device("cpu"), torch.float32, progress=NoProgress())
