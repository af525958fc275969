"""Engines come up on a GPU that others use, too: whole, and as one rank's share of the model without the other rank."""

import pytest
import torch

from server import engine_setup
from server.model.config import RELEASED_DIR
from server.model.progress import NoProgress
from server.model.shard import Alone, Shard
from server.settings import load_settings
from tests.engine.test_ranks_gpu import Case
from tests.model.mixed_steps import DTYPES, make_checkpoints

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

CACHE_BYTES = 4 << 30


class LonelyRank(Alone):
    """Rank 0 of two, as `server.model.ranks.Ranks`; in place of the other one's parts it takes nothing, or its own again."""

    def __init__(self):
        self.shard, self.collective = Shard(0, 2), self

    def all_gather(self, x):
        return x.repeat(1, 2)

    def share(self, token_ids):
        pass

    def any_rank(self, flags):
        return list(flags)

    def least(self, number):
        return number


def no_pixels(ref):
    raise AssertionError("no request has media")


def test_an_engine_comes_up_with_the_bundled_checkpoint():
    values = {"model": RELEASED_DIR.parent / "tiny", "device": "cuda", "max_num_seqs": 8, "cache_bytes": CACHE_BYTES}
    ready = engine_setup.build(load_settings(values, environ={}), no_pixels).ready
    assert ready.max_model_len == 131_072
    assert ready.num_pages > 131_072 // 128


@pytest.mark.parametrize("weights", DTYPES)
def test_a_share_of_the_model_comes_up(weights, tmp_path, monkeypatch):
    """It launches what each of two ranks launches, so that `test_ranks_gpu` finds the kernels compiled."""
    monkeypatch.setattr(engine_setup, "choose_device", lambda *_: torch.device("cuda", torch.cuda.current_device()))
    settings = Case(weights).settings(make_checkpoints(tmp_path)[weights])
    ready = engine_setup.build(settings, no_pixels, NoProgress(), ranks=LonelyRank()).ready
    assert ready.max_model_len == settings.max_model_len
