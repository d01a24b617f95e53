"""Count the words of the documentation for users, and fail if there are too many.

    python .ci/words.py

Counted is every page of docs/ but those of docs/dev/, generated reference included, without code blocks, addresses of
links and markup. A word is what stands between spaces and has a letter or a digit. Of README everything counts.
"""

import re
import sys
from pathlib import Path

from prose import ROOT

DOCS = ROOT / "docs"
AT_MOST = 20_000
AT_MOST_IN_README = 900
AT_MOST_BY_FOLDER = {"tutorials": 900, "how-to": 700, "explanation": 1_500}
"""Of one page."""
NO_PROSE = re.compile(r"^```.*?^```$|<!--.*?-->|<[^>]+>|(?<=\])\([^)]*\)|[`*#|]", re.MULTILINE | re.DOTALL)


def words(page: Path) -> int:
    """The words of a page."""
    text = NO_PROSE.sub(" ", page.read_text(encoding="utf-8"))
    return sum(any(map(str.isalnum, word)) for word in text.split())


def main() -> int:
    """Print the counts; 1 if one is too high."""
    counts = {page: words(page) for page in sorted(DOCS.rglob("*.md")) if DOCS / "dev" not in page.parents}
    too_many = False
    for page, count in counts.items():
        most = AT_MOST_BY_FOLDER.get(page.parent.name, AT_MOST)
        too_many |= count > most
        print(f"{count:>7,}  {page.relative_to(ROOT)}{f'  TOO MANY, at most {most}' if count > most else ''}")
    total = sum(counts.values())
    print(f"{total:>7,}  at most {AT_MOST:,}{'  TOO MANY' if total > AT_MOST else ''}")
    in_readme = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    print(f"{in_readme:>7,}  README.md, at most {AT_MOST_IN_README}")
    return int(too_many or total > AT_MOST or in_readme > AT_MOST_IN_README)


if __name__ == "__main__":
    sys.exit(main())
