"""Command lines: help, and one line with exit status 2 for each mistake."""

import socket
import subprocess
import sys
from importlib.metadata import entry_points
from unittest.mock import Mock

import pytest
import torch
import typer
import yaml
from support.runs import command, environment, overrides, tiny, write_config

from tahq import __version__
from tahq_launch import cli
from tahq_launch.plan import first_plan

from .conftest import PROGRAMS, assert_one_line

TINY = tiny(pipeline={"stages": 2})


@pytest.fixture
def launch(tahq, tmp_path):
    """launch(config, "--dry-run", ...) runs `tahq-launch cluster.yaml` inside this process."""

    def run(config: dict, *arguments: str) -> tuple[int, str, str]:
        write_config(tmp_path, config)
        return tahq("tahq-launch", "cluster.yaml", *arguments)

    return run


@pytest.mark.parametrize(
    ("group", "names"),
    [
        ((), "launch worker coordinator keygen measure plan export trace probe doctor"),
        (("codec",), "list inspect compare"),
    ],
)
def test_group_alone_lists_its_commands_whose_help_has_an_example_and_defaults(tahq, group, names):
    status, stdout, stderr = tahq("tahq", *group)
    assert (status, stderr) == (0, "")
    assert all(f"  {name} " in stdout for name in names.split())
    for name in names.split():
        status, stdout, stderr = tahq("tahq", *group, name, "--help")
        assert (status, stderr, "Example: tahq" in stdout, "Default:" in stdout) == (0, "", True, True)


def commands(group=None, path=()):
    """Every command of `tahq` with its path, groups included."""
    group = group or typer.main.get_command(cli.tahq_app())
    yield path, group
    for name, member in getattr(group, "commands", {}).items():
        if not member.hidden:
            yield from commands(member, (*path, name))


REPORTS = {"doctor", "ps", "status", "eval", "plan", "probe", "codec list", "codec compare", "netem calibrate"}
ALIASES = {"--codecs", "--spec", "--wire", "--out", "--write"}
"""Options of version 0.1, which still work."""


def test_every_command_has_the_common_options_and_its_help_is_whole(tahq):
    found = list(commands())
    assert len(found) > 25
    for path, member in found:
        helped = tahq("tahq", *path, "-h")
        assert helped == tahq("tahq", *path, "--help")
        assert (helped[0], helped[2]) == (0, "")
        name, help_text = " ".join(path), helped[1]
        assert not [line for line in help_text.splitlines()[1:] if line.endswith("...")], name
        assert "-h, --help" in help_text
        options = {option: parameter for parameter in member.params for option in parameter.opts}
        assert ("--json" in options) == (name in REPORTS) or name == "netem probe", name
        assert "--json" not in options or options["--json"].is_flag, name
        for option, parameter in options.items():
            assert option not in ALIASES or parameter.opts[0] in ("--codec", "--output"), (name, option)
            assert getattr(parameter, "help", None) or parameter.hidden, (name, option)
    assert tahq("tahq", "netem") == tahq("tahq", "netem", "-h")


