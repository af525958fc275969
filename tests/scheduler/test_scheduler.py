import logging

import pytest

from server.kvcache.block_manager import InvariantError
from server.messages import (
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    RequestEvent,
    SamplingParams,
    Submit,
    TokenLogprobs,
    Tokens,
)
from server.scheduler.config import SchedulerConfig
from server.scheduler.plan import PromptLogprobs, SampledToken, StepResult
from server.scheduler.scheduler import Scheduler
from tests.fakes import expected_tokens
from tests.scheduler.driver import VOCAB_SIZE, Driver, picture, request, small_config


def chunk_lens(driver: Driver, step: int = -1) -> list[int]:
    return [chunk.num_tokens for chunk in driver.plans[step].chunks]


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    driver = Driver(small_config(budget=8))
    driver.add(request("a", range(21), 2))
    driver.drain()
    assert [chunk_lens(driver, step) for step in range(4)] == [[8], [8], [5], [1]]
    assert [chunk.samples for plan in driver.plans for chunk in plan.chunks] == [False, False, True, True]
    driver.check_outputs()


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    driver = Driver(small_config(budget=8))
    driver.add(request("a", [1, 2], 8), request("b", [3, 4], 8))
    driver.step()
    driver.add(request("c", range(20), 2))
    driver.step()
    assert chunk_lens(driver) == [1, 1, 6]
    driver.step()
    assert chunk_lens(driver) == [1, 1, 6]


def test_a_decode_behind_a_long_prompt_in_order_still_runs() -> None:
    driver = Driver(small_config(budget=4))
    driver.add(request("short", [1], 8))
    driver.step()
    driver.add(request("long", range(30), 2, priority=-1))
    driver.step()
    driver.step()
    assert chunk_lens(driver) == [1, 3]


def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one() -> None:
    driver = Driver(small_config(num_pages=32, budget=8))
    driver.add(request("long", range(60), 2))
    driver.step()
    assert chunk_lens(driver) == [8]
    driver.add(request("short", range(3), 4), request("other", range(6), 4))
    driver.step()
    assert chunk_lens(driver) == [4, 2, 2]  # each leaves half of what it finds, and no more, to those behind it
    driver.drain()
    chunks = [sorted(chunk.num_tokens for chunk in plan.chunks) for plan in driver.plans]
    assert [1, 1, 6] in chunks  # what nobody behind wants goes to the first
    driver.drain()
    driver.check_outputs()


def test_a_prompt_that_finds_no_room_keeps_no_budget_from_others() -> None:
    driver = Driver(small_config(num_pages=8, budget=8))
    driver.add(request("a", range(24), 2), request("b", range(29), 2))
    driver.step()
    driver.step()
    assert [chunk_lens(driver, step) for step in range(2)] == [[4], [8]]


def test_a_sequence_is_described_once_and_its_slot_is_released_once() -> None:
    driver = Driver(small_config())
    driver.add(request("a", [1, 2, 3], 3), request("b", [4], 1))
    driver.drain()
    driver.add(request("c", [5], 1))
    driver.drain()
    assert [len(plan.new_sequences) for plan in driver.plans] == [2, 0, 0, 1]
    released = [slot for plan in driver.plans for slot in plan.released_slots]
    taken = [new.slot for plan in driver.plans for new in plan.new_sequences]
    assert sorted(released) == sorted(taken[:2])


def test_released_slots_alone_make_no_step() -> None:
    driver = Driver(small_config())
    driver.add(request("a", [1], 1))
    driver.drain()
    assert driver.scheduler.schedule() is None
    driver.add(request("b", [1], 1))
    plan = driver.scheduler.schedule()
    assert plan is not None
    assert plan.released_slots == (driver.plans[0].chunks[0].slot,)


def test_equal_priorities_run_in_order_of_arrival_and_lower_values_before() -> None:
    driver = Driver(small_config(num_seqs=1))
    driver.add(request("late", [1], 2, priority=1), request("first", [1], 2), request("second", [1], 2))
    driver.add(request("urgent", [1], 2, priority=-1))
    driver.drain()
    assert list(driver.ends) == ["urgent", "first", "second", "late"]


