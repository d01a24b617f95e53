"""`tahq codec list`, `inspect` and `compare`: tables, JSON, a plot, files of tensors, and one line for each mistake."""

import io
import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tahq.errors import UserError
from tahq.quant import get_codec
from tahq_launch.analysis.codec_comparison import load_tensors

from .conftest import assert_one_line


@pytest.fixture
def codec(tahq):
    """codec("list", …) runs `tahq codec list …` inside this process: (status, stdout, stderr)."""
    return lambda *arguments: tahq("tahq", "codec", *arguments)


def test_list_has_every_codec_with_bits_and_parameters(codec):
    status, stdout, _ = codec("list")
    assert status == 0
    rows = {line.split()[0]: line.split() for line in stdout.splitlines()[2:]}
    assert rows["tah"][1:3] == ["4.409", "group=64,int4=0.8,tau=2,low=3,high=4,alloc=group,select=high,adaptive=on"]
    assert rows["fixed"][1] == "8.250"
    assert {"raw", "aqsgd"} < rows.keys()


def test_list_as_json_is_for_any_shape_with_elements(codec):
    _, stdout, _ = codec("list", "--json", "--shape", "3,100")
    rows = {row["codec"]: row for row in map(json.loads, stdout.splitlines())}
    assert rows["tah"]["bits_per_element"] == 8 * get_codec("tah").encoded_nbytes((3, 100)) / 300
    assert (rows["aqsgd"]["stateful"], rows["tah"]["stateful"]) == (True, False)
    for shape, part in (("2,x", "whole numbers"), ("0,4", "no elements"), ("-1,4", "shape")):
        assert_one_line(codec("list", f"--shape={shape}"), 2, part)


@pytest.fixture
def inspect(codec, tmp_path):
    """inspect("tah", "--hex", "48") writes a stream of that codec and runs `tahq codec inspect` on it."""
    x = torch.randn((2, 3, 100), generator=torch.Generator().manual_seed(0))

    def run(spec: str, *arguments: str, damage: bool = False) -> tuple[int, str, str]:
        stream = bytearray(get_codec(spec, backend="reference").encode(x).tolist())
        if damage:
            stream[40] = stream[41] = 0xFF
        (tmp_path / "x.bin").write_bytes(stream)
        return codec("inspect", "x.bin", *arguments)

    return run


KNOWN = ("--shape", "2,3,100", "--hex", "48")


@pytest.mark.parametrize(
    ("name", "spec", "arguments"),
    [
        ("tah", "tah", ("--spec", "tah", *KNOWN)),
        ("without_a_shape", "tah", ("--spec", "tah")),
        ("stateful", "aqsgd", ("--spec", "aqsgd", *KNOWN)),
        ("without_a_header", "raw", ("--spec", "raw", *KNOWN)),
        ("guessed", "fixed:bits=6", ("--hex", "16")),
        ("unknown", "raw", ()),
    ],
)
def test_inspected_stream_is_shown_as_far_as_codec_and_shape_allow(inspect, golden, name, spec, arguments):
    status, stdout, stderr = inspect(spec, *arguments)
    assert (status, stderr) == (0, "")
    golden(f"codec_inspect/{name}.txt", stdout)


def test_inspect_shows_a_damaged_stream_and_refuses_it(inspect):
    outcome = inspect("tah", "--spec", "tah", *KNOWN, damage=True)
    assert_one_line(outcome, 2, "x.bin: tah:", "a scale is not finite")
    assert "zero-point" in outcome[1]
    assert "valid:" not in outcome[1]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--shape", "2,3,100"], "--codec"),
        (["--spec", "taf"], "did you mean tah?"),
        (["--spec", "tah", "--shape", "2,3,200"], "the shape needs"),
        (["--hex", "-1"], "--hex"),
    ],
)
def test_inspect_mistake_is_one_line(inspect, arguments, part):
    assert_one_line(inspect("tah", *arguments), 2, part)


@pytest.fixture
def tensors(tmp_path):
    made = {
        "act": torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "grad": torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(1)) * 1e-6,
        "steps": torch.arange(4),
    }
    save_file(made, tmp_path / "x.safetensors")
    return made


@pytest.fixture
def compare(codec, tensors):
    """compare("x.safetensors", …) runs `tahq codec compare x.safetensors …` with the reference codecs."""
    return lambda *arguments: codec("compare", *arguments, "--backend", "reference")


def test_compare_prints_a_table_for_every_tensor_that_codecs_take(compare, tensors, tmp_path):
    bad = {"bias": torch.zeros(64), "broken": torch.tensor([1.0, torch.nan]), "none": torch.zeros(0, 8)}
    save_file(tensors | bad, tmp_path / "model.safetensors")
    status, stdout, stderr = compare("model.safetensors", "--spec", "tah", "--spec", "fixed:bits=6")
    assert status == 0
    left_out = [line.split(" is left out: ")[0] for line in stderr.splitlines()]
    assert left_out == [f"model.safetensors: {name}" for name in (*bad, "steps")]
    assert stderr.endswith("codecs take fp32, bf16 and fp16 tensors [..., C]; it is torch.int64 [4]\n")
    assert "act: [2, 8, 64], bfloat16, cpu" in stdout
    bits = [line.split()[3] for line in stdout.splitlines() if line.startswith("  fixed:bits=6")]
    shapes = [tensors[name].shape for name in ("act", "grad")]
    assert bits == [f"{8 * get_codec('fixed:bits=6').encoded_nbytes(s) / s.numel():.3f}" for s in shapes]
    asked_for = compare("model.safetensors", "--tensor", "act", "--tensor", "bias", "--spec", "tah")
    assert_one_line(asked_for, 2, "model.safetensors: bias: comparing codecs needs a tensor with nonzero values")
    assert asked_for[1] == ""


