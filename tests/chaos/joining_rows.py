"""A worker of another version, configuration, tokenizer or data is refused, and told the difference.

The coordinator names the field too, and waits for a matching worker, with which the run then completes.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from chaos.odd_worker import READY
from chaos.program import Program
from chaos.row import Attempt, Figures, Row
from chaos.starting import by_hand, small_run, usual_worker
from chaos.worker_rows import odd_worker

REFUSED_WITHIN_S = 5.0
_SENTENCES = "".join(f"Sentence {i} says that {i * i} is {i} times itself.\n" for i in range(400))
_CHANGES = (
    "training.lr=0.5",
    "training.clip_norm=0.25",
    "training.steps=5",
    "run.seed=4",
    "run.peer_timeout=9.0",
    'wire.gradients="fixed:bits=7"',
    "pipeline.in_flight=2",
    "data.validation=0.1",
    "data.shuffle=false",
    "links.piece=65536",
)


def _refused(
    attempt: Attempt, oddity: str, value: str, field: str, differ: Callable[[Path], None] | None = None
) -> Figures:
    """A run that an odd worker tries to join after the others; `differ` changes the files of its folder."""
    stage = attempt.dice.choice([0, 1, 2] if differ is None else [0, 2])  # those that read the files
    config = small_run(4, data={"seq_len": 32, "text": "text.txt", "tokenizer": "tokenizer.json"})
    config["training"]["global_batch"] = 8
    odd_folder = attempt.folder / "odd"
    for folder in (attempt.folder, odd_folder):
        folder.mkdir(exist_ok=True)
        _write_files(folder)
    if differ is not None:
        differ(odd_folder)

    def start(each: int, peer: str) -> Program:
        place = odd_folder if each == stage else attempt.folder
        return odd_worker(place, each, peer, oddity, value) if each == stage else usual_worker(place, each, peer)

    with ExitStack() as stack, by_hand(attempt.folder, config, start_worker=start) as scene:
        odd = scene.workers[stage]
        odd.line_with(READY, 60)
        began_s = time.monotonic()
        odd.process.wait(60)
        took_s = time.monotonic() - began_s
        odd.close()
        assert odd.status == 2, f"ended with {odd.status}:\n{odd.text}"
        assert field in odd.text, f"the worker was told: {odd.text}"
        assert took_s <= REFUSED_WITHIN_S, f"refused after {took_s:.1f} s"
        said = scene.leader.line_with(field, 5)
        scene.workers[stage] = stack.enter_context(usual_worker(attempt.folder, stage, scene.peer))
        outcome = scene.finish(60)
        assert outcome.steps == tuple(range(1, config["training"]["steps"] + 1))
    assert "refused the worker" in said, said
    return {"refused_after_s": took_s}


def _write_files(folder: Path, vocabulary: int = 300) -> None:
    from tokenizers import ByteLevelBPETokenizer

    (folder / "text.txt").write_text(_SENTENCES)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [_SENTENCES], vocab_size=vocabulary, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def _one_letter(folder: Path) -> None:
    (folder / "text.txt").write_text(_SENTENCES.replace("399 times", "399 tames"))


def configuration(attempt: Attempt) -> Figures:
    change = attempt.dice.choice(_CHANGES)
    return {"key": change, **_refused(attempt, "config", change, "config_hash")}


version = partial(_refused, oddity="version", value="9.9.9", field="version")
tokenizer = partial(
    _refused, oddity="nothing", value="-", field="tokenizer_hash", differ=partial(_write_files, vocabulary=299)
)
data = partial(_refused, oddity="nothing", value="-", field="data_hash", differ=_one_letter)
_REFUSED = "refused within 5 s, the field named on both sides; the run waits for a matching worker"

JOINING_ROWS = (
    Row("other-version", "a worker of another version", _REFUSED, version, 20),
    Row("other-configuration", "a worker whose configuration differs in one field", _REFUSED, configuration, 20),
    Row("other-tokenizer", "a worker whose tokenizer has one token less", _REFUSED, tokenizer, 20),
    Row("other-data", "a worker whose data differ in one letter", _REFUSED, data, 20),
)