def test_shell_completes_the_names_of_commands():
    words = {"_TAHQ_COMPLETE": "complete_bash", "COMP_WORDS": "tahq st", "COMP_CWORD": "1"}
    done = subprocess.run([command("tahq")], env=environment() | words, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["status", "stop"]


@pytest.mark.parametrize("command", [("tahq",), ("tahq", "worker"), ("tahq-launch",), ("tahq-worker",)])
def test_version_is_printed(tahq, command):
    assert tahq(*command, "--version") == (0, f"tahq {__version__}\n", "")


def test_help_needs_neither_torch_nor_zmq():
    program = (
        "import sys; sys.argv = ['tahq', 'launch', '--help']\n"
        "from tahq_launch.cli import main\n"
        "status = main()\n"
        "heavy = {'torch', 'transformers', 'zmq'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else status)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_is_installed(program):
    (script,) = entry_points(group="console_scripts", name=program)
    assert script.load() is PROGRAMS[program]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["tahq-launch"], "CLUSTER.YAML"),
        (["tahq-worker", "--stage", "1"], "--peer"),
        (["tahq-worker", "--spare", "--stage", "1", "--peer", "127.0.0.1:1"], "leave out --stage"),
        (["tahq-worker", "--takeover", "--peer", "127.0.0.1:1"], "--takeover needs --stage"),
        (["tahq-worker", "--no-curve", "--key", "a", "--peer", "127.0.0.1:1"], "--no-curve"),
        (["tahq-worker", "--stage", "one", "--peer", "127.0.0.1:1"], "--stage"),
        (["tahq-worker", "--device", "gpu", "--peer", "127.0.0.1:1"], "--device"),
        (["tahq", "lunch"], "lunch"),
        (["tahq", "x" * 100_000], "xxx… (100,0"),
        (["tahq", "export", "runs/a", "b", "--shard-size", "4 potatoes"], "--shard-size"),
    ],
)
def test_wrong_command_line_is_one_line_and_points_to_the_help(tahq, arguments, part):
    assert_one_line(tahq(*arguments), 2, part, "--help")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["tahq-launch", "nowhere.yaml"], "tahq-launch: nowhere.yaml does not exist"),
        (["tahq-worker", "--peer", "somewhere"], "host:port"),
        (["tahq-worker", "--peer", "127.0.0.1:9", "--bind", "7001"], "--bind: '7001' is not an address"),
        (["tahq-launch", "namespaces.yaml", "--set", f"run.dir={'x' * 1000}"], "File name too long: xxx"),
        (["tahq-worker", "--peer", "127.0.0.1:9", "--key", "no.secret"], "no key at no.secret; make one with `tahq"),
        (["tahq-worker", "--peer", "127.0.0.1:9", "--coordinator-key", "12ab"], "--coordinator-key: expected a pub"),
        (["tahq", "export", "runs/nothing", "out"], "runs/nothing is not a run's folder"),
        (["tahq", "coordinator", "namespaces.yaml"], "hosts: namespaces is for tahq-launch"),
    ],
)
def test_missing_file_or_unusable_value_is_one_line(tahq, tmp_path, arguments, part):
    (tmp_path / "namespaces.yaml").write_text(yaml.safe_dump({**TINY, "hosts": "namespaces"}))
    assert_one_line(tahq(*arguments), 2, part)


HOSTS = [{"address": "192.0.2.7"}, {"address": "192.0.2.8"}]
CABEL = {"hosts": "namespaces", "emulate": {"profile": "cabel"}}


@pytest.mark.parametrize(
    ("sections", "arguments", "parts"),
    [
        ({}, overrides("training.stepz=4"), ["did you mean steps?"]),
        ({}, overrides("data.tokenizer=nope"), ["--set data.tokenizer=nope: data.tokenizer: no such folder"]),
        (
            {"model": {"path": "Qwen2.5-0.5B"}},
            [],
            ["model.path Qwen2.5-0.5B is not a folder here, nor a name on the Hugging Face Hub (OWNER/NAME)"],
        ),
        ({}, ["--resume"], ["runs/tiny", "no checkpoint"]),
        ({"hosts": HOSTS}, [], ["run.bind is 127.0.0.1:0", "192.0.2.7", "run.advertise"]),
        (CABEL, [], ["no profile 'cabel'", "did you mean cable?"]),
        (
            {"security": {"allow": ["no.keys"]}},
            [],
            ["security.allow.0: expected a public key of 64 digits or an exist"],
        ),
    ],
)
def test_mistake_in_the_configuration_leaves_no_run_behind(launch, tmp_path, sections, arguments, parts):
    assert_one_line(launch({**TINY, **sections}, *arguments), 2, *parts)
    assert not (tmp_path / "runs").exists()


