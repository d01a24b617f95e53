"""Versions: as read from a clone without git, as built from tags, and which of them are of the same source."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tahq.version import NUMBER, git_revision, is_same_source, source_version

ROOT = Path(__file__).parents[1]


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path):
    """A repository with one commit of what a build of the version needs."""
    folder = tmp_path / "clone"
    (folder / "tahq").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "tahq/version.py"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "one")
    return folder


def commit_of(folder: Path) -> str:
    return git(folder, "rev-parse", "HEAD")[:9]


@pytest.mark.parametrize("state", ["branch", "packed", "detached", "changed", "worktree"])
def test_version_of_a_clone_names_its_head(clone, state):
    folder = clone
    match state:
        case "packed":
            git(clone, "pack-refs", "--all")
        case "detached":
            git(clone, "checkout", "-q", "--detach")
        case "changed":
            (clone / "README.md").write_text("changed")
        case "worktree":
            folder = clone.parent / "worktree"
            git(clone, "worktree", "add", "-q", "-b", "side/line", str(folder))
            git(folder, "commit", "-q", "--allow-empty", "-m", "two")
            assert commit_of(folder) != commit_of(clone)
    assert source_version(folder) == f"{NUMBER}+g{commit_of(folder)}"


@pytest.mark.parametrize(("created", "version"), [("tahq-3.2.1+gabc.dist-info", "3.2.1+gabc"), (".git", NUMBER)])
def test_version_without_a_clone_is_that_of_the_wheel_or_the_number(tmp_path, created, version):
    assert source_version(tmp_path) == NUMBER
    (tmp_path / created).mkdir()
    assert source_version(tmp_path) == version


def built(folder: Path) -> str:
    """The version that a wheel of this folder would have."""
    command = [sys.executable, "-m", "hatchling", "version"]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_built_version_is_of_the_tag_and_without_tags_that_of_the_clone(clone):
    assert built(clone) == source_version(clone)
    git(clone, "tag", "archive/2")
    git(clone, "tag", "v9.8.7")
    assert built(clone) == "9.8.7"
    git(clone, "commit", "-q", "--allow-empty", "-m", "two")
    assert is_same_source(built(clone), source_version(clone))
    (clone / "README.md").write_text("changed")
    assert is_same_source(built(clone), source_version(clone))
    assert built(clone).startswith(f"9.8.7+g{commit_of(clone)}")


def test_built_version_of_an_archive_is_the_number(clone):
    (clone / ".git").rename(clone.parent / "elsewhere")
    assert built(clone) == NUMBER


def test_number_is_the_fallback_of_builds_and_is_raised_after_its_tag():
    assert (
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["fallback-version"] == NUMBER
    )
    if (ROOT / ".git").exists() and git(ROOT, "tag", "--list", f"v{NUMBER}"):
        assert git(ROOT, "rev-parse", f"v{NUMBER}^{{commit}}") == git(ROOT, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("0.2.0", "0.2.0", True),
        ("0.2.0", "0.1.0", False),
        ("0.2.0+g635492c39", "0.2.0", True),  # a clone and a wheel of a release, or an archive
        ("0.2.0+g635492c39", "0.1.0", False),
        ("0.2.0+g635492c39", "0.2.0+g8c940b6aa", False),
        ("0.2.0+g635492c39", "0.1.0+g635492c39", True),  # a clone and a wheel of a commit after a tag
        ("0.2.0+g635492c39", "0.2.0+g635492c39ab.d20261127", True),
        ("", "0.2.0", False),
    ],
)
def test_versions_are_of_the_same_source_if_commits_agree_or_else_releases(one, other, is_same):
    assert is_same_source(one, other) == is_same_source(other, one) == is_same


@pytest.mark.parametrize(("version", "revision"), [("0.2.0", "v0.2.0"), ("0.2.0+gabc.d20261127", "abc")])
def test_git_revision_is_the_commit_or_the_tag(version, revision):
    assert git_revision(version) == revision
