"""Weight gradients computed later than input gradients: the W of a split backward.

While a forward pass is recorded, layers that multiply by a weight (nn.Linear, GPT-2's Conv1D) compute `product`, whose
backward computes the gradient of its input only and keeps what the gradients of weight and bias need.
`DeferredGradients.run` computes those with the products that autograd would have used, so a backward in two parts is
bit-equal to a whole one. Gradients of norms and embeddings are cheap and computed at once.

Source: zero bubble (Qi et al. 2023, §2), which splits a backward into B, here I, and W.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from tahq.errors import ModelError


class DeferredGradients:
    """The deferred part of one micro-batch's backward in one chunk."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, compute: Callable[[], None]) -> None:
        """Defer a computation until `run`."""
        self._pending.append(compute)

    def run(self) -> None:
        """Do the deferred computations, which add to the gradients of the parameters."""
        pending, self._pending = self._pending, []
        with torch.no_grad():
            for compute in pending:
                compute()


_current: ContextVar[tuple[DeferredGradients | None] | None] = ContextVar("deferral", default=None)
"""Where products leave the gradients of their weights; None: products are torch's."""


def recording(deferred: DeferredGradients | None) -> AbstractContextManager[object]:
    """A context whose matrix products leave the gradients of their weights to `deferred`; None: no change."""
    return nullcontext() if deferred is None else _own_products(deferred)


@contextmanager
def _own_products(deferred: DeferredGradients | None) -> Iterator[None]:
    token = _current.set((deferred,))
    try:
        yield
    finally:
        _current.reset(token)


def current_deferral() -> DeferredGradients | None:
    """This thread's `recording`, for layers with their own autograd functions; None outside of one."""
    current = _current.get()
    return current[0] if current is not None and torch.is_grad_enabled() else None


_ROW_ALIGNMENT = 16
"""Bytes."""

WeightCopies = dict[tuple[torch.Tensor, torch.dtype], Any]
"""Casts of weights, and under `training.precision: fp8` their codes.

`torch.autocast` keeps its casts until the thread's outermost context ends. On a stage that is a micro-batch, so each in
flight would keep its own copies, 2 bytes per weight, and cast every weight anew.
"""
_shared: ContextVar[WeightCopies | None] = ContextVar("weight copies", default=None)


def shared_copies() -> WeightCopies | None:
    """The casts of this thread's `sharing_weight_copies`; None outside of one."""
    return _shared.get()


@contextmanager
def sharing_weight_copies() -> Iterator[None]:
    """A context in which this thread casts each weight once, under autocast too; weights must not change meanwhile.

    An autocast context that ends in another thread, as recomputation's does in autograd's, drops the casts early.
    """
    token = _shared.set({})
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        _shared.reset(token)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


@contextmanager
def own_products(deferred: DeferredGradients | None, copies: WeightCopies | None) -> Iterator[None]:
    """A context whose matrix products are `product`, with these casts of weights: in autograd's threads, too."""
    token = _shared.set(copies)
    try:
        with _own_products(deferred):
            yield
    finally:
        _shared.reset(token)


class PackedWeight(Protocol):
    """The values of a weight that is not trained, in few bits."""

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in new memory, in its own shape."""


class RecomputedInput(Protocol):
    """The input of products, kept in another form until their backward."""

    tensors: Sequence[torch.Tensor]
    """What a backward needs."""
    is_exact: bool
    """Whether the input gets the same bits again."""

    def expect(self) -> "Recomputation":
        """Announce one more product; returns what gives it the input again."""


class Recomputation(Protocol):
    """Gives the products of one input that input again; holds no tensors between forward and backward."""

    def rows(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The input, [..., K]."""


def recomputed_input(x: torch.Tensor) -> RecomputedInput | None:
    """What recomputes a tensor in the backward, where something does: its attribute `kept`."""
    return getattr(x, "kept", None) if torch.is_grad_enabled() else None


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is a product with a weight."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def let_own_products(tree: nn.Module) -> None:
    """Make the layers of a tree of modules compute `product`, in a context that says so or with an input not kept."""
    for layer in filter(is_linear, tree.modules()):
        layer.forward = partial(_linear, layer, layer.forward)


