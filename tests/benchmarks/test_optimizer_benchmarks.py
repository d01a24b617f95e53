"""The optimizers' benchmarks, small and on the CPU: the bytes that they count, and their tables."""

import math
import subprocess
import sys
from pathlib import Path

import bench_optimizer_step
import pytest
import torch
from optimizer_rows import Entry, entries, llama_shapes, make_parameters, state_nbytes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.mark.parametrize(("wanted", "tolerance"), [(1e6, 0.1), (1e9, 0.03), (3e8, 0.1)])
def test_shapes_have_about_the_wanted_number_of_parameters(wanted, tolerance):
    assert sum(map(math.prod, llama_shapes(wanted))) == pytest.approx(wanted, rel=tolerance)


def named(name: str) -> Entry:
    (found,) = (entry for entry in entries(CPU) if entry.name == name)
    return found


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("torch AdamW, loop", 8 * 8192),
        ("adamw_bf16", 4 * 8192),
        ("adamw8bit", 2 * 8192 + 2 * 4 * 32),
        ("torch AdamW of bf16, loop", 4 * 8192),
    ],
)
def test_bytes_of_states_are_counted_without_counters(name, nbytes):
    entry = named(name)
    parameters = make_parameters([(64, 128)], entry.dtype, CPU)
    row = bench_optimizer_step.prepare(entry, parameters)
    assert row.state_nbytes == nbytes
    assert row.moved_nbytes == 3 * 8192 * entry.dtype.itemsize + 2 * nbytes


def test_tensors_that_states_share_are_counted_once():
    shared = torch.zeros(10)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3)) for _ in range(2)])
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter] = {"table": shared, "own": {"inside": torch.zeros(5)}, "step": torch.zeros(())}
    assert state_nbytes(optimizer) == 40 + 2 * 20


@pytest.mark.acceptance
@pytest.mark.parametrize("script", ["bench_optimizer_step.py", "bench_optimizer_memory.py"])
def test_a_small_run_writes_its_table(tmp_path, script):
    out = tmp_path / "table.md"
    few = ["--repeats", "1", "--only", "loop", "8bit"] if "step" in script else []
    command = [sys.executable, str(BENCHMARKS / script), "--parameters", "6e5", "--device", "cpu", *few]
    done = subprocess.run([*command, "--output", str(out)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in out.read_text().splitlines() if line.startswith("| adamw8bit"))
    assert "| 2.0" in line
