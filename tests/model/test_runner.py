"""The runner's bookkeeping, seen by a model that writes down what it is given."""

import contextlib
import gc
import itertools
import weakref

import numpy as np
import pytest
import torch

from server.kvcache.pools import CachePools, CacheSpec
from server.messages import MediaItem, MediaKind, SamplingParams, SlabRef, TokenRange
from server.model.ranks import OneRank
from server.model.runner import ModelRunner
from server.model.shard import Shard
from server.scheduler.plan import Chunk, NewSequence, StepPlan

PAGE, VOCAB, HIDDEN = 4, 32, 3
SPEC = CacheSpec((False, True), num_kv_heads=1, head_dim=2, index_dim=2, page_size=PAGE, dtype=torch.float32)


class NotingModel:
    """Continues every sequence with its last token plus one; an item's features are its first pixel."""

    def __init__(self):
        self.steps = []
        self.num_logit_rows = []
        self.encoded = []
        self.broken_rows = []
        self.error = None

    def forward(self, token_ids, batch, pools, embeddings):
        if self.error is not None:
            raise self.error
        self.steps.append((token_ids, batch, embeddings))
        return token_ids[:, None].expand(-1, HIDDEN).float()

    def logits(self, hidden_rows):
        self.num_logit_rows.append(hidden_rows.shape[0])
        logits = torch.nn.functional.one_hot(hidden_rows[:, 0].long() + 1, VOCAB).float()
        logits[[row for row in self.broken_rows if row < len(logits)]] = torch.nan
        return logits

    media_segment_len = 4

    def encode_media(self, items):
        self.encoded.append([tuple(frames.shape) for frames in items])
        return [self.features(frames) for frames in items]

    def features(self, frames):
        first = frames.flatten()[0].item()
        num_tokens = (frames.shape[0] + 1) // 2 * frames.shape[1] * frames.shape[2] // 28**2
        return first + torch.arange(num_tokens)[:, None].expand(-1, HIDDEN) / 100


@pytest.fixture
def model():
    return NotingModel()


@pytest.fixture
def pools():
    pools = CachePools(SPEC, 16, torch.device("cpu"))
    for lane in (pools.dense, pools.index, pools.sparse):
        lane.zero_()
    return pools


@pytest.fixture
def runner(model, pools):
    return runner_on(model, pools)


def runner_on(model, pools, read_pixels=None, **options):
    return ModelRunner(
        model,
        pools,
        max_num_seqs=4,
        max_model_len=40,
        vocab_size=VOCAB,
        read_pixels=read_pixels or (lambda ref: np.full(ref.num_bytes, ref.offset, dtype=np.uint8)),
        base_seed=0,
        **options,
    )


def new(slot, token_ids, *, media=(), **sampling):
    params = SamplingParams(max_tokens=9, **{"temperature": 0.0, **sampling})
    return NewSequence(slot, f"r{slot}", list(token_ids), len(token_ids), params, media)


def step(runner, *chunks, new_sequences=(), released=()):
    return runner.execute(StepPlan(0, tuple(released), tuple(new_sequences), chunks))


def sampled(result):
    assert not result.failures
    return {token.slot: token.token_id for token in result.sampled}


def test_a_decode_step_reads_its_token_from_the_device(runner, model):
    result = step(runner, Chunk(2, 0, 3, (5,), samples=True), new_sequences=[new(2, [7, 8, 9])])
    assert sampled(result) == {2: 10}
    assert sampled(step(runner, Chunk(2, 3, 1, (), samples=True))) == {2: 11}
    assert sampled(step(runner, Chunk(2, 4, 1, (3,), samples=True))) == {2: 12}
    assert [token_ids.tolist() for token_ids, _, _ in model.steps] == [[7, 8, 9], [10], [11]]
    _, batch, _ = model.steps[-1]
    assert batch.positions.tolist() == [4]
    assert batch.page_table.tolist() == [[5, 3]]
    assert batch.slot_mapping.tolist() == [3 * PAGE]
    assert batch.seq_lens.tolist() == [5]


