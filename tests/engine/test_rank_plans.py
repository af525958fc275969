"""What goes from rank 0 to the others, and when, with a group that is a list and runners that write down what they do."""

import msgspec
import pytest

from server.messages import SamplingParams
from server.rank_plans import STOP, LeadRunner, RankStep, follow
from server.scheduler.plan import Chunk, NewSequence, SlotFailure, StepPlan, StepResult


class Group(list):
    def send(self, message):
        self.append(message)

    def receive(self):
        return self.pop(0)


class Step:
    def __init__(self, failures):
        self.failures = failures

    def wait(self):
        return StepResult((), self.failures)


class Runner:
    def __init__(self, *failures, error=None):
        self.log = []
        self.failures = list(failures)
        self.error = error

    def launch(self, plan):
        self.log.append(plan)
        if self.error is not None:
            raise self.error
        return Step(self.failures.pop(0) if self.failures else ())

    def forget_media(self, slot):
        self.log.append(slot)


def plan(step_id):
    sequence = NewSequence(step_id, f"r{step_id}", [1, 2], 2, SamplingParams(max_tokens=4, seed=-5, logit_bias=((3, 0.5),)), ())
    return StepPlan(step_id, (step_id + 1,), (sequence,), (Chunk(step_id, 0, 2, (7, 8), samples=True),))


def test_a_rank_launches_the_plans_of_rank_0_and_forgets_what_failed_there():
    group, lead, other = Group(), Runner((SlotFailure(0, "no"),)), Runner()
    leader = LeadRunner(lead, group)
    first = leader.launch(plan(0))
    second = leader.launch(plan(1))  # planned while the first one runs
    assert first.wait().failures[0].slot == 0
    second.wait()
    leader.launch(plan(2))
    leader.launch(plan(3))
    group.send(STOP)
    follow(other, group)
    assert lead.log == [plan(0), plan(1), plan(2), plan(3)]
    assert other.log == [plan(0), plan(1), 0, plan(2), plan(3)]
    assert group == []


def test_the_others_have_the_plan_before_rank_0_launches_it():
    group = Group()
    with pytest.raises(RuntimeError):
        LeadRunner(Runner(error=RuntimeError("no")), group).launch(plan(0))
    assert [msgspec.msgpack.decode(message, type=RankStep).plan for message in group] == [plan(0)]


def test_a_rank_that_cannot_launch_a_plan_does_not_take_the_next_one():
    group = Group([msgspec.msgpack.encode(RankStep(plan(i))) for i in range(2)])
    with pytest.raises(RuntimeError):
        follow(Runner(error=RuntimeError("no")), group)
    assert len(group) == 1
