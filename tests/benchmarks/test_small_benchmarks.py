"""What the benchmarks of memory, optimizers and the runtime count, small and on the CPU."""

import importlib
import math
import subprocess
import sys
from pathlib import Path

import bench_largest_model
import bench_launched_memory
import bench_models
import bench_optimizer_step
import pytest
import torch
from bench_runtime import MICRO_BATCHES, measure_actions
from coat_norms import norm_variants
from layer_parts import Layer, Size, make_layer, saved_by_operator
from optimizer_rows import entries, llama_shapes, make_parameters, state_nbytes
from trace_overhead import overheads

from tahq.memory.config import AgoqConfig, CoatConfig, Fp8Config
from tahq.observe.trace_file import FIRST_STAGE_PID
from tahq.worker.assembly import resolved_spec

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZE = Size(hidden=192, inner=512, heads=3, batch=1, seq_len=64)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("bench_*.py")))
def test_benchmark_finds_what_it_imports(name):
    importlib.import_module(name)


@pytest.mark.parametrize(
    ("config", "units"),
    [
        (None, {"RMSNorm": 6.0, "Act Func": 8.0, "FlashAttn": 4.0, "Linear": 2 + 8 / 3}),
        (CoatConfig(), {"RMSNorm": 1.125, "Act Func": 3.0, "FlashAttn": 4.0, "Linear": 1 + 4 / 3}),
        (Fp8Config(), {"RMSNorm": 6.0, "Act Func": 8.0, "FlashAttn": 4.0, "Linear": 1 + 4 / 3}),
        (AgoqConfig(), {"RMSNorm": 4.125 / 8, "Act Func": 2 * 8 / 3 * 4.125 / 16, "FlashAttn": 4.0}),
    ],
    ids=["bf16", "coat", "fp8", "agoq"],
)
def test_layer_benchmark_counts_the_bytes_that_a_layer_saves(config, units):
    layer = Layer(SIZE, CPU, make_layer(SIZE, CPU, config, master=False), master=False)
    found = {operator: nbytes / SIZE.unit for operator, nbytes in saved_by_operator(layer).items()}
    assert found.keys() == units.keys()
    # statistics of norms and attention and the rotary tables come on top: for 64 tokens they count
    rest = {"RMSNorm": 0.03, "FlashAttn": 0.75}
    for operator, expected in units.items():
        assert expected <= found[operator] + 1e-9
        assert found[operator] <= expected + rest.get(operator, 0.001)
    for work in norm_variants(8, 64, CPU).values():
        work()


@pytest.mark.parametrize(("wanted", "tolerance"), [(1e6, 0.1), (1e9, 0.03), (3e8, 0.1)])
def test_shapes_have_about_the_wanted_number_of_parameters(wanted, tolerance):
    assert sum(map(math.prod, llama_shapes(wanted))) == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("torch AdamW, loop", 8 * 8192),
        ("adamw8bit", 2 * 8192 + 2 * 4 * 32),
        ("torch AdamW of bf16, loop", 4 * 8192),
    ],
)
def test_bytes_of_states_are_counted_without_counters(name, nbytes):
    (entry,) = (entry for entry in entries(CPU) if entry.name == name)
    row = bench_optimizer_step.prepare(entry, make_parameters([(64, 128)], entry.dtype, CPU))
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


@pytest.mark.parametrize(
    ("size", "precision", "tokens_per_s", "share"),
    [("0.5b", "bf16", 149_900, 0.467), ("1.5b", "fp8", 72_900, 0.412), ("7b", "bf16", 13_811, 0.601)],
)
def test_shares_of_the_peak_are_those_that_llmq_prints(size, precision, tokens_per_s, share):
    # its benchmarks/H100x1.md
    work = bench_models.Work("tahq-bf16", size, "cpu", 1024, 8, 4, 6, None, profile=False)
    spec, step_s = resolved_spec(work.config({}, "bf16"), None), work.tokens / tokens_per_s
    found = bench_models.peak_share(spec, work.seq_len, work.tokens, precision, step_s)
    assert found == pytest.approx(share, abs=0.003)


@pytest.mark.acceptance
def test_memory_options_are_within_three_percent_of_all_choices(tmp_path):
    out = tmp_path / "table.md"
    command = [sys.executable, str(BENCHMARKS / "bench_memory_plans.py"), "--problems", "8", "--output", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    (row,) = (line.split("|") for line in out.read_text().splitlines() if line.startswith("| 8 |"))
    assert float(row[4].strip(" %")) <= 3.0


@pytest.mark.acceptance
def test_benchmark_of_models_measures_every_variant(tmp_path):
    out = tmp_path / "table.md"
    options = ["--small", "--device", "cpu", "--variants", *bench_models.VARIANTS, "--output", str(out)]
    command = [sys.executable, str(BENCHMARKS / "bench_models.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")] for line in out.read_text().splitlines()]
    rates = {cells[1]: cells[4] for cells in rows if cells[1:] and cells[1] in bench_models.VARIANTS}
    assert rates.keys() == set(bench_models.VARIANTS)
    assert all(float(rate.replace(",", "")) > 0 for rate in rates.values())


