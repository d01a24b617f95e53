"""Questions and answers made from documents by rule, for fine-tuning, and the share that a model answers exactly.

Three kinds, in turn while there are documents for them: the default of a parameter, which stands in the question; the
package that a docstring comes from; the section of the manual that a page is in.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest
from typing import Any, Protocol

import torch

from tahq.data.tokenizer import Tokenizer

SECTIONS = {
    "1": "commands",
    "2": "system calls",
    "3": "functions",
    "5": "files",
    "7": "overviews",
    "8": "administration",
}
LONGEST = 400
"""Characters of what is quoted in a question."""
PER_DOCUMENT = 6
"""Questions of a kind from one document."""


class Source(Protocol):
    """What a question is made from; see `make_corpus.Document`."""

    package: str
    path: str
    text: str

    @property
    def place(self) -> str: ...


def questions_of(documents: Sequence[Source], count: int) -> list[dict[str, str]]:
    """At most `count` records with `prompt` and `response`, no prompt twice; of a kind at most half of them."""
    most = -(-count // 2)
    kinds = (islice(chain.from_iterable(map(ask, documents)), most) for ask in (_defaults, _packages, _sections))
    in_turn = filter(None, chain.from_iterable(zip_longest(*kinds)))
    return list(islice({each["prompt"]: each for each in in_turn}.values(), count))


def _record(quoted: str, question: str, answer: str) -> dict[str, str]:
    return {"prompt": f"{quoted.strip()}\n\nQuestion: {question}\nAnswer:", "response": f" {answer}"}


def _defaults(document: Source) -> Iterator[dict[str, str]]:
    """Of a parameter of functions that have two defaults of different text, other than None."""
    if document.path.partition("#")[0].endswith(".py"):
        found = re.finditer(r"^ *def \w+\([^()]{20,300}\)", document.text, re.MULTILINE)
        yield from islice(filter(None, (_default(" ".join(each[0].split()), document) for each in found)), PER_DOCUMENT)


def _default(signature: str, document: Source) -> dict[str, str] | None:
    parameters = re.findall(r"(\w+)(?:: [^,=]+)? ?= ?([\w.'\"-]{1,20})(?=,|\))", signature)
    known = [(name, value) for name, value in parameters if value != "None"]
    if len({value for _, value in known}) < 2:
        return None
    name, value = known[int(document.place[8:16], 16) % len(known)]
    return _record(signature, f"What is the default of {name}?", value)


def _packages(document: Source) -> Iterator[dict[str, str]]:
    if document.path.partition("#")[0].endswith(".py"):
        quoted = re.finditer(r'^ *(?:def|class) .*:\n *"""([^"\\]{80,2000})"""', document.text, re.MULTILINE)
        for each in islice(quoted, PER_DOCUMENT):
            yield _record(each[1].strip()[:LONGEST], "Which package is this text from?", document.package)


def _sections(document: Source) -> Iterator[dict[str, str]]:
    found = re.search(r"/man(\d)/", document.path)
    name = re.search(r"^NAME\n(.{10,})", document.text, re.MULTILINE)
    if found is not None and name is not None and found[1] in SECTIONS:
        answer = f"{found[1]}, {SECTIONS[found[1]]}"
        yield _record(name[1][:LONGEST], "Which section of the manual is this in?", answer)


class Answers(Protocol):
    """A model that takes tokens [N, L] and the number of them that count in each row [N] to the likeliest next [N]."""

    def next_tokens(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor: ...


@torch.no_grad()
def exact_matches(model: Answers, tokenizer: Tokenizer, records: Sequence[Any], batch: int = 64) -> float:
    """Share of the records whose response is what greedy decoding gives, up to the end-of-document token."""
    hits = sum(sum(_answered(model, tokenizer, records[at : at + batch])) for at in range(0, len(records), batch))
    return hits / len(records)


def _answered(model: Answers, tokenizer: Tokenizer, records: Sequence[Any]) -> Iterator[bool]:
    prompts = [tokenizer.encode(record["prompt"]).tolist() for record in records]
    wanted = [[*tokenizer.encode(record["response"]).tolist(), tokenizer.end_of_document] for record in records]
    count = max(map(len, wanted))
    tokens = torch.zeros(len(records), max(map(len, prompts)) + count, dtype=torch.int64)
    lengths, rows = torch.tensor([len(prompt) for prompt in prompts]), torch.arange(len(records))
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    for _ in range(count):
        tokens[rows, lengths] = model.next_tokens(tokens, lengths).cpu()
        lengths += 1
    for row, prompt, answer in zip(tokens.tolist(), prompts, wanted, strict=True):
        yield row[len(prompt) : len(prompt) + len(answer)] == answer
