"""`tahq probe` as its user meets it: the report, where weights come from, and one line for each mistake."""

import io
import json
import subprocess
import sys

import pytest
import torch
from support.plain_loop import train_plainly
from support.runs import Run, command, environment, finish, launch, tiny, write_config

from tahq.config.cluster import ClusterConfig
from tahq.errors import ConfigError, UserError
from tahq.pipeline.probe.gradient_probe import GradientProbe
from tahq_launch import cli
from tahq_launch.analysis import probe as probe_command
from tahq_launch.analysis.probe import ProgressLines, gradients_of, progress_of
from tahq_launch.analysis.probe_setup import ProbeRequest, default_wires, open_setup, parse_wire

CONFIG = tiny(
    pipeline={"stages": 2},
    training={"steps": 2},
    model={"num_layers": 2, "hidden_size": 32},
    wire={"activations": "tah", "gradients": "fixed:bits=6"},
)
RAW = tiny(pipeline={"stages": 2}, training={"steps": 2}, model={"num_layers": 2, "hidden_size": 32})


@pytest.fixture
def probe(tmp_path, monkeypatch, capsys):
    """probe("--steps", "1", ...) runs `tahq probe cluster.yaml` inside this process: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, CONFIG)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tahq", "probe", "cluster.yaml", *arguments])
        status = cli.main()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    done = launch(tmp_path_factory.mktemp("run"), RAW)
    assert done.returncode == 0, done.stderr
    return done


# -- the report ----------------------------------------------------------------------------------


def test_report_and_json_say_the_same(probe, tmp_path):
    status, stdout, stderr = probe("--steps", "2", "--batches", "2", "--warm-up", "1", "--json", "probe.json")
    assert status == 0
    assert stderr.startswith("0 of 21 gradients: step 0, warm-up\n")
    values = json.loads((tmp_path / "probe.json").read_text())
    assert (values["first_step"], values["num_cuts"], len(values["losses"])) == (1, 1, 2)
    assert [wire["activations"].partition(",")[0] for wire in values["wires"]] == ["tah:group=64"] * 2 + [
        "tah:group=32"
    ] * 2
    for wire in values["wires"]:
        assert len(wire["step_errors"]) == 4
        assert len(wire["expectation_errors"]) == 2
        assert all(0 < error < 1 for error in wire["step_errors"] + wire["expectation_errors"])
        assert wire["delta"] == 1 - max(wire["step_errors"] + wire["expectation_errors"])
        assert list(wire["groups"]) == ["embedding", "stage 0", "stage 1", "head"]
        assert f"{max(wire['step_errors']):.3g} at most" in stdout
    assert "weights: random, then 1 step without codecs" in stdout
    assert "Assumption 4.4 holds" in stdout


def test_exceeded_limits_are_said_and_are_no_failure(probe):
    four = ("--set", "model.num_layers=4", "--set", "pipeline.stages=4")
    status, stdout, _ = probe(*four, "--steps", "2", "--batches", "2", "--wire", "fixed:bits=2 / fixed:bits=2")
    assert status == 0
    assert "NOT below the paper's 0.4 a step" in stdout or "does not hold" in stdout
    assert "spend more bits" in stdout
    assert "These weights are random" in stdout


def test_lossless_wire_has_no_error(probe, tmp_path):
    status, stdout, _ = probe("--steps", "1", "--batches", "2", "--wire", "raw/raw", "--json", "raw.json")
    assert status == 0
    assert "holds with δ = 1;" in stdout
    (wire,) = json.loads((tmp_path / "raw.json").read_text())["wires"]
    assert (wire["step_errors"], wire["expectation_errors"], wire["cosines"]) == ([0.0, 0.0], [0.0], [1.0, 1.0])


def test_what_is_not_finite_is_null_in_the_json(probe, tmp_path):
    """Activations of 1e5 are beyond fp16, and so is what it makes of them."""
    arguments = ("--set", "model.overrides={initializer_range: 30000.0}", "--steps", "1", "--batches", "1")
    status, stdout, _ = probe(*arguments, "--wire", "raw:dtype=fp16 / raw", "--json", "out.json")
    assert status == 0
    assert "NaN or infinite" in stdout
    (wire,) = json.loads((tmp_path / "out.json").read_text())["wires"]
    assert (wire["step_errors"], wire["delta"]) == ([None], None)


@pytest.mark.acceptance
def test_program_prints_plain_lines_to_a_pipe(tmp_path):
    write_config(tmp_path, CONFIG)
    done = subprocess.run(
        [command("tahq"), "probe", "cluster.yaml", "--steps", "1", "--batches", "1", "--wire", "tah / raw"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    assert done.stderr.startswith("0 of 2 gradients: step 0, batch 1 of 1, without codecs\n")
    assert "\x1b" not in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()


def test_progress_says_which_gradient_is_computed_and_how_many_are_left():
    now_s = 0.0
    stream = io.StringIO()
    with ProgressLines(gradients_of(3, 1, 1, 2, 1), stream, lambda: now_s) as lines:
        for _ in range(5):
            now_s += 4.0
            lines.advance()
    assert stream.getvalue().splitlines() == [
        "0 of 5 gradients: step 3, warm-up",
        "2 of 5 gradients, 12 s left: step 4, batch 2 of 2, wire 1 of 1",
        "4 of 5 gradients, 4 s left: step 4, batch 1 of 2, wire 1 of 1",
    ]


def test_progress_on_a_terminal_is_a_bar_that_leaves_nothing(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_of(gradients_of(0, 1, 1, 1, 1)) as bar:
        for _ in range(3):
            bar.advance()
    assert "done" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")


# -- which codecs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tah / fixed:bits=6", ("tah", "fixed:bits=6")),
        ("tah/raw", ("tah", "raw")),
        ("  tah:int4=4/5/tah:int4=1/2  ", ("tah:int4=0.8", "tah:int4=0.5")),
    ],
)
def test_two_codecs_are_told_apart_at_the_slash_between_them(text, expected):
    assert parse_wire(text) == parse_wire(" / ".join(expected))


@pytest.mark.parametrize("text", ["tah", "tah / raw / raw", "tah:int4=4/5", "", "tah / raww"])
def test_what_is_no_pair_of_codecs_is_refused(text):
    with pytest.raises(ConfigError, match=r"expected 'FORWARD / BACKWARD'|did you mean raw"):
        parse_wire(text)


def test_default_wires_are_the_runs_and_the_papers_tiles():
    config = ClusterConfig.model_validate(CONFIG)
    assert [parse_wire(f"{wire.activations} / {wire.gradients}") for wire in default_wires(config)] == [
        parse_wire(text)
        for text in ("tah / fixed:bits=6", "tah / raw", "tah:group=32 / raw", "tah:group=32 / fixed:bits=6")
    ]


# -- where weights come from ----------------------------------------------------------------------


def request(run: Run, **options) -> ProbeRequest:
    changes = (f"run.dir={run.folder.parent}",)
    return ProbeRequest(run.folder.parents[1] / "cluster.yaml", changes, ("tah / raw",), **options)


def test_resume_goes_on_from_the_snapshot_to_the_bit(run):
    setup = open_setup(request(run, resume=True))
    assert setup.start_step == 2
    assert all(torch.equal(p, run.weights[name]) for name, p in setup.model.parameters.items())
    probe = GradientProbe(setup.model, setup.batches, setup.wires, setup.update)
    probe.probe(2, 2)
    model = {**RAW["model"], "vocab_size": 256}
    longer = ClusterConfig.model_validate({**RAW, "model": model, "training": {**RAW["training"], "steps": 3}})
    expected = train_plainly(longer).weights
    assert [n for n, p in setup.model.parameters.items() if not torch.equal(p, expected[n])] == []


def test_weights_of_a_folder_are_read(run, tmp_path):
    done = finish(tmp_path, "tahq", "export", str(run.folder), "hf")
    assert done.returncode == 0, done.stderr
    setup = open_setup(request(run, weights=tmp_path / "hf"))
    assert setup.start_step == 0
    assert all(torch.equal(p, run.weights[name]) for name, p in setup.model.parameters.items())


def test_another_model_than_the_snapshots_is_refused(run, probe):
    outcome = probe("--resume", "--set", f"run.dir={run.folder.parent}", "--set", "model.num_heads=4")
    assert_one_line(outcome, 2, "model.num_heads")


@pytest.mark.acceptance
def test_run_of_low_rank_weights_is_taken_up_from_its_export_alone(tmp_path):
    low_rank = {**RAW, "training": {**RAW["training"], "optimizer": "qgalore", "qgalore": {"rank": 8}}}
    trained = launch(tmp_path, low_rank)
    assert trained.returncode == 0, trained.stderr
    with pytest.raises(UserError, match=r"trained by qgalore.*tahq export"):
        open_setup(request(trained, resume=True))
    done = finish(tmp_path, "tahq", "export", str(trained.folder), "hf")
    assert done.returncode == 0, done.stderr
    probed = finish(tmp_path, "tahq", "probe", "cluster.yaml", "--weights", "hf", "--steps", "1", "--wire", "tah / raw")
    assert probed.returncode == 0, probed.stderr
    assert "from hf, moved by AdamW in place of qgalore" in " ".join(probed.stdout.split())


# -- mistakes -------------------------------------------------------------------------------------


def assert_one_line(outcome: tuple[int, str, str], status: int, *parts: str) -> None:
    got, _, stderr = outcome
    assert got == status, stderr
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("tahq: ")
    for part in parts:
        assert part in stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--set", "pipeline.stages=1"], "nothing crosses a wire"),
        (["--wire", "tah"], "expected 'FORWARD / BACKWARD'"),
        (["--wire", "tahh / raw"], "did you mean tah?"),
        (["--wire", "aqsgd / raw"], "only over epochs"),
        (["--resume"], "no checkpoint"),
        (["--weights", "nowhere"], "nowhere"),
        (["--weights", "nowhere", "--resume"], "give one of them"),
        (["--json", "nowhere/probe.json"], "--json nowhere/probe.json"),
        (["--steps", "0"], "--steps"),
        (["--batches", "0"], "--batches"),
        (["--device", "cuda:99"], "cuda:99"),
    ],
)
def test_mistake_is_one_line(probe, arguments, part):
    assert_one_line(probe(*arguments), 2, part)


def test_gradients_that_are_not_finite_by_themselves_end_with_status_5(probe):
    outcome = probe("--set", "training.lr=1e30", "--warm-up", "3", "--set", "training.clip_norm=null")
    status, _, stderr = outcome
    first, *_, last = stderr.splitlines()
    assert (status, first) == (5, "0 of 83 gradients: step 0, warm-up")
    assert last.startswith("tahq: ")
    assert "without any codec" in last


def test_too_little_memory_is_said_with_what_helps(probe, monkeypatch):
    def allocate(setup, request):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(probe_command, "measure", allocate)
    assert_one_line(probe(), 4, "CUDA out of memory", "--batches 1")


def test_help_has_an_example_and_defaults(probe):
    status, stdout, _ = probe("--help")
    assert status == 0
    assert "Example: tahq probe" in stdout
    assert "default: 4" in stdout
