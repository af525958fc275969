"""Captured decode steps on a Hopper GPU: every replay is, bit for bit, what the same work gives when it is launched anew."""

import pytest
import torch

from server.kvcache.pools import CachePools
from server.messages import SamplingParams
from server.model.batch_builder import BatchBuilder
from server.model.config import cache_spec
from server.model.decode_graphs import CudaRecorder, DecodeGraphs, batch_ladder
from server.scheduler.plan import Chunk, NewSequence
from tests.model.mixed_steps import load, make_checkpoints

pytestmark = pytest.mark.gpu

NUM_SEQS, WINDOW = 11, 1 << 17
LENGTHS = (2600, 1, 130, 2049, 128, 700, 17, 3000, 5, 255, 1300)


@pytest.fixture(scope="module", params=["bf16", "mxfp8"])
def graphs(tmp_path_factory, request):
    """Graphs for 11 sequences of random keys and values, with their builder; free pages hold NaN."""
    model = load(make_checkpoints(tmp_path_factory.mktemp("checkpoints"))[request.param], "cuda", torch.bfloat16)
    spec = cache_spec(model.config, model.dtype)
    num_pages = sum(-(-length // spec.page_size) for length in LENGTHS)
    pools = CachePools(spec, num_pages + 3, model.device)
    for lane in (pools.dense, pools.index, pools.sparse):
        lane.normal_()
    pools.poison(range(num_pages, num_pages + 3))
    builder = BatchBuilder(NUM_SEQS, WINDOW, spec.page_size, model.device)
    with torch.inference_mode():
        graphs = DecodeGraphs(model, pools, builder, CudaRecorder(), max_num_seqs=NUM_SEQS, max_model_len=WINDOW)
    first_page = 0
    chunks = []
    for slot, length in enumerate(LENGTHS):
        pages = tuple(range(first_page, first_page := first_page + -(-length // spec.page_size)))
        builder.admit(NewSequence(slot, f"r{slot}", [7 * slot % 250] * length, length, SamplingParams(1), ()))
        chunks.append(Chunk(slot, length - 1, 1, pages, samples=True))
        builder.append_pages(chunks[-1:])
    return graphs, chunks


@torch.inference_mode()
@pytest.mark.parametrize("context", [8192, 32768, WINDOW])
@pytest.mark.parametrize("num_chunks", range(1, NUM_SEQS + 1))
def test_a_replay_is_what_its_work_gives(graphs, num_chunks, context, monkeypatch):
    graphs, chunks = graphs
    monkeypatch.setattr(graphs, "_context_ladder", [context])
    output = graphs.launch(chunks[:num_chunks])
    hidden, logits = output.hidden.clone(), output.logits.clone()
    num_rows = next(rung for rung in batch_ladder(NUM_SEQS) if rung >= num_chunks)
    again, logits_again = graphs._compute(num_rows, context)
    assert hidden.isfinite().all()
    assert torch.equal(hidden, again[:num_chunks])
    assert torch.equal(logits, logits_again[:num_chunks])
