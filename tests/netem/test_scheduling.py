"""Priorities of the calling thread: taken where they may be, and given back."""

import os
import subprocess
import sys

import pytest

from tahq_netem.programs import hurrying

HURRY = """
import os
from tahq_netem.programs import hurry, hurrying
with hurrying():
    pass
print(hurry(), os.sched_getscheduler(0) == os.SCHED_RR)
"""


def policy():
    return os.sched_getscheduler(0), os.sched_getparam(0).sched_priority


def test_hurry_ends_with_the_block_and_may_be_nested():
    before = policy()
    with hurrying():
        within = policy()
        with hurrying():
            assert policy() == within
        assert policy() == within
    assert policy() == before
    assert within in (before, (os.SCHED_RR, 1))


def test_hurry_ends_with_an_error():
    before = policy()
    with pytest.raises(ZeroDivisionError), hurrying():
        1 / 0  # noqa: B018
    assert policy() == before


def test_what_was_granted_is_said():
    granted, is_real_time = subprocess.check_output([sys.executable, "-c", HURRY], text=True).rsplit(maxsplit=1)
    assert granted in ("real-time", "nice -10", "normal")
    assert (granted == "real-time") is (is_real_time == "True")


def test_without_rights_nothing_changes():
    if os.geteuid() != 0:
        pytest.skip("takes its rights away, and so needs some")
    # Imported first: an ordinary user may not be able to read this checkout.
    program = f"import os, tahq_netem.programs\nos.setgid(65534); os.setuid(65534)\n{HURRY}"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "normal False\n"