class TestRefusals:
    def test_more_than_the_cache_holds_is_refused_at_once_with_both_numbers(self) -> None:
        driver = Driver(small_config(num_pages=4))
        driver.add(request("big", range(14), 3), request("fits", range(13), 3))
        end = driver.end("big")
        assert isinstance(end, Failed)
        assert end.kind is FailureKind.NO_FIT
        assert "17 tokens" in end.message
        assert "cache holds at most 16" in end.message
        driver.drain()
        driver.check_outputs()

    def test_more_than_the_window_is_refused(self) -> None:
        driver = Driver(small_config(window=10))
        driver.add(request("big", range(8), 3))
        end = driver.end("big")
        assert isinstance(end, Failed)
        assert "context window holds at most 10" in end.message

    def test_an_empty_prompt_is_invalid(self) -> None:
        driver = Driver(small_config())
        driver.add(request("empty", []))
        end = driver.end("empty")
        assert isinstance(end, Failed)
        assert end.kind is FailureKind.INVALID

    def test_a_second_request_with_an_open_id_does_not_disturb_the_first(self, caplog: pytest.LogCaptureFixture) -> None:
        driver = Driver(small_config())
        driver.add(request("a", [1, 2, 3]))
        with caplog.at_level(logging.ERROR):
            assert driver.scheduler.add(request("a", [9, 9])) == []
        assert "open already" in caplog.text
        driver.drain()
        driver.check_outputs()

    def test_a_budget_below_the_number_of_slots_is_a_config_error(self) -> None:
        with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\) is below max_num_seqs \(4\)"):
            small_config(num_seqs=4, budget=3)

    def test_sizes_must_be_positive(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            small_config(num_pages=0)


class TestEnds:
    def first_tokens(self) -> list[int]:
        return expected_tokens(request("a", [1, 2, 3], 6), VOCAB_SIZE)

    def test_a_stop_token_ends_the_sequence_and_is_its_last_token(self) -> None:
        tokens = self.first_tokens()
        driver = Driver(small_config())
        driver.add(request("a", [1, 2, 3], 6, stop=(tokens[2],)))
        driver.drain()
        assert driver.output["a"] == tokens[:3]
        assert driver.end("a") == Finished("a", FinishReason.STOP, 3, 0, 3)

    @pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4])
    def test_a_stop_token_counts_only_after_min_tokens(self, min_tokens: int) -> None:
        """The result is made up: a sampler that does not mask shows what the scheduler does by itself."""
        scheduler = Scheduler(small_config())
        scheduler.add(request("a", [1, 2, 3], 6, stop=(7,), min_tokens=min_tokens))
        events = []
        while scheduler.has_work:
            plan = scheduler.schedule()
            assert plan is not None
            events += scheduler.commit(plan, StepResult(tuple(SampledToken(chunk.slot, 7) for chunk in plan.chunks)))
        assert events[-1] == Finished("a", FinishReason.STOP, 3, 0, min_tokens + 1)

    def test_max_tokens_ends_by_length(self) -> None:
        driver = Driver(small_config())
        driver.add(request("a", [1, 2, 3], 6))
        driver.drain()
        assert driver.end("a") == Finished("a", FinishReason.LENGTH, 3, 0, 6)

    def test_a_stop_token_at_max_tokens_is_a_stop(self) -> None:
        tokens = self.first_tokens()
        driver = Driver(small_config())
        driver.add(request("a", [1, 2, 3], 6, stop=(tokens[5],)))
        driver.drain()
        end = driver.end("a")
        assert isinstance(end, Finished)
        assert end.reason is FinishReason.STOP

    def test_a_sequence_may_fill_the_window_and_the_cache_to_the_last_token(self) -> None:
        driver = Driver(small_config(num_pages=4, window=16))
        driver.add(request("a", range(10), 6))
        driver.drain()
        assert driver.end("a") == Finished("a", FinishReason.LENGTH, 10, 0, 6)
        driver.check_outputs()