def test_a_mixed_batch_is_laid_out_as_the_kernels_expect_it(runner, model):
    step(runner, Chunk(0, 0, 2, (1,), samples=True), new_sequences=[new(0, [3, 4])])
    result = step(
        runner,
        Chunk(0, 2, 1, (), samples=True),
        Chunk(1, 0, 1, (2,), samples=False),
        Chunk(3, 0, 6, (9, 8), samples=True),
        Chunk(2, 4, 3, (6, 7), samples=False),
        new_sequences=[new(1, [20, 21]), new(3, range(10, 16)), new(2, range(1, 12))],
    )
    assert sampled(result) == {0: 6, 3: 16}
    token_ids, batch, embeddings = model.steps[-1]
    assert embeddings is None
    assert token_ids.tolist() == [5, 20, 10, 11, 12, 13, 14, 15, 5, 6, 7]
    assert batch.num_decodes == 2
    assert batch.query_start.tolist() == [0, 1, 2, 8, 11]
    assert batch.sequence_of_token.tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3]
    assert batch.positions.tolist() == [2, 0, 0, 1, 2, 3, 4, 5, 4, 5, 6]
    assert batch.seq_lens.tolist() == [3, 1, 6, 7]
    assert batch.slot_mapping.tolist() == [6, 8, 36, 37, 38, 39, 32, 33, 28, 29, 30]
    assert batch.page_table[2:].tolist() == [[9, 8], [6, 7]]
    assert ((batch.page_table >= 0) & (batch.page_table < 16)).all()
    assert (batch.max_query_len, batch.max_seq_len, batch.page_size) == (6, 7, PAGE)
    assert [tensor.dtype for tensor in (token_ids, batch.positions, batch.slot_mapping)] == [torch.int64] * 3
    int32 = (batch.query_start, batch.seq_lens, batch.page_table, batch.sequence_of_token)
    assert [tensor.dtype for tensor in int32] == [torch.int32] * 4
    assert model.num_logit_rows == [1, 2]


def test_a_step_without_a_complete_sequence_samples_nothing(runner, model):
    assert step(runner, Chunk(0, 0, 2, (1,), samples=False), new_sequences=[new(0, [3, 4, 5])]).sampled == ()
    assert model.num_logit_rows == []


def test_a_slot_is_given_to_its_next_sequence_in_the_same_plan(runner, model):
    step(runner, Chunk(0, 0, 6, (1, 2), samples=True), new_sequences=[new(0, range(6))])
    result = step(runner, Chunk(0, 0, 2, (3,), samples=True), new_sequences=[new(0, [8, 9])], released=[0])
    assert sampled(result) == {0: 10}
    assert model.steps[-1][1].page_table.tolist() == [[3]]


def test_a_resumed_sequence_brings_its_output_along(runner, model):
    step(runner, Chunk(0, 0, 2, (1,), samples=True), new_sequences=[new(0, [3, 4])])
    resumed = NewSequence(1, "r0", [3, 4, 5], 2, SamplingParams(max_tokens=9, temperature=0.0), ())
    assert sampled(step(runner, Chunk(1, 0, 3, (2,), samples=True), new_sequences=[resumed], released=[0])) == {1: 6}
    assert model.steps[-1][0].tolist() == [3, 4, 5]


def test_slots_may_be_released_without_work_and_more_than_once(runner):
    assert step(runner, released=[0, 3]).sampled == ()
    step(runner, Chunk(0, 0, 1, (1,), samples=True), new_sequences=[new(0, [3])], released=[0])
    assert step(runner, released=[0]) == step(runner, released=[0])


def test_a_row_that_is_not_finite_fails_its_slot_alone(runner, model):
    model.broken_rows = [1]
    chunks = [Chunk(slot, 0, 1, (slot,), samples=True) for slot in range(3)]
    result = step(runner, *chunks, new_sequences=[new(slot, [slot]) for slot in range(3)])
    assert [(token.slot, token.token_id) for token in result.sampled] == [(0, 1), (2, 3)]
    assert [failure.slot for failure in result.failures] == [1]


