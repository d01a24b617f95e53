"""A slice's blocks as CUDA graphs: the host launches a micro-batch's forward, or backward, at once.

Kernel by kernel a GPT2-XL block takes the host 2.4 ms forward and 2.4 ms backward on a cloud machine, whatever the
micro-batch, where an H200 computes one sample in 0.7 ms (docs/dev/experiment-log.md). A graph has the same kernels,
and so the same bits.

Graphs read and write at the addresses of their recording, so each micro-batch in flight has a slot: a graph of its
forward, one of its backward (of the gradient of its input, if the backward is split, and one of its weights'), and
memory that all of a slot's graphs share and other slots do not. More slots are recorded as long as memory is free;
micro-batches that find none are computed kernel by kernel.
"""

import gc
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import nn

from tahq.kernel_launch import on_device_of
from tahq.memory.free_memory import free_bytes
from tahq.models.deferred_gradients import DeferredGradients, accumulate, gradient_dtype, shared_copies
from tahq.models.keyed_dropout import KeyedDropout
from tahq.models.slice import ModelSlice

log = logging.getLogger(__name__)

KEPT_FREE = 2 << 30
"""Bytes of a device that no slot is recorded in: for evaluation, copies and other processes."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Graphs of one micro-batch, and where they read and write."""

    x: torch.Tensor
    positions: torch.Tensor | None
    y: torch.Tensor
    of_y: torch.Tensor
    of_x: torch.Tensor | None
    """None: no gradient goes to x, before which nothing is trained."""
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    weights: torch.cuda.CUDAGraph | None
    """Gradients of weights, of a split backward."""


_Kind = tuple[torch.Size, torch.dtype, bool, bool]
"""Shape and dtype of hidden states, whether the backward is split, and whether there are positions."""


