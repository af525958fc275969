"""Fixtures of the model's tests. Those on a GPU do without `tests.oracle`, as importing transformers takes long."""

import pytest
import torch

import server.kernels.msa_attention
from server.kernels.attention_batch import AttentionBatch


@pytest.fixture(scope="session")
def real_blocks(tmp_path_factory):
    """Blocks of 128 tokens, 16 of them attended: the released geometry."""
    from tests.oracle import SEED, Oracle, tiny_config

    return Oracle.create(tiny_config(), tmp_path_factory.mktemp("real_blocks"), seed=SEED)


@pytest.fixture(scope="session")
def small_blocks(tmp_path_factory):
    """Blocks of 16 tokens, 4 of them attended."""
    from tests.oracle import SEED, Oracle, tiny_config

    config = tiny_config(block_size=16, topk_blocks=4)
    return Oracle.create(config, tmp_path_factory.mktemp("small_blocks"), seed=SEED)


class SelectionLog:
    """All selections of sparse layers, with the positions they were made for."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, AttentionBatch]] = []

    def assert_blocks_were_dropped(self, topk: int) -> None:
        """Every call had queries with more visible blocks than `topk`, and heads that chose different ones."""
        assert self.calls
        for selection, batch in self.calls:
            own = batch.positions // batch.page_size
            dropping = own >= topk
            assert dropping.any()
            chosen = selection[:, dropping].sort(-1).values  # [Hi, t, topk]
            assert (chosen >= 0).all()
            assert (chosen == own[dropping][:, None]).any(-1).all(), "the own block is always attended"
            assert (chosen[0] != chosen[1]).any(), "heads select for themselves"


@pytest.fixture
def selections(monkeypatch):
    """Records what the model selects."""
    log, select = SelectionLog(), server.kernels.msa_attention.msa_select_torch

    def recording(index_q, index_lane, batch, *limits):
        selection = select(index_q, index_lane, batch, *limits)
        log.calls.append((selection, batch))
        return selection

    monkeypatch.setattr(server.kernels.msa_attention, "msa_select_torch", recording)
    return log
