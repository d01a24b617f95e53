"""Whole runs beside the plain loop with the same configuration."""

from typing import Any

import torch

from support.plain_loop import PlainRun, train_plainly
from support.runs import Run
from tahq.config.cluster import ClusterConfig


def plain(config: dict[str, Any], *, cut: bool = False) -> PlainRun:
    model = {**config["model"], "vocab_size": 256}
    return train_plainly(ClusterConfig.model_validate({**config, "model": model}), cut=cut)


def assert_equal_to_the_bit(run: Run, expected: PlainRun) -> None:
    assert run.returncode == 0, run.stderr
    assert run.losses == expected.losses
    assert [row["grad_norm"] for row in run.metrics] == expected.norms
    weights = run.weights
    assert weights.keys() == expected.weights.keys()
    assert [name for name in weights if not torch.equal(weights[name], expected.weights[name])] == []
