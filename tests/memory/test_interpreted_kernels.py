"""Runs kernel tests in Triton's interpreter, which has to be chosen before triton is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tahq.quant.backends import interprets_triton

ROOT = Path(__file__).parents[2]
FILES = ("test_fp8_adamw_triton.py", "test_fp8_flow_triton.py", "test_affine_triton.py")
TIMEOUT_S = 900


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(interprets_triton(), reason="the interpreter is already chosen: they run in this process")
@pytest.mark.parametrize("tier", ["not acceptance", pytest.param("acceptance", marks=pytest.mark.acceptance)])
def test_kernels_pass_their_tests_in_the_interpreter(tier):
    paths = [str(Path(__file__).with_name(name)) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", "-m", tier, *paths]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