def _linear(layer: Any, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    kept, current = recomputed_input(x), _current.get()
    if kept is None and current is None:
        return forward(x)
    weight, bias, deferred = layer.weight, layer.bias, None if current is None else current[0]
    if isinstance(layer, nn.Linear):
        return product(x, weight, bias, transposed=True, deferred=deferred, kept=kept)
    rows = x.view(-1, x.shape[-1])
    return product(rows, weight, bias, transposed=False, deferred=deferred, kept=kept).view(*x.shape[:-1], -1)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    transposed: bool,
    deferred: DeferredGradients | None,
    kept: RecomputedInput | None = None,
) -> torch.Tensor:
    """x·Wᵀ + b with W [out, in] (`transposed`, F.linear), or x·W + b with W [in, out] (torch.addmm).

    `deferred`: where the backward leaves the gradients of weight and bias; None: it computes them. `kept`: what the
    backward recomputes x from; None: x itself is kept.
    """
    recomputation = kept.expect() if kept is not None and weight.requires_grad else None
    tensors = () if kept is None or recomputation is None else kept.tensors
    y: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, deferred, transposed, recomputation, _InputGradient.of(x), *tensors
    )
    return y


class _InputGradient:
    """The gradient of a tensor by all products that take it; on CUDA each adds its own within the product.

    The last one returns the sum, so a backward must reach all of them.
    """

    def __init__(self) -> None:
        self.num_expected = self._num_served = 0
        self._total: torch.Tensor | None = None

    @classmethod
    def of(cls, x: torch.Tensor) -> "_InputGradient":
        """The one that all products of this tensor share."""
        is_recomputing = torch._C._current_graph_task_id() >= 0
        if is_recomputing or not torch.is_grad_enabled():  # a product that will have no backward
            return cls()
        shared: _InputGradient = getattr(x, "input_gradient", None) or cls()
        shared.num_expected += 1
        if x.is_cuda:
            x.input_gradient = shared  # type: ignore[attr-defined]
        return shared

    def add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
        """Add left·right; the sum, if this was the last product's."""
        total = self._total
        self._total = left.mm(right) if total is None else torch.addmm(total, left, right, out=total)
        self._num_served += 1
        if self._num_served % self.num_expected:
            return None
        total, self._total = self._total, None
        return total


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        deferred: DeferredGradients | None,
        transposed: bool,
        recomputation: Recomputation | None,
        of_input: _InputGradient,
        *kept: torch.Tensor,
    ) -> torch.Tensor:
        dtype = product_dtype(x)
        cast = x.to(dtype)
        # The parameters themselves are kept: recomputation under checkpointing would save a copy without .grad.
        ctx.weight, ctx.bias, ctx.deferred, ctx.transposed = weight, bias, deferred, transposed
        ctx.dtype, ctx.input_dtype, ctx.shape, ctx.copies = dtype, x.dtype, x.shape, shared_copies()
        ctx.recomputation, ctx.of_input = recomputation, of_input
        ctx.save_for_backward(*(kept or ((cast,) if weight.requires_grad else ())))
        matrix = cast_weight(weight, dtype, ctx.copies)
        if bias is None:
            assert transposed
            return linear(cast, matrix)
        if transposed:
            return F.linear(cast, matrix, bias.to(dtype))
        return torch.addmm(bias.to(dtype), cast, matrix)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors, recomputation, dtype = ctx.saved_tensors, ctx.recomputation, ctx.dtype
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        weight, bias, transposed = ctx.weight, ctx.bias, ctx.transposed

        def of_parameters() -> None:
            if weight.requires_grad:
                x = tensors[0] if recomputation is None else recomputation.rows(tensors, dtype)
                rows = x.reshape(-1, x.shape[-1])
                accumulate_product(weight, *((gradient.t(), rows) if transposed else (rows.t(), gradient)))
            if bias is not None and bias.requires_grad:
                if gradient.is_cuda:  # in half the time of a sum, and unrounded
                    accumulate_product(bias, _ones(len(gradient), gradient.dtype, gradient.device), gradient)
                else:
                    accumulate(bias, gradient.sum(0))

        if ctx.deferred is None:
            of_parameters()
        elif weight.requires_grad or (bias is not None and bias.requires_grad):  # else nothing waits with its tensors
            ctx.deferred.add(of_parameters)
        nothing = (None,) * (6 + (0 if recomputation is None else len(tensors)))
        if not ctx.needs_input_grad[0]:
            return None, *nothing
        matrix = cast_weight(weight, dtype, ctx.copies)
        of_input = ctx.of_input.add(gradient, matrix if transposed else matrix.t())
        return None if of_input is None else of_input.view(ctx.shape).to(ctx.input_dtype), *nothing


