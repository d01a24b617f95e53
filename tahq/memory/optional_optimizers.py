"""8-bit and FP8 optimizers of other packages, for comparison: bitsandbytes and torchao, if they are installed.

They are used as their documentation says, and keep their states to themselves: those are of types and layouts
that change from version to version, so no snapshot holds them, and a run with one cannot be resumed.
`adamw8bit` and `fp8_adamw` are tahq's own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim import Optimizer

from tahq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OptionalKind:
    """An optimizer of another package: where its class is, and how the package is installed."""

    package: str
    module: str
    name: str
    extra: str

    def check_installed(self, choice: str) -> None:
        """Raise ConfigError, one line, where the package is missing; it is not imported."""
        if find_spec(self.package) is None:
            raise ConfigError(
                f"training.optimizer: {choice} needs {self.package}, which is not installed: "
                f"pip install 'tahq[{self.extra}]', or take adamw8bit, tahq's own"
            )


OPTIONAL: Mapping[str, OptionalKind] = {
    "bnb_adamw8bit": OptionalKind("bitsandbytes", "bitsandbytes.optim", "AdamW8bit", "bitsandbytes"),
    "torchao_adamw8bit": OptionalKind("torchao", "torchao.optim", "AdamW8bit", "torchao"),
    "torchao_adamw_fp8": OptionalKind("torchao", "torchao.optim", "AdamWFp8", "torchao"),
}
"""By their names in cluster.yaml."""


class ForeignOptimizer(Optimizer):
    """Another package's optimizer, with groups as tahq sets them and a `state` that is always empty.

    torchao keeps its rates as tensors, so that its compiled step is not compiled again for each: a rate that is
    set here as a number is written into them.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, build: Callable[[list[dict[str, Any]]], Any]) -> None:
        super().__init__([dict(group) for group in groups], {"lr": lr})
        self.inner = build([dict(group) for group in groups])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """A step of the other optimizer at the rates of these groups."""
        for ours, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            if isinstance(theirs["lr"], torch.Tensor):
                theirs["lr"].fill_(ours["lr"])
            else:
                theirs["lr"] = ours["lr"]
        loss: float | None = self.inner.step(closure)
        return loss


def build_optional(
    choice: str, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
) -> ForeignOptimizer:
    """The optimizer of one of `OPTIONAL`, over groups that have a `weight_decay` each.

    Raises:
        ConfigError: its package is not installed, or is of a version that does not have it.
    """
    kind = OPTIONAL[choice]
    kind.check_installed(choice)
    try:
        build = getattr(import_module(kind.module), kind.name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"training.optimizer: {choice}: the installed {kind.package} has no {kind.module}.{kind.name} ({error}); "
            f"pip install --upgrade 'tahq[{kind.extra}]'"
        ) from error
    return ForeignOptimizer(groups, lr, lambda own: build(own, lr=lr, betas=betas, eps=eps))


def check_optional(choice: str, *, resumes: bool) -> None:
    """Before a run starts: nothing for optimizers of tahq's own.

    Raises:
        ConfigError: the package of an optional one is missing; or its run is to be resumed.
    """
    if choice not in OPTIONAL:
        return
    if resumes:
        raise ConfigError(
            f"training.optimizer: {choice} keeps its states out of snapshots, so its runs cannot be resumed; "
            "start a new one under another run.name, or train with adamw8bit, tahq's own"
        )
    OPTIONAL[choice].check_installed(choice)
