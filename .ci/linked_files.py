"""Hook of mkdocs: pages may link to files outside docs/, such as results; the site has a copy of each below source/.

A link to a folder outside docs/ becomes plain text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from prose import LINK, ROOT

TEXT_AND_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)#\s:]*)\)")


def _outside(link: str, page_uri: str) -> str | None:
    """The linked file's path from the repository's root; None: the link stays inside docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page_uri), link))
    return None if not link or path.startswith("docs/") else path


def _copy_uri(path: str) -> str:
    """Where the site has it: as plain text, which browsers show."""
    is_text = Path(path).suffix in (".md", ".py", ".yaml", ".txt", "")
    return f"source/{path}{'.txt' * is_text}"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files that pages link to."""
    for page in files.documentation_pages():
        for link, _ in LINK.findall(page.content_string):
            path = _outside(link, page.src_uri)
            if path and (ROOT / path).is_file() and not files.get_file_from_path(_copy_uri(path)):
                files.append(File.generated(config, _copy_uri(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Point links at the copies."""

    def changed(found: re.Match[str]) -> str:
        path = _outside(found[2], page.file.src_uri)
        if path is None:
            return found[0]
        if (ROOT / path).is_dir():
            return found[1]
        return f"[{found[1]}]({posixpath.relpath(_copy_uri(path), posixpath.dirname(page.file.src_uri) or '.')})"

    return TEXT_AND_LINK.sub(changed, markdown)