def test_after_a_step_that_raised_the_slots_can_be_used_again(runner, model):
    model.error = RuntimeError("no")
    with pytest.raises(RuntimeError):
        step(runner, Chunk(0, 0, 5, (1, 2), samples=True), new_sequences=[new(0, range(5))])
    model.error = None
    assert sampled(step(runner, Chunk(0, 0, 1, (3,), samples=True), new_sequences=[new(0, [4])], released=[0])) == {0: 5}


def test_poison_covers_fresh_pages_and_spares_the_prefix(model, pools):
    runner = runner_on(model, pools, poison_pages=True)
    step(runner, Chunk(0, 2 * PAGE, 3, (4, 5, 6), samples=False), new_sequences=[new(0, range(14))])
    is_poisoned = [bool(pools.kv_lane(0)[page].isnan().all()) for page in (4, 5, 6)]
    assert is_poisoned == [False, False, True]
    pools.kv_lane(0)[6] = 0
    step(runner, Chunk(0, 11, 3, (7,), samples=True))
    assert not pools.kv_lane(0)[6].isnan().any()
    assert pools.kv_lane(0)[7].isnan().all()


def picture(first_pixel, offset, num_tokens=4):
    ref = SlabRef(first_pixel, num_tokens * 4 * 3 * 14 * 14, 1)
    return MediaItem(MediaKind.IMAGE, bytes([first_pixel]) * 32, (1, 2, 2 * num_tokens), (TokenRange(offset, num_tokens),), ref)


def test_only_the_features_of_the_chunk_are_placed(runner, model):
    media = (picture(10, 2), picture(20, 7))
    sequences = [new(0, [1]), new(1, range(12), media=media)]
    step(runner, Chunk(0, 0, 1, (0,), samples=True), Chunk(1, 0, 4, (1,), samples=False), new_sequences=sequences)
    rows, features = model.steps[-1][2]
    assert rows.tolist() == [3, 4]
    assert features[:, 0].tolist() == pytest.approx([10.0, 10.01])
    step(runner, Chunk(0, 1, 1, (), samples=True), Chunk(1, 4, 6, (2, 3), samples=False))
    rows, features = model.steps[-1][2]
    assert rows.tolist() == [1, 2, 4, 5, 6]
    assert features[:, 0].tolist() == pytest.approx([10.02, 10.03, 20.0, 20.01, 20.02])
    step(runner, Chunk(1, 10, 1, (), samples=False))
    assert model.steps[-1][2][1][:, 0].tolist() == pytest.approx([20.03])
    step(runner, Chunk(1, 11, 1, (), samples=True))
    assert model.steps[-1][2] is None
    assert model.encoded == [[(1, 28, 112, 3)]] * 2


def test_the_features_of_a_clip_fill_its_ranges_in_order(runner, model):
    ref = SlabRef(30, 16 * 3 * 2 * 14 * 14, 1)
    clip = MediaItem(MediaKind.VIDEO, b"h" * 32, (2, 2, 4), (TokenRange(1, 2), TokenRange(5, 2)), ref)
    step(runner, Chunk(0, 2, 6, (1, 2), samples=True), new_sequences=[new(0, range(8), media=(clip,))])
    rows, features = model.steps[-1][2]
    assert rows.tolist() == [0, 3, 4]
    assert features[:, 0].tolist() == pytest.approx([30.01, 30.02, 30.03])
    assert model.encoded == [[(4, 28, 56, 3)]]


def clip_of(first_pixel, offset, num_pairs, num_frames=None):
    """One token per temporal patch, with a token of text between them."""
    ref = SlabRef(first_pixel, (2 * num_pairs if num_frames is None else num_frames) * 28 * 28 * 3, 1)
    ranges = tuple(TokenRange(offset + 2 * pair, 1) for pair in range(num_pairs))
    return MediaItem(MediaKind.VIDEO, bytes([first_pixel]) * 32, (num_pairs, 2, 2), ranges, ref)


