"""`tahq probe`: the report, origins of weights, and one line for each mistake."""

import io
import json
import math
from unittest.mock import Mock

import pytest
import torch
from support.plain_loop import train_plainly
from support.runs import Run, finish, overrides, tiny, train, write_config

from tahq.config.cluster import ClusterConfig
from tahq.errors import ConfigError, UserError
from tahq.pipeline.cut_model import ProbedWire
from tahq.pipeline.gradient_probe import ErrorSums, GradientProbe, StepErrors, WireResult
from tahq_launch.analysis import probe as probe_command
from tahq_launch.analysis.probe import Progress, error_rows, gradients_of, sentence
from tahq_launch.analysis.probe_setup import ProbeRequest, open_setup, parse_wire

from .conftest import TWO_STAGES, assert_one_line

CONFIG = {**TWO_STAGES, "wire": {"activations": "tah", "gradients": "fixed:bits=6", "backend": "reference"}}


@pytest.fixture
def probe(tahq, tmp_path):
    """probe("--steps", "1", ...) runs `tahq probe cluster.yaml` inside this process: (status, stdout, stderr)."""
    write_config(tmp_path, CONFIG)
    return lambda *arguments: tahq("tahq", "probe", "cluster.yaml", *arguments)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return train(tmp_path_factory.mktemp("run"), TWO_STAGES)


def test_report_and_json_agree(probe, tmp_path):
    status, stdout, stderr = probe("--steps", "2", "--batches", "2", "--warm-up", "1", "--output", "probe.json")
    assert status == 0
    assert stderr.startswith("0 of 21 gradients: step 0, warm-up\n")
    assert "steps 1 to 2, M = 2 batches of 8 samples per step; loss without codecs: " in stdout
    values = json.loads((tmp_path / "probe.json").read_text())
    assert (values["first_step"], values["num_cuts"], len(values["losses"])) == (1, 1, 2)
    wires = [(wire["activations"].partition(",")[0], wire["gradients"][:10]) for wire in values["wires"]]
    raw, own = "raw:dtype=", "fixed:bits"
    assert wires == [("tah:group=64", own), ("tah:group=64", raw), ("tah:group=32", raw), ("tah:group=32", own)]
    for wire in values["wires"]:
        errors = wire["step_errors"] + wire["expectation_errors"]
        assert (len(wire["step_errors"]), len(wire["expectation_errors"])) == (4, 2)
        assert all(0 < error < 1 for error in errors)
        assert wire["delta"] == 1 - max(errors)
        assert list(wire["groups"]) == ["embedding", "stage 0", "stage 1", "head"]
        assert f"at most {max(wire['step_errors']):.3g}, below" in stdout
    assert "weights: random, then 1 step without codecs" in stdout
    assert "Assumption 4.4 holds" in stdout


@pytest.mark.parametrize(
    ("changes", "wire", "said", "errors", "delta"),
    [
        ([], "raw/raw", "holds with δ = 1;", [0.0], 1.0),
        (["model.overrides={initializer_range: 30000.0}"], "raw:dtype=fp16 / raw", "NaN or infinite", [None], None),
    ],
    ids=["lossless", "activations of 1e5 overflow fp16"],
)
def test_zero_and_infinite_errors_are_in_report_and_json(probe, changes, wire, said, errors, delta):
    arguments = (*overrides(*changes), "--steps", "1", "--batches", "2", "--wire", wire)
    status, stdout, _ = probe(*arguments)
    assert status == 0
    assert said in stdout
    (measured,) = json.loads(probe(*arguments, "--json")[1])["wires"]
    assert (measured["step_errors"], measured["expectation_errors"]) == (2 * errors, errors)
    assert (measured["delta"], measured["below_step_limit"]) == (delta, delta is not None)
    assert errors[0] in measured["groups"].values()
    assert ("spend more bits" in stdout) == (delta is None)
    assert "These weights are random" in stdout
    assert "A mean over M = 2 batches still contains 1/2 of" in stdout


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
        (["--output", "nowhere/probe.json"], "cannot write nowhere/probe.json"),
        (["--steps", "0"], "--steps"),
        (["--device", "cuda:99"], "cuda:99"),
    ],
)
def test_mistake_is_one_line(probe, arguments, part):
    assert_one_line(probe(*arguments), 2, part)


def test_gradients_that_are_not_finite_without_codecs_end_with_status_5(probe):
    status, _, stderr = probe("--set", "training.lr=1e30", "--warm-up", "3", "--set", "training.clip_norm=null")
    first, *_, last = stderr.splitlines()
    assert (status, first) == (5, "0 of 83 gradients: step 0, warm-up")
    assert last.startswith("tahq: ")
    assert "without any codec" in last


def test_too_little_memory_is_reported_with_advice(probe, monkeypatch):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    monkeypatch.setattr(probe_command, "measure", Mock(side_effect=error))
    assert_one_line(probe(), 4, "CUDA out of memory", "--batches 1")


