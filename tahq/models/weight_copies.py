"""bf16 copies of weights, made once for as long as the weights stay as they are.

`torch.autocast` remembers its copies of weights until the thread's outermost context ends. On a stage that is a
micro-batch, so that each one in flight would keep copies of its own, 2 bytes a weight, and each would be cast anew.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch


class WeightCopies:
    """For products that cast their weights themselves: each of them once a dtype."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.Tensor, torch.dtype], torch.Tensor] = {}

    def of(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight in that dtype, without a graph."""
        if weight.dtype == dtype:
            return weight.detach()
        if (weight, dtype) not in self._made:
            self._made[weight, dtype] = weight.detach().to(dtype)
        return self._made[weight, dtype]


_shared: ContextVar[WeightCopies | None] = ContextVar("weight copies", default=None)


def shared_copies() -> WeightCopies | None:
    """Those of the context that this thread is in; None: in none, and nothing is kept."""
    return _shared.get()


@contextlib.contextmanager
def sharing_weight_copies() -> Iterator[None]:
    """A context in whose thread autocast's copies of weights are made once; no weight may change meanwhile.

    A context of autocast that ends in another thread, as one of recomputation does in autograd's, drops them early.
    """
    token = _shared.set(WeightCopies())
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        _shared.reset(token)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