def test_a_step_encodes_only_the_segments_of_a_clip_that_it_touches_and_lets_them_go(runner, model):
    sequence = new(0, range(24), media=(clip_of(50, 1, 10, num_frames=19),))
    step(runner, Chunk(0, 0, 4, (1,), samples=False), new_sequences=[sequence])
    assert model.encoded == [[(8, 28, 28, 3)]]
    step(runner, Chunk(0, 4, 4, (2,), samples=False))
    assert len(model.encoded) == 1
    step(runner, Chunk(0, 8, 12, (3, 4, 5), samples=False))
    assert model.encoded[1:] == [[(8, 28, 28, 3), (3, 28, 28, 3)]]
    assert len(model.steps[-1][2][0]) == 6
    assert not runner._media._slots[0].features.keys() - {runner._media._slots[0].pieces[2].key}


def test_the_items_of_all_sequences_are_encoded_in_one_batch_and_equal_ones_once(runner, model):
    media = (picture(10, 0, num_tokens=1), picture(10, 1, num_tokens=1), picture(20, 2, num_tokens=2))
    sequences = [new(0, range(4), media=media), new(1, range(4), media=media[::-1][:1])]
    step(runner, *(Chunk(slot, 0, 4, (slot,), samples=True) for slot in (0, 1)), new_sequences=sequences)
    assert model.encoded == [[(1, 28, 28, 3), (1, 28, 56, 3)]]
    assert model.steps[-1][2][1][:, 0].tolist() == pytest.approx([10.0, 10.0, 20.0, 20.01, 20.0, 20.01])


def test_an_item_that_the_encoder_cannot_take_fails_its_slot_alone(runner, model):
    features = model.features

    def refuse(frames):
        if frames.flatten()[0].item() == 13:
            raise RuntimeError("no")
        return features(frames)

    model.features = refuse
    sequences = [new(slot, range(4), media=(picture(first, 0),)) for slot, first in enumerate((10, 13, 20))]
    result = step(runner, *(Chunk(slot, 0, 4, (slot,), samples=True) for slot in range(3)), new_sequences=sequences)
    assert [failure.slot for failure in result.failures] == [1]
    assert [token.slot for token in result.sampled] == [0, 2]


def test_an_attempt_to_encode_that_failed_holds_on_to_nothing(runner, model):
    alive = []

    class Activations:
        pass

    def encode(items):
        model.encoded.append(len(items))
        assert not [each for each in alive if each() is not None]
        activations = Activations()
        alive.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("no")

    model.encode_media = encode
    sequences = [new(slot, range(4), media=(picture(10 + slot, 0),) if slot else ()) for slot in range(3)]
    gc.disable()
    try:
        result = step(runner, *(Chunk(slot, 0, 4, (slot,), samples=True) for slot in range(3)), new_sequences=sequences)
        assert [each() for each in alive] == [None] * 3
    finally:
        gc.enable()
    assert model.encoded == [2, 1, 1]
    assert [failure.slot for failure in result.failures] == [1, 2]
    assert [token.slot for token in result.sampled] == [0]


def test_more_than_a_batch_is_encoded_in_several(runner, model, monkeypatch):
    monkeypatch.setattr("server.model.media_features.MAX_BATCH_TOKENS", 5)
    lengths = [4, 1, 2, 3, 8, 1]
    offsets = [0, *itertools.accumulate(lengths)]
    media = tuple(picture(10 * i, offsets[i], num_tokens=length) for i, length in enumerate(lengths))
    step(runner, Chunk(0, 0, 20, (0, 1, 2, 3, 4), samples=True), new_sequences=[new(0, range(20), media=media)])
    assert [len(items) for items in model.encoded] == [2, 2, 1, 1]
    firsts = [int(value) for value in model.steps[-1][2][1][:, 0].tolist()]
    assert firsts == [10 * i for i, length in enumerate(lengths) for _ in range(length)]


def test_media_of_earlier_requests_are_not_encoded_again_while_the_cache_has_room(model, pools):
    one = 4 * HIDDEN * 4  # bytes of a picture's features
    runner = runner_on(model, pools, feature_cache_bytes=2 * one)
    for slot, first in enumerate((10, 20, 10, 30, 10, 20)):
        step(
            runner,
            Chunk(0, 0, 4, (0,), samples=True),
            new_sequences=[new(0, range(4), media=(picture(first, 0),))],
            released=(0,) if slot else (),
        )
    assert len(model.encoded) == 4  # 20 was the least recently used when 30 came
    cache = runner._media.cache
    assert (cache.num_hits, cache.num_misses, cache.num_bytes, len(cache)) == (2, 4, 2 * one, 2)


