import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from support.runs import launch, tiny
from torch.nn import Parameter

from tahq.config.cluster import ClusterConfig
from tahq.errors import ConfigError
from tahq.memory.optional_optimizers import OPTIONAL, ForeignOptimizer, build_optional, check_optional
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.update.optimizer import OPTIMIZERS, build_optimizer, optimizer_nbytes, optimizer_tensors
from tahq.pipeline.update.optimizer import optimizer_kind as kind_of

RATES = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
every_choice = pytest.mark.parametrize("choice", OPTIONAL)


def is_missing(choice: str) -> bool:
    return importlib.util.find_spec(OPTIONAL[choice].package) is None


def torchs_adamw(groups):
    return ForeignOptimizer(groups, 1e-2, lambda own: torch.optim.AdamW(own, **RATES, foreach=False))


def test_own_and_optional_optimizers_have_other_names():
    assert not OPTIMIZERS.keys() & OPTIONAL.keys()


@every_choice
def test_a_missing_package_is_one_line_that_says_what_to_install(choice):
    if not is_missing(choice):
        pytest.skip(f"{OPTIONAL[choice].package} is installed")
    message = f"training.optimizer: {choice} needs {OPTIONAL[choice].package}.*tahq\\[{OPTIONAL[choice].extra}\\]"
    for attempt in (
        lambda: check_optional(choice, resumes=False),
        lambda: kind_of(choice).build([], TrainingConfig(steps=1, optimizer=choice)),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            attempt()
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(not is_missing("bnb_adamw8bit"), reason="bitsandbytes is installed")
def test_a_run_ends_before_it_begins_with_status_2(tmp_path):
    run = launch(tmp_path, tiny(training={"optimizer": "bnb_adamw8bit"}))
    assert run.returncode == 2
    assert run.stderr.strip().endswith("pip install 'tahq[bitsandbytes]', or take adamw8bit, tahq's own")
    assert not run.folder.exists()


@every_choice
def test_snapshots_and_resuming_are_refused(choice):
    sections = tiny(training={"optimizer": choice}, run={"snapshot_every": 2})
    with pytest.raises(ValueError, match=f"no snapshot holds the states of training.optimizer {choice}"):
        ClusterConfig.model_validate(sections)
    with pytest.raises(ConfigError, match="keeps its states out of snapshots"):
        check_optional(choice, resumes=True)


def test_tahqs_own_are_not_checked():
    for choice in OPTIMIZERS:
        check_optional(choice, resumes=True)


def test_a_version_without_the_class_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", ModuleType("torchao.optim"))
    monkeypatch.setattr("tahq.memory.optional_optimizers.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"the installed torchao has no torchao.optim.AdamW8bit"):
        build_optional("torchao_adamw8bit", [], **RATES)


@every_choice
def test_memory_is_estimated(choice):
    assert optimizer_nbytes(TrainingConfig(steps=1, optimizer=choice), [(512, 256)]) == 512 * 256 * (2 + 8 / 256)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_rates_of_the_groups_reach_the_other_optimizer(as_tensor):
    ours, theirs = Parameter(torch.ones(5)), Parameter(torch.ones(5))
    optimizer = torchs_adamw([{"params": [ours], "weight_decay": 0.1}])
    if as_tensor:  # as torchao has it
        optimizer.inner.param_groups[0]["lr"] = torch.tensor(0.5, dtype=torch.float64)
    reference = torch.optim.AdamW([theirs], weight_decay=0.1, foreach=False, **RATES)
    for rate in (0.25, 0.125):
        ours.grad, theirs.grad = torch.full((5,), 2.0), torch.full((5,), 2.0)
        optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = rate
        optimizer.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert optimizer_tensors(optimizer, {"x": ours}) == {}
    optimizer.zero_grad(set_to_none=True)
    assert ours.grad is None


@every_choice
def test_five_steps_are_near_torchs_adamw(choice):
    """Within 1.5 rates: a step is one rate long, and five of 8 bits err by less than a third each."""
    if is_missing(choice):
        pytest.skip(f"{OPTIONAL[choice].package} is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    start = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    ours, theirs = Parameter(start.cuda()), Parameter(start.cuda())
    optimizer = build_optimizer(TrainingConfig(steps=9, optimizer=choice, lr=1e-2), {"x": ours}, lambda *_: True)
    reference = torch.optim.AdamW([theirs], weight_decay=0.1, foreach=False, **RATES)
    for step in range(5):
        gradient = torch.randn(64, 128, generator=torch.Generator().manual_seed(step + 1))
        ours.grad, theirs.grad = gradient.cuda(), gradient.cuda()
        optimizer.step()
        reference.step()
    assert (ours - theirs).abs().max() <= 1.5e-2
