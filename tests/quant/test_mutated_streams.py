"""One million damaged buffers: each decodes to something of the right shape or raises CodecError, and that is all.

The decoding is done by a process of its own, in memory between two pages that it must not touch, so that a decoder
which reads beside its buffer ends the process, not the tests.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.mutated_decoding import CASES, jobs

from tahq.quant.inspection import codec_summaries

pytestmark = pytest.mark.ci

TESTS = Path(__file__).parents[1]
MILLION = 1_000_000
TIMEOUT_S = 900


def start(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process):
    """What a program printed to stdout and stderr, and its status; it does not outlive the test."""
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return stdout, stderr, process.returncode


@pytest.mark.parametrize(
    ("count", "parts"),
    [(10_000, 1), pytest.param(MILLION, min(os.cpu_count() or 1, len(CASES)), marks=pytest.mark.acceptance)],
)
@pytest.mark.timeout(TIMEOUT_S + 100)
def test_mutated_buffers_never_crash_or_over_read_a_decoder(count, parts):
    processes = [start("-m", "support.mutated_decoding", count, 1, part, parts) for part in range(parts)]
    finished = []
    for stdout, stderr, status in map(finish, processes):
        said = [json.loads(line) for line in stdout.splitlines()]
        assert status == 0, f"died with {status} in {said[-1:]}:\n{stderr[-4000:]}"
        finished += [each for each in said if "decoded" in each]
    assert len(finished) == len(CASES)
    assert sum(each["decoded"] for each in finished) >= count
    for each in finished:
        if each["decoded"] < 1000:  # too few for a share
            continue
        assert 0.05 < each["share_refused"] < 0.95, f"{each}: mutations that all decode, or none, try little"


def test_every_codec_and_each_of_its_backends_is_tried():
    planned = jobs(MILLION)
    assert {job.spec.partition(":")[0] for job in planned} == codec_summaries().keys()
    assert sum(job.num_decodes for job in planned) >= MILLION
    backends = {job.spec.partition(":")[0]: job.backends for job in planned}
    for codec in ("tah", "fixed", "eden", "wf"):
        assert set(backends[codec]) == {"cpu", "reference"}


@pytest.mark.parametrize(("place", "step"), [("at_end", "len(data)"), ("at_start", "-1")])
def test_reading_one_byte_beside_the_buffer_ends_the_process(place, step):
    program = (
        "import ctypes, numpy as np\n"
        "from support.guarded_memory import GuardedMemory\n"
        "data = np.arange(48, dtype=np.uint8)\n"
        f"view = GuardedMemory(5000).{place}(data)\n"
        "assert view.tolist() == data.tolist()\n"
        "print('inside', flush=True)\n"
        f"ctypes.c_uint8.from_address(view.data_ptr() + {step}).value\n"
    )
    stdout, stderr, status = finish(start("-c", program))
    assert (stdout, status) == ("inside\n", -signal.SIGSEGV), stderr