def test_features_of_a_sequence_that_failed_are_not_used_again(model, pools):
    runner = runner_on(model, pools, feature_cache_bytes=1 << 20)
    sequences = [new(slot, range(4), media=(picture(first, 0),)) for slot, first in enumerate((10, 20))]
    chunks = [Chunk(slot, 0, 4, (slot,), samples=True) for slot in (0, 1)]
    model.broken_rows = [0]
    result = step(runner, *chunks, new_sequences=sequences)
    assert [failure.slot for failure in result.failures] == [0]
    assert len(runner._media.cache) == 1
    model.broken_rows = []
    step(runner, *chunks, new_sequences=sequences, released=(0, 1))
    assert model.encoded[1:] == [[(1, 28, 112, 3)]]
    assert runner._media.cache.num_bytes == 2 * 4 * HIDDEN * 4


def test_tokens_behind_the_last_item_do_not_look_at_media(runner):
    sequence = new(0, range(10), media=(clip_of(50, 1, 2), picture(10, 5, num_tokens=1)))
    step(runner, Chunk(0, 0, 6, (1, 2), samples=False), new_sequences=[sequence])
    del runner._media._slots[0].pieces
    assert sampled(step(runner, Chunk(0, 6, 4, (3,), samples=True))) == {0: 10}


def test_a_picture_behind_a_prefix_hit_is_not_encoded(runner, model):
    sequence = new(0, range(10), media=(picture(10, 1),))
    step(runner, Chunk(0, 2 * PAGE, 2, (1, 2, 3), samples=True), new_sequences=[sequence])
    assert model.encoded == []


@pytest.mark.parametrize("fault", ["unreadable", "too short"])
def test_a_picture_that_cannot_be_had_fails_its_slot_alone(model, pools, fault):
    def read(ref):
        if fault == "unreadable":
            raise ValueError("the range was reused")
        return np.zeros(ref.num_bytes - 1, dtype=np.uint8)

    runner = runner_on(model, pools, read)
    result = step(
        runner,
        Chunk(1, 0, 1, (1,), samples=True),
        Chunk(0, 0, 6, (2, 3), samples=True),
        new_sequences=[new(1, [4]), new(0, range(6), media=(picture(10, 1),))],
    )
    assert [(token.slot, token.token_id) for token in result.sampled] == [(1, 5)]
    assert [failure.slot for failure in result.failures] == [0]
    assert model.steps[-1][0].tolist() == [4]


class TwoRanks(OneRank):
    """One of two ranks; the other one reports the flags `lost` whenever it is asked, and rank 0 sampled `token_ids`."""

    def __init__(self, rank, lost, token_ids=()):
        super().__init__()
        self.shard = Shard(rank, 2)
        self.lost, self.token_ids = lost, token_ids
        self.num_asked = 0

    def any_rank(self, flags):
        self.num_asked += 1
        return [a or b for a, b in zip(flags, self.lost, strict=True)]

    def share(self, token_ids):
        if self.shard.rank:
            token_ids.copy_(torch.tensor(self.token_ids))


def test_a_picture_that_another_rank_cannot_have_fails_its_slot_alone(model, pools):
    ranks = TwoRanks(0, [False, True])
    runner = runner_on(model, pools, ranks=ranks)
    sequences = [new(1, [4]), new(0, range(6), media=(picture(10, 1),))]
    result = step(runner, Chunk(1, 0, 1, (1,), samples=True), Chunk(0, 0, 6, (2, 3), samples=True), new_sequences=sequences)
    assert [(token.slot, token.token_id) for token in result.sampled] == [(1, 5)]
    assert [failure.slot for failure in result.failures] == [0]
    assert sampled(step(runner, Chunk(1, 1, 1, (), samples=True), released=[0])) == {1: 6}
    assert ranks.num_asked == 1, "steps without media ask nobody"