def test_compare_as_json_lines(compare, tmp_path):
    specs = ("--spec", "raw:dtype=fp16", "--spec", "tah")
    _, stdout, _ = compare("x.safetensors", "--tensor", "grad", *specs, "--json")
    raw, tah = map(json.loads, stdout.splitlines())
    assert (raw["tensor"], raw["shape"], raw["dtype"]) == ("grad", [2, 8, 100], "float32")
    assert (raw["spec"], raw["nbytes"]) == ("raw:dtype=fp16", 3200)
    assert 0 < raw["relative_error"] < tah["relative_error"] < 0.3
    np.save(tmp_path / "big.npy", np.full((2, 8), 1e30))
    _, stdout, _ = compare("big.npy", "--spec", "raw:dtype=fp16", "--json")
    assert json.loads(stdout)["relative_error"] is None


@pytest.mark.ci
def test_compare_draws_a_plot(compare, tmp_path):
    pytest.importorskip("matplotlib")
    assert compare("x.safetensors", "--plot", "out.png")[0] == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    options = ("--tensor", "act", "--spec", "tah", "--plot", "out.docx")
    assert_one_line(compare("x.safetensors", *options), 2, "out.docx", "docx")


def test_without_matplotlib_only_a_plot_is_refused_and_before_anything_is_measured(compare, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert compare("x.safetensors", "--spec", "tah")[0] == 0
    monkeypatch.setattr("tahq_launch.analysis.codec_comparison.find_spec", lambda name: None)
    outcome = compare("x.safetensors", "--plot", "out.png")
    assert_one_line(outcome, 2, "--plot needs matplotlib", "tahq[plots]")
    assert outcome[1] == ""


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nowhere.npy"], "nowhere.npy: No such file"),
        (["x.bin"], ".safetensors, .npy files; got .bin"),
        (["x.safetensors", "--tensor", "weights"], "no tensor 'weights'; there are act, grad"),
        (["x.safetensors", "--tensor", "steps"], "codecs take fp32, bf16 and fp16"),
        (["x.safetensors", "--spec", "eden?"], "no codec 'eden?'"),
        (["x.safetensors", "--draws", "1"], "--draws"),
        (["x.safetensors", "--device", "abacus"], "--device abacus cannot be used"),
        (["zeros.npy"], "zeros.npy: zeros: comparing codecs needs"),
    ],
)
def test_compare_mistake_is_one_line(compare, tmp_path, arguments, part):
    np.save(tmp_path / "zeros.npy", np.zeros((2, 8)))
    assert_one_line(compare(*arguments), 2, part)


def test_missing_stream_or_unknown_backend_is_one_line(codec, tensors):
    assert_one_line(codec("inspect", "nowhere.tah"), 2, "nowhere.tah: No such file")
    assert_one_line(codec("compare", "x.safetensors", "--backend", "gpu"), 2, "backend must be", "'gpu'")


def test_safetensors_keep_their_types_and_npy_in_fp64_becomes_fp32(tmp_path):
    made = {"a": torch.ones(2, 8, dtype=torch.bfloat16), "scalar": torch.tensor(1.0), "ids": torch.arange(3)}
    save_file(made, tmp_path / "x.safetensors")
    taken, left_out = load_tensors(tmp_path / "x.safetensors")
    assert (taken.keys(), left_out.keys()) == ({"a"}, {"ids", "scalar"})
    assert torch.equal(taken["a"], made["a"])
    np.save(tmp_path / "boundary.npy", np.linspace(0, 1, 6).reshape(2, 3))
    ((name, x),) = load_tensors(tmp_path / "boundary.npy")[0].items()
    assert (name, x.dtype, list(x.shape)) == ("boundary", torch.float32, [2, 3])


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("code from the file was run",))


def npy(array: np.ndarray, save=np.save, **options) -> bytes:
    file = io.BytesIO()
    save(file, array, **options)
    return file.getvalue()


def huge_npy() -> bytes:
    """The header of 5 PB, and 64 bytes."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (10**13, 64)})
    return file.getvalue() + bytes(64)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("x.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{}", ""),
        ("x.npy", b"\x93NUMPY\x01\x00", ""),
        ("x.npy", b"", ""),
        ("x.npy", npy(np.zeros(3), np.savez), "an archive of several arrays"),
        ("x.npy", huge_npy(), "does not fit into memory, or is damaged: .*640000000000000"),
        ("x.npy", npy(np.array([Trap()], dtype=object), allow_pickle=True), ""),
        ("x.npy", npy(np.zeros((2, 8), "V2")), r"no equivalent of its type \|V2; convert it to float32"),
        ("x.npy", npy(np.zeros((2, 8), [("x", "f4")])), "'x'"),
    ],
    ids=["cut safetensors", "cut npy", "empty npy", "npz", "larger than memory", "pickled code", "V2", "structured"],
)
def test_file_that_is_damaged_or_has_no_tensors_is_named_and_never_executed(tmp_path, name, content, part):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.*{part}"):
        load_tensors(tmp_path / name)
