"""Runs the tests of the FP8 optimizer's kernel in Triton's interpreter, chosen before triton is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tahq.quant.backends import interprets_triton


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(interprets_triton(), reason="the interpreter is already chosen: they run in this process")
def test_kernel_passes_its_tests_in_the_interpreter():
    path = str(Path(__file__).with_name("test_fp8_adamw_triton.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", path]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