class TestAborts:
    def test_unknown_and_ended_ids_are_ignored(self) -> None:
        driver = Driver(small_config())
        driver.add(request("a", [1], 1))
        driver.drain()
        assert driver.scheduler.abort("a") == []
        assert driver.scheduler.abort("never heard of") == []

    def test_in_the_tick_of_the_submit(self) -> None:
        driver = Driver(small_config())
        driver.add(request("a", [1, 2]))
        driver.abort("a")
        assert driver.end("a") == Finished("a", FinishReason.ABORT, 2, 0, 0)
        driver.step()
        assert driver.plans == []
        driver.check_outputs()

    def test_while_running_gives_everything_back_at_once(self) -> None:
        driver = Driver(small_config())
        driver.add(request("a", range(20), 4))
        driver.step()
        driver.abort("a")
        stats = driver.scheduler.stats()
        assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages
        driver.check_outputs()
        driver.check_slots()

    @pytest.mark.parametrize("depth", [1, 2])
    def test_during_a_step_keeps_its_pages_until_the_step_is_committed(self, depth: int) -> None:
        driver = Driver(small_config(num_pages=4), depth)
        driver.add(request("a", range(6), 4), request("b", [1], 4))

        def abort_and_look() -> None:
            driver.abort("a")
            stats = driver.scheduler.stats()
            assert (stats.num_running, stats.num_free_pages) == (1, 1)

        driver.step(before_execute=abort_and_look)
        driver.drain()
        assert driver.output["a"] == []
        driver.check_outputs()
        driver.check_slots()

    def test_while_preempted(self) -> None:
        driver = Driver(small_config(num_pages=4))
        driver.add(request("a", range(6), 10), request("b", range(20, 26), 8))
        while not driver.scheduler.stats().preemptions_total:
            driver.step()
        num_output_tokens = len(driver.output["b"])
        driver.abort("b")
        assert driver.end("b") == Finished("b", FinishReason.ABORT, 6, 0, num_output_tokens)
        driver.drain()
        driver.check_outputs()

    def test_shutdown_ends_all(self) -> None:
        driver = Driver(small_config(num_seqs=1))
        driver.add(request("a", [1]), request("b", [1]))
        driver.step()
        driver.record(driver.scheduler.shutdown())
        assert not driver.scheduler.has_work
        driver.check_outputs()