def test_a_rank_that_follows_goes_on_with_the_tokens_of_rank_0(model, pools):
    ranks = TwoRanks(1, [], token_ids=[20, 30])
    runner = runner_on(model, pools, ranks=ranks)
    sequences = [new(0, [3]), new(1, [4], num_prompt_logprobs=1), new(2, [5, 6, 7])]
    chunks = [Chunk(0, 0, 1, (1,), samples=True), Chunk(1, 0, 1, (2,), samples=True), Chunk(2, 0, 2, (3,), samples=False)]
    result = step(runner, *chunks, new_sequences=sequences)
    assert (result.sampled, result.prompt_logprobs) == ((), ())
    step(runner, Chunk(0, 1, 1, (), samples=True), Chunk(1, 1, 1, (), samples=True))
    assert model.steps[-1][0].tolist() == [20, 30]
    assert model.num_logit_rows == [2, 2], "all ranks make logits, each its part of them"


def test_a_step_of_failures_only_runs_no_model(model, pools):
    def read(ref):
        raise ValueError("the range was reused")

    runner = runner_on(model, pools, read)
    result = step(runner, Chunk(0, 0, 6, (2, 3), samples=True), new_sequences=[new(0, range(6), media=(picture(10, 1),))])
    assert [failure.slot for failure in result.failures] == [0]
    assert model.steps == []


def test_a_lost_device_is_not_one_requests_fault(model, pools):
    def read(ref):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    runner = runner_on(model, pools, read)
    with pytest.raises(torch.AcceleratorError):
        step(runner, Chunk(0, 0, 6, (2, 3), samples=True), new_sequences=[new(0, range(6), media=(picture(10, 1),))])


def scores_of(result):
    """(slot, position) -> entry."""
    return {(entry.slot, entry.start + i): score for entry in result.prompt_logprobs for i, score in enumerate(entry.logprobs)}


def test_prompt_tokens_are_scored_where_asked_chunk_by_chunk(runner, model):
    asked, plain = new(0, [5, 6, 9, 10, 3], num_prompt_logprobs=2), new(1, [7, 8, 9])
    first = step(
        runner,
        Chunk(1, 0, 3, (0,), samples=True),
        Chunk(0, 0, 2, (1,), samples=False),
        new_sequences=[plain, asked],
    )
    second = step(runner, Chunk(1, 3, 1, (), samples=True), Chunk(0, 2, 3, (2,), samples=True))
    scores = scores_of(first) | scores_of(second)
    assert list(scores) == [(0, 1), (0, 2), (0, 3), (0, 4)]
    best, other = (torch.log_softmax(torch.eye(VOCAB)[0], dim=0)[i].item() for i in (0, 1))
    # The model continues every token with the next number.
    assert [scores[0, i].logprob for i in (1, 2, 3, 4)] == pytest.approx([best, other, best, other])
    assert scores[0, 2].top_ids[0] == 7
    assert [len(score.top_ids) for score in scores.values()] == [2] * 4
    assert not step(runner, Chunk(0, 5, 1, (), samples=True)).prompt_logprobs


def test_a_long_prompt_is_scored_in_blocks(runner, model, monkeypatch):
    monkeypatch.setattr("server.model.prompt_logprobs.ROWS_PER_BLOCK", 3)
    prompt = [5, 6, 7, 20, 21, 3, 4, 5]
    sequence = new(0, prompt, num_prompt_logprobs=0)
    result = step(runner, Chunk(0, 0, 8, (1, 2), samples=True), new_sequences=[sequence])
    assert model.num_logit_rows == [3, 3, 1, 1]
    (entry,) = result.prompt_logprobs
    assert entry.start == 1
    follows = [score.logprob > -3 for score in entry.logprobs]
    assert follows == [after == before + 1 for before, after in itertools.pairwise(prompt)]


def test_scores_that_are_not_finite_fail_their_slot_alone(runner, model):
    model.broken_rows = [2]  # of each call: only the longer prompt has so many
    result = step(
        runner,
        Chunk(0, 0, 2, (1,), samples=False),
        Chunk(1, 0, 4, (2,), samples=False),
        new_sequences=[new(0, [5, 6, 7], num_prompt_logprobs=0), new(1, [5, 6, 7, 8, 9], num_prompt_logprobs=0)],
    )
    assert [failure.slot for failure in result.failures] == [1]
    assert [entry.slot for entry in result.prompt_logprobs] == [0]


