"""NaN that only one stage sees, once: all stages skip the step, the batch is kept, and the run goes on."""

import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from support.runs import Run, environment, start, tiny, train, write_config

pytestmark = pytest.mark.ci

STEPS, DISTURBED = 5, 3
CONFIG = tiny(
    run={"name": "tiny", "checkpoint_every": 1, "keep_checkpoints": STEPS},
    model={"num_layers": 3},
    pipeline={"stages": 3},
    training={"steps": STEPS, "lr_schedule": "constant"},
)
DISTURBED_WORKER = f"""
import sys
import torch
from tahq.memory.galore.low_rank_weight import LowRankWeight
from tahq.pipeline.stage import Stage
from tahq_launch.cli import worker_main

def nan_at(number):
    calls = iter(range(10**9))
    return lambda gradient: gradient * torch.nan if next(calls) == number else gradient

connect, take = Stage.__init__, LowRankWeight.take

def disturb_parameter(stage, plan, modules, *arguments, **options):
    connect(stage, plan, modules, *arguments, **options)
    # A norm's: COAT's linear layers accumulate their gradients without autograd's hooks.
    weight = next(weight for weight in modules[plan.stage].parameters() if weight.dim() == 1)
    weight.register_hook(nan_at({DISTURBED - 1} * plan.training.num_micro_batches + 1))

disturbed = nan_at(MICRO_BATCH)

def disturb_projection(weight, gradient):
    is_it = (weight.name, weight._step) == ("model.layers.1.mlp.up_proj.weight", {DISTURBED - 1})
    take(weight, disturbed(gradient) if is_it else gradient)

if MICRO_BATCH is None:
    Stage.__init__ = disturb_parameter
else:
    LowRankWeight.take = disturb_projection
sys.argv = ["tahq-worker", *sys.argv[1:]]
sys.exit(worker_main())
"""
"""A worker in whose stage the gradient of one weight is NaN in one micro-batch of one step, and so never sent.

It is a parameter's in the second micro-batch; or that of a matrix that is trained in a subspace, in MICRO_BATCH.
"""

LLAMA = {"family": "llama", "num_layers": 3, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96}
# A subspace is searched for in every second step, the disturbed one too.
QGALORE = {"optimizer": "qgalore", "qgalore": {"gap": 2, "lazy": False}}


def changed(**sections) -> dict:
    """CONFIG with some keys of some sections changed."""
    return {name: {**CONFIG.get(name, {}), **sections.get(name, {})} for name in {**CONFIG, **sections}}


def disturbed_run(folder, config, micro_batch=None) -> Run:
    write_config(folder, config)
    coordinator = start(folder, "tahq", "coordinator", "cluster.yaml", "--bind", "127.0.0.1:0")
    peer = coordinator.stdout.readline().split()[-1]
    middle = subprocess.Popen(
        [
            sys.executable,
            "-c",
            DISTURBED_WORKER.replace("MICRO_BATCH", str(micro_batch)),
            "--stage",
            "1",
            "--peer",
            peer,
        ],
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    ends = [start(folder, "tahq-worker", "--stage", str(stage), "--peer", peer) for stage in (0, 2)]
    stdout, stderr = coordinator.communicate(timeout=120)
    for process in (middle, *ends):
        assert (process.communicate(timeout=60)[1].count("Traceback"), process.returncode) == (0, 0)
    return Run(folder / "runs" / "tiny", coordinator.returncode, stdout, stderr)


def test_nan_in_one_micro_batch_of_a_middle_stage_is_skipped_by_all(tmp_path):
    calm = train(tmp_path / "calm", CONFIG)
    run = disturbed_run(tmp_path, CONFIG)
    assert run.losses[:DISTURBED] == calm.losses[:DISTURBED]  # the loss itself is not touched
    assert_skipped_once(run)


@pytest.mark.acceptance
@pytest.mark.parametrize(
    "sections",
    [
        {"model": LLAMA, "memory": {"activations": "coat"}, "training": {"optimizer": "fp8_adamw"}},
        {"training": {"optimizer": "adamw8bit", "adamw8bit": {"min_elements": 0}}},
        # norms as usual: the hook is called once more where their gradient is recomputed
        {"memory": {"activations": {"kind": "agoq", "stored": ["mlp"]}, "gradients": "fp8"}},
        {"training": {"precision": "fp8"}},
    ],
    ids=["coat", "adamw8bit", "agoq", "fp8"],
)
def test_nan_is_skipped_with_few_bits_in_memory(tmp_path, sections):
    assert_skipped_once(disturbed_run(tmp_path, changed(**sections)))


@pytest.mark.acceptance
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_nan_is_skipped_in_the_gradient_that_a_subspace_is_made_of_and_in_a_later_one(tmp_path, micro_batch):
    assert_skipped_once(disturbed_run(tmp_path, changed(model=LLAMA, training=QGALORE), micro_batch))


def assert_skipped_once(run: Run) -> None:
    """All stages have skipped one step, its batch is kept, and the run went on."""
    assert run.returncode == 0, run.stderr
    assert [row["step"] for row in run.metrics if row["skipped"]] == [DISTURBED]
    assert all(loss is not None for loss in run.losses)
    state = run.snapshot()
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    updates = {name: tensor.item() for name, tensor in state.items() if name.startswith("optimizer/step/")}
    assert len(updates) == sum(name.startswith("model/") for name in state)
    assert set(updates.values()) == {STEPS - 1}  # every parameter of every stage
    (kept,) = (run.folder / "non_finite").iterdir()
    with safe_open(kept, "pt") as file:
        assert file.metadata()["step"] == str(DISTURBED)
        assert file.get_tensor("tokens").numel() > 0