@cache
def _ones(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.ones(1, length, dtype=dtype, device=device)


def linear(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x·Wᵀ, [..., out], without a graph. On CUDA rows begin where fast kernels need it, of an odd vocabulary, too."""
    width, lanes = len(matrix), _ROW_ALIGNMENT // x.itemsize
    if not x.is_cuda or width % lanes == 0:
        return F.linear(x, matrix)
    y = x.new_empty(*x.shape[:-1], -(-width // lanes) * lanes)[..., :width]
    torch.mm(x.reshape(-1, x.shape[-1]), matrix.t(), out=y.flatten(0, -2))
    return y


def cast_weight(weight: torch.Tensor, dtype: torch.dtype, copies: WeightCopies | None) -> torch.Tensor:
    """The weight in that dtype, made once if copies are shared; its `product_copy`, if it has that.

    A weight with the attribute `packed` is decoded each time, and its own values are never read.
    """
    packed: PackedWeight | None = getattr(weight, "packed", None)
    if packed is not None:
        return packed.decoded(dtype)
    copy: torch.Tensor | None = getattr(weight, "product_copy", None)
    if copy is not None and copy.dtype == dtype:
        return copy
    if copies is None or weight.dtype == dtype:
        return weight.to(dtype)
    if (weight, dtype) not in copies:
        copies[weight, dtype] = weight.detach().to(dtype)
    cast: torch.Tensor = copies[weight, dtype]
    return cast


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of matrix products with x: autocast's inside autocast, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def after_gradient(holder: Any, call: Callable[[Any], None]) -> None:
    """Have `call` called with a parameter, or a low-rank weight, whenever something was added to its gradient.

    Calls come in the order in which they were asked for.
    """
    before: Callable[[Any], None] = getattr(holder, "on_gradient", None) or (lambda one: None)

    def both(one: Any) -> None:
        before(one)
        call(one)

    holder.on_gradient = both
    if isinstance(holder, torch.Tensor):
        holder.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]


def gradient_dtype(parameter: Any) -> torch.dtype:
    """The type in which a parameter's gradient is kept; its own, unless `set_gradient_dtype` was called."""
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return dtype


def set_gradient_dtype(parameters: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    """Keep gradients in this type: autograd converts each micro-batch's, and adds it in fp32, rounded to nearest.

    ModelError: torch is older than 2.10, and its gradients have the type of their parameter.
    """
    for parameter in parameters:
        if not hasattr(parameter, "grad_dtype"):
            raise ModelError(
                f"training.adamw_bf16.weights and memory.gradients: bf16 need torch 2.10 or newer, this is "
                f"{torch.__version__}; update torch, or set both to fp32"
            )
        parameter.grad_dtype = dtype


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor, *, is_whole: bool = True) -> None:
    """Add to a parameter's gradient, and call its `on_gradient`, if it has that, as autograd does.

    `is_whole` False: more of the same gradient follows, so `on_gradient` is not called yet.
    """
    if parameter.grad is None:
        parameter.grad = gradient.to(gradient_dtype(parameter))
    else:
        # like autograd: rounds a wider gradient first, and widens a narrower one while adding
        is_wider = gradient.itemsize > parameter.grad.itemsize
        parameter.grad.add_(gradient.to(parameter.grad.dtype) if is_wider else gradient)
    if is_whole:
        announce(parameter)


def accumulate_product(
    parameter: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, is_whole: bool = True
) -> None:
    """`accumulate` of left·right, of one row for a bias. On CUDA the product adds itself to one in fp32, unrounded."""
    if not (left.is_cuda and gradient_dtype(parameter) == torch.float32):
        accumulate(parameter, left.mm(right).view(parameter.shape), is_whole=is_whole)
        return
    total, share = parameter.grad, 1
    if total is None:
        total, share = torch.empty_like(parameter, dtype=torch.float32), 0
    widened: dict[str, Any] = {} if left.dtype == total.dtype else {"out_dtype": total.dtype}
    place = total.view(len(left), -1)
    torch.addmm(place, left, right, beta=share, out=place, **widened)
    parameter.grad = total
    if is_whole:
        announce(parameter)


def announce(parameter: torch.Tensor) -> None:
    """Call a parameter's `on_gradient`, if it has that, after something was added to its gradient."""
    on_gradient: Callable[[torch.Tensor], None] | None = getattr(parameter, "on_gradient", None)
    if on_gradient is not None:
        on_gradient(parameter)