def test_a_resumed_sequence_is_not_scored_again(runner):
    params = SamplingParams(max_tokens=9, temperature=0.0, num_prompt_logprobs=1)
    resumed = NewSequence(0, "r0", [3, 4, 5], 2, params, ())
    assert step(runner, Chunk(0, 0, 3, (1,), samples=True), new_sequences=[resumed]).prompt_logprobs == ()


def test_pixels_are_read_in_the_launch(model, pools):
    reads = []
    runner = runner_on(model, pools, lambda ref: reads.append(ref) or np.full(ref.num_bytes, 10, dtype=np.uint8))
    sequence = new(0, range(6), media=(picture(10, 1),))
    pending = runner.launch(StepPlan(0, (), (sequence,), (Chunk(0, 0, 6, (2, 3), samples=True),)))
    assert len(reads) == 1
    assert sampled(pending.wait()) == {0: 6}
    assert len(reads) == 1


class NotingUpload:
    """Copies nothing, and writes down what it is told."""

    def __init__(self):
        self.notes = []

    def start(self, frames):
        self.notes.append("start")
        return frames

    def join(self):
        self.notes.append("join")

    def wait(self):
        self.notes.append("wait")


def test_the_device_has_read_the_pixels_before_a_rank_says_that_it_has_its_media(model, pools):
    class Ranks(TwoRanks):
        def any_rank(self, flags):
            upload.notes.append("any_rank")
            return super().any_rank(flags)

    runner = runner_on(model, pools, ranks=Ranks(0, [False]))
    upload = runner._media._upload = NotingUpload()
    features = model.features
    model.features = lambda frames: upload.notes.append("encode") or features(frames)
    sequence = new(0, range(10), media=(picture(10, 0), picture(20, 4)))
    step(runner, Chunk(0, 0, 9, (1, 2, 3), samples=False), new_sequences=[sequence])
    assert upload.notes == ["start", "start", "join", "encode", "encode", "wait", "any_rank"]
    upload.notes.clear()
    step(runner, Chunk(0, 9, 1, (), samples=True))
    assert upload.notes == [], "steps without pixels wait for none"


@pytest.mark.parametrize("error", [RuntimeError, torch.AcceleratorError])
def test_the_device_has_read_the_pixels_when_they_cannot_be_encoded(model, pools, error):
    def refuse(frames):
        raise error("no")

    runner = runner_on(model, pools)
    upload = runner._media._upload = NotingUpload()
    model.features = refuse
    sequence = new(0, range(6), media=(picture(10, 1),))
    with contextlib.suppress(torch.AcceleratorError):
        step(runner, Chunk(0, 0, 6, (2, 3), samples=True), new_sequences=[sequence])
    assert upload.notes == ["start", "join", "wait"]


def test_steps_may_be_launched_ahead_and_waited_for_later(runner, model):
    plans = [
        StepPlan(0, (), (new(0, [3, 4]),), (Chunk(0, 0, 2, (1,), samples=True),)),
        StepPlan(1, (), (new(1, [7]),), (Chunk(0, 2, 1, (), samples=True), Chunk(1, 0, 1, (2,), samples=True))),
        StepPlan(2, (), (), (Chunk(1, 1, 1, (), samples=True),)),
    ]
    pending = [runner.launch(plan) for plan in plans]
    assert [sampled(step.wait()) for step in pending] == [{0: 5}, {0: 6, 1: 8}, {1: 9}]


def test_features_of_a_failed_sequence_are_forgotten_when_its_step_is_waited_for(model, pools):
    runner = runner_on(model, pools, feature_cache_bytes=1 << 20)
    model.broken_rows = [0]
    sequence = new(0, range(4), media=(picture(10, 0),))
    pending = runner.launch(StepPlan(0, (), (sequence,), (Chunk(0, 0, 4, (0,), samples=True),)))
    assert len(runner._media.cache) == 1
    assert [failure.slot for failure in pending.wait().failures] == [0]
    assert len(runner._media.cache) == 0
