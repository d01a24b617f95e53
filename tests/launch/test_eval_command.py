"""`tahq eval` over a real run of two stages: its loss is that of the run's own validation."""

import json
import shutil
import sys

import pytest
import torch
import yaml
from support.runs import Run, finish, tiny, train
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from .conftest import assert_one_line

CONFIG = tiny(
    pipeline={"stages": 2},
    training={"steps": 2, "eval_every": 1, "eval_batches": 2},
    model={"num_layers": 2, "hidden_size": 32},
    run={"checkpoint_every": 1},
)
TEXT = "def main():\n    return 7\n" * 40


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A run with its export in `model`, and a text beside it."""
    run = train(tmp_path_factory.mktemp("run"), CONFIG)
    assert finish(run.folder.parent, "tahq", "export", "tiny", "model").returncode == 0
    (run.folder.parent / "other.txt").write_text(TEXT)
    return run


def evaluated(run: Run, *arguments: str) -> dict:
    done = finish(run.folder.parent, "tahq", "eval", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_loss_of_a_run_and_of_its_export_is_that_of_its_own_validation(run):
    for arguments, row in (
        (["tiny"], run.metrics[1]),
        (["tiny", "--step", "1"], run.metrics[0]),
        (["model", "--data", "tiny"], run.metrics[1]),
    ):
        found, validation = evaluated(run, *arguments), row["validation"]
        assert found["tokens"] == validation["tokens"]
        assert found["loss"] == pytest.approx(validation["loss_raw"], rel=1e-6)
        assert found["perplexity"] == pytest.approx(validation["perplexity_raw"], rel=1e-6)
    assert evaluated(run, "tiny", "--batches", "1")["tokens"] == validation["tokens"] // 2


def test_loss_of_a_text_is_the_mean_over_its_whole_samples(run):
    found = evaluated(run, "tiny", "--text", "other.txt")
    model = AutoModelForCausalLM.from_pretrained(run.folder.parent / "model").eval()
    ids = [*AutoTokenizer.from_pretrained(run.folder.parent / "model").encode(TEXT), 0]
    num, seq_len = (len(ids) - 1) // 32, 32
    tokens, labels = (torch.tensor(ids[at : at + num * seq_len]).reshape(num, seq_len) for at in (0, 1))
    with torch.no_grad():
        loss = cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
    assert (found["tokens"], found["loss"]) == (num * seq_len, pytest.approx(float(loss), rel=1e-5))
    shown = finish(run.folder.parent, "tahq", "eval", "model", "--text", "other.txt").stdout
    assert shown.splitlines()[0] == "model"
    assert "perplexity" in shown


def test_missing_data_another_tokenizer_and_missing_lm_eval_are_one_line(run, tahq, tmp_path, monkeypatch):
    shutil.copytree(run.folder.parent, tmp_path, dirs_exist_ok=True)
    assert_one_line(tahq("tahq", "eval", "model"), 2, "give --text FILE, or --data RUN")
    assert_one_line(tahq("tahq", "eval", "nowhere"), 2, "nowhere is not a run's folder")
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert_one_line(tahq("tahq", "eval", "model", "--data", "tiny"), 2, "another tokenizer than tiny")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert_one_line(tahq("tahq", "eval", "tiny", "--tasks", "hellaswag"), 2, "pip install 'lm-eval[hf]'")


def test_local_task_of_lm_eval_has_its_results(run, tmp_path):
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    questions = [{"question": "def ", "choices": ["main", "zzzz"], "answer": 0}] * 8
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    task = {
        "task": "tiny_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tiny_choice.yaml").write_text(yaml.safe_dump(task))
    folder = run.folder.parent
    found = evaluated(run, "model", "--tasks", "tiny_choice", "--task-folder", str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    with torch.no_grad():
        scores = [
            float(-cross_entropy(model(ids[None, :-1]).logits[0, 3:], ids[4:], reduction="sum"))
            for ids in (torch.tensor(list(b"def " + word)) for word in (b"main", b"zzzz"))
        ]
    assert found["tasks"]["tiny_choice"]["acc"] == float(scores[0] > scores[1])
    assert "loss" not in found
    unknown = finish(folder, "tahq", "eval", "model", "--tasks", "no_such_task")
    assert (unknown.returncode, "lm-eval has no task no_such_task" in unknown.stderr) == (2, True)
