"""`tahq init`: files that pass a dry run, and one that trains."""

import os
import pty
import select
import subprocess
import sys

import pytest
from support.runs import finish
from transformers import GPT2Config, GPT2LMHeadModel

from tahq.config.file import load_config
from tahq.errors import ConfigError

from .conftest import assert_one_line


@pytest.fixture
def init(tahq, tmp_path):
    """init(*arguments): what `tahq init` has written."""

    def run(*arguments: str) -> str:
        status, out, err = tahq("tahq", "init", *arguments)
        assert status == 0, err
        assert out.startswith("cluster.yaml is written; ")
        return (tmp_path / "cluster.yaml").read_text()

    return run


@pytest.mark.ci
def test_file_to_try_trains_here(init, tmp_path):
    init()
    done = finish(tmp_path, "tahq-launch", "cluster.yaml", "--set", "training.steps=3")
    assert done.returncode == 0, done.stderr
    assert "done: 3 of 3 steps" in done.stdout


def test_file_to_pretrain_passes_a_dry_run(init, tahq, tmp_path):
    (tmp_path / "my texts.txt").write_text("something to learn, again and again\n" * 400)
    init("--for", "pretrain", "--data", "my texts.txt")
    status, out, err = tahq("tahq-launch", "cluster.yaml", "--dry-run")
    assert (status, err) == (0, "")
    assert "1 epochs of 32 samples" in out


def test_file_to_finetune_passes_a_dry_run(init, tahq, tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=512, n_embd=32, n_layer=2, n_head=2)).save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "2+2", "response": "4"}\n' * 20)
    init("--for", "finetune", "--model", "model", "--data", "pairs.jsonl")
    status, out, err = tahq("tahq-launch", "cluster.yaml", "--dry-run", "--set", "data.tokenizer=bytes")
    assert status == 0, err
    assert "learning rate 2e-05" in out


def test_file_for_machines_has_this_one_first(init, tmp_path):
    init("--for", "pretrain", "--host", "ada@198.51.100.20", "--host", "lab", "--data", "a", "--data", "b")
    config = load_config(tmp_path / "cluster.yaml")
    assert [(host.local, host.ssh) for host in config.hosts] == [
        (True, None),
        (False, "ada@198.51.100.20"),
        (False, "lab"),
    ]
    assert config.hosts[1].address == "198.51.100.20"
    assert (config.pipeline.stages, config.data.text) == (3, ["a", "b"])


def test_file_for_friends_invites_them(init, tmp_path):
    assert "\nhosts: {invited: 5}" in init("--for", "friends", "--invited", "5", "--data", "texts")
    try:
        config = load_config(tmp_path / "cluster.yaml")
    except ConfigError as error:
        pytest.skip(f"hosts cannot be invited yet: {error}")
    assert config.training.epochs == 1


def test_file_that_exists_is_kept(tahq, tmp_path):
    (tmp_path / "cluster.yaml").write_text("mine")
    assert_one_line(tahq("tahq", "init"), 2, "cluster.yaml exists already; remove it, or give another name")
    assert (tmp_path / "cluster.yaml").read_text() == "mine"


def test_questions_on_a_terminal_are_asked_again_until_they_are_answered(tmp_path):
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "tahq_launch.cli", "init", "run.yaml"]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    shown = b""
    for question, answer in (
        (b"one of them", b"maybe"),
        (b"is not one of 'try', 'pretrain', 'finetune', 'friends'", b"pretrain"),
        (b"files or folders of text", b"books notes.txt"),
        (b"other machines", b""),
    ):
        while question not in shown:
            assert select.select([outer], [], [], 60)[0], shown
            shown += os.read(outer, 4096)
        os.write(outer, answer + b"\n")
    assert process.wait(60) == 0
    os.close(outer)
    config = load_config(tmp_path / "run.yaml")
    assert (config.data.text, config.pipeline.stages) == (["books", "notes.txt"], 2)
