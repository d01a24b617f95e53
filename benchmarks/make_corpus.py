"""Make the corpus of the long trainings: token files, held-out tokens, and questions with answers.

    python benchmarks/make_corpus.py --tokenizer GPT2_FOLDER --output /tmp/corpus       # some 20 minutes on two cores
    python benchmarks/make_corpus.py --unpack FOLDER                                    # where the .xz files travelled

Documents are source and text files of the wheels, and manuals of the Debian packages, that `corpus_packages.txt` names
with their versions. They are fetched by `pip download` and `apt-get download`, and kept in OUTPUT/packages. A manual
becomes plain text by simple rules; one that is hardly English is left out. A long document is cut at line ends.

Duplicates: lines are compared without their spacing and with all digits equal; only lines of 20 characters or more
count. A document is dropped if documents before it have half of its characters, so exact copies go, too. Held-out
documents come last and are dropped from a fifth on, so no held-out document shares that much with all that is trained
on. Of a package some 3.5 million characters are taken, and 100,000 held out. A hash of a document's package and path
decides its place, and whether it is held out: one in a hundred is.

A document's tokens are followed by the end-of-document token. `train-N.bin` have 45 million tokens each, the last one
fewer; with their .xz they travel one by one. `manifest.json` has the number of tokens and the SHA-256 of every file;
the recorded one, `corpus_manifest.json`, is compared with it.
"""

import argparse
import gzip
import hashlib
import html
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from corpus_questions import questions_of
from harness import say

from tahq.data.config import DataConfig
from tahq.data.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer

HERE = Path(__file__).parent
PART_TOKENS = 45_000_000
FEWEST, MOST = 500, 200_000
"""Characters of a document; longer ones are cut."""
COUNTED = 20
"""Characters from which on a line counts in comparisons."""
IN_TRAINING, IN_HELD_OUT = 0.5, 0.2
"""Share of a document's characters from which on it is a duplicate."""
HELD_OUT_ONE_IN = 100
PACKAGE_MOST, PACKAGE_HELD_OUT = 3_500_000, 100_000
"""Characters of one package from which on no more documents are taken, of training and of those held out."""
QUESTIONS = {"train": 4000, "test": 400}
PAGES_SHARE = 0.1
"""A line of more of a package's HTML pages than this is not part of their text, but of their frame."""


class Document(NamedTuple):
    """A text, `wheel` or `manual`, and its origin."""

    kind: str
    package: str
    path: str
    text: str

    @property
    def place(self) -> str:
        """Hex digits by which documents are in order."""
        return hashlib.sha256(f"{self.package}/{self.path}".encode()).hexdigest()

    @property
    def is_held_out(self) -> bool:
        return int(self.place[:8], 16) % HELD_OUT_ONE_IN == 0


# -- packages ----------------------------------------------------------------------------------------