class TestFaults:
    def test_one_slot_s_failure_ends_that_sequence_only(self) -> None:
        driver = Driver(small_config())
        driver.add(request("a", [1, 2]), request("b", [3, 4]), request("c", range(30), 2))
        driver.runner.failing = lambda chunk, request_id: request_id == "b"
        driver.drain()
        assert driver.end("b") == Failed("b", FailureKind.INTERNAL, "non-finite logits")
        assert isinstance(driver.end("a"), Finished)
        driver.check_outputs()
        driver.check_slots()

    def test_a_failure_in_the_middle_of_a_prompt_ends_it(self) -> None:
        driver = Driver(small_config())
        driver.add(request("a", range(30), 2))
        driver.runner.failing = lambda chunk, request_id: not chunk.samples
        driver.step()
        assert isinstance(driver.end("a"), Failed)
        driver.check_outputs()

    def test_a_corrupt_page_fails_no_second_request(self) -> None:
        driver = Driver(small_config())
        driver.add(request("first", range(10), 1))
        driver.drain()
        driver.add(request("unlucky", range(10), 1))
        driver.runner.failing = lambda chunk, request_id: request_id == "unlucky"
        driver.drain()
        driver.runner.poison(driver.plans[-1].chunks[0].new_page_ids)
        driver.add(request("next", range(10), 1))
        driver.drain()
        assert driver.num_cached_tokens("next") == 0
        driver.check_outputs()

    def test_a_step_that_raises_ends_its_sequences_and_no_others(self) -> None:
        driver = Driver(small_config(num_seqs=2))
        driver.add(request("a", [1, 2]), request("b", [3, 4]), request("c", [5]))
        driver.runner.crashing = True
        driver.drain()
        assert driver.end("a") == Failed("a", FailureKind.INTERNAL, "the step failed")
        assert isinstance(driver.end("b"), Failed)
        assert isinstance(driver.end("c"), Finished)
        driver.check_outputs()
        driver.check_slots()

    def test_pages_of_a_step_that_raised_are_not_found_again(self) -> None:
        driver = Driver(small_config(budget=16))
        driver.add(request("a", range(12)))
        driver.runner.crashing = True
        driver.drain()
        driver.add(request("b", range(12)))
        driver.drain()
        assert driver.num_cached_tokens("b") == 0
        driver.check_outputs()

    def test_a_missing_token_ends_its_sequence(self) -> None:
        scheduler = Scheduler(small_config())
        scheduler.add(request("a", [1]))
        plan = scheduler.schedule()
        assert plan is not None
        assert scheduler.commit(plan, StepResult(())) == [Failed("a", FailureKind.INTERNAL, "No token was sampled.")]
        scheduler.check()

    def test_steps_are_committed_in_order(self) -> None:
        scheduler = Scheduler(small_config(budget=4))
        scheduler.add(request("a", range(12)))
        first, second = scheduler.schedule(), scheduler.schedule()
        assert first is not None
        assert second is not None
        with pytest.raises(InvariantError, match="not the oldest"):
            scheduler.commit(second, StepResult(()))
        assert scheduler.commit(first, StepResult(())) == []

    def test_wrong_books_are_logged_and_repaired_when_idle(self, caplog: pytest.LogCaptureFixture) -> None:
        driver = Driver(small_config())
        driver.add(request("a", range(12)))
        driver.drain()
        driver.scheduler._blocks.allocate(1)
        with caplog.at_level(logging.ERROR):
            assert driver.scheduler.schedule() is None
        assert "books are wrong" in caplog.text
        assert driver.scheduler.stats().num_free_pages == 16
        driver.add(request("b", range(12)))
        driver.drain()
        driver.check_outputs()