@pytest.mark.acceptance
def test_benchmark_of_launched_runs_reports_every_kind_of_run(tmp_path):
    out = tmp_path / "table.md"
    runs = ["llama-qgalore", "qwen-offload", "llama-70b-stage", "planned-1.5b-16gb"]
    command = [sys.executable, str(BENCHMARKS / "bench_launched_memory.py"), "--small", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--runs", *runs, "--output", str(out)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in out.read_text().splitlines()]
    rates = {cells[0]: cells[bench_launched_memory.COLUMNS.index("tokens/s")] for cells in rows if cells[0] in runs}
    assert all(float(rates[name].replace(",", "")) > 0 for name in runs)


@pytest.mark.acceptance
def test_benchmark_of_adapters_has_pefts_losses(tmp_path):
    out = tmp_path / "table.md"
    options = ["--small", "--device", "cpu", "--precision", "fp32", "--steps", "2", "--output", str(out)]
    command = [sys.executable, str(BENCHMARKS / "bench_adapters.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in out.read_text().splitlines() if line.startswith("| tahq-")]
    assert len(rows) == 4
    for row in rows:  # a coded scale may round another way than in bitsandbytes
        assert float(row[-2]) < (1e-4 if "qlora" in row[1] else 1e-5)


def test_benchmark_of_the_largest_model_needs_more_without_each_option():
    estimates = {removed: bench_largest_model.estimate(removed, 1, 16) for removed in bench_largest_model.REMOVED}
    (num_parameters, card, _), *others = estimates.values()
    assert num_parameters == 16 * (4 * 2048**2 + 3 * 2048 * 5632 + 2 * 2048) + 2048 + 2 * 2048 * 152_064
    assert all(other[0] == num_parameters and other[1] > card for other in others)


@pytest.mark.acceptance
def test_runtime_benchmark_measures_every_action_of_every_stage():
    cost = measure_actions(2, 2)
    assert len(cost.actions_ms) == 2 * MICRO_BATCHES * 2 * 2
    assert len(cost.chain_ms) == 2
    assert all(ms > 0 for ms in (cost.core_ms, *cost.actions_ms, *cost.chain_ms))
    assert {"forward", "backward", "wait", "beside:encode", "beside:decode"} <= cost.shares.keys()


def span(name, category, begin_ms, end_ms, pid=FIRST_STAGE_PID, tid=1):
    times = {"ts": 1e3 * begin_ms, "dur": 1e3 * (end_ms - begin_ms)}
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, **times}


def test_trace_overhead_counts_every_moment_of_a_step_once():
    names = [
        {"ph": "M", "name": "thread_name", "pid": FIRST_STAGE_PID, "tid": tid, "args": {"name": name}}
        for tid, name in ((1, "compute"), (2, "encode"))
    ]
    spans = [
        span("step 3", "step", 0, 100, pid=1),
        span("data", "data", -20, 5),  # what lies outside of the step is not part of it
        span("wait for stage 1: gradients 0", "wait", 5, 20),
        span("wait for the codec: gradients 0", "wait", 20, 22),
        span("0B0", "backward", 21, 71),  # begins while the codec is still waited for
        span("encode: gradients 0", "encode", 0, 100, tid=2),  # beside: no time of the step
        span("wait for room: gradients 1", "wait", 70, 80),
        span("commit", "commit", 85, 100),
    ]
    (stage,) = overheads({"traceEvents": [*names, *spans]})
    shares = (stage.compute, stage.frames, stage.update, stage.commit, stage.codec, stage.rest)
    assert shares == pytest.approx((0.50, 0.24, 0.05, 0.15, 0.01, 0.05))
    assert stage.overhead == pytest.approx(0.06)


@pytest.mark.ci
def test_collectives_by_copies_are_those_of_the_library_and_each_has_its_row(tmp_path):
    sizes = ("--gpus", "3", "--mib", "1.5", "--size", "32", "--repeats", "2")
    command = [sys.executable, str(BENCHMARKS / "bench_copy_engines.py"), "--device", "cpu", *sizes]
    subprocess.run([*command, "--output", str(tmp_path / "result.md")], check=True, timeout=200)
    rows = [line.split(" | ")[0].strip("| ") for line in (tmp_path / "result.md").read_text().splitlines()]
    assert (rows.count("all-gather"), rows.count("reduce-scatter")) == (2, 2)