def fetch(listed: Iterable[str], folder: Path) -> list[Path]:
    """The files of packages such as `sympy==1.14.0` (a wheel) and `git-doc=1:2.39.5-0+deb12u3` (Debian)."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for line in listed:
        name, version = re.split("==?", line, maxsplit=1)
        wheel = "==" in line
        stem = f"{re.sub('[-_.]+', '_', name)}-{version}-" if wheel else f"{name}_{version.replace(':', '%3a')}_"
        if not (found := _found(folder, stem)):
            say(f"fetching {line}")
            pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", line)
            subprocess.run(pip if wheel else ("apt-get", "download", "-q", line), cwd=folder, check=True)
            found = _found(folder, stem)
        files.append(found[0])
    return files


def _found(folder: Path, stem: str) -> list[Path]:
    return [each for each in sorted(folder.iterdir()) if each.name.lower().startswith(stem.lower())]


def documents(file: Path) -> Iterator[Document]:
    """The documents of a wheel or of a Debian package, before any is dropped."""
    package = re.split("[-_]", file.name)[0] if file.suffix == ".whl" else file.name.partition("_")[0]
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            names = (name for name in archive.namelist() if name.endswith((".py", ".rst", ".md")))
            texts = {name: text for name in names if (text := _decoded(archive.read(name))) and _is_prose(text)}
        yield from (Document("wheel", package, *each) for each in _cut(texts))
    else:
        yield from (Document("manual", package, *each) for each in _cut(_manual(file)))


def _cut(texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    for path, text in texts.items():
        lines, size, number = list[str](), 0, 0
        for line in text.splitlines(keepends=True):
            lines.append(line)
            size += len(line)
            if size > MOST:
                yield f"{path}#{number}", "".join(lines)
                lines, size, number = [], 0, number + 1
        if size >= FEWEST:
            yield f"{path}#{number}", "".join(lines)


def _manual(file: Path) -> dict[str, str]:
    pages: dict[str, str] = {}
    unpack = ("dpkg-deb", "--fsys-tarfile", str(file))
    with (
        subprocess.Popen(unpack, stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive,
    ):
        for member in archive:
            read = _reader(member.name.removesuffix(".gz").lower())
            stream = archive.extractfile(member) if member.isreg() and read else None
            if read is None or stream is None:
                continue
            data = stream.read()
            text = _decoded(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
            if text and _is_english(text := read(text)) and _is_prose(text):
                pages[member.name] = text
    framed = {path: text for path, text in pages.items() if "htm" in path.rpartition(".")[2]}
    counts = Counter(line for text in framed.values() for line in {each.strip() for each in text.splitlines()} if line)
    frame = {line for line, count in counts.items() if count > max(PAGES_SHARE * len(framed), 10)}
    return pages | {path: _without(text, frame) for path, text in framed.items()}


def _without(text: str, frame: set[str]) -> str:
    lines = (line for line in text.splitlines(keepends=True) if line.strip() not in frame)
    return re.sub("\n{3,}", "\n\n", "".join(lines))


def _decoded(data: bytes) -> str:
    try:
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError:
        return ""


def _is_prose(text: str) -> bool:
    """Not a table of numbers, and nothing with endless lines."""
    return (
        len(text) >= FEWEST
        and len(text) < 200 * (text.count("\n") + 1)
        and sum(map(str.isdigit, text)) < 0.25 * len(text)
    )


def _is_english(text: str) -> bool:
    words = re.findall("[a-z]+", text[:20_000].lower())
    usual = sum(word in ("the", "of", "to", "and", "is") for word in words)
    return usual > 0.05 * len(words) and sum(map(str.isascii, text)) > 0.98 * len(text)


def _reader(name: str) -> Callable[[str], str] | None:
    """What makes plain text of a file in a Debian package; None: the file is left out."""
    if re.search(r"/man/man\d/", name):
        return text_of_manual
    if re.search(r"changelog|copyright|genindex|/search|news\.", name):
        return None
    if name.endswith((".html", ".htm", ".xhtml")):
        return text_of_html
    return str if re.search(r"\.(txt|rst|md|pod|info(-\d+)?|dict\.dz)$", name) else None


def text_of_html(page: str) -> str:
    """The text of a page, without scripts and navigation."""
    page = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    left_out = "script|style|nav|header|footer|aside|head"
    page = re.sub(rf"<({left_out})\b.*?</\1\s*>", "", page, flags=re.DOTALL | re.IGNORECASE)
    page = re.sub(r"</?(p|div|h\d|li|tr|dt|dd|pre|table|ul|ol|br|section)\b[^>]*>", "\n", page, flags=re.IGNORECASE)
    page = html.unescape(re.sub(r"<[^>]*>", "", page))
    return re.sub(r"\n\s*\n\s*", "\n\n", page).strip() + "\n"


def text_of_manual(page: str) -> str:
    """The text of a page in roff: requests are dropped, the arguments of macros stay."""
    lines = []
    for line in page.splitlines():
        if re.match(r"['.]\s*(\\\"|so|de|ds|ie|el|if|nr|tr|TH|Dd|Os|\.$)", line):
            continue
        if line[:1] in (".", "'"):
            macro, _, rest = line[1:].strip().partition(" ")
            line = ("\n" if macro in ("SH", "SS", "Sh", "Ss", "PP", "TP", "IP", "Pp") else "") + rest.replace('"', "")
        lines.append(line)
    text = re.sub(r"\\f(\[\w*\]|\(..|.)|\\s[-+]?\d|\\[&/,|^%:]", "", "\n".join(lines))
    for code, character in {r"\-": "-", r"\e": "\\", r"\(aq": "'", r"\(bu": "*", r"\(en": "-", r"\(em": "--"}.items():
        text = text.replace(code, character)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\\\(..|\\\[\w+\]", "", text)).strip() + "\n"


# -- duplicates --------------------------------------------------------------------------------------


def without_duplicates(found: Iterable[Document]) -> list[Document]:
    """Those that stay, in order, the held-out ones at the end."""
    known: set[bytes] = set()
    sizes = Counter[tuple[str, bool]]()
    kept = []
    for document in sorted(found, key=lambda each: (each.is_held_out, each.place)):
        lines = {digest: size for digest, size in map(_line, document.text.splitlines()) if size >= COUNTED}
        total = sum(lines.values())
        most = PACKAGE_HELD_OUT if document.is_held_out else PACKAGE_MOST
        if sizes[document.package, document.is_held_out] > most:
            continue
        shared = sum(size for digest, size in lines.items() if digest in known)
        if total == 0 or shared >= (IN_HELD_OUT if document.is_held_out else IN_TRAINING) * total:
            continue
        known.update(lines)
        sizes[document.package, document.is_held_out] += len(document.text)
        kept.append(document)
    return kept


def _line(line: str) -> tuple[bytes, int]:
    """A hash of a line that is equal for equal lines in the sense above, and its size."""
    plain = re.sub(r"\d", "0", "".join(line.split()))
    return hashlib.blake2b(plain.encode("utf-8", "replace"), digest_size=8).digest(), len(plain)


# -- files -------------------------------------------------------------------------------------------


def write_tokens(kept: list[Document], tokenizer: Tokenizer, output: Path, part_tokens: int = PART_TOKENS) -> None:
    """Write train-0.bin, train-1.bin, … and held-out.bin."""
    for held_out in (False, True):
        parts: list[Any] = []
        number = size = 0
        chosen = [each.text for each in kept if each.is_held_out == held_out]
        for first in range(0, len(chosen), 500):
            for tokens in tokenizer.encode_all(chosen[first : first + 500]):
                parts += [tokens, np.array([tokenizer.end_of_document], tokens.dtype)]
                size += len(tokens) + 1
                if size >= part_tokens and not held_out:
                    _write(output / f"train-{number}.bin", parts)
                    parts, number, size = [], number + 1, 0
            say(f"{min(first + 500, len(chosen))} of {len(chosen)} documents")
        if parts:
            _write(output / ("held-out.bin" if held_out else f"train-{number}.bin"), parts)


def _write(path: Path, parts: list[Any]) -> None:
    np.concatenate(parts).astype("<u2").tofile(path)
    with path.open("rb") as plain, lzma.open(f"{path}.xz", "wb", preset=6) as packed:
        packed.write(plain.read())
    say(f"{path}: {path.stat().st_size // 2:,} tokens, {Path(f'{path}.xz').stat().st_size / 2**20:.1f} MiB packed")


def manifest(output: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of every file that was made, tokens of token files."""
    rows = {}
    for path in sorted([*output.glob("*.bin"), *output.glob("*.jsonl")]):
        data = path.read_bytes()
        rows[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        if path.suffix == ".bin":
            rows[path.name]["tokens"] = len(data) // 2
    return rows


def check(output: Path, recorded: Path, *, all_of_it: bool) -> None:
    """End with status 2 if the files are not the recorded ones."""
    expected, found = json.loads(recorded.read_text()), manifest(output)
    names = expected.keys() | found.keys() if all_of_it else expected.keys() & found.keys()
    if wrong := sorted(name for name in names if expected.get(name) != found.get(name)):
        sys.exit(f"{output}: {', '.join(wrong)} differ from {recorded}: other versions of packages or libraries?")
    say(f"as recorded: {', '.join(sorted(names))}")


def make(options: argparse.Namespace) -> None:
    for old in [*options.output.glob("*.bin*"), *options.output.glob("*.jsonl")]:
        old.unlink()
    tokenizer = load_tokenizer(DataConfig(text="stdlib", tokenizer=options.tokenizer))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    listed = [line for line in options.packages.read_text().splitlines() if line and not line.startswith("#")]
    found = [each for file in fetch(listed, options.output / "packages") for each in documents(file)]
    kept = without_duplicates(found)
    for kind in ("wheel", "manual"):
        counts = [sum(len(each.text) for each in some if each.kind == kind) / 1e6 for some in (found, kept)]
        say(f"{kind}: {counts[0]:.1f} million characters, {counts[1]:.1f} without duplicates")
    for name, count in QUESTIONS.items():
        records = questions_of([each for each in kept if each.is_held_out == (name == "test")], count)
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (options.output / f"questions-{name}.jsonl").write_text("".join(lines))
    write_tokens(kept, tokenizer, options.output)
    (options.output / "manifest.json").write_text(json.dumps(manifest(options.output), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for packages and results")
    parser.add_argument("--tokenizer", help="folder of GPT-2's tokenizer")
    parser.add_argument("--packages", type=Path, default=HERE / "corpus_packages.txt")
    parser.add_argument("--manifest", type=Path, default=HERE / "corpus_manifest.json", help="what is to come out")
    parser.add_argument("--unpack", type=Path, help="only unpack the .xz files of this folder, and check them")
    options = parser.parse_args()
    if options.unpack:
        for packed in sorted(options.unpack.glob("*.bin.xz")):
            packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
        check(options.unpack, options.manifest, all_of_it=False)
        return
    if not (options.output and options.tokenizer):
        parser.error("needs --output and --tokenizer, or --unpack")
    make(options)
    if options.manifest.exists():
        check(options.output, options.manifest, all_of_it=True)


if __name__ == "__main__":
    main()
