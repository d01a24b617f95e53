"""Fail on phrases that readers stumble over, and on links in the docs that lead nowhere.

    python .ci/prose.py

CONTRIBUTING.md (Language) says what to write instead.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PHRASES = re.compile(
    r"""\b(whence|whoever|unsay|wherein|thereof)\b
    |\bthat\ is\ none\b
    |\bis\ told\ of\b
    |\bwhat\ (came|comes|becomes|became)\ of\b
    |\bwhat\ it\ (comes|came)\ to\b
    |\bof\ one's\ own\b
    |\bfor\ so\ long\b
    |\b(a\ second|seconds|bytes|bits|one|two|three)\ an?\ (step|stage|link|host|token|parameter|element|micro-batch)\b
    |\bTODO\(package\)""",
    re.IGNORECASE | re.VERBOSE,
)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def tracked(*patterns: str) -> list[Path]:
    """Files that git knows."""
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", *patterns], capture_output=True, text=True, check=True)
    return [ROOT / name for name in names.stdout.splitlines() if (ROOT / name).exists()]


def odd_phrases() -> list[str]:
    """file:line: phrase."""
    return [
        f"{file.relative_to(ROOT)}:{number}: {found.group(0)}"
        for file in tracked("*.py", "*.md", "*.yaml")
        if file != Path(__file__).resolve() and "results" not in file.parts
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        for found in PHRASES.finditer(line)
    ]


def anchors(file: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links() -> list[str]:
    """file: target, of relative links in the docs whose file or heading does not exist."""
    dead = []
    for file in tracked("*.md"):
        for target, anchor in LINK.findall(file.read_text(encoding="utf-8")):
            page = file.parent / target if target else file
            if not page.exists() or (anchor and page.suffix == ".md" and anchor not in anchors(page)):
                dead.append(f"{file.relative_to(ROOT)}: {target}{anchor and '#' + anchor} does not exist")
    return dead


def main() -> int:
    """Print what was found; 1 if anything was."""
    found = odd_phrases() + dead_links()
    print("\n".join(found) or "no odd phrases, no dead links")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
