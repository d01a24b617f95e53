"""The short form of `make chaos`: each quick row once, most rows of real processes only in `make acceptance`."""

import pytest

from chaos.message_rows import MESSAGE_ROWS
from chaos.row import Attempt, Calm, Row
from chaos.session import ROWS, obstacle

pytestmark = pytest.mark.ci

SHORT = 0.01
"""This share of work that takes long only because there is much of it."""
AT_EVERY_COMMIT = ("coordinator-commit-sent",)


def _quick() -> list[object]:
    return [pytest.param(row, id=row.name, marks=_marks(row)) for row in ROWS if row.is_quick]


def _marks(row: Row) -> list[pytest.MarkDecorator]:
    """Rows of real processes measure stalls, and so run one at a time."""
    if row in MESSAGE_ROWS:
        return []
    netns = [pytest.mark.netns] if "namespaces" in row.needs else []
    return [*netns, pytest.mark.serial, *([] if row.name in AT_EVERY_COMMIT else [pytest.mark.acceptance])]


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Calm:
    return Calm(tmp_path_factory.mktemp("calm"))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("row", _quick())
def test_row(row: Row, calm, tmp_path):
    if (reason := obstacle(row)) is not None:
        pytest.skip(reason)
    row.attempt(Attempt(row.name, 0, tmp_path, calm, SHORT))


def test_names_of_rows_are_unique():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() and " " not in name for name in names)