class TestPreemption:
    def test_the_last_in_order_gives_way_and_resumes_with_its_pages(self) -> None:
        driver = Driver(small_config(num_pages=6, budget=16))
        driver.add(request("old", range(8), 12), request("new", range(20, 28), 12))
        driver.drain()
        stats = driver.scheduler.stats()
        assert stats.preemptions_total > 0
        assert list(driver.ends) == ["old", "new"]
        resumed = [new for plan in driver.plans for new in plan.new_sequences if new.request_id == "new"][1]
        assert resumed.token_ids[8:] == driver.output["new"][: len(resumed.token_ids) - 8]
        chunk = next(c for p in driver.plans if resumed in p.new_sequences for c in p.chunks if c.slot == resumed.slot)
        assert chunk.start > 0  # full pages were found again
        driver.check_outputs()

    def test_a_later_priority_gives_way_to_an_earlier_one_that_came_after_it(self) -> None:
        driver = Driver(small_config(num_pages=6, budget=16))
        driver.add(request("patient", range(8), 12))
        driver.step()
        driver.add(request("urgent", range(20, 28), 12, priority=-1))
        driver.drain()
        assert list(driver.ends) == ["urgent", "patient"]
        driver.check_outputs()

    def test_room_made_by_a_preemption_goes_to_whoever_waits_before_the_victim(self) -> None:
        driver = Driver(small_config(num_pages=8, budget=16))
        driver.add(request("old", range(8), 12), request("victim", range(20, 32), 10))
        driver.step()
        driver.step()
        driver.add(request("urgent", range(40, 52), 2, priority=-1))
        driver.step()
        assert driver.scheduler.stats().num_waiting == 1
        while not driver.scheduler.stats().preemptions_total:
            driver.step()
        assert [new.request_id for new in driver.plans[-1].new_sequences] == ["urgent"]
        assert driver.plans[-1].new_sequences[0].slot in driver.plans[-1].released_slots
        driver.drain()
        assert list(driver.ends) == ["urgent", "old", "victim"]
        driver.check_outputs()

    def test_the_last_in_order_pauses_with_its_pages_and_nobody_overtakes_it(self) -> None:
        driver = Driver(small_config(num_pages=6, budget=32))
        driver.add(request("old", range(9), 4), request("new", range(20, 32), 8))
        driver.step()
        driver.add(request("tiny", [1], 1))
        while driver.output["old"] and "old" not in driver.ends:
            driver.step()
        stats = driver.scheduler.stats()
        assert stats.preemptions_total == 0
        assert "tiny" not in driver.ends
        assert len(driver.output["new"]) == 1  # its second token needs a seventh page
        driver.drain()
        driver.check_outputs()

    def test_a_preempted_sequence_waits_before_those_of_its_priority(self) -> None:
        driver = Driver(small_config(num_pages=6, budget=16))
        driver.add(request("old", range(8), 12), request("new", range(20, 28), 12), request("newest", range(40, 48), 12))
        driver.drain()
        assert driver.scheduler.stats().preemptions_total > 0
        assert list(driver.ends) == ["old", "new", "newest"]

    def test_cached_tokens_count_the_first_admission_only(self) -> None:
        driver = Driver(small_config(num_pages=6, budget=16))
        driver.add(request("old", range(8), 12), request("new", range(20, 28), 12))
        driver.drain()
        assert driver.num_cached_tokens("new") == 0
        assert driver.scheduler.stats().prefix_query_tokens_total == 16

    def test_a_prompt_that_waits_for_room_blocks_those_behind_it_and_not_for_ever(self) -> None:
        driver = Driver(small_config(num_pages=8, budget=16))
        driver.add(request("a", range(12), 12), request("wide", range(100, 128), 2), request("b", [1], 2))
        driver.step()
        assert driver.scheduler.stats().num_waiting == 2
        driver.drain()
        assert next(iter(driver.ends)) == "a"
        driver.check_outputs()


