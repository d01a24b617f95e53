"""Tensors out of files: what is taken, what is refused, and that nothing in a file is executed."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tahq.errors import UserError
from tahq_launch.analysis.codec_comparison import load_tensors


def test_safetensors_gives_the_floating_point_tensors(tmp_path):
    made = {"a": torch.ones(2, 8, dtype=torch.bfloat16), "scalar": torch.tensor(1.0), "ids": torch.arange(3)}
    save_file(made, tmp_path / "x.safetensors")
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert loaded.taken.keys() == {"a"}
    assert torch.equal(loaded.taken["a"], made["a"])
    assert loaded.left_out.keys() == {"ids", "scalar"}
    assert loaded.left_out["ids"].endswith("it is torch.int64 [3]")


def test_npy_is_named_like_its_file_and_fp64_becomes_fp32(tmp_path):
    np.save(tmp_path / "boundary.npy", np.linspace(0, 1, 6).reshape(2, 3))
    (name, x), *rest = load_tensors(tmp_path / "boundary.npy").taken.items()
    assert (name, x.dtype, list(x.shape), rest) == ("boundary", torch.float32, [2, 3], [])


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("code from the file was run",))


def test_nothing_in_a_file_is_executed(tmp_path):
    np.save(tmp_path / "trap.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"trap\.npy"):
        load_tensors(tmp_path / "trap.npy")


@pytest.mark.parametrize(
    ("array", "part"),
    [
        (np.zeros((2, 8), "V2"), r"no such type as its \|V2; convert it to float32"),
        (np.zeros((2, 8), np.longdouble), "float128"),
        (np.array([["a", "b"]]), "<U1"),
        (np.zeros((2, 8), [("x", "f4")]), "'x'"),
        (np.zeros((2, 8), "datetime64[s]"), "datetime64"),
    ],
    ids=["V2", "longdouble", "text", "structured", "datetime"],
)
def test_array_of_a_type_that_torch_lacks_is_refused(tmp_path, array, part):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(UserError, match=rf"x\.npy is no readable \.npy file: .*{part}"):
        load_tensors(tmp_path / "x.npy")


def test_several_arrays_under_the_suffix_of_one_are_refused(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    (tmp_path / "x.npz").rename(tmp_path / "x.npy")
    with pytest.raises(UserError, match="an archive of several arrays"):
        load_tensors(tmp_path / "x.npy")


def test_array_that_says_it_is_larger_than_memory_is_refused(tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (10**13, 64)})
        file.write(bytes(64))
    with pytest.raises(UserError, match=r"x\.npy does not fit into memory, or is damaged: .*640000000000000"):
        load_tensors(tmp_path / "x.npy")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{}"),
        ("x.safetensors", b""),
        ("x.npy", b"\x93NUMPY\x01\x00"),
        ("x.npy", b""),
    ],
)
def test_damaged_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        load_tensors(tmp_path / name)


def test_other_suffixes_and_missing_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"\.safetensors, \.npy files; got \.bin"):
        load_tensors(tmp_path / "x.bin")
    for suffix in ("safetensors", "npy"):
        with pytest.raises(UserError, match="No such file"):
            load_tensors(tmp_path / f"x.{suffix}")
