"""`tahq codec …` as somebody meets it: tables, JSON, a plot, and one line for each mistake."""

import builtins
import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tahq.quant import get_codec
from tahq_launch import cli


@pytest.fixture
def tahq(tmp_path, monkeypatch, capsys):
    """tahq("list", …) runs `tahq codec list …` inside this process, in an empty folder: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tahq", "codec", *arguments])
        status = cli.main()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def tensors(tmp_path):
    made = {
        "act": torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "grad": torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(1)) * 1e-6,
        "steps": torch.arange(4),
    }
    save_file(made, tmp_path / "x.safetensors")
    return made


def write_stream(path, spec, shape=(2, 3, 100)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    path.write_bytes(bytes(get_codec(spec, backend="reference").encode(x).tolist()))


def assert_one_line(outcome, *parts):
    status, _, stderr = outcome
    assert status == 2, stderr
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("tahq: ")
    for part in parts:
        assert part in stderr


def test_group_alone_lists_its_commands(tahq):
    status, stdout, stderr = tahq()
    assert (status, stderr) == (0, "")
    assert all(f"  {name} " in stdout for name in ("list", "inspect", "compare"))


@pytest.mark.parametrize("command", ["list", "inspect", "compare"])
def test_help_has_an_example_and_defaults(tahq, command):
    status, stdout, _ = tahq(command, "--help")
    assert status == 0
    assert f"Example: tahq codec {command}" in stdout
    assert "Default:" in stdout


# -- list ----------------------------------------------------------------------------------------


def test_list_has_every_codec_with_bits_and_parameters(tahq):
    status, stdout, _ = tahq("list")
    assert status == 0
    rows = {line.split()[0]: line.split() for line in stdout.splitlines()[2:]}
    assert rows["tah"][1:3] == ["4.409", "group=64,int4=0.8,tau=2,low=3,high=4,alloc=group,select=high,adaptive=on"]
    assert rows["fixed"][1] == "8.250"
    assert {"raw", "aqsgd"} < rows.keys()


def test_list_as_json_for_another_shape(tahq):
    _, stdout, _ = tahq("list", "--json", "--shape", "3,100")
    rows = {row["codec"]: row for row in map(json.loads, stdout.splitlines())}
    assert rows["tah"]["bits_per_element"] == 8 * get_codec("tah").encoded_nbytes((3, 100)) / 300
    assert rows["aqsgd"]["stateful"]
    assert not rows["tah"]["stateful"]


def test_table_is_drawn_where_somebody_looks(tahq, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, stdout, _ = tahq("list")
    assert status == 0
    assert "──" in stdout
    assert "4.409" in stdout


@pytest.mark.parametrize(("shape", "part"), [("2,x", "whole numbers"), ("0,4", "no elements"), ("-1,4", "shape")])
def test_list_refuses_a_shape_that_is_none(tahq, shape, part):
    assert_one_line(tahq("list", f"--shape={shape}"), part)


# -- inspect -------------------------------------------------------------------------------------


def test_inspect_shows_header_sections_statistics_and_bytes(tahq, tmp_path):
    write_stream(tmp_path / "x.tah", "tah")
    status, stdout, stderr = tahq("inspect", "x.tah", "--spec", "tah", "--shape", "2,3,100", "--hex", "48")
    assert (status, stderr) == (0, "")
    words = " ".join(stdout.split())
    assert "2 log2 G 6 G, channels per tile" in words
    assert "zero-point 64 24 8 fp16 per tile" in words
    assert "00  01 00 06 03 04" in stdout
    assert "bit map\n  20  " in stdout
    assert "share of allocation tiles with H bits" in stdout
    assert "The stream is valid: it was decoded in full." in stdout


def test_inspect_without_a_spec_says_what_it_can_and_what_is_missing(tahq, tmp_path):
    write_stream(tmp_path / "x.bin", "fixed:bits=6")
    status, stdout, _ = tahq("inspect", "x.bin", "--hex", "16")
    assert status == 0
    assert "Header, if fixed wrote it" in stdout
    assert "3 bits 6 of a code" in " ".join(stdout.split())
    assert "00  01 00 06 06" in stdout
    assert "--spec tah --shape" in stdout
    assert "valid:" not in stdout


def test_inspect_without_a_shape_shows_the_header(tahq, tmp_path):
    write_stream(tmp_path / "x.tah", "tah")
    status, stdout, _ = tahq("inspect", "x.tah", "--spec", "tah")
    assert status == 0
    assert "need the shape too" in stdout
    assert "Sections of" not in stdout


def test_inspect_shows_a_damaged_stream_and_refuses_it(tahq, tmp_path):
    write_stream(tmp_path / "x.tah", "tah")
    damaged = bytearray((tmp_path / "x.tah").read_bytes())
    damaged[40] = damaged[41] = 0xFF
    (tmp_path / "x.tah").write_bytes(damaged)
    outcome = tahq("inspect", "x.tah", "--spec", "tah", "--shape", "2,3,100", "--hex", "16")
    assert_one_line(outcome, "x.tah: tah:", "a scale is not finite")
    assert "zero-point" in outcome[1]
    assert "valid:" not in outcome[1]


def test_inspect_of_a_stateful_codec_says_what_it_did_not_do(tahq, tmp_path):
    write_stream(tmp_path / "x.bin", "aqsgd")
    status, stdout, _ = tahq("inspect", "x.bin", "--spec", "aqsgd", "--shape", "2,3,100")
    assert status == 0
    assert "what the ends of its cut remember" in stdout


def test_inspect_of_raw_bytes_has_no_header(tahq, tmp_path):
    write_stream(tmp_path / "x.bin", "raw")
    status, stdout, _ = tahq("inspect", "x.bin", "--spec", "raw", "--shape", "2,3,100")
    assert status == 0
    assert "Header" not in stdout
    _, stdout, _ = tahq("inspect", "x.bin")
    assert "No codec with a header" in stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nowhere.tah"], "nowhere.tah: No such file"),
        (["x.tah", "--shape", "2,3,100"], "--spec"),
        (["x.tah", "--spec", "taf"], "did you mean tah?"),
        (["x.tah", "--spec", "tah", "--shape", "2,3,200"], "the shape needs"),
        (["x.tah", "--spec", "tah:alloc=512", "--shape", "2,3,100"], "alloc=512"),
        (["x.tah", "--hex", "-1"], "--hex"),
        (["x.tah", "--spec", "eden:bits=" + "9" * 310], "bits must be a number from 1 to 8; got 999"),
        (["x.tah", "--spec", "aqsgd:cache=none", "--shape", "1000000000000,8"], "the shape needs"),
    ],
)
def test_inspect_mistake_is_one_line(tahq, tmp_path, arguments, part):
    write_stream(tmp_path / "x.tah", "tah")
    assert_one_line(tahq("inspect", *arguments), part)


# -- compare -------------------------------------------------------------------------------------


def compare(tahq, *arguments):
    return tahq("compare", *arguments, "--backend", "reference")


def test_compare_prints_a_table_for_every_tensor(tahq, tensors):
    status, stdout, stderr = compare(tahq, "x.safetensors", "--spec", "tah", "--spec", "fixed:bits=6")
    assert status == 0
    assert stderr == (
        "x.safetensors: steps is left out: codecs take fp32, bf16 and fp16 tensors [..., C]; it is torch.int64 [4]\n"
    )
    assert "act: [2, 8, 64], bfloat16, cpu" in stdout
    assert "grad: [2, 8, 100], float32, cpu" in stdout
    assert "steps" not in stdout
    bits = [line.split()[3] for line in stdout.splitlines() if line.startswith("  fixed:bits=6")]
    sizes = [
        8 * get_codec("fixed:bits=6").encoded_nbytes(x.shape) / x.numel() for x in (tensors["act"], tensors["grad"])
    ]
    assert bits == [f"{size:.3f}" for size in sizes]


def test_compare_leaves_out_what_nothing_can_be_measured_on(tahq, tensors, tmp_path):
    bad = {"bias": torch.zeros(64), "broken": torch.tensor([1.0, torch.nan]), "none": torch.zeros(0, 8)}
    save_file({"act": tensors["act"], **bad}, tmp_path / "model.safetensors")
    status, stdout, stderr = compare(tahq, "model.safetensors", "--spec", "tah", "--json")
    assert (status, [json.loads(line)["tensor"] for line in stdout.splitlines()]) == (0, ["act"])
    assert [line.split(" is left out: ")[0] for line in stderr.splitlines()] == [
        f"model.safetensors: {name}" for name in bad
    ]
    asked_for = compare(tahq, "model.safetensors", "--tensor", "act", "--tensor", "bias", "--spec", "tah")
    assert_one_line(asked_for, "model.safetensors: bias: codecs are compared on a tensor with values")
    assert asked_for[1] == ""


def test_compare_as_json_lines(tahq, tensors):
    _, stdout, _ = compare(
        tahq, "x.safetensors", "--tensor", "grad", "--spec", "raw:dtype=fp16", "--spec", "tah", "--json"
    )
    raw, tah = map(json.loads, stdout.splitlines())
    assert (raw["tensor"], raw["shape"], raw["dtype"]) == ("grad", [2, 8, 100], "float32")
    assert (raw["spec"], raw["nbytes"]) == ("raw:dtype=fp16", 3200)
    assert 0 < raw["relative_error"] < tah["relative_error"] < 0.3


def test_compare_writes_an_infinite_error_as_null(tahq, tmp_path):
    np.save(tmp_path / "big.npy", np.full((2, 8), 1e30))
    _, stdout, _ = compare(tahq, "big.npy", "--spec", "raw:dtype=fp16", "--json")
    assert json.loads(stdout)["relative_error"] is None


def test_compare_draws_a_plot(tahq, tensors, tmp_path):
    pytest.importorskip("matplotlib")
    status, _, _ = compare(tahq, "x.safetensors", "--plot", "out.png")
    assert status == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_is_refused_before_anything_is_measured(tahq, tensors, monkeypatch):
    monkeypatch.setattr("tahq_launch.analysis.codec_comparison.find_spec", lambda name: None)
    outcome = compare(tahq, "x.safetensors", "--plot", "out.png")
    assert_one_line(outcome, "--plot needs matplotlib", "tahq[plots]")
    assert outcome[1] == ""


def test_plot_in_an_unknown_format_is_one_line(tahq, tensors):
    pytest.importorskip("matplotlib")
    options = ("--tensor", "act", "--spec", "tah", "--plot", "out.docx")
    assert_one_line(compare(tahq, "x.safetensors", *options), "out.docx", "docx")


def test_comparing_needs_no_matplotlib(tahq, tensors, monkeypatch):
    real = builtins.__import__

    def no_matplotlib(name, *rest, **options):
        assert not name.startswith("matplotlib")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    assert compare(tahq, "x.safetensors", "--spec", "tah")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nowhere.npy"], "nowhere.npy: No such file"),
        (["x.safetensors", "--tensor", "weights"], "no tensor 'weights'; there are act, grad"),
        (["x.safetensors", "--tensor", "steps"], "codecs take fp32, bf16 and fp16"),
        (["x.safetensors", "--spec", "eden?"], "no codec 'eden?'"),
        (["x.safetensors", "--spec", "fixed:bits=40"], "bits must be"),
        (["x.safetensors", "--draws", "1"], "--draws"),
        (["x.safetensors", "--device", "abacus"], "--device abacus cannot be used"),
        (["zeros.npy"], "zeros.npy: zeros: codecs are compared on"),
    ],
)
def test_compare_mistake_is_one_line(tahq, tensors, tmp_path, arguments, part):
    np.save(tmp_path / "zeros.npy", np.zeros((2, 8)))
    assert_one_line(compare(tahq, *arguments), part)


def test_unknown_backend_is_one_line(tahq, tensors):
    assert_one_line(tahq("compare", "x.safetensors", "--backend", "gpu"), "backend must be", "'gpu'")
