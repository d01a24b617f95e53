"""The table of errors and exit statuses in tahq/errors.py."""

import inspect
import re

from tahq import errors
from tahq.errors import InterruptedRunError, RunAbortedError, TahqError, UserError

TREE_LINE = re.compile(r"^[\s│├└─]*(\w+Error)\s+(\d+|any)\s", re.MULTILINE)
CLASSES = {name: each for name, each in vars(errors).items() if inspect.isclass(each) and issubclass(each, TahqError)}


def test_docstring_tree_has_every_error_with_its_exit_status():
    statuses = {name: str(each.exit_status) for name, each in CLASSES.items()}
    assert dict(TREE_LINE.findall(errors.__doc__)) == statuses | {"RunAbortedError": "any"}
    nested = re.findall(r"^\s+│\s+[├└]── (\w+)", errors.__doc__, re.MULTILINE)
    assert set(nested) == {n for n, each in CLASSES.items() if issubclass(each, UserError) and each is not UserError}


def test_aborted_and_interrupted_runs_have_the_status_of_their_cause():
    aborted = RunAbortedError("stage 2 is out of memory", 4)
    assert (aborted.exit_status, str(aborted)) == (4, "stage 2 is out of memory")
    assert [InterruptedRunError("stopped", number).exit_status for number in (2, 15)] == [130, 143]
