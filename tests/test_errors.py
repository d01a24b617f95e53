import inspect
import re

import pytest

from tahq import errors
from tahq.errors import ConfigError, InterruptedRunError, PeerLostError, RunAbortedError, TahqError, UserError

TREE_LINE = re.compile(r"^[\s│├└─]*(\w+Error)\s+(\d+|any)\s", re.MULTILINE)


def _error_classes() -> dict[str, type[TahqError]]:
    return {name: each for name, each in vars(errors).items() if inspect.isclass(each) and issubclass(each, TahqError)}


def test_docstring_tree_has_every_error_with_its_exit_status():
    documented = dict(TREE_LINE.findall(errors.__doc__))
    statuses = {name: str(each.exit_status) for name, each in _error_classes().items()}
    assert documented == statuses | {"RunAbortedError": "any"}


def test_aborted_run_exits_with_the_status_it_was_told():
    error = RunAbortedError("stage 2 is out of memory", 4)
    assert (error.exit_status, str(error)) == (4, "stage 2 is out of memory")


def test_docstring_tree_nests_user_errors_under_user_error():
    nested = re.findall(r"^\s+│\s+[├└]── (\w+)", errors.__doc__, re.MULTILINE)
    expected = {
        name for name, each in _error_classes().items() if issubclass(each, UserError) and each is not UserError
    }
    assert set(nested) == expected


@pytest.mark.parametrize(("signal_number", "status"), [(2, 130), (15, 143)])
def test_interrupted_run_exits_with_128_plus_the_signal(signal_number, status):
    error = InterruptedRunError("stopped", signal_number)
    assert (error.exit_status, str(error)) == (status, "stopped")
    assert InterruptedRunError.exit_status == 130


def test_user_mistakes_and_lost_peers_have_different_statuses():
    assert ConfigError("x").exit_status == 2
    assert PeerLostError("x").exit_status == 3
    assert not issubclass(PeerLostError, UserError)


def test_every_error_has_a_docstring():
    assert all(each.__doc__ for each in _error_classes().values())
