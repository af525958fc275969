import math

import pytest
import torch

from server.kernels.sampling import RowStatus, SamplingTable, SamplingWork, sample_rows_torch
from server.kernels.sampling_adjust import Adjustments
from server.kernels.sampling_triton import BLOCK, CAPACITY, SamplingWorkspace, sample_rows_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POSITION = 7


def table_of(rows):
    """Slots with the parameters of `rows`; what a row does not name is off."""
    table = SamplingTable.allocate(len(rows), torch.device(DEVICE))
    off = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    off_ints = {"top_k": 0, "seed": 0, "state_row": -1, "mask_row": -1}
    assert all(row.keys() <= off.keys() | off_ints.keys() for row in rows)
    table.floats.copy_(torch.tensor([[row.get(name, value) for name, value in off.items()] for row in rows]))
    table.ints.copy_(torch.tensor([[row.get(name, value) for name, value in off_ints.items()] for row in rows]))
    return table


def work_of(rows):
    if any(row.get("top_k") or row.get("top_p", 1) < 1 or row.get("min_p") for row in rows):
        return SamplingWork.FILTERED
    return SamplingWork.PLAIN if any(row.get("temperature", 1) for row in rows) else SamplingWork.GREEDY


def choose(logits, rows, *, block=32, capacity=64, slots=None, adjustments=None, twin=False):
    """Token ids and statuses, [2, S] on the host."""
    table, num_rows = table_of(rows), len(logits)
    slots = torch.arange(num_rows, device=DEVICE) if slots is None else torch.tensor(slots, device=DEVICE)
    positions = torch.full((num_rows,), POSITION, device=DEVICE)
    out = torch.full((2, num_rows), -99, device=DEVICE)
    logits = logits.to(DEVICE)
    before = logits.clone()
    if twin:
        sample_rows_torch(logits, table, slots, positions, out, adjustments)
    else:
        workspace = SamplingWorkspace.allocate(num_rows, logits.shape[1], logits.device, block=block, capacity=capacity)
        workspace.space.fill_(-(2**62) + 12345)
        sample_rows_triton(logits, table, slots, positions, work_of(rows), out, workspace, adjustments)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return out.tolist()


def both(logits, rows, **options):
    """The tokens, after checking that the twin chooses them too."""
    ids, statuses = choose(logits, rows, **options)
    twin_ids, twin_statuses = choose(logits, rows, twin=True)
    assert statuses == twin_statuses
    assert ids == twin_ids
    return ids


def normal(num_rows, vocab_size, seed=0, scale=3.0):
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


FILTERS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "all three": {"top_k": 9, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7},
    "top_k of one": {"top_k": 1},
    "top_k beyond the row": {"top_k": 10**6},
    "tiny top_p": {"top_p": 1e-9},
    "top_p just below one": {"top_p": 1 - 2**-24},
    "min_p of one": {"min_p": 1.0},
    "tiny min_p": {"min_p": 1e-30, "top_k": 30},
    "cold": {"temperature": 1e-6, "top_k": 7},
    "hot": {"temperature": 50.0, "top_p": 0.5},
    "hot and plain": {"temperature": 50.0},
}


@pytest.mark.parametrize("vocab_size", [1, 31, 33, 101])
@pytest.mark.parametrize("name", FILTERS)
def test_rows_choose_what_the_twin_chooses(name, vocab_size):
    both(normal(3, vocab_size), [FILTERS[name] | {"seed": seed} for seed in range(3)])


def test_every_mix_in_one_batch_and_slots_in_any_order():
    rows = [row | {"seed": seed} for seed, row in enumerate(FILTERS.values())]
    logits = normal(len(rows), 77, seed=4)
    slots = list(range(len(rows)))[::-1]
    alone = [both(logits[i : i + 1], [rows[slot]])[0] for i, slot in enumerate(slots)]
    assert choose(logits, rows, slots=slots)[0] == alone


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "all three", "hot"])
@pytest.mark.parametrize("capacity", [1, 4])
def test_more_tokens_in_the_bins_than_memory_for_them_change_nothing(name, capacity):
    logits = (normal(4, 90) * 2).round() / 2  # many are equal, as bfloat16 makes them
    both(logits, [FILTERS[name] | {"seed": seed} for seed in range(4)], capacity=capacity)


@pytest.mark.parametrize("name", ["top_k", "all three", "cold"])
@pytest.mark.parametrize("logits", [normal(3, 101, seed=3), normal(3, 101, seed=3).round()], ids=["distinct", "coarse"])
def test_top_k_of_many_blocks(name, logits):
    both(logits, [FILTERS[name] | {"seed": seed} for seed in range(3)], block=8)


