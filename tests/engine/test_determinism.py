"""A request's tokens depend on the request alone: not on chunks, batch mates, preemption or the prefix cache.

All runs use the real model on pages poisoned with NaN, so a read of stale memory would make the output not finite.
"""

import numpy as np
import pytest
import torch

from server.messages import Failed, FailureKind, MediaItem, MediaKind, SamplingParams, Submit, TokenRange
from tests.engine.serving import Pixels, Server
from tests.oracle import IMAGE_TOKEN, VIDEO_TOKEN

PAGE = 16


def prompt_of(length, seed):
    return torch.randint(3, 240, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(name, prompt, *, num_output=12, media=(), **sampling):
    return Submit(name, prompt, SamplingParams(max_tokens=num_output, **{"temperature": 0.0, **sampling}), media)


REQUESTS = [
    request("long", prompt_of(231, 1), num_output=30),
    request("short", prompt_of(3, 2), num_output=40),
    request("whole pages", prompt_of(5 * PAGE, 3), num_output=20),
    request("seeded", prompt_of(100, 4), num_output=25, temperature=0.8, seed=5),
    request("filtered", prompt_of(77, 5), num_output=25, temperature=1.3, seed=6, top_p=0.9, top_k=40),
    request("penalised", prompt_of(50, 6), num_output=25, repetition_penalty=1.3, frequency_penalty=0.5),
]


@pytest.fixture(scope="module")
def alone(model):
    """The tokens of each request, served alone in one chunk."""
    return {each.request_id: Server(model).serve([each])[each.request_id] for each in REQUESTS}


def test_outputs_have_the_asked_length_and_differ(alone):
    assert [len(alone[each.request_id]) for each in REQUESTS] == [each.sampling.max_tokens for each in REQUESTS]
    assert len({tuple(tokens[:12]) for tokens in alone.values()}) == len(REQUESTS)


def test_batch_mates_do_not_matter(model, alone):
    assert Server(model).serve(REQUESTS) == alone
    assert Server(model).serve(REQUESTS[::-1]) == alone


@pytest.mark.parametrize("budget", [8, 13, 64, 101])
def test_the_chunk_size_does_not_matter(model, alone, budget):
    assert Server(model, max_num_batched_tokens=budget).serve(REQUESTS) == alone


def test_requests_that_join_and_leave_do_not_matter(model, alone):
    server = Server(model, max_num_seqs=3, max_num_batched_tokens=40)
    for i, each in enumerate(REQUESTS):
        server.submit(request(f"passer-by {i}", prompt_of(40, 20 + i), num_output=50))
        server.submit(each)
        target = server.scheduler.stats().steps_total + 3
        server.run(until=lambda target=target: server.scheduler.stats().steps_total >= target)
        server.scheduler.abort(f"passer-by {i}")
    server.run()
    assert {each.request_id: server.output(each.request_id) for each in REQUESTS} == alone


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preemption_does_not_matter(model, alone, enable_prefix_caching):
    server = Server(model, num_pages=19, max_num_batched_tokens=50, enable_prefix_caching=enable_prefix_caching)
    assert server.serve(REQUESTS) == alone
    assert server.scheduler.stats().preemptions_total > 0


@pytest.mark.parametrize("remainder", range(PAGE))
def test_a_shared_prefix_of_any_length_does_not_matter(model, remainder):
    shared = prompt_of(6 * PAGE + remainder, 9)
    first = request("first", shared + prompt_of(30, 10))
    second = request("second", [*shared, 250, *prompt_of(20, 11)])
    same = request("same", first.prompt_token_ids)
    cold = [Server(model).serve([each])[each.request_id] for each in (first, second)]

    server = Server(model, enable_prefix_caching=True)
    assert server.serve([first])["first"] == cold[0]
    assert server.serve([second, same]) == {"second": cold[1], "same": cold[0]}
    assert server.end("second").num_cached_tokens == 6 * PAGE
    assert server.end("same").num_cached_tokens == (len(same.prompt_token_ids) - 1) // PAGE * PAGE


def test_a_conversation_that_grows_does_not_matter(model):
    server = Server(model, enable_prefix_caching=True, max_num_batched_tokens=37)
    history = prompt_of(50, 12)
    for turn in range(5):
        name = f"turn {turn}"
        reply = server.serve([request(name, history, num_output=15)])[name]
        assert reply == Server(model).serve([request(name, history, num_output=15)])[name]
        assert server.end(name).num_cached_tokens >= (PAGE * turn if turn else 0)
        history = history + reply + prompt_of(9, 30 + turn)


GRID = (1, 8, 12)
NUM_FEATURES = 24


def picture(seed):
    return np.random.default_rng(seed).integers(0, 256, (96, 3, 14, 14), dtype=np.uint8)


def with_picture(name, pixels, seed, *, before=37, after=21, num_output=12):
    """A prompt with one picture of 24 tokens behind `before` tokens of text; text does not depend on the picture."""
    prompt = prompt_of(before, 13) + [IMAGE_TOKEN] * NUM_FEATURES + prompt_of(after, 14)
    item = MediaItem(MediaKind.IMAGE, bytes([seed]) * 32, GRID, (TokenRange(before, NUM_FEATURES),), pixels.add(picture(seed)))
    return request(name, prompt, num_output=num_output, media=(item,))


def with_clip(name, pixels):
    """Two temporal patches of 6 tokens with text between them."""
    prompt = prompt_of(10, 15) + [VIDEO_TOKEN] * 6 + prompt_of(5, 16) + [VIDEO_TOKEN] * 6 + prompt_of(8, 17)
    clip = np.random.default_rng(99).integers(0, 256, (48, 3, 2, 14, 14), dtype=np.uint8)
    ranges = (TokenRange(10, 6), TokenRange(21, 6))
    return request(name, prompt, media=(MediaItem(MediaKind.VIDEO, b"v" * 32, (2, 4, 6), ranges, pixels.add(clip)),))


@pytest.mark.parametrize("budget", [8, 45, 64])
def test_a_chunk_may_begin_and_end_inside_a_picture_or_clip(model, budget):
    pixels = Pixels()
    requests = [with_picture("a", pixels, 1), with_picture("b", pixels, 2), with_clip("clip", pixels)]
    cold = {each.request_id: Server(model, pixels=pixels).serve([each])[each.request_id] for each in requests}
    assert cold["a"] != cold["b"]
    reads = pixels.num_reads
    assert Server(model, pixels=pixels, max_num_batched_tokens=budget).serve(requests) == cold
    assert pixels.num_reads - reads == 3


def test_the_prefix_cache_tells_pictures_apart_and_reuses_equal_ones(model):
    pixels = Pixels()
    first, other = with_picture("first", pixels, 1, after=60), with_picture("other", pixels, 2, after=60)
    again = with_picture("again", pixels, 1, after=60)
    cold = {each.request_id: Server(model, pixels=pixels).serve([each])[each.request_id] for each in (first, other, again)}
    server = Server(model, pixels=pixels, enable_prefix_caching=True)
    assert {each.request_id: server.serve([each])[each.request_id] for each in (first, other, again)} == cold
    assert server.end("other").num_cached_tokens == 37 // PAGE * PAGE
    assert server.end("again").num_cached_tokens == (37 + 24 + 60 - 1) // PAGE * PAGE


def test_a_preempted_request_encodes_its_picture_again(model):
    pixels = Pixels()
    requests = [request("early", prompt_of(20, 19), num_output=70), with_picture("late", pixels, 1, num_output=60)]
    cold = {each.request_id: Server(model, pixels=pixels).serve([each])[each.request_id] for each in requests}
    reads = pixels.num_reads
    server = Server(model, pixels=pixels, num_pages=12)
    assert server.serve(requests) == cold
    assert server.scheduler.stats().preemptions_total > 0
    assert pixels.num_reads - reads == 1 + server.scheduler.stats().preemptions_total


def test_a_picture_that_cannot_be_read_fails_its_request_alone(model):
    pixels = Pixels()
    good, bad, text = with_picture("good", pixels, 1), with_picture("bad", pixels, 2), request("text", prompt_of(60, 18))
    cold = {each.request_id: Server(model, pixels=pixels).serve([each])[each.request_id] for each in (good, text)}
    pixels.broken = {1}
    server = Server(model, pixels=pixels, max_num_batched_tokens=64, enable_prefix_caching=True)
    for each in (good, bad, text):
        server.submit(each)
    server.run()
    assert {name: server.output(name) for name in cold} == cold
    (failure,) = server.events["bad"]
    assert isinstance(failure, Failed)
    assert failure.kind is FailureKind.INTERNAL

    pixels.broken = set()
    again = with_picture("again", pixels, 2)
    assert server.serve([again])["again"] == Server(model, pixels=pixels).serve([again])["again"]


def test_the_logprobs_of_a_prompt_do_not_depend_on_chunks_cache_or_preemption(model):
    prompt = prompt_of(6 * PAGE + 5, 30)
    asked = request("asked", prompt, num_output=3, num_prompt_logprobs=2)

    def scores(server):
        (entries,) = [event.prompt_logprobs for event in server.events["asked"] if getattr(event, "prompt_logprobs", [])]
        assert len(entries) == len(prompt) - 1
        assert all(entry.logprob <= entry.top_logprobs[0] < 0 for entry in entries)
        return [entry.top_ids for entry in entries], [entry.logprob for entry in entries]

    def assert_same(server):
        top_ids, logprobs = scores(server)
        assert top_ids == expected[0]
        assert logprobs == pytest.approx(expected[1], abs=1e-3)

    whole = Server(model)
    expected_tokens = whole.serve([asked])
    expected = scores(whole)
    # The entry of the last position agrees with what the shorter prompt gives as the log-probability of a sampled token.
    shorter = Server(model)
    forced = request("forced", prompt[:-1], num_output=1, num_logprobs=2, logit_bias=((prompt[-1], 1000.0),))
    shorter.serve([forced])
    (tokens,) = [event.logprobs for event in shorter.events["forced"] if getattr(event, "logprobs", [])]
    assert tokens[0].top_ids == expected[0][-1]
    assert tokens[0].logprob == pytest.approx(expected[1][-1], abs=1e-3)

    chunked = Server(model, max_num_batched_tokens=13)
    assert chunked.serve([asked]) == expected_tokens
    assert_same(chunked)
    cached = Server(model, enable_prefix_caching=True)
    cached.serve([request("warm", prompt)])
    assert cached.serve([asked]) == expected_tokens
    assert_same(cached)
    tight = Server(model, num_pages=9, max_num_batched_tokens=24)
    tight.submit(request("first", prompt_of(30, 31), num_output=60))
    assert tight.serve([asked]) == expected_tokens
    assert_same(tight)
    assert tight.scheduler.stats().preemptions_total > 0
