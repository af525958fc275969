"""Mixed steps on a Hopper GPU: all loops give the same tokens, and those are what our twins in float32 say.

The overlapped loop runs the same steps as the plain one, so its tokens are the same. Graphs give the same tokens in float32. In
bf16, sums over a padded batch or a differently cut context round differently, and a choice between near equals (blocks,
experts, at last tokens) falls the other way now and then; so a few sequences may part. `test_graphs_gpu` shows that replays
add nothing to that.
"""

import pytest
import torch

from tests.model.mixed_steps import (
    DECISIVE_GAP,
    DTYPES,
    LOOPS,
    MIN_RIGHT,
    agreement,
    load,
    make_checkpoints,
    make_requests,
    serve,
)

pytestmark = pytest.mark.gpu

MAX_PARTINGS = {"float32": 0, "bf16": 4, "mxfp8": 4}  # of 16 sequences, between graphs and the plain loop


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def served(checkpoints, dtype):
    """What each loop makes of the same requests."""
    model = load(checkpoints[dtype], "cuda", DTYPES[dtype])
    return {loop: serve(model, make_requests(), loop) for loop in LOOPS}


def test_there_are_steps_of_all_kinds(served):
    for each in served.values():
        assert min(each.steps[kind] for kind in ("mixed", "decode")) > 10


@pytest.mark.parametrize("loop", LOOPS[1:])
def test_every_loop_gives_the_plain_loops_tokens(served, dtype, loop):
    plain = served["plain"]
    partings = plain.gaps_at_partings(served[loop].tokens)
    print(
        f"{dtype} {loop}: {len(partings)} of {len(plain.tokens)} sequences part, at gaps up to {max(partings, default=0):.3f}"
    )
    assert len(partings) <= (MAX_PARTINGS[dtype] if loop == "graphs" else 0)


def test_the_tokens_are_the_references(served, checkpoints, dtype):
    reference = load(checkpoints["restored" if dtype == "mxfp8" else dtype], "cuda", torch.float32)
    found = agreement(reference, make_requests(), served["graphs"].tokens, DECISIVE_GAP[dtype])
    print(f"{dtype}: {found}")
    assert found.num_decisive > 100
    assert found.share >= MIN_RIGHT[dtype]
