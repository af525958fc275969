import asyncio
import stat

import msgspec
import pytest
import zmq

from server import transport
from server.messages import (
    Abort,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    MediaItem,
    MediaKind,
    Ready,
    SamplingParams,
    Shutdown,
    SlabRef,
    Submit,
    TokenLogprobs,
    TokenRange,
    Tokens,
)
from server.transport import EngineChannel, FrontChannel, MessageTooLargeError, PeerGoneError, make_address

TIMEOUT_S = 10.0


@pytest.fixture
def address(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return make_address()


def on_loop(scenario):
    async def bounded():
        async with asyncio.timeout(TIMEOUT_S):
            await scenario()

    asyncio.run(bounded())


async def connected(address):
    """Both ends, after a message has gone each way."""
    front = FrontChannel(address)
    engine = EngineChannel(address)
    engine.send([Ready(1, 2, 3, 4)])
    assert await front.receive() == [Ready(1, 2, 3, 4)]
    while True:
        try:
            front.send(Abort("connected"))
            break
        except PeerGoneError:
            await asyncio.sleep(0)
    assert engine.receive(TIMEOUT_S) == [Abort("connected")]
    return front, engine


def test_the_sockets_live_where_only_this_user_can_go(address):
    assert stat.S_IMODE(address.stat().st_mode) == 0o700


def test_messages_arrive_as_they_were_sent_in_both_directions(address):
    submit = Submit(
        request_id="r",
        prompt_token_ids=[1, 2, 200_025],
        sampling=SamplingParams(max_tokens=3, seed=2**64 - 1, logit_bias=((5, -1.5),), stop_token_ids=(7,), num_logprobs=2),
        media=(MediaItem(MediaKind.IMAGE, b"\xff" * 32, (1, 2, 2), (TokenRange(2, 1),), SlabRef(64, 2352, 9)),),
        priority=-1,
        cache_salt=b"\x00tenant",
    )
    events = [
        Tokens("r", [3], [TokenLogprobs(-0.5, (1, 2), (-0.5, -1.5))]),
        Finished("r", FinishReason.STOP, 3, 0, 1),
        Failed("s", FailureKind.NO_FIT, "no"),
    ]

    async def scenario():
        front, engine = await connected(address)
        for message in (submit, Abort("r"), Shutdown()):
            front.send(message)
        received = []
        while len(received) < 3:
            received += engine.receive(TIMEOUT_S)
        assert received == [submit, Abort("r"), Shutdown()]
        engine.send(events)
        assert await front.receive() == events
        front.close()
        engine.close()

    on_loop(scenario)


def test_an_idle_engine_comes_back_after_its_timeout(address):
    engine = EngineChannel(address)
    assert engine.receive(0.01) == []
    engine.close()


def test_sending_to_an_engine_that_is_not_there_says_so(address):
    async def scenario():
        front = FrontChannel(address)
        with pytest.raises(PeerGoneError):
            front.send(Abort("r"))
        front.close()

    on_loop(scenario)


def test_a_message_beyond_the_limit_is_refused_before_it_is_sent(address, monkeypatch):
    async def scenario():
        front, engine = await connected(address)
        monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", 1000)
        with pytest.raises(MessageTooLargeError):
            front.send(Submit("r", list(range(2000)), SamplingParams(max_tokens=1)))
        front.send(Abort("r"))
        assert engine.receive(TIMEOUT_S) == [Abort("r")]
        front.close()
        engine.close()

    on_loop(scenario)


@pytest.mark.parametrize(
    "frame",
    [b"\xc1", msgspec.msgpack.encode([{"type": "abort", "request_id": 5}]), msgspec.msgpack.encode([{"type": "exec"}])],
    ids=["not MessagePack", "wrong type", "unknown message"],
)
def test_a_frame_that_is_no_message_is_an_error(address, frame):
    engine = EngineChannel(address)
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.bind(f"ipc://{address}/to_engine")
        stranger.send(frame)
        with pytest.raises(msgspec.DecodeError):
            engine.receive(TIMEOUT_S)
    engine.close()


def test_the_engines_last_words_arrive_after_it_closed(address):
    async def scenario():
        front = FrontChannel(address)
        engine = EngineChannel(address)
        engine.send([Failed("r", FailureKind.INTERNAL, "bye")])
        await asyncio.to_thread(engine.close)
        assert await front.receive() == [Failed("r", FailureKind.INTERNAL, "bye")]
        assert await front.receive_within(0.01) == []
        front.close()

    on_loop(scenario)
