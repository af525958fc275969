import pytest
import torch

from server.model.config import M3Config
from server.model.m3 import M3Model
from tests.oracle import SilentProgress, save_checkpoint, tiny_config


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory):
    """A random model with pages of 16 tokens, of which a query selects 4: beyond 64 tokens it drops some."""
    folder = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(tiny_config(block_size=16, topk_blocks=4), folder)
    return folder


@pytest.fixture(scope="package")
def model(checkpoint):
    config = M3Config.from_file(checkpoint)
    return M3Model.load(checkpoint, config, torch.device("cpu"), torch.float32, progress=SilentProgress())
