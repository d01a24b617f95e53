"""Which test files go into the guest: those that have tests marked `netem_kernel`.

Collected here, where everything can be imported: in the guest there is no torch, and a file that imports it would fail
to be collected although none of its tests is wanted.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tahq.errors import UserError

MARKER: Final = "netem_kernel"
_NO_TESTS_COLLECTED: Final = 5


def select_tests(checkout: Path, arguments: list[str]) -> list[str]:
    """The ids of the tests, relative to the checkout.

    Args:
        checkout: the folder with pyproject.toml.
        arguments: to narrow the choice, as pytest takes them (`-k jitter`).

    Raises:
        UserError: collecting failed, or nothing is marked.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", MARKER, "tests/netem", *arguments]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    selected = [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
    if done.returncode not in (0, _NO_TESTS_COLLECTED):
        raise UserError(f"pytest could not collect tests/netem:\n{done.stdout.strip()}")
    if not selected:
        raise UserError(f"no test of tests/netem is marked {MARKER} and fits {' '.join(arguments) or 'anything'}")
    return selected


def files_of(selected: list[str]) -> list[str]:
    """The files of these tests, each once, in order."""
    return list(dict.fromkeys(test.partition("::")[0] for test in selected))
