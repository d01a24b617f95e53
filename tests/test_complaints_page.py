"""The tests that docs/dev/complaints.md names exist, and the docs have what a new user missed."""

import re
from pathlib import Path

import pytest
from words import main as count_words

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/dev/complaints.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("file", "name"), sorted(set(NAMED)))
def test_named_test_exists(file, name):
    assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "parts"),
    [
        ("networking.md", ("WireGuard, Tailscale", "| coordinator | 7700 |", "A router in between")),
        ("nat.md", ("their link is *relayed*",)),
        ("install.md", ("pip install", "tahq doctor --fix", "same version")),
        ("doctor.md", ("| work folder, model, data |", "copies this account's key", "copies a missing model")),
    ],
)
def test_page_has_what_was_missing(page, parts):
    text = " ".join((ROOT / "docs/how-to" / page).read_text(encoding="utf-8").split())
    assert [part for part in parts if part not in text] == []


def test_docs_have_no_more_words_than_they_may():
    assert count_words() == 0