class TestPrefixReuse:
    PAGE = 8

    def run_pair(self, first: list[int], second: list[int], *, caching: bool = True) -> Driver:
        driver = Driver(small_config(num_pages=32, page_size=self.PAGE, budget=13, caching=caching))
        driver.add(request("first", first, 3))
        driver.drain()
        driver.add(request("second", second, 20))
        driver.drain()
        driver.check_outputs()
        return driver

    @pytest.mark.parametrize("shared_len", range(25))
    def test_whole_pages_of_an_equal_prefix_are_reused_and_the_output_is_the_same(self, shared_len: int) -> None:
        first, second = [1] * 24, [1] * shared_len + [2] * (30 - shared_len)
        with_reuse, without = self.run_pair(first, second), self.run_pair(first, second, caching=False)
        assert with_reuse.num_cached_tokens("second") == shared_len // self.PAGE * self.PAGE
        assert without.num_cached_tokens("second") == 0
        assert with_reuse.output == without.output

    @pytest.mark.parametrize("prompt_len", range(1, 26))
    def test_the_last_prompt_token_is_always_computed(self, prompt_len: int) -> None:
        driver = self.run_pair([1] * prompt_len, [1] * prompt_len)
        assert driver.num_cached_tokens("second") == (prompt_len - 1) // self.PAGE * self.PAGE

    def test_generated_tokens_are_reused_by_the_next_turn(self) -> None:
        prompt = [1] * 10
        answer = expected_tokens(request("first", prompt, 20), VOCAB_SIZE)
        driver = Driver(small_config(num_pages=32, page_size=self.PAGE))
        driver.add(request("first", prompt, 20))
        driver.drain()
        driver.add(request("second", prompt + answer + [2], 3))
        driver.drain()
        assert driver.num_cached_tokens("second") == 24  # 29 tokens were computed
        driver.check_outputs()

    def test_another_picture_behind_the_same_placeholders_is_no_hit(self) -> None:
        prompt = [1] * 6 + [9] * 8 + [2] * 6
        driver = Driver(small_config(num_pages=32))
        for index, content in enumerate((b"\x01" * 32, b"\x02" * 32, b"\x01" * 32)):
            driver.add(request(str(index), prompt, 6, media=(picture(content, (6, 8)),)))
            driver.drain()
        assert [driver.num_cached_tokens(str(index)) for index in range(3)] == [0, 4, 16]
        assert driver.output["0"] != driver.output["1"]
        driver.check_outputs()

    def test_another_salt_is_no_hit(self) -> None:
        driver = Driver(small_config(num_pages=32))
        for index, salt in enumerate((b"", b"a", b"b", b"a")):
            driver.add(request(str(index), [1] * 13, 1, salt=salt))
            driver.drain()
        assert [driver.num_cached_tokens(str(index)) for index in range(4)] == [0, 0, 0, 12]

    def test_a_page_is_found_only_after_its_step_is_committed(self) -> None:
        driver = Driver(small_config(num_pages=32, budget=32))
        driver.add(request("a", [1] * 12, 1), request("b", [1] * 12, 1))
        driver.step()
        assert [chunk.start for chunk in driver.plans[0].chunks] == [0, 0]
        driver.add(request("c", [1] * 12, 1))
        driver.drain()
        assert driver.num_cached_tokens("b") == 0
        assert driver.num_cached_tokens("c") == 8
        driver.check_outputs()

    def test_pages_of_a_running_sequence_are_shared(self) -> None:
        driver = Driver(small_config(num_pages=6, budget=16))
        driver.add(request("a", [1] * 9, 6))
        driver.step()
        driver.add(request("b", [1] * 8 + [2], 6))
        driver.step()
        assert driver.scheduler.stats().num_free_pages == 2
        driver.drain()
        driver.check_outputs()

    def test_hits_and_queries_are_counted(self) -> None:
        stats = self.run_pair([1] * 24, [1] * 24).scheduler.stats()
        assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (48, 16)
        assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (48, 23)

    def test_nothing_is_queried_or_cached_when_switched_off(self) -> None:
        stats = self.run_pair([1] * 24, [1] * 24, caching=False).scheduler.stats()
        assert (stats.prefix_query_tokens_total, stats.num_cached_pages) == (0, 0)


class TestOneStepAhead:
    """`schedule()` with a step in flight: the engine's overlapped loop."""

    def test_a_decode_is_planned_before_its_token_is_known(self) -> None:
        scheduler = Scheduler(small_config())
        scheduler.add(request("a", [1, 2, 3], 3))
        plans = [scheduler.schedule() for _ in range(4)]
        starts = [plan.chunks[0].start for plan in plans if plan is not None]
        assert starts == [0, 3, 4]  # max_tokens = 3: no fourth step
        assert plans[3] is None

    def test_a_token_after_a_stop_is_dropped(self) -> None:
        scheduler = Scheduler(small_config())
        scheduler.add(request("a", [1, 2, 3], 5, stop=(7,)))
        first, second = scheduler.schedule(), scheduler.schedule()
        assert first is not None
        assert second is not None
        result = StepResult((SampledToken(first.chunks[0].slot, 7),))
        assert scheduler.commit(first, result) == [Tokens("a", [7]), Finished("a", FinishReason.STOP, 3, 0, 1)]
        scheduler.check()
        assert scheduler.stats().num_free_pages == 15
        assert scheduler.commit(second, result) == []
        scheduler.check()
        assert scheduler.stats().num_free_pages == 16

    @pytest.mark.parametrize("num_pages", [6, 8, 40])
    def test_outputs_equal_the_plain_loop_s(self, num_pages: int) -> None:
        requests = [request(str(i), range(i, i + 5 + i), 10, stop=tuple(range(4)), priority=i % 2) for i in range(8)]
        outputs = []
        for depth in (1, 2):
            driver = Driver(small_config(num_pages=num_pages), depth)
            driver.add(*requests)
            driver.drain()
            driver.check_outputs()
            outputs.append(driver.output)
        assert outputs[0] == outputs[1]


