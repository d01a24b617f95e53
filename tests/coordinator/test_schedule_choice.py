"""When a search for another schedule is made, taken, and taken back; what a checkpoint keeps of it; memory."""

from itertools import pairwise

import pytest
from support.at_once import AtOnce

from tahq.comm.control.messages import Hello
from tahq.coordinator.observer import StepRecord
from tahq.coordinator.schedule_choice import (
    MEASURED_STEPS,
    MEMORY_SHARE,
    SEARCH_AFTER,
    SEARCH_EVERY,
    Proposal,
    ScheduleChanges,
    ScheduleChoice,
    memory_by_stage,
)

FIRST, DEEP, DEEPER = (
    ScheduleChoice("1f1b"),
    ScheduleChoice("zero-bubble", (5, 4)),
    ScheduleChoice("zero-bubble", (9, 9)),
)
LIMITS = [100, 0]


class Searches:
    """Proposes what is next in `found`; remembers what it was asked."""

    def __init__(self, *found):
        self.found, self.asked = list(found), []

    def __call__(self, steps, present, memory):
        self.asked.append((len(steps), present, memory))
        return self.found.pop(0) if self.found else Proposal(present, 1.0, 1.0)


def begun(searches, saved=None):
    return ScheduleChanges(searches, FIRST, saved or {}, AtOnce(), LIMITS)


def steps(changes, step_s, count):
    """Steps of so many seconds; what changed, by step."""
    records = [StepRecord(number, 1.0, 100, step_s, 1.0, 1.0, False, False) for number in range(1, count + 1)]
    return {record.step: why for record in records if (why := changes.decide(record))}


def test_measured_steps_lead_to_a_change():
    searches = Searches(Proposal(DEEP, 0.5, 1.0))
    changes = begun(searches)
    ((step, why),) = steps(changes, 1.0, 6).items()
    assert (step, changes.present, changes.told) == (5, DEEP, DEEP)
    assert why == "zero-bubble, in flight 5 4 (steps of 0.5 s predicted, 1 s as before)"
    assert searches.asked == [(MEASURED_STEPS, FIRST, LIMITS)]


@pytest.mark.parametrize("proposal", [Proposal(DEEP, 0.99, 1.0), Proposal(FIRST, 0.5, 1.0)])
def test_small_gains_change_nothing(proposal):
    changes = begun(Searches(proposal))
    assert not steps(changes, 1.0, 10)
    assert changes.present == FIRST


def test_change_that_makes_steps_longer_is_taken_back_and_not_tried_again():
    searches = Searches(Proposal(DEEP, 0.5, 1.0), Proposal(DEEP, 0.5, 1.0), Proposal(DEEPER, 0.5, 1.0))
    changes = begun(searches)
    steps(changes, 1.0, 5)
    assert list(steps(changes, 1.05, 4)) == [4]
    assert changes.present == FIRST
    assert not steps(changes, 1.0, SEARCH_AFTER + 5)
    assert steps(changes, 1.0, 2 * SEARCH_AFTER + 5)
    assert changes.present == DEEPER


def test_steps_that_take_another_time_are_searched_again():
    searches = Searches()
    changes = begun(searches)
    steps(changes, 1.0, SEARCH_AFTER)
    assert len(searches.asked) == 1
    steps(changes, 1.3, 3)
    assert len(searches.asked) == 2


def test_steps_that_take_the_same_time_are_searched_ever_more_seldom():
    searches, asked = Searches(), []
    changes = begun(searches)
    for _ in range(400):
        steps(changes, 1.0, 1)
        asked.append(len(searches.asked))
    at = [asked.index(count) for count in range(1, max(asked) + 1)]
    assert [later - earlier for earlier, later in pairwise(at)] == [10, 20, 40, 80, 100, 100]


def test_checkpoint_keeps_what_is_in_force():
    changes = begun(Searches(Proposal(DEEP, 0.5, 1.0)))
    steps(changes, 1.0, 6)
    assert begun(Searches(), changes.saved()).present == DEEP


@pytest.mark.parametrize(
    "saved", [{}, {"schedule": 3}, {"schedule": ["1f1b", 2]}, {"schedule": ["other"]}, {"schedule": ["1f1b", 1, 0]}]
)
def test_what_does_not_fit_is_not_restored(saved):
    assert begun(Searches(), saved).present == FIRST


def test_depths_that_are_set_since_then_are_not_restored():
    pinned = ScheduleChoice("1f1b", (3, 2))
    saved = {"schedule": ["zero-bubble", 5, 4]}
    assert ScheduleChanges(Searches(), pinned, saved, AtOnce(), LIMITS, are_depths_set=True).present == pinned


def test_configured_schedule_never_changes():
    changes = ScheduleChanges(None, FIRST, {"schedule": ["zero-bubble", 5, 4]}, AtOnce(), LIMITS)
    assert not steps(changes, 1.0, 300)
    assert (changes.present, changes.told, changes.saved()) == (FIRST, None, {})


def test_failed_search_ends_no_run(caplog):
    def fails(*_):
        raise ZeroDivisionError

    changes = begun(fails, {"schedule": ["zero-bubble", 5, 4]})
    assert not steps(changes, 1.0, 2 * SEARCH_EVERY)
    assert (changes.told, caplog.text.count("search for a faster schedule failed")) == (DEEP, 1)
    assert changes.saved()


def test_stages_on_one_device_share_its_memory():
    told = [("a", "cuda:0", 1000), ("a", "cuda:0", 900), ("a", "cuda:1", 800), ("b", "cuda:0", 0)]
    hellos = [
        (host, Hello(stage, "", "", "", "", "", device, "", 0, 0, memory_nbytes=nbytes))
        for stage, (host, device, nbytes) in enumerate(told)
    ]
    assert memory_by_stage(hellos) == [int(MEMORY_SHARE * n) for n in (450, 450, 800, 0)]
    assert memory_by_stage([("a", None)]) == [0]
