import pytest

from server.engine_setup import build
from server.model.config import RELEASED_DIR
from server.settings import load_settings

pytestmark = pytest.mark.gpu

CACHE_BYTES = 4 << 30  # other tests use the GPU, too


def no_pixels(ref):
    raise AssertionError("no request has media")


def test_an_engine_comes_up_with_the_bundled_checkpoint():
    values = {"model": RELEASED_DIR.parent / "tiny", "device": "cuda", "max_num_seqs": 8, "cache_bytes": CACHE_BYTES}
    ready = build(load_settings(values, environ={}), no_pixels).ready
    assert ready.max_model_len == 131_072
    assert ready.num_pages > 131_072 // 128
