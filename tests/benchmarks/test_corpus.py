"""The corpus: plain text of packages, duplicates, the held-out part, token files, and questions."""

import json
import lzma
import zipfile

import make_corpus
import numpy as np
import pytest
from corpus_questions import questions_of
from make_corpus import Document, documents, text_of_html, text_of_manual, without_duplicates

from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import BytesTokenizer


def document(path, text, package="one"):
    return Document("wheel", package, path, text)


def lines(word, count=20):
    return "".join(f"{word} says number {chr(97 + n)} of the long lines\n" for n in range(count))


def paths(*, held_out, count=1):
    found = (f"file{n}.py" for n in range(10_000) if document(f"file{n}.py", "").is_held_out == held_out)
    return [next(found) for _ in range(count)]


def test_copies_are_dropped_and_held_out_documents_share_hardly_anything_with_training():
    first, copy, half, mixed = paths(held_out=False, count=4)
    held, part = paths(held_out=True, count=2)
    texts = {
        first: lines("ann"),
        copy: lines("ann").replace(" ", "   ").replace("number", "number"),
        half: lines("ann", 12) + lines("ben", 8),
        mixed: lines("ann", 6) + lines("carl", 14),
        held: lines("dora"),
        part: lines("ann", 5) + lines("ernest", 15),  # a quarter: too much for held-out text only
    }
    kept = without_duplicates(document(path, text) for path, text in texts.items())
    by_path = {each.path for each in kept}
    assert len({first, copy, half} & by_path) == 1  # whichever comes first
    assert held in by_path
    assert part not in by_path
    assert [each.is_held_out for each in kept] == sorted(each.is_held_out for each in kept)


def test_pages_become_plain_text():
    page = "<head><title>x</title></head><nav>Home</nav><h1>Copy &amp; move</h1>"
    page += "<p>To <b>copy</b>,<br>use cp.<script>1</script>"
    assert text_of_html(page) == "Copy & move\n\nTo copy,\nuse cp.\n"
    roff = '.\\" comment\n.TH LS 1\n.SH NAME\nls \\- list \\fBfiles\\fP\n.SH "SEE ALSO"\n.BR cp (1)\n'
    assert text_of_manual(roff) == "NAME\nls - list files\n\nSEE ALSO\ncp (1)\n"


def test_corpus_of_a_wheel_is_what_a_run_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(make_corpus, "FEWEST", 50)
    wheel = tmp_path / "words-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for n in range(300):
            archive.writestr(
                f"words/m{n}.py", lines(f"module{'abcdefghij'[n % 10]}{'klmnopqrst'[n // 10 % 10]}{n}x", 8)
            )
        archive.writestr("words/long.csv", "1,2,3\n" * 1000)
    kept = without_duplicates(documents(wheel))
    assert {each.package for each in kept} == {"words"}
    make_corpus.write_tokens(kept, BytesTokenizer(), tmp_path, part_tokens=20_000)
    parts = sorted(tmp_path.glob("train-*.bin"))
    assert len(parts) > 1
    assert all(part.stat().st_size >= 2 * 20_000 for part in parts[:-1])
    assert lzma.decompress((tmp_path / "train-0.bin.xz").read_bytes()) == parts[0].read_bytes()
    tokens = np.concatenate([np.fromfile(part, "<u2") for part in parts])
    texts = bytes(tokens.astype(np.uint8)).decode().split("\0")[:-1]
    assert texts == [each.text for each in kept if not each.is_held_out]
    recorded = tmp_path / "recorded.json"
    recorded.write_text(json.dumps(make_corpus.manifest(tmp_path)))
    make_corpus.check(tmp_path, recorded, all_of_it=True)
    dataset = load_dataset(DataConfig(tokens=str(tmp_path / "train-*.bin"), seq_len=64), BytesTokenizer())
    assert dataset.num_train_samples > 10
    parts[0].write_bytes(parts[0].read_bytes()[:-2])
    with pytest.raises(SystemExit, match=r"train-0\.bin differ"):
        make_corpus.check(tmp_path, recorded, all_of_it=False)


def test_questions_have_their_answers_from_the_document():
    source = (
        'def fit(x, tol: float = 0.5, rate=0.25, name=None):\n    """'
        + "Fit a line to all of the points. " * 4
        + '"""\n'
    )
    page = Document("manual", "tools", "./usr/share/man/man8/mount.8.gz#0", "NAME\nmount - attach a file system\n")
    asked = questions_of([document("lines.py#0", source), page], 6)
    answers = {each["prompt"].partition("Question: ")[2]: each["response"] for each in asked}
    (default,) = (prompt for prompt in answers if "default" in prompt)
    assert answers[default] == (" 0.5" if "tol" in default else " 0.25")
    assert answers["Which package is this text from?\nAnswer:"] == " one"
    assert answers["Which section of the manual is this in?\nAnswer:"] == " 8, administration"
