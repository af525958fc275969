from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.messages import Failed, FailureKind, Submit
from server.scheduler.config import SchedulerConfig
from tests.fakes import expected_tokens
from tests.scheduler.driver import VOCAB_SIZE, Driver, picture, request

PAGE = 4
PICTURES = (b"\x01" * 32, b"\x02" * 32)
PROFILE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Add:
    submit: Submit


@dataclass(frozen=True)
class AbortOne:
    index: int


@dataclass(frozen=True)
class Step:
    """One turn of the loop, with what goes wrong in it; indices name requests in the order of their submission."""

    abort_before_execute: int | None
    abort_before_commit: int | None
    failing: int | None
    crashes: bool


@st.composite
def submits(draw: st.DrawFn) -> Submit:
    shared_len = draw(st.integers(0, 4 * PAGE))
    tail = draw(st.lists(st.integers(0, 1), min_size=0 if shared_len else 1, max_size=PAGE + 1))
    prompt = [10] * shared_len + tail
    media = ()
    if draw(st.booleans()):  # few places, so that different pictures often meet behind equal tokens
        offset, length = draw(st.sampled_from([(0, 2), (1, 3), (3, 6)]))
        length = min(length, len(prompt) - offset)
        if length > 0:
            prompt[offset : offset + length] = [9] * length
            media = (picture(draw(st.sampled_from(PICTURES)), (offset, length)),)
    return request(
        f"{draw(st.uuids())}",
        prompt,
        draw(st.integers(1, 3 * PAGE)),
        priority=draw(st.integers(-1, 1)),
        stop=draw(st.sampled_from([(), tuple(range(8))])),
        min_tokens=draw(st.integers(0, 3)),
        media=media,
        salt=draw(st.sampled_from([b"", b"", b"tenant"])),
    )


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    num_seqs = draw(st.integers(1, 4))
    return SchedulerConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs + draw(st.integers(0, 12)),
        max_model_len=draw(st.sampled_from([20, 64])),
        page_size=PAGE,
        num_pages=draw(st.integers(3, 12)),
        enable_prefix_caching=draw(st.booleans()),
    )


indices = st.integers(0, 15)
rarely = st.one_of(st.none(), st.none(), st.none(), indices)
operations = st.one_of(
    st.builds(Add, submits()),
    st.builds(Step, rarely, rarely, rarely, st.sampled_from([False] * 9 + [True])),
    st.builds(Step, st.none(), st.none(), st.none(), st.just(False)),
    st.builds(AbortOne, indices),
)


def nth(driver: Driver, index: int | None) -> str:
    """The id of a submitted request, open or not; an unknown one when there is none."""
    ids = list(driver.submitted)
    return ids[index % len(ids)] if ids and index is not None else "unknown"


def run(driver: Driver, program: list[Add | AbortOne | Step]) -> None:
    limit = driver.scheduler.config.max_seq_len
    for operation in program:
        if isinstance(operation, Add):
            submit = operation.submit
            driver.add(submit)
            fits = len(submit.prompt_token_ids) + submit.sampling.max_tokens <= limit
            assert (submit.request_id in driver.ends) == (not fits)
        elif isinstance(operation, AbortOne):
            driver.abort(nth(driver, operation.index))
        else:
            failing = None if operation.failing is None else nth(driver, operation.failing)
            driver.runner.failing = lambda chunk, request_id, failing=failing: request_id == failing
            driver.runner.crashing = operation.crashes
            driver.step(
                before_execute=lambda index=operation.abort_before_execute: driver.abort(nth(driver, index)),
                before_commit=lambda index=operation.abort_before_commit: driver.abort(nth(driver, index)),
            )
            driver.runner.crashing = False
    driver.runner.failing = lambda chunk, request_id: False
    driver.drain()


@given(configs(), st.integers(1, 2), st.lists(operations, min_size=5, max_size=40))
@settings(PROFILE, max_examples=400)
def test_every_request_ends_once_and_everything_comes_back(
    config: SchedulerConfig, depth: int, program: list[Add | AbortOne | Step]
) -> None:
    driver = Driver(config, depth)
    run(driver, program)
    driver.check_outputs()
    driver.check_slots()


@given(st.lists(submits(), min_size=2, max_size=8), configs(), st.integers(1, 2), st.lists(st.integers(0, 3), max_size=8))
@settings(PROFILE, max_examples=300)
def test_output_depends_on_the_request_only(
    requests: list[Submit], config: SchedulerConfig, depth: int, pauses: list[int]
) -> None:
    driver = Driver(config, depth)
    for index, submit in enumerate(requests):
        driver.add(submit)
        for _ in range(pauses[index] if index < len(pauses) else 0):
            driver.step()
    driver.drain()
    for submit in requests:
        end = driver.end(submit.request_id)
        if isinstance(end, Failed):
            assert end.kind is FailureKind.NO_FIT
        else:
            assert driver.output[submit.request_id] == expected_tokens(submit, VOCAB_SIZE)


@given(st.data())
@settings(PROFILE, max_examples=30)
def test_first_in_order_advances_in_every_step(data: st.DataObject) -> None:
    """Whatever is behind it in a tiny cache, the sequence that comes first is in each plan until it ends."""
    config = data.draw(configs())
    driver = Driver(config)
    others = data.draw(st.lists(submits(), min_size=3, max_size=8))
    first = request("first", [3] * 5, config.max_seq_len - 5, priority=-2)
    driver.add(*others[:2])
    driver.step()
    driver.add(first, *others[2:])
    while not driver.runner.slots or "first" not in [slot.new.request_id for slot in driver.runner.slots.values()]:
        driver.step()
    slot = next(index for index, slot in driver.runner.slots.items() if slot.new.request_id == "first")
    while "first" not in driver.ends:
        driver.step()
        assert slot in [chunk.slot for chunk in driver.plans[-1].chunks]
    driver.drain()
    driver.check_outputs()