def test_port_in_use_is_named_and_leaves_no_run_behind(launch, tahq, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert_one_line(launch(TINY, *overrides(f"run.bind={address}")), 2, address, "in use")
        assert_one_line(tahq("tahq", "coordinator", "cluster.yaml", "--bind", address), 2, address, "in use")
    assert not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()


@pytest.mark.parametrize("arguments", [["--dry-run"], []])
def test_unusable_record_to_replay_leaves_no_run_behind(launch, tmp_path, arguments):
    (tmp_path / "cut.jsonl").write_text('{"step": 1, "links": [{"li')
    wire = {"activations": "wf", "gradients": "eden", "follow": {}, "replay": "cut.jsonl"}
    assert_one_line(launch({**TINY, "wire": wire}, *arguments), 2, "wire.replay: cut.jsonl has no steps")
    assert not (tmp_path / "runs").exists()


LATE = """\
model:
  family: llama
  num_layers: 2
  hidden_size: 32
  num_heads: 4
data:
  text: stdlib
training: {steps: 2}
pipeline: {stages: 2}
"""
LISTED = "hosts: [{address: localhost}, {address: localhost}]\nlinks: {measured: /nope}\npipeline:"


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("num_heads: 4", "num_heads: 3", 5, "model.num_heads 3 does not divide model.hidden_size 32"),
        ("num_heads: 4", "num_heads: 4\n  overrides: {foo: 1}", 6, "model.overrides.foo: LlamaConfig has no such key"),
        ("text: stdlib", "text: stdlib\n  tokenizer: nope", 8, "data.tokenizer: no such folder: nope"),
        (
            "pipeline:",
            "hosts: namespaces\nemulate: {profile: cabel}\npipeline:",
            10,
            "emulate.profile: no profile 'cabel'",
        ),
        ("pipeline:", LISTED, 10, "links.measured: /nope does not exist; `tahq measure` writes such files"),
    ],
)
def test_mistake_found_after_reading_names_line_and_key(tahq, tmp_path, old, new, line, message):
    (tmp_path / "cluster.yaml").write_text(LATE.replace(old, new))
    for program, *words in (["tahq-launch"], ["tahq", "probe"]):
        assert_one_line(tahq(program, *words, "cluster.yaml"), 2, f"{program}: cluster.yaml:{line}: {message}")


ONE_HERE = "hosts=[{address: 192.0.2.1}, {address: localhost}]"
NONE_HERE = "hosts=[{address: 192.0.2.1}, {address: 192.0.2.2}]"


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["data.text=nope.txt"], "data.text: no such file or folder: nope.txt"),
        (["data={jsonl: pairs-*.jsonl}"], "data.records: glob matches no file: pairs-*.jsonl"),
        (["data.text=nope.txt", ONE_HERE], "data.text: no such file or folder: nope.txt"),
        (["run.device=cuda:7"], "run.device: cuda:7 is not on this machine, which has no CUDA device"),
        ([f"{ONE_HERE[:-2]}, device: cuda}}]"], "hosts.1.device: cuda is not on this machine"),
        (
            ["hosts=namespaces", "emulate={congestion_control: bbx}"],
            "emulate.congestion_control: bbx does not exist; this",
        ),
    ],
)
def test_dry_run_finds_what_is_missing_on_this_machine(launch, monkeypatch, assignments, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert_one_line(launch(TINY, "--dry-run", *overrides(*assignments)), 2, message)


def test_dry_run_prints_the_schedule_starts_nothing_and_ignores_what_other_machines_lack(launch, tmp_path):
    elsewhere = overrides("data.text=nope.txt", "run.device=cuda:7", NONE_HERE)
    for arguments in ([], elsewhere):
        status, stdout, stderr = launch(TINY, "--dry-run", *arguments)
        assert (status, stderr) == (0, "")
        assert "0F0" in stdout
    assert not (tmp_path / "runs").exists()


def test_internal_error_is_one_line_and_with_debug_a_traceback(launch, monkeypatch):
    monkeypatch.setattr(first_plan, "launch", Mock(side_effect=ZeroDivisionError("two lines\nof it")))
    assert_one_line(launch(TINY), 1, "internal error: ZeroDivisionError: two lines of it", "--debug")
    status, _, stderr = launch(TINY, "--debug")
    assert status == 1
    assert "Traceback" in stderr
    assert stderr.splitlines()[-1].startswith("tahq-launch: internal error")


def test_keyboard_interrupt_before_a_run_is_130(launch, monkeypatch):
    monkeypatch.setattr(first_plan, "launch", Mock(side_effect=KeyboardInterrupt))
    assert launch(TINY) == (130, "importing libraries\n", "")


def test_what_is_never_freed_is_no_leak_to_triton():
    pytest.importorskip("triton")
    program = "import triton; from tahq_launch.command_line import collect_as_usual; collect_as_usual()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