def test_stats_show_running_waiting_and_totals() -> None:
    driver = Driver(small_config(num_seqs=2, budget=16))
    driver.add(*(request(str(i), [i] * 5, 4) for i in range(3)))
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages, stats.num_free_pages) == (2, 1, 16, 12)
    assert (stats.steps_total, stats.prompt_tokens_total, stats.generation_tokens_total) == (1, 10, 2)


def test_longest_sequence_is_bounded_by_window_and_cache() -> None:
    assert SchedulerConfig(1, 1, 100, 4, 16).max_seq_len == 64
    assert SchedulerConfig(1, 1, 60, 4, 16).max_seq_len == 60


class TestPromptLogprobs:
    """Plans are answered by hand: the entry of position i has the log-probability -i."""

    def scheduler(self, **config: int) -> Scheduler:
        return Scheduler(small_config(**config))

    def submit(self, name: str, prompt: range, max_tokens: int = 2, *, num_top: int | None = 0) -> Submit:
        return Submit(name, list(prompt), SamplingParams(max_tokens, num_prompt_logprobs=num_top))

    def step(self, scheduler: Scheduler, prompt_len: int, scored: tuple[str, ...] = ("a",)) -> list[RequestEvent]:
        plan = scheduler.schedule()
        assert plan is not None
        self.names = getattr(self, "names", {}) | {new.slot: new.request_id for new in plan.new_sequences}
        entries = []
        for chunk in plan.chunks:
            positions = range(chunk.start + 1, min(chunk.start + chunk.num_tokens + 1, prompt_len))
            if self.names[chunk.slot] in scored and positions:
                entries.append(PromptLogprobs(chunk.slot, positions[0], tuple(TokenLogprobs(-i) for i in positions)))
        sampled = tuple(SampledToken(chunk.slot, 7) for chunk in plan.chunks if chunk.samples)
        return scheduler.commit(plan, StepResult(sampled, (), tuple(entries)))

    def test_they_come_with_the_first_token_in_order(self) -> None:
        scheduler = self.scheduler(budget=8)
        scheduler.add(self.submit("a", range(21), 3))
        assert self.step(scheduler, 21) == []
        assert self.step(scheduler, 21) == []
        (first,) = self.step(scheduler, 21)
        assert isinstance(first, Tokens)
        assert [entry.logprob for entry in first.prompt_logprobs] == [-i for i in range(1, 21)]
        (second,) = self.step(scheduler, 21)
        assert isinstance(second, Tokens)
        assert second.prompt_logprobs == []

    def test_a_cached_prefix_is_computed_again_for_them(self) -> None:
        scheduler = self.scheduler(budget=16)
        scheduler.add(self.submit("warm", range(12), 1, num_top=None))
        self.step(scheduler, 12)
        scheduler.add(self.submit("a", range(12), 1))
        tokens, end = self.step(scheduler, 12)
        assert isinstance(tokens, Tokens)
        assert [entry.logprob for entry in tokens.prompt_logprobs] == [-i for i in range(1, 12)]
        assert isinstance(end, Finished)
        assert end.num_cached_tokens == 0
        scheduler.add(self.submit("later", range(12), 1, num_top=None))
        end = self.step(scheduler, 12)[-1]
        assert isinstance(end, Finished)
        assert end.num_cached_tokens == 8, "its pages can be found by others all the same"

    def test_a_prompt_that_is_preempted_half_way_has_every_entry_once(self) -> None:
        scheduler = self.scheduler(num_pages=6, budget=8)
        scheduler.add(self.submit("first", range(100, 107), 12, num_top=None))
        events = self.step(scheduler, 16)
        scheduler.add(self.submit("a", range(16), 2))
        while scheduler.has_work:
            events += self.step(scheduler, 16)
        assert scheduler.stats().preemptions_total > 0
        entries = [entry for event in events if isinstance(event, Tokens) for entry in event.prompt_logprobs]
        assert [entry.logprob for entry in entries] == [-i for i in range(1, 16)]