class BlockGraphs:
    """Computes blocks by graphs from the second step on, when optimizer states have their memory.

    `begin` is called before each step; all passes of a step share copies of weights (`sharing_weight_copies`).
    """

    def __init__(self, module: ModelSlice) -> None:
        self._module = module
        self._step = 0
        self._slots: dict[_Kind, list[_Slot]] = {}
        self._free: dict[_Kind, list[_Slot]] = {}
        self._slot_bytes = 0
        """Memory of the largest slot."""
        self._paused_until: float = 0
        """Nothing more is recorded up to this step; infinite once a recording has failed."""
        self._gradients: list[torch.Tensor] = []
        """Where recorded backwards add to the gradients of `_parameters`."""
        self._copies: dict[tuple[torch.Tensor, torch.dtype], torch.Tensor] = {}
        """The casts of weights that recorded passes read."""

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        """Of the blocks, those that are trained; none where passes cannot be recorded."""
        parameters = [each for block in self._module.blocks() for each in block.parameters() if each.requires_grad]
        return parameters if _has_fixed_kernels(self._module, parameters) else []

    def begin(self) -> None:
        """Before a step: no micro-batch is in flight."""
        self._step += 1
        self._free = {kind: list(slots) for kind, slots in self._slots.items()}

    def through_blocks(self, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """As the slice's own, whose `deferred` it observes; in training by a slot, if there is one."""
        is_step = self._step > 1 and torch.is_grad_enabled() and shared_copies() is not None
        deferred = self._module.deferred
        slot = self._taken(hidden, positions, deferred is not None) if is_step else None
        if slot is None:
            return self._module.through_blocks(hidden, positions)
        if not hidden.requires_grad:  # else autograd would not call the replay's backward
            hidden = hidden.detach().requires_grad_()
        y: torch.Tensor = _Replay.apply(hidden, positions, self, slot, deferred)  # type: ignore[no-untyped-call]
        return y

    def _taken(self, hidden: torch.Tensor, positions: torch.Tensor | None, is_split: bool) -> _Slot | None:
        """A slot that is not in use, recorded if need be and possible."""
        if not self._parameters:
            return None
        self._refresh_copies()
        kind: _Kind = hidden.shape, hidden.dtype, is_split, positions is not None
        free = self._free.setdefault(kind, [])
        if not free and self._step > self._paused_until and self._make_room(hidden.device, kind):
            gc.disable()  # a graph that is freed meanwhile makes a recording fail
            try:  # one that fails leaves its stream the current one
                with on_device_of(hidden), torch.cuda.stream(torch.cuda.current_stream(hidden.device)):
                    slot = self._record(hidden, positions, is_split)
            except RuntimeError as error:
                self._paused_until = math.inf
                log.warning("computing the blocks without further CUDA graphs: %s", error)
                return None
            finally:
                gc.enable()
            self._slots.setdefault(kind, []).append(slot)
            return slot
        if free:
            return free.pop()
        # a pass kernel by kernel holds nodes of autograd's that a recording would wait for
        self._paused_until = max(self._paused_until, self._step)
        return None

    def _make_room(self, device: torch.device, kind: _Kind) -> bool:
        """Whether another slot fits; if need be, those of an earlier schedule or length are given up for it."""
        needed = self._slot_bytes + KEPT_FREE
        if free_bytes(device) >= needed:
            return True
        idle = [each for each in self._slots if each != kind and len(self._free[each]) == len(self._slots[each])]
        for other in idle:
            del self._free[other], self._slots[other]
        if idle:
            torch.cuda.empty_cache()
        return bool(idle) and free_bytes(device) >= needed

    def _refresh_copies(self) -> None:
        """Once in a step: cast the weights anew, for all passes of it."""
        shared: Any = shared_copies()
        if any(each not in shared for each in self._copies):
            with torch.no_grad():
                for (weight, _), copy in self._copies.items():
                    copy.copy_(weight)
            shared.update(self._copies)

    def _record(self, hidden: torch.Tensor, positions: torch.Tensor | None, is_split: bool) -> _Slot:
        """Run the kernels once, so that they are compiled, then record them."""
        autocast = partial(torch.autocast, "cuda", torch.get_autocast_dtype("cuda"))
        # the context's cache of casts would not outlive the step
        casting = partial(autocast, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False)
        x, of_y = hidden.detach().clone().requires_grad_(hidden.requires_grad), torch.zeros_like(hidden)
        places = None if positions is None else positions.clone()
        stream = _recording_stream(hidden.device)
        with self._apart(is_split) as deferred, autocast(enabled=False):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                with casting():
                    y = self._module.through_blocks(x, places)
                self._backward(x, y, of_y)
                deferred.run()
            torch.cuda.current_stream().wait_stream(stream)
            of_blocks = {id(each) for block in self._module.blocks() for each in block.parameters()}
            shared = shared_copies() or {}
            self._copies |= {key: copy for key, copy in shared.items() if id(key[0]) in of_blocks}
            del y
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            graphs = [torch.cuda.CUDAGraph() for _ in range(3 if is_split else 2)]
            record = partial(torch.cuda.graph, pool=torch.cuda.graph_pool_handle(), stream=stream)
            # codecs work in other threads meanwhile
            record = partial(record, capture_error_mode="thread_local")
            with record(graphs[0]), casting():
                y = self._module.through_blocks(x, places)
            with record(graphs[1]):
                of_x = self._backward(x, y, of_y)
            if is_split:
                with record(graphs[2]):
                    deferred.run()
            self._slot_bytes = max(self._slot_bytes, torch.cuda.memory_reserved() - before)
        return _Slot(x, places, y.detach(), of_y, of_x, graphs[0], graphs[1], graphs[2] if is_split else None)

    @contextmanager
    def _apart(self, is_split: bool) -> Iterator[DeferredGradients]:
        """A context in which passes add to `_gradients`, and leave gradients of weights to a deferral of their own."""
        if not self._gradients:
            self._gradients = [torch.zeros_like(p, dtype=gradient_dtype(p)) for p in self._parameters]
        before, own = self._module.deferred, DeferredGradients()
        gradients = [each.grad for each in self._parameters]
        try:
            self._module.deferred = own if is_split else None
            for parameter, place in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = place
            yield own
        finally:
            self._module.deferred = before
            for parameter, kept in zip(self._parameters, gradients, strict=True):
                parameter.grad = kept

    def _backward(self, x: torch.Tensor, y: torch.Tensor, of_y: torch.Tensor) -> torch.Tensor | None:
        """The gradient of x; adds those of weights that are not deferred. AccumulateGrad would change streams."""
        inputs = [x] if x.requires_grad else []
        gradients = torch.autograd.grad(y, [*inputs, *self._parameters], of_y, allow_unused=True)
        of_x, others = gradients[0] if inputs else None, gradients[len(inputs) :]
        with torch.no_grad():
            for parameter, gradient in zip(self._parameters, others, strict=True):
                if gradient is not None:  # others were added by their products
                    accumulate(parameter, gradient)
        return of_x

    def replay_backward(self, slot: _Slot, deferred: DeferredGradients | None) -> None:
        """Replay a slot's backward, and give the slot back when gradients of weights are computed."""
        self._place_gradients()
        slot.backward.replay()
        if deferred is None:
            self._give_back(slot, is_split=False)
        else:
            deferred.add(partial(self._replay_weights, slot))

    def _replay_weights(self, slot: _Slot) -> None:
        assert slot.weights is not None
        self._place_gradients()
        slot.weights.replay()
        self._give_back(slot, is_split=True)

    def _give_back(self, slot: _Slot, *, is_split: bool) -> None:
        self._free[slot.x.shape, slot.x.dtype, is_split, slot.positions is not None].append(slot)

    def _place_gradients(self) -> None:
        """Let the parameters have the gradients that recorded backwards add to."""
        for parameter, place in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is place:
                continue
            with torch.no_grad():
                place.zero_() if parameter.grad is None else place.copy_(parameter.grad)
            parameter.grad = place


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: torch gives its 32 out again and again, and a codec's kernels on the same one would be recorded."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _has_fixed_kernels(module: ModelSlice, parameters: Iterable[Any]) -> bool:
    """Whether every pass launches the same kernels, and the host does nothing else in it."""
    layers = [layer for block in module.blocks() for layer in block.modules()]
    has_hooks = any(getattr(each, "on_gradient", None) or each._post_accumulate_grad_hooks for each in parameters)
    drops = any(isinstance(layer, KeyedDropout) and layer.p > 0 for layer in layers)
    return not (module.around_block or module.checkpoint_blocks or has_hooks or drops)


class _Replay(torch.autograd.Function):
    """Hidden states through a slot's graphs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        positions: torch.Tensor | None,
        graphs: BlockGraphs,
        slot: _Slot,
        deferred: DeferredGradients | None,
    ) -> torch.Tensor:
        ctx.graphs, ctx.slot, ctx.deferred = graphs, slot, deferred
        slot.x.copy_(x)
        if slot.positions is not None and positions is not None:
            slot.positions.copy_(positions)
        slot.forward.replay()
        return slot.y.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.slot.of_y.copy_(gradients[0])
        ctx.graphs.replay_backward(ctx.slot, ctx.deferred)
        # the slot's own is overwritten by its next micro-batch, perhaps before this one is sent
        of_x = ctx.slot.of_x
        return None if of_x is None else of_x.clone(), None, None, None, None
