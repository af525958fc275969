import pytest
import torch

from server.kernels.sampling_adjust import apply_penalties, keep_tokens


def test_penalties_match_their_definitions():
    logits = torch.tensor([[2.0, -2.0, 1.0, 4.0, -1.0]])
    penalised = apply_penalties(
        logits,
        prompt_seen=torch.tensor([[True, True, False, False, False]]),
        output_counts=torch.tensor([[0, 0, 0, 3, 1]], dtype=torch.int32),
        repetition=torch.tensor([2.0]),
        presence=torch.tensor([0.5]),
        frequency=torch.tensor([0.25]),
    )
    assert penalised.tolist() == [[1.0, -4.0, 1.0, 4.0 / 2 - 0.5 - 0.75, -2.0 - 0.5 - 0.25]]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_a_bit_mask_keeps_its_tokens(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator)
    num_words = -(-vocab_size // 32)
    mask = torch.randint(-(2**31), 2**31, (3, num_words), generator=generator).to(torch.int32)
    mask[1], mask[2] = -1, 0
    kept = keep_tokens(logits, mask)
    for row in range(3):
        for token_id in range(vocab_size):
            is_kept = int(mask[row, token_id // 32]) >> (token_id % 32) & 1
            assert kept[row, token_id] == (logits[row, token_id] if is_kept else float("-inf"))
    assert torch.equal(kept[1], logits[1])