def heads_of_blocks(*, rest):
    """[101] logits in blocks of 16: eight at the head of each block that hardly differ from block to block, then `rest`."""
    logits = torch.full((101,), rest)
    heads = torch.arange(101) % 16 < 8
    logits[heads] = (torch.arange(101)[heads] // 16 % 3) * 2.0**-20
    return logits


# The seven blocks of 16 logits that `weigh` may leave out for top_k, by their best ones, with the ends in awkward places.
LEFT_OUT = {
    "all equal": torch.zeros(101),
    "ascending": torch.arange(101) / 8.0,
    "descending": -torch.arange(101) / 8.0,
    "best of one block": torch.where((torch.arange(101) >= 48) & (torch.arange(101) < 64), 5.0, 0.0),
    "one of each block, equal": torch.where(torch.arange(101) % 16 == 7, 4.0, 0.0),
    "one of each block, ascending": torch.where(torch.arange(101) % 16 == 3, torch.arange(101) / 50.0, -2.0),
    "heads of blocks": heads_of_blocks(rest=-1.0),
    "hardly any weight": heads_of_blocks(rest=-40.0) + torch.where(torch.arange(101) == 50, 29.0, 0.0),
    "no weight but three": torch.where(torch.arange(101) % 40 == 20, 0.0, -35.0),
    "of both signs of zero": torch.where(torch.arange(101) % 3 == 0, -0.0, 0.0),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_blocks_that_top_k_leaves_out_change_nothing(name):
    rows = [{"top_k": k, "seed": 11 * k} for k in (1, 6, 8)]
    rows += [{"top_k": k, "top_p": 0.9, "min_p": 0.3, "temperature": 3.0} for k in (2, 7)]
    both(LEFT_OUT[name].expand(len(rows), -1).contiguous(), rows, block=16, capacity=128)


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "min_p", "all three"])
def test_equal_logits(name):
    logits = torch.zeros(3, 70)
    logits[1] = -0.0
    logits[2, ::2] = -0.0
    ids = both(logits, [FILTERS[name] | {"seed": 5}] * 3)
    assert len(set(ids)) == 1
    if "top_k" in FILTERS[name]:
        assert ids[0] < FILTERS[name]["top_k"]


def test_one_token_left():
    logits = torch.full((len(FILTERS), 40), -math.inf)
    logits[:, 33] = 0.0
    logits[:, 3] = -1e4
    mask = torch.tensor([[0, 2]], dtype=torch.int32)
    rows = [row | {"mask_row": 0} for row in FILTERS.values()]
    logits = logits.nan_to_num(neginf=-3e4)
    ids, statuses = choose(logits, rows, adjustments=adjustments_of(40, len(rows), masks=mask))
    assert set(ids) == {33}
    assert set(statuses) == {RowStatus.CHOSEN}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's NumPy
def test_rows_that_are_not_finite_or_empty_leave_the_others_alone():
    rows = [FILTERS["all three"] | {"seed": seed} for seed in range(6)]
    logits = normal(6, 65)
    alone = both(logits, rows)
    logits[1], logits[3, 64], logits[4, 0] = math.nan, math.inf, -math.inf
    ids, statuses = choose(logits, rows)
    failed = RowStatus.NOT_FINITE
    assert statuses == [0, failed, 0, failed, failed, 0]
    assert [ids[i] for i in (0, 2, 5)] == [alone[i] for i in (0, 2, 5)]
    assert all(0 <= token_id < 65 for token_id in ids)


def test_half_precision_logits_are_taken_as_they_are():
    logits = normal(5, 50).half()
    rows = [FILTERS["all three"] | {"seed": seed} for seed in range(5)]
    assert choose(logits, rows) == choose(logits.float(), rows)


