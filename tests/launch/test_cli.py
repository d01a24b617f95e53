"""The command line as somebody meets it who has never seen tahq: help, and one line for each mistake."""

import socket
import subprocess
import sys

import pytest
import torch
import yaml
from support.runs import command, environment, tiny, write_config

from tahq_launch import cli
from tahq_launch.start import launcher

PROGRAMS = {
    "tahq": cli.main,
    "tahq-launch": cli.launch_main,
    "tahq-worker": cli.worker_main,
    "tahq-netem": cli.netem_main,
}
TINY = tiny(pipeline={"stages": 2})


@pytest.fixture
def tahq(tmp_path, monkeypatch, capsys):
    """tahq("tahq-launch", ...) runs a program inside this process: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(program: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        status = PROGRAMS[program]()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def assert_one_line(outcome: tuple[int, str, str], status: int, *parts: str) -> None:
    got, _, stderr = outcome
    assert got == status, stderr
    assert stderr.count("\n") == 1, stderr
    assert stderr.endswith("\n")
    assert "Traceback" not in stderr
    for part in parts:
        assert part in stderr


def test_help_names_units_defaults_and_an_example(tahq):
    for arguments in (["tahq-launch"], ["tahq-worker"], ["tahq", "coordinator"], ["tahq", "keygen"], ["tahq", "probe"]):
        status, stdout, stderr = tahq(*arguments, "--help")
        assert (status, stderr) == (0, "")
        assert "Example: tahq" in stdout
        assert "Default:" in stdout


def test_tahq_alone_lists_its_commands(tahq):
    status, stdout, _ = tahq("tahq")
    assert status == 0
    assert all(
        f"  {name} " in stdout for name in ("launch", "worker", "coordinator", "keygen", "export", "trace", "netem")
    )


def test_help_needs_neither_torch_nor_pydantic():
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
    done = subprocess.run([command(program), "--help"], capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 0
    assert f"Usage: {program}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["tahq-launch"], "CLUSTER.YAML"),
        (["tahq-launch", "a.yaml", "--restart"], "--restart"),
        (["tahq-launch", "a.yaml", "b.yaml"], "b.yaml"),
        (["tahq-worker", "--stage", "1"], "--peer"),
        (["tahq-worker", "--spare", "--stage", "1", "--peer", "127.0.0.1:1"], "leave out --stage"),
        (["tahq-worker", "--takeover", "--peer", "127.0.0.1:1"], "--takeover needs --stage"),
        (["tahq-worker", "--stage", "one", "--peer", "127.0.0.1:1"], "--stage"),
        (["tahq-worker", "--stage", "-3", "--peer", "127.0.0.1:1"], "--stage"),
        (["tahq", "lunch"], "lunch"),
        (["tahq", "export", "runs/a"], "OUT"),
        (["tahq", "export", "runs/a", "b", "--shard-size", "4 potatoes"], "--shard-size"),
    ],
)
def test_wrong_command_line_is_one_line_and_points_to_the_help(tahq, arguments, part):
    assert_one_line(tahq(*arguments), 2, part, "--help")


def test_missing_file_is_named(tahq):
    assert_one_line(tahq("tahq-launch", "nowhere.yaml"), 2, "tahq-launch: nowhere.yaml does not exist")


def test_unknown_key_names_file_line_and_the_nearest_key(tahq, tmp_path):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(TINY).replace("micro_batch", "micro_bach"))
    outcome = tahq("tahq-launch", "cluster.yaml")
    assert_one_line(outcome, 2, "tahq-launch: cluster.yaml:", "micro_bach", "did you mean micro_batch?")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("training.steps", "expected section.key=value"),
        ("training.stepz=4", "did you mean steps?"),
        ("training.steps=-4", "training.steps"),
        ("training.micro_batch=3", "not divisible by micro_batch 3"),
        ("pipeline.stages=5", "model.num_layers 4"),
        ("model.max_seq_len=16", "data.seq_len 32"),
        ("hosts=namespace", "expected local or namespaces"),
        ("data.tokenizer=nowhere", "nowhere"),
        ("links.rate=100", "100mbit"),
    ],
)
def test_bad_value_is_one_line(tahq, tmp_path, override, part):
    write_config(tmp_path, TINY)
    assert_one_line(tahq("tahq-launch", "cluster.yaml", "--set", override), 2, part)
    assert not (tmp_path / "runs").exists()


def test_model_folder_without_weights_is_named(tahq, tmp_path):
    write_config(tmp_path, {**TINY, "model": {"path": "empty-model"}})
    (tmp_path / "empty-model").mkdir()
    assert_one_line(tahq("tahq-launch", "cluster.yaml"), 2, "empty-model")


def test_port_in_use_is_named_and_leaves_no_run_behind(tahq, tmp_path):
    write_config(tmp_path, TINY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        outcome = tahq("tahq-launch", "cluster.yaml", "--set", f"run.bind={address}")
        assert_one_line(outcome, 2, address, "in use")
        assert_one_line(tahq("tahq", "coordinator", "cluster.yaml", "--bind", address), 2, address, "in use")
    assert not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()


def test_finished_run_is_not_overwritten(tahq, tmp_path):
    write_config(tmp_path, TINY)
    metrics = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"step": 1}\n')
    assert_one_line(tahq("tahq-launch", "cluster.yaml"), 2, "runs/tiny", "run.name")
    assert metrics.read_text() == '{"step": 1}\n'


def test_resume_of_nothing_says_so(tahq, tmp_path):
    write_config(tmp_path, TINY)
    assert_one_line(tahq("tahq-launch", "cluster.yaml", "--resume"), 2, "runs/tiny", "no checkpoint")


def test_remote_hosts_need_an_address_that_they_can_dial(tahq, tmp_path):
    hosts = [{"address": "192.0.2.7", "ssh": "someone@192.0.2.7"}, {"address": "192.0.2.8"}]
    write_config(tmp_path, {**TINY, "hosts": hosts})
    assert_one_line(tahq("tahq-launch", "cluster.yaml"), 2, "run.bind is 127.0.0.1:0", "192.0.2.7", "run.advertise")


def test_worker_with_a_malformed_peer_is_one_line(tahq):
    assert_one_line(tahq("tahq-worker", "--peer", "somewhere"), 2, "somewhere", "host:port")


def test_export_of_no_run_is_one_line(tahq):
    assert_one_line(tahq("tahq", "export", "runs/nothing", "out"), 2, "runs/nothing")


def test_dry_run_starts_nothing(tahq, tmp_path):
    write_config(tmp_path, TINY)
    status, stdout, stderr = tahq("tahq-launch", "cluster.yaml", "--dry-run")
    assert (status, stderr) == (0, "")
    assert "0F0" in stdout
    assert not (tmp_path / "runs").exists()


def test_dry_run_shows_the_network_of_namespaces(tahq, tmp_path):
    links = {"rate": "100mbit", "hosts": {"host1": {"up": "5mbit", "site": "home"}}}
    write_config(tmp_path, {**TINY, "hosts": "namespaces", "links": links})
    status, stdout, stderr = tahq("tahq-launch", "cluster.yaml", "--dry-run")
    assert (status, stderr) == (0, "")
    assert "Network of 2 hosts" in stdout
    assert "host1      1    5 Mbit/s  100 Mbit/s" in stdout
    assert not (tmp_path / "runs").exists()


def test_profile_that_there_is_not_is_one_line(tahq, tmp_path):
    write_config(tmp_path, {**TINY, "hosts": "namespaces", "links": {"profile": "cabel"}})
    for arguments in (["--dry-run"], []):
        assert_one_line(tahq("tahq-launch", "cluster.yaml", *arguments), 2, "no profile 'cabel'", "did you mean cable?")


@pytest.mark.parametrize("arguments", [["--dry-run"], []], ids=["dry run", "run"])
@pytest.mark.parametrize(
    ("record", "part"),
    [
        ("nowhere.jsonl", "cannot read nowhere.jsonl: No such file"),
        (".", "cannot read .: Is a directory"),
        ("empty.jsonl", "empty.jsonl has no steps"),
        ("cut.jsonl", "cut.jsonl has no steps"),
        ("other.jsonl", "other.jsonl:1 does not have the codecs of a step"),
    ],
)
def test_record_to_replay_that_is_of_no_use_leaves_no_run_behind(tahq, tmp_path, arguments, record, part):
    for name, text in (("empty", ""), ("cut", '{"step": 1, "links": [{"li'), ("other", '{"step": 1}\n')):
        (tmp_path / f"{name}.jsonl").write_text(text)
    write_config(tmp_path, {**TINY, "wire": {"activations": "wf", "gradients": "eden", "follow": {}, "replay": record}})
    assert_one_line(tahq("tahq-launch", "cluster.yaml", *arguments), 2, f"wire.replay: {part}")
    assert not (tmp_path / "runs").exists()


ONE_HERE = "hosts=[{address: 192.0.2.1}, {address: localhost}]"
NONE_HERE = "hosts=[{address: 192.0.2.1}, {address: localhost, ssh: me@localhost, workdir: /data}]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.text=nope.txt"], "data.text: no such file or folder: nope.txt"),
        (["data={tokens: foo.bin}"], "data.tokens: no such file or folder: foo.bin"),
        (["data={jsonl: pairs-*.jsonl}"], "data.jsonl: glob matches no file: pairs-*.jsonl"),
        (["data.text=nope.txt", ONE_HERE], "data.text: no such file or folder: nope.txt"),
        (["run.device=cuda:7"], "run.device: cuda:7 is not on this machine, which has no CUDA device"),
        (
            [f"{ONE_HERE[:-2]}, device: cuda}}]"],
            "hosts.1.device: cuda is not on this machine, which has no CUDA device",
        ),
        (
            ["hosts=namespaces", "links={congestion_control: bbx}"],
            "links.congestion_control: there is no bbx; this kernel",
        ),
    ],
)
def test_dry_run_misses_what_is_not_on_this_machine(tahq, tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    write_config(tmp_path, TINY)
    options = [word for change in changes for word in ("--set", change)]
    assert_one_line(tahq("tahq-launch", "cluster.yaml", "--dry-run", *options), 2, message)


def test_dry_run_does_not_look_for_what_is_elsewhere(tahq, tmp_path):
    write_config(tmp_path, TINY)
    changes = ("data.text=nope.txt", "run.device=cuda:7", NONE_HERE)
    status, _, stderr = tahq(
        "tahq-launch", "cluster.yaml", "--dry-run", *(word for change in changes for word in ("--set", change))
    )
    assert (status, stderr) == (0, "")


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


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("num_heads: 4", "num_heads: 3", 5, "model.num_heads 3 does not divide model.hidden_size 32"),
        (
            "num_heads: 4",
            "num_heads: 4\n  num_kv_heads: 3",
            6,
            "model.num_kv_heads 3 does not divide model.num_heads 4",
        ),
        ("num_heads: 4", "num_heads: 4\n  overrides: {foo: 1}", 6, "model.overrides.foo: LlamaConfig has no such key"),
        ("text: stdlib", "text: stdlib\n  tokenizer: nope", 8, "data.tokenizer: no such folder: nope"),
        ("pipeline:", "hosts: namespaces\nlinks: {profile: cabel}\npipeline:", 10, "links.profile: no profile 'cabel'"),
        ("pipeline:", "hosts: namespaces\nlinks:\n  cap_up: 60%\npipeline:", 11, "links.cap_up: 60% is a share"),
        (
            *("pipeline:", "hosts: [{address: localhost}, {address: localhost}]\nlinks: {measured: /nope}\npipeline:"),
            *(10, "links.measured: /nope cannot be read"),
        ),
    ],
)
def test_mistake_that_is_found_after_reading_names_line_and_key(tahq, tmp_path, old, new, line, message):
    (tmp_path / "cluster.yaml").write_text(LATE.replace(old, new))
    for program, *words in (["tahq-launch", "--dry-run"], ["tahq-launch"], ["tahq", "probe"]):
        status, _, stderr = tahq(program, *words, "cluster.yaml")
        assert (status, stderr.count("\n")) == (2, 1)
        assert stderr.startswith(f"{program}: cluster.yaml:{line}: {message}")


def test_set_that_is_found_to_be_wrong_after_reading_is_named(tahq, tmp_path):
    (tmp_path / "cluster.yaml").write_text(LATE)
    outcome = tahq("tahq-launch", "cluster.yaml", "--dry-run", "--set", "data.tokenizer=nope")
    assert_one_line(outcome, 2, "tahq-launch: --set data.tokenizer=nope: data.tokenizer: no such folder")


def test_workers_by_hand_cannot_be_in_namespaces(tahq, tmp_path):
    write_config(tmp_path, {**TINY, "hosts": "namespaces"})
    assert_one_line(tahq("tahq", "coordinator", "cluster.yaml"), 2, "hosts: namespaces is for tahq-launch")


@pytest.fixture
def broken(monkeypatch, tmp_path):
    def fail(request, announce):
        raise ZeroDivisionError("two lines\nof it")

    monkeypatch.setattr(launcher, "launch", fail)
    write_config(tmp_path, TINY)


@pytest.mark.usefixtures("broken")
def test_internal_error_is_one_line_and_our_fault(tahq):
    outcome = tahq("tahq-launch", "cluster.yaml")
    assert_one_line(outcome, 1, "internal error: ZeroDivisionError: two lines of it", "--debug")


@pytest.mark.usefixtures("broken")
def test_debug_shows_the_traceback(tahq):
    status, _, stderr = tahq("tahq-launch", "cluster.yaml", "--debug")
    assert status == 1
    assert "Traceback" in stderr
    assert stderr.splitlines()[-1].startswith("tahq-launch: internal error")


def test_keyboard_interrupt_before_a_run_is_130(tahq, monkeypatch):
    def interrupt(request, announce):
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "launch", interrupt)
    status, _, stderr = tahq("tahq-launch", "cluster.yaml")
    assert (status, stderr) == (130, "")
