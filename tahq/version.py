"""The version of this source: the release that it is or leads to, and the commit, as in ``0.1.0+g635492c39``.

A wheel has the version that it was built as, from the tag and the commit (pyproject.toml, [tool.hatch.version]). A
clone has that of HEAD, read at each start, also where it is installed as editable: its metadata are of the day on which
it was installed. Other copies of the source know no commit.
"""

from pathlib import Path

NUMBER = "0.1.0"
"""The release that this source is or leads to; raise it in the first commit after a tag, and in pyproject.toml."""
_SHORT = 9
"""Digits of a commit in a version, as in that of a wheel."""


def source_version(folder: Path) -> str:
    """The version of the source whose package `tahq` is in this folder."""
    if (folder / ".git").exists():
        commit = _head(folder / ".git")
        return f"{NUMBER}+g{commit[:_SHORT]}" if commit else NUMBER
    # importlib.metadata takes 40 ms to import, and finds other copies' metadata in other folders
    installed = next(folder.glob("tahq-*.dist-info"), None)
    return installed.name.removeprefix("tahq-").removesuffix(".dist-info") if installed else NUMBER


def is_same_source(one: str, other: str) -> bool:
    """Whether two versions may be of the same source: commits are compared where both are known, otherwise releases.

    Changes that are not committed do not count, and neither does the date that setuptools-scm appends for them.
    """
    commits = _commit(one), _commit(other)
    if all(commits):
        return commits[0].startswith(commits[1]) or commits[1].startswith(commits[0])
    return _release(one) == _release(other)


def git_revision(version: str) -> str:
    """The commit of a version, or the tag of a release, as git names it."""
    return _commit(version).removeprefix("g") or f"v{_release(version)}"


def _release(version: str) -> str:
    return version.partition("+")[0]


def _commit(version: str) -> str:
    """With setuptools-scm's letter g; empty if the version does not name its commit."""
    return version.partition("+")[2].partition(".")[0]


def _head(git: Path) -> str:
    """The commit of HEAD, read without git, which may be missing or refuse another user's folder; empty: unknown."""
    try:
        if git.is_file():  # of a worktree or a submodule
            git = git.parent / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name, shared = head.removeprefix("ref: "), git / "commondir"
        folder = git / shared.read_text().strip() if shared.exists() else git
        if (folder / name).exists():
            return (folder / name).read_text().strip()
        packed = (line.split() for line in (folder / "packed-refs").read_text().splitlines())
        return next((fields[0] for fields in packed if fields[1:] == [name]), "")
    except OSError:
        return ""
