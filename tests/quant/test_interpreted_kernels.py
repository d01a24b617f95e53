"""Runs the tests of Triton's kernels in Triton's interpreter, which has to be chosen before triton is imported.

It takes thousands of times as long as a GPU, so most of their tests are marked `acceptance`.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tahq.quant.backends import interprets_triton

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900

pytestmark = [pytest.mark.ci, pytest.mark.timeout(TIMEOUT_S + 20)]


MEMORY = " ".join(
    f"../memory/test_{name}_triton.py" for name in ("affine", "fp8_adamw", "fp8_flow", "nf4", "residual", "stored")
)
MODELS = "../models/test_attention_triton.py ../models/test_loss_triton.py"
"""Files of which a part is quick."""
CASES = [
    ("test_codecs_triton.py", "not acceptance"),
    pytest.param("test_codecs_triton.py", "acceptance", marks=pytest.mark.acceptance),
    pytest.param(MEMORY, "", marks=pytest.mark.acceptance),
    pytest.param("test_tah_triton.py", "", marks=pytest.mark.acceptance),
    pytest.param("test_gaussian_triton.py", "", marks=pytest.mark.acceptance),
    pytest.param("../memory/test_adamw_triton.py", "not acceptance", marks=pytest.mark.acceptance),
    pytest.param(MODELS, "not acceptance", marks=pytest.mark.acceptance),
]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(interprets_triton(), reason="the interpreter is already chosen: they run in this process")
@pytest.mark.parametrize(("files", "tier"), CASES)
def test_kernels_pass_their_tests_in_the_interpreter(files, tier):
    paths = [str(Path(__file__).parent / file) for file in files.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", "-m", tier, *paths]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
