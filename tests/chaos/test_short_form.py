"""Each row that is quick, once: the short form of `make chaos`."""

import pytest

from chaos.message_rows import MESSAGE_ROWS
from chaos.row import Attempt, Calm, Row
from chaos.rows import ROWS
from chaos.session import obstacle

SHORT = 0.05
"""Of what takes long only because there is much of it, this share."""


def _quick() -> list[object]:
    return [pytest.param(row, id=row.name, marks=_marks(row)) for row in ROWS if row.is_quick]


def _marks(row: Row) -> list[pytest.MarkDecorator]:
    """What runs processes of its own measures how long they stall."""
    netns = [pytest.mark.netns] if "namespaces" in row.needs else []
    return netns if row in MESSAGE_ROWS else [*netns, pytest.mark.serial]


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Calm:
    return Calm(tmp_path_factory.mktemp("calm"))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("row", _quick())
def test_row(row: Row, calm, tmp_path):
    if (reason := obstacle(row)) is not None:
        pytest.skip(reason)
    row.attempt(Attempt(row.name, 0, tmp_path, calm, SHORT))


def test_rows_have_names_of_their_own():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() and " " not in name for name in names)