def adjustments_of(vocab_size, num_rows, *, edits=(), states=None, masks=None, grammar=None, grammar_rows=None):
    words = -(-vocab_size // 32)
    edits = sorted(edits)
    counts = torch.bincount(torch.tensor([row for row, _, _ in edits], dtype=torch.int64), minlength=num_rows)
    empty = torch.zeros((1, words), dtype=torch.int32)
    adjustments = Adjustments(
        edit_starts=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        edit_ids=torch.tensor([token_id for _, token_id, _ in edits], dtype=torch.int64),
        edit_values=torch.tensor([value for _, _, value in edits], dtype=torch.float32),
        token_states=torch.zeros((1, vocab_size), dtype=torch.int32) if states is None else states.clone(),
        masks=empty if masks is None else masks,
        grammar_rows=torch.tensor(grammar_rows or [-1] * num_rows),
        grammar_masks=empty if grammar is None else grammar,
    )
    return Adjustments(*(tensor.to(DEVICE) for tensor in adjustments.tensors()))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adjusted_rows_choose_and_count_what_the_twin_does(temperature):
    vocab_size, generator = 75, torch.Generator().manual_seed(2)
    states = torch.randint(0, 6, (3, vocab_size), generator=generator).to(torch.int32)
    masks = torch.randint(-(2**31), 2**31, (2, 3), generator=generator).to(torch.int32)
    grammar = torch.randint(-(2**31), 2**31, (2, 3), generator=generator).to(torch.int32)
    rows = [
        {},
        {"state_row": 2, "repetition": 1.5, "presence": 0.5, "frequency": 0.25},
        {"mask_row": 1, "top_k": 4},
        {},
        {"state_row": 0, "mask_row": 0, "repetition": 0.5, "frequency": -0.5, "top_p": 0.7},
        {"top_p": 0.9},
    ]
    rows = [row | {"temperature": temperature} for row in rows]
    edits = [(0, 17, 3.0), (3, 4, -math.inf), (3, 9, 2.0), (3, 9, 1.0), (4, 5, 4.0), (4, 74, -1.0)]
    options = {"edits": edits, "masks": masks, "grammar": grammar, "grammar_rows": [-1, -1, -1, 1, 0, -1], "states": states}
    logits = normal(6, vocab_size)
    ours, twins = (adjustments_of(vocab_size, 6, **options) for _ in range(2))
    chosen = choose(logits, rows, adjustments=ours)
    assert chosen == choose(logits, rows, adjustments=twins, twin=True)
    assert torch.equal(ours.token_states, twins.token_states)
    counted = (ours.token_states.cpu() - states).nonzero().tolist()
    assert counted == sorted([[2, chosen[0][1]], [0, chosen[0][4]]])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's NumPy
def test_a_row_whose_tokens_are_all_forbidden_has_no_choice():
    logits, rows = normal(2, 40), [{"mask_row": 0, "top_k": 3}, {"top_k": 3}]
    masks = torch.zeros((1, 2), dtype=torch.int32)
    adjustments = adjustments_of(40, 2, masks=masks)
    ids, statuses = choose(logits, rows, adjustments=adjustments)
    assert statuses == [RowStatus.NO_CHOICE, RowStatus.CHOSEN]
    assert statuses == choose(logits, rows, adjustments=adjustments, twin=True)[1]
    assert 0 <= ids[0] < 40


TRUE_SIZE = {"block": BLOCK, "capacity": CAPACITY}
LOGITS = {
    "normal": lambda rows: normal(rows, 200_064, scale=3.0),
    "rounded to bfloat16": lambda rows: normal(rows, 200_064, scale=3.0).bfloat16().float(),
    "flat": lambda rows: normal(rows, 200_064, scale=0.1).bfloat16().float(),
    "peaked": lambda rows: -1.5 * (normal(rows, 200_064).argsort().argsort() + 1.0).log(),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOGITS)
def test_true_size_rows_choose_what_the_twin_chooses(name):
    rows = [row | {"seed": seed} for seed in range(3) for row in FILTERS.values()]
    logits = LOGITS[name](len(rows))
    ids = both(logits, rows, **TRUE_SIZE)
    picked = range(0, len(rows), 7)
    alone = [choose(logits[i : i + 1], rows, slots=[i], **TRUE_SIZE)[0][0] for i in picked]
    assert alone == [ids[i] for i in picked]


@pytest.mark.gpu
def test_a_graph_chooses_again_from_new_logits():
    rows = list(FILTERS.values())
    table, slots = table_of(rows), torch.arange(len(rows), device=DEVICE)
    positions, out = torch.full_like(slots, POSITION), torch.empty((2, len(rows)), dtype=torch.int64, device=DEVICE)
    first, second = normal(len(rows), 200_064, seed=1), normal(len(rows), 200_064, seed=2)
    logits = first.cuda()
    workspace = SamplingWorkspace.allocate(len(rows), 200_064, logits.device)
    arguments = (logits, table, slots, positions, SamplingWork.FILTERED, out, workspace)
    sample_rows_triton(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_rows_triton(*arguments)
    for values in (second, first):
        logits.copy_(values)
        graph.replay()
        assert out.tolist() == choose(values, rows, twin=True)


@pytest.mark.parametrize("name", ["plain", "all three"])
def test_frequencies_follow_the_distribution(name):
    num_draws, vocab_size = (20_000, 40) if DEVICE == "cuda" else (100, 12)
    logits = normal(1, vocab_size, seed=8, scale=1.0)
    row = FILTERS[name]
    weights = torch.softmax(logits[0].double() / row.get("temperature", 1.0), 0)
    if name == "all three":
        order = weights.argsort(descending=True)
        head = weights[order[:9]] / weights[order[:9]].sum()
        kept = (head.cumsum(0) - head < row["top_p"]) & (head >= row["min_p"] * head[0])
        expected = torch.zeros(vocab_size, dtype=torch.float64)
        expected[order[:9]] = head * kept
        weights = expected / expected.sum()
    ids = choose(logits.expand(num_draws, -1).contiguous(), [row | {"seed": seed} for seed in range(num_draws)])[0]
    counts = torch.bincount(torch.tensor(ids), minlength=vocab_size)
    assert counts[weights == 0].sum() == 0
    expected = weights[weights > 0] * num_draws
    chi_squared = ((counts[weights > 0] - expected) ** 2 / expected).sum().item()
    degrees = len(expected) - 1
    assert chi_squared < degrees + 5 * math.sqrt(2 * degrees)
