"""Tensors out of files: what is taken, what is refused, and that nothing in a file is executed."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tahq.errors import UserError
from tahq_launch.tensor_files import load_tensors


def test_safetensors_gives_the_floating_point_tensors(tmp_path):
    made = {"a": torch.ones(2, 8, dtype=torch.bfloat16), "scalar": torch.tensor(1.0), "ids": torch.arange(3)}
    save_file(made, tmp_path / "x.safetensors")
    taken = load_tensors(tmp_path / "x.safetensors")
    assert taken.keys() == {"a"}
    assert torch.equal(taken["a"], made["a"])


def test_npy_is_named_like_its_file_and_fp64_becomes_fp32(tmp_path):
    np.save(tmp_path / "boundary.npy", np.linspace(0, 1, 6).reshape(2, 3))
    (name, x), *rest = load_tensors(tmp_path / "boundary.npy").items()
    assert (name, x.dtype, list(x.shape), rest) == ("boundary", torch.float32, [2, 3], [])


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("code from the file was run",))


def test_nothing_in_a_file_is_executed(tmp_path):
    np.save(tmp_path / "trap.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"trap\.npy"):
        load_tensors(tmp_path / "trap.npy")


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
