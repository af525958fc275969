import asyncio

from server.api.request_stream import RequestStream
from server.messages import Failed, FailureKind, Finished, FinishReason, TokenLogprobs, Tokens

END = Finished("r", FinishReason.STOP, 1, 0, 3)


def stream_with_aborts():
    aborts = []
    return RequestStream("r", aborts.append), aborts


async def collect(stream):
    return [event async for event in stream]


def test_unread_tokens_are_merged_in_order_with_their_logprobs():
    async def scenario():
        stream, _ = stream_with_aborts()
        for i in range(1000):
            stream.put(Tokens("r", [2 * i, 2 * i + 1], [TokenLogprobs(-2.0 * i), TokenLogprobs(-2.0 * i - 1)]))
        stream.put(END)
        return await collect(stream)

    merged, end = asyncio.run(scenario())
    assert merged.token_ids == list(range(2000))
    assert [entry.logprob for entry in merged.logprobs] == [-float(i) for i in range(2000)]
    assert end == END


def test_the_prompts_logprobs_survive_merging_and_come_once():
    async def scenario():
        stream, _ = stream_with_aborts()
        stream.put(Tokens("r", [1], [], [TokenLogprobs(-1.0), TokenLogprobs(-2.0)]))
        stream.put(Tokens("r", [2]))
        first = await anext(stream)
        stream.put(Tokens("r", [3]))
        return first, await anext(stream)

    first, second = asyncio.run(scenario())
    assert first == Tokens("r", [1, 2], [], [TokenLogprobs(-1.0), TokenLogprobs(-2.0)])
    assert second == Tokens("r", [3])


def test_a_waiting_consumer_gets_every_event_when_it_comes():
    async def scenario():
        stream, _ = stream_with_aborts()
        consumer = asyncio.create_task(collect(stream))
        for i in range(3):
            stream.put(Tokens("r", [i]))
            # Two turns of the loop: the first wakes the consumer, the second lets it wait again.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        stream.put(END)
        return await consumer

    assert asyncio.run(scenario()) == [Tokens("r", [0]), Tokens("r", [1]), Tokens("r", [2]), END]


def test_the_stream_stays_at_its_end():
    async def scenario():
        stream, _ = stream_with_aborts()
        stream.put(Failed("r", FailureKind.INTERNAL, "no"))
        return await collect(stream), await collect(stream)

    assert asyncio.run(scenario()) == ([Failed("r", FailureKind.INTERNAL, "no")], [])


def test_abort_is_sent_once_and_never_after_the_end():
    async def scenario():
        stream, aborts = stream_with_aborts()
        stream.abort()
        stream.abort()
        assert aborts == ["r"]
        ended, aborts = stream_with_aborts()
        ended.put(END)
        ended.abort()
        assert aborts == []

    asyncio.run(scenario())


def test_the_terminal_event_still_comes_after_an_abort():
    async def scenario():
        stream, _ = stream_with_aborts()
        stream.abort()
        stream.put(Finished("r", FinishReason.ABORT, 1, 0, 0))
        return await collect(stream)

    assert asyncio.run(scenario()) == [Finished("r", FinishReason.ABORT, 1, 0, 0)]
