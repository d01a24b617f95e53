"""torch's own schedules with packed stages train as a plain loop does with the codec put in by hand, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.torch_pipelines import STEPS, WORLD, Case, PlainTraining, run_world

CASES = {
    "gpipe on 2": Case("gpipe", (2, 3)),
    "1f1b on 2, keyed": Case("1f1b", (0, 1), "wf", "eden", first_step=5),
    "interleaved on 2, stochastic": Case("interleaved", (2, 3), "tah", "fixed:bits=6,round=stochastic"),
    "v on 2, nothing packed within a rank": Case("zbv", (0, 1), "fixed:bits=4", "eden"),
    "1f1b on 2, other tensors": Case("1f1b", (2, 3), with_others=True, is_subclass=True),
    "gpipe on 2, bf16": Case("gpipe", (0, 1), dtype=torch.bfloat16),
    "1f1b on 2, steps refused": Case("1f1b", (0, 1), "wf", "eden", has_refused_steps=True),
    "interleaved on 4, other tensors": Case("interleaved", (0, 1, 2, 3), "wf", "eden", with_others=True),
}
RARER_CASES = {
    "1f1b on 2, shapes given": Case("1f1b", (2, 3), "wf", "eden", is_static=True),
    "1f1b on 2, a second schedule of other shapes": Case("1f1b", (2, 3), "wf", "eden", micro_batches=(4, 2)),
    "1f1b on 2, other tensors, evaluated first": Case(
        "1f1b", (0, 1), "wf", "eden", with_others=True, is_evaluated_first=True
    ),
    "1f1b on 2, other tensors, shapes given": Case("1f1b", (2, 3), "wf", "eden", with_others=True, is_static=True),
    "breadth first on 2": Case("bfs", (0, 1)),
    "v that overlaps on 2": Case("dualpipev", (2, 3), "fixed:bits=4", "eden"),
    "1f1b on 2, aqsgd without a cache": Case("1f1b", (2, 3), "aqsgd:cache=none", "raw:dtype=fp32"),
    "gpipe on 4": Case("gpipe", (0, 1, 2, 3)),
    "1f1b on 4, keyed": Case("1f1b", (0, 1, 2, 3), "wf", "eden"),
}


def trained(cases: dict[str, Case], folder: Path) -> list[dict[str, Any]]:
    """What every rank wrote."""
    run_world(cases, folder)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def found(_tried_torch: None, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return trained(CASES, tmp_path_factory.mktemp("ranks"))


def check(case: Case, found: list[dict[str, Any]], name: str) -> None:
    """Losses and gradients are those of the codecs put in by hand."""
    plain = PlainTraining(case).results()
    parts = [found[rank]["cases"][name] for rank in case.ranks]
    last = parts[case.place(case.num_stages - 1)]
    for step in range(STEPS):
        assert last["steps"][step]["losses"] == plain["steps"][step]["losses"]
        gradients = {stage: tensors for part in parts for stage, tensors in part["steps"][step]["gradients"].items()}
        assert sorted(gradients) == list(range(case.num_stages))
        for stage, tensors in gradients.items():
            for parameter, gradient in tensors.items():
                assert torch.equal(gradient, plain["steps"][step]["gradients"][stage][parameter]), (stage, parameter)
    assert last["eval"] == plain["eval"]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_codecs_put_in_by_hand(found: list[dict[str, Any]], name: str) -> None:
    check(CASES[name], found, name)


@pytest.mark.acceptance
@pytest.mark.usefixtures("_tried_torch")
def test_rarer_schedules_tensors_and_shapes_train_as_by_hand(tmp_path: Path) -> None:
    everything = trained(RARER_CASES, tmp_path)
    for name, case in RARER_CASES.items():
        check(case, everything, name)


def test_codecs_matter_to_the_losses(found: list[dict[str, Any]]) -> None:
    """Nothing would be shown above if packing changed nothing."""
    lossless = PlainTraining(Case("gpipe", (2, 3), "raw:dtype=fp32", "raw:dtype=fp32")).results()
    assert found[3]["cases"]["gpipe on 2"]["steps"][0]["losses"] != lossless["steps"][0]["losses"]


def test_ranks_with_different_codecs_are_told(found: list[dict[str, Any]]) -> None:
    for rank in (2, 3):
        assert "ranks" in found[rank]["told"]
        assert "compress differently: gradients 'fixed:bits=" in found[rank]["told"]
