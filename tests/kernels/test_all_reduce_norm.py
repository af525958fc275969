"""Each rank alone, with what the others would have sent in its mailbox beforehand: what it gives, sends and leaves behind."""

import pytest
import torch

from server.kernels.all_reduce_norm import EMPTY, MAX_ROWS, NUM_ROUNDS, SENDER_BYTES, Mailboxes, all_reduce_add_norm, has_owners
from server.kernels.norm import gemma_rms_norm_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
DIM, NUM_ROWS = 48, 5


def words_of(rows):
    """Rows of bf16 as the mailbox holds them."""
    return rows.contiguous().view(torch.int32)


class Office:
    """The mailboxes of all ranks in one process, as [round, sender, word]."""

    def __init__(self, world, word=EMPTY):
        shape = (NUM_ROUNDS, world, SENDER_BYTES // 4)
        self.boxes = [torch.full(shape, word, dtype=torch.int32, device=DEVICE) for _ in range(world)]
        self.addresses = torch.tensor([box.data_ptr() for box in self.boxes], device=DEVICE)

    def mail_of(self, rank, turn=0):
        rounds = torch.full((MAX_ROWS,), turn, dtype=torch.int32, device=DEVICE)
        return Mailboxes(rank, self.addresses, self.boxes[rank], rounds)

    def put(self, to, turn, sender, row, values):
        words = words_of(values)
        self.boxes[to][turn, sender, row * len(words) : (row + 1) * len(words)] = words

    def rows(self, of, turn, sender):
        return self.boxes[of][turn, sender, : NUM_ROWS * DIM // 2].view(NUM_ROWS, DIM // 2)


def make(world):
    generator = torch.Generator().manual_seed(world)
    parts, residual = (torch.randn(shape, generator=generator) for shape in ((world, NUM_ROWS, DIM), (NUM_ROWS, DIM)))
    weight = torch.randn(DIM, generator=generator)
    return [tensor.bfloat16().to(DEVICE) for tensor in (parts, residual, weight)]


def expected_total(parts, residual):
    """In fp32 in the order of the ranks, rounded once."""
    total = torch.zeros(residual.shape, device=DEVICE)
    for part in parts:
        total += part.float()
    return (total + residual.float()).bfloat16()


def assert_close(normed, total, weight):
    reference = gemma_rms_norm_torch(total.float(), weight.float(), EPS)
    torch.testing.assert_close(normed.float(), reference, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("turn", range(NUM_ROUNDS))
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (2, 1), (3, 1), (4, 3)])
def test_in_one_shot_a_rank_adds_all_rows_and_sends_its_own_to_all(world, rank, turn):
    parts, residual, weight = make(world)
    office = Office(world)
    for sender in set(range(world)) - {rank}:
        for row in range(NUM_ROWS):
            office.put(rank, turn, sender, row, parts[sender][row])
            office.put(rank, (turn - 1) % NUM_ROUNDS, sender, row, parts[sender][row])
    mail = office.mail_of(rank, turn)
    normed, total = all_reduce_add_norm(parts[rank], residual, weight, EPS, mail, owned=False)
    torch.testing.assert_close(total, expected_total(parts, residual), rtol=2**-7, atol=0)  # sums may associate otherwise
    assert_close(normed, total, weight)
    for other in set(range(world)) - {rank}:
        assert torch.equal(office.rows(other, turn, rank), words_of(parts[rank]))
        assert (office.rows(rank, (turn - 1) % NUM_ROUNDS, other) == EMPTY).all(), "read rows must be emptied"
        assert torch.equal(office.rows(rank, turn, other), words_of(parts[other])), "others may not be done with this round"
    assert mail.rounds[:NUM_ROWS].eq((turn + 1) % NUM_ROUNDS).all()
    assert mail.rounds[NUM_ROWS:].eq(turn).all()


@pytest.mark.parametrize("turn", range(NUM_ROUNDS))
@pytest.mark.parametrize(("world", "rank"), [(2, 0), (3, 1), (4, 3)])
def test_in_two_shots_owners_add_and_send_the_new_residual(world, rank, turn):
    parts, residual, weight = make(world)
    expected = expected_total(parts, residual)
    office = Office(world)
    for row in range(NUM_ROWS):
        owner = row % world
        for sender in set(range(world)) - {rank}:
            if owner == rank:
                office.put(rank, turn, sender, row, parts[sender][row])
        if owner != rank:
            office.put(rank, turn, owner, row, expected[row])
    mail = office.mail_of(rank, turn)
    normed, total = all_reduce_add_norm(parts[rank], residual, weight, EPS, mail, owned=True)
    torch.testing.assert_close(total, expected, rtol=2**-7, atol=0)
    assert_close(normed, total, weight)
    for other in set(range(world)) - {rank}:
        sent = office.rows(other, turn, rank)
        for row in range(NUM_ROWS):
            if row % world == rank:
                assert torch.equal(sent[row], words_of(total[row]))
            elif row % world == other:
                assert torch.equal(sent[row], words_of(parts[rank][row]))
            else:
                assert (sent[row] == EMPTY).all()


def test_negative_zeros_are_sent_as_zeros():
    """Else a row would never come whole."""
    office = Office(2)
    zeros = torch.full((1, DIM), -0.0, dtype=torch.bfloat16, device=DEVICE)
    office.put(0, 0, 1, 0, torch.zeros(DIM, dtype=torch.bfloat16, device=DEVICE))
    _, total = all_reduce_add_norm(zeros, zeros, zeros[0], EPS, office.mail_of(0), owned=False)
    assert office.boxes[1][0, 0, : DIM // 2].eq(0).all()
    assert words_of(total).eq(0).all()


@pytest.mark.parametrize(
    ("x", "is_taken"),
    [
        (torch.ones((1, 6144), dtype=torch.bfloat16), True),
        (torch.ones((MAX_ROWS, 6144), dtype=torch.bfloat16), True),
        (torch.ones((MAX_ROWS, 6152), dtype=torch.bfloat16), False),
        (torch.ones((MAX_ROWS + 1, 64), dtype=torch.bfloat16), False),
        (torch.ones((1, 60), dtype=torch.bfloat16), False),
        (torch.ones((0, 64), dtype=torch.bfloat16), False),
        (torch.ones((64, 16), dtype=torch.bfloat16).T, False),
        (torch.ones((2, 64)), False),
    ],
    ids=["a row", "as much as there is room", "too wide", "too many", "no whole words", "nothing", "strided", "another dtype"],
)
def test_mailboxes_take_what_fits_them(x, is_taken):
    assert Mailboxes(0, torch.zeros(2), torch.zeros(1), torch.zeros(1)).takes(x) == is_taken


@pytest.mark.parametrize(
    ("num_rows", "world", "expected"), [(MAX_ROWS, 2, False), (16, 4, False), (32, 4, True), (8, 8, False), (16, 8, True)]
)
def test_many_rows_of_many_ranks_go_in_two_shots(num_rows, world, expected):
    assert has_owners(num_rows * 6144 * 2, world) == expected


def ranks_on_one_gpu(world, num_rows, owned, steps):
    """Graphs of several steps in a row, each rank on a stream of its own; yields what every rank got in each replay."""
    parts = torch.randn((world, num_rows, 6144), device=DEVICE).bfloat16()
    residual, weight = torch.randn((num_rows, 6144), device=DEVICE).bfloat16(), torch.randn(6144, device=DEVICE).bfloat16()

    def chain(mail):
        found, x, stream = [], parts[mail.rank], residual
        for _ in range(steps):
            x, stream = all_reduce_add_norm(x, stream, weight, EPS, mail, owned=owned)
            found.append(stream)
        return found

    full = Office(world, word=0)  # nobody waits there: programs cannot be loaded while one waits
    for rank in range(world):
        all_reduce_add_norm(parts[rank], residual, weight, EPS, full.mail_of(rank), owned=owned)
    office = Office(world)
    mails, streams = [office.mail_of(rank) for rank in range(world)], [torch.cuda.Stream() for _ in range(world)]
    torch.cuda.synchronize()
    graphs, totals = [torch.cuda.CUDAGraph() for _ in range(world)], []
    for mail, graph, stream in zip(mails, graphs, streams, strict=True):
        with torch.cuda.graph(graph, stream=stream):
            totals.append(chain(mail))
    for _ in range(10):
        parts.copy_(torch.randn(parts.shape, device=DEVICE))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()  # side by side: a rank waits for the others
        torch.cuda.synchronize()
        yield parts, residual, totals


@pytest.mark.gpu
@pytest.mark.parametrize("owned", [False, True], ids=["one shot", "two shots"])
@pytest.mark.parametrize(("world", "num_rows"), [(2, 1), (2, 64), (3, 7), (4, 16), (8, 4)])
def test_ranks_side_by_side_get_the_same_bits_at_every_replay(world, num_rows, owned):
    for parts, residual, totals in ranks_on_one_gpu(world, num_rows, owned, steps=4):
        torch.testing.assert_close(totals[0][0], expected_total(parts, residual), rtol=2**-7, atol=1e-2)
        for others in totals[1:]:
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(totals[0], others, strict=True))