def test_progress_names_the_gradient_and_the_time_left():
    now_s = 0.0
    stream = io.StringIO()
    progress = Progress(gradients_of(3, 1, 1, 2, 1), stream, lambda: now_s)
    for _ in range(5):
        now_s += 4.0
        progress.advance()
    assert stream.getvalue().splitlines() == [
        "0 of 5 gradients: step 3, warm-up",
        "2 of 5 gradients, 12 s left: step 4, batch 2 of 2, wire 1 of 1",
        "4 of 5 gradients, 4 s left: step 4, batch 1 of 2, wire 1 of 1",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tah / fixed:bits=6", ("tah", "fixed:bits=6")),
        ("tah/raw", ("tah", "raw")),
        ("  tah:int4=4/5/tah:int4=1/2  ", ("tah:int4=0.8", "tah:int4=0.5")),
        *((text, None) for text in ("tah", "tah / raw / raw", "tah:int4=4/5", "", "tah / raww")),
    ],
)
def test_wire_is_split_at_the_slash_between_two_codecs_or_refused(text, expected):
    if expected:
        assert parse_wire(text) == parse_wire(" / ".join(expected))
        return
    with pytest.raises(ConfigError, match=r"expected 'FORWARD / BACKWARD'|did you mean raw"):
        parse_wire(text)


def request(run: Run, **options) -> ProbeRequest:
    changes = (f"run.dir={run.folder.parent}",)
    return ProbeRequest(run.folder.parents[1] / "cluster.yaml", changes, ("tah / raw",), **options)


@pytest.mark.ci
def test_resume_continues_from_the_checkpoint_to_the_bit(run):
    setup = open_setup(request(run, resume=True))
    assert setup.start_step == 2
    assert all(torch.equal(p, run.weights[name]) for name, p in setup.model.parameters.items())
    probe = GradientProbe(setup.model, setup.batches, setup.wires, setup.update)
    probe.probe(2, 2)
    longer = tiny(**{**TWO_STAGES, "training": {"steps": 3}, "model": {**TWO_STAGES["model"], "vocab_size": 256}})
    expected = train_plainly(ClusterConfig.model_validate(longer)).weights
    assert [n for n, p in setup.model.parameters.items() if not torch.equal(p, expected[n])] == []


def test_weights_of_a_folder_are_read(run, tmp_path):
    done = finish(tmp_path, "tahq", "export", str(run.folder), "hf")
    assert done.returncode == 0, done.stderr
    setup = open_setup(request(run, weights=tmp_path / "hf"))
    assert setup.start_step == 0
    assert all(torch.equal(p, run.weights[name]) for name, p in setup.model.parameters.items())

    adapted = {**TWO_STAGES, "adapter": {"rank": 4, "dora": True}}
    beside, own = (
        open_setup(ProbeRequest(write_config(tmp_path, {**adapted, **model}), (), ("tah / raw",), weights=weights))
        for model, weights in (({}, tmp_path / "hf"), ({"model": {"path": str(tmp_path / "hf")}}, None))
    )
    assert any(name.endswith("lora_magnitude_vector.weight") for name in beside.model.weights)
    assert all(torch.equal(p, own.model.weights[name]) for name, p in beside.model.weights.items())


def test_another_model_than_the_checkpoints_is_refused(run, probe):
    outcome = probe("--resume", "--set", f"run.dir={run.folder.parent}", "--set", "model.num_heads=4")
    assert_one_line(outcome, 2, "model.num_heads")


@pytest.mark.acceptance
def test_run_of_low_rank_weights_is_probed_from_its_export_only(tmp_path):
    low_rank = {**TWO_STAGES, "training": {**TWO_STAGES["training"], "optimizer": "qgalore", "qgalore": {"rank": 8}}}
    trained = train(tmp_path, low_rank)
    with pytest.raises(UserError, match=r"trained by qgalore.*tahq export"):
        open_setup(request(trained, resume=True))
    done = finish(tmp_path, "tahq", "export", str(trained.folder), "hf")
    assert done.returncode == 0, done.stderr
    probed = finish(tmp_path, "tahq", "probe", "cluster.yaml", "--weights", "hf", "--steps", "1", "--wire", "tah / raw")
    assert probed.returncode == 0, probed.stderr
    assert "from hf, updated by AdamW in place of qgalore" in " ".join(probed.stdout.split())


WIRE = ProbedWire("tah:group=32", "fixed:bits=6,group=64,round=nearest")


def result(*errors: float, mean: float | None = None) -> WireResult:
    batches = tuple({"stage 0": ErrorSums(1.0, error, 0.0)} for error in errors)
    total = None if mean is None else {"stage 0": ErrorSums(4.0, 4.0 * mean, 0.0)}
    return WireResult(WIRE, (StepErrors(5, batches, total),))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (result(0.1, 0.2, mean=0.05), "δ = 0.8; error per step at most 0.2, below the paper's 0.4, of the expectation"),
        (result(0.1, 0.5, mean=0.2), "at most 0.5, NOT below the paper's 0.4, of the expectation at most 0.2, NOT b"),
        (result(0.1), "holds with δ = 0.9; error per step at most 0.1, below the paper's 0.4."),
        (result(0.1004), "holds with δ = 0.899;"),
        (result(0.3, 1.5, mean=0.2), "does not hold: an error of 1.5 is as large as the gradient itself"),
        (result(0.3, math.nan), "does not hold: with these codecs a gradient is NaN or infinite"),
    ],
)
def test_sentence_says_whether_the_assumption_holds(measured, expected):
    assert sentence(measured).startswith("tah:group=32 / fixed:bits=6: Assumption 4.4 ")
    assert expected in sentence(measured)


def test_row_has_bits_and_errors():
    """688 and 816 bytes for 1,024 elements; for M → ∞ (4 · 0.1 − 0.1 − 0.2) / 2 over (4 − 2) / 2; cosine 1/√1.2."""
    (row,) = error_rows([result(0.1, 0.2, mean=0.1)], (2, 8, 64))
    assert row == [1, "tah:group=32", "5.38", "fixed:bits=6", "6.38", "0.15", "0.2", "0.1", "0.05", "0.9129"]
