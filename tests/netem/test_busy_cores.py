"""Busy cores: what this process and its children use is counted, sleeping is not."""

import subprocess
import sys
import time

from tahq_netem.measure.machine import BusyMeter, num_usable_cores

SPIN = (
    "import time; end = time.process_time() + {}\n"
    "while time.process_time() < end: pass\n"
    "print('done', flush=True)\n"
    "input()"
)


def test_grandchild_that_computes_is_counted():
    # process time, so that a busy machine makes it take longer and not count less
    child = (
        "import subprocess, sys; "
        f"subprocess.run([sys.executable, '-c', {SPIN.format(0.6)!r}], stdin=sys.stdin, stdout=sys.stdout)"
    )
    meter = BusyMeter()
    begin_s = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"done\n"
    seconds = time.monotonic() - begin_s
    busy = meter.read()
    process.communicate(b"\n")
    assert busy.own * seconds > 0.55
    assert busy.own <= num_usable_cores() + 0.1
    assert busy.machine >= busy.own - 0.1
    assert busy.others >= 0.0


def test_sleeping_is_not_counted():
    meter = BusyMeter()
    time.sleep(0.3)
    assert meter.read().own < 0.2
