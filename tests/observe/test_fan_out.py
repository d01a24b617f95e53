"""Several observers as one."""

from inspect import getmembers, isfunction

import pytest

from tahq.coordinator.observer import RunObserver
from tahq.observe.run_view import Observers


class Listing(RunObserver):
    def __init__(self, calls):
        self.calls = calls

    def warned(self, text):
        self.calls.append(text)


class Full(RunObserver):
    def stage_left(self, stage):
        raise OSError("no space left on device")


@pytest.mark.parametrize("name", [n for n, _ in getmembers(RunObserver, isfunction) if not n.startswith("_")])
def test_everything_is_passed_on(name):
    told = type("Told", (RunObserver,), {name: lambda self, *arguments: calls.append(arguments)})
    calls = []
    getattr(Observers([told()]), name)(1)
    assert calls == [(1,)]


def test_all_are_told_in_order():
    calls = []
    Observers([Listing(calls), Listing(calls)]).warned("hot")
    assert calls == ["hot", "hot"]


def test_one_that_cannot_write_is_left_out_and_the_others_are_told():
    calls = []
    observers = Observers([Full(), Listing(calls)])
    observers.stage_left(1)
    observers.stage_left(1)
    assert calls == ["Full cannot write any more and is left out: no space left on device"]
