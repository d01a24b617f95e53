"""Layers of a block that keep their inputs in a few bits and recompute their outputs: AGoQ's stored activations.

Kept for the backward, in blocks of 128 (`block_codes`):

- the inputs of norms; their outputs, the inputs of the products that follow, are recomputed;
- the outputs of gate and up, or of the MLP's first product; SiLU(gate)·up, or GELU, is recomputed;
- Q, K, V and attention's output as without AGoQ; the latter is the input of the output projection too. With `attention`
  in `memory.agoq.stored` they are codes, too.

A layer computes its output from the exact input, so a forward has the bits that it has without AGoQ. Its backward is
that of the decoded input: every intermediate value is recomputed from it (the paper's case 1).

On CUDA the kernels of `stored_triton` compute norms, SiLU(gate)·up and GELU by tanh together with codes, recomputation
and gradients; other layers, and all on a CPU, are torch's, differentiated by autograd at the decoded input.

Without bits, inputs are kept unchanged: the gradients are then those of a layer that recomputes nothing, to the bit
(`memory/recompute.py`). That layer has the same kernels on CUDA, but keeps its output.

Modules keep their names and parameters: `store_inputs` gives some of transformers' modules another `forward`. A tensor
whose backward will recompute it carries how as the attribute `kept`, which the products that take it look for.

Source: AGoQ §4.1, appendix 8.1, Table 1.
Letters: B samples, S positions, T = B·S tokens, C channels.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tahq.kernel_launch import has_triton
from tahq.memory.config import AgoqConfig
from tahq.memory.small_floats.block_codes import BLOCK, BlockCodes, dequantize_blocks, quantize_blocks
from tahq.models.deferred_gradients import product_dtype
from tahq.models.keyed_dropout import keyed_attention
from tahq.models.slice import ModelSlice

Function = Callable[..., torch.Tensor]
STORED_ATTENTION = "tahq_stored_attention"
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


class Layer(Protocol):
    """One call of a layer that keeps codes of its inputs."""

    parameters: tuple[nn.Parameter, ...]
    is_exact: bool
    """Whether inputs are kept unchanged."""

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The output of the exact inputs, and codes and scales of each."""

    def output(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output of the decoded inputs."""

    def gradients(
        self, tensors: Sequence[torch.Tensor], gradient: torch.Tensor, needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Of inputs and parameters, at the decoded inputs."""


Bits = int | None
"""Per stored number; None: inputs are kept unchanged."""


def store_inputs(module: ModelSlice, config: AgoqConfig, bits: int) -> None:
    """Make a slice's blocks store their activations in so many bits per number."""
    model = module.spec.hf_config
    if "attention" in config.stored:
        module.attend_by(STORED_ATTENTION, _stored_attention)
    for block in module.blocks():
        own = set(block.children())
        for layer in block.modules():
            store_inputs_of(layer, config.stored, bits, model, is_own=layer in own)


def is_norm(layer: nn.Module) -> bool:
    """Whether a module of a block is one of its norms."""
    return isinstance(layer, nn.LayerNorm) or type(layer).__name__.endswith("RMSNorm")


def output_projection(attention: Any) -> nn.Module:
    """The product that takes attention's output."""
    projection: nn.Module = attention.o_proj if hasattr(attention, "o_proj") else attention.c_proj
    return projection


def store_inputs_of(
    layer: Any, which: Sequence[str], bits: Bits, model: Any, *, is_own: bool, recomputes: bool = True
) -> None:
    """Make one module of a block store its inputs, if `which` names its kind (`memory.agoq.stored`).

    `model`: transformers' configuration; `is_own`: whether the module is the block's own child; `recomputes`: whether
    the products that take its output have it recomputed, instead of keeping it.
    """
    name = type(layer).__name__
    if "norms" in which and is_norm(layer):
        layer.forward = partial(_norm, layer, layer.forward, bits, recomputes, is_own)
    elif "attention" in which and name.endswith("Attention"):
        layer.stored_bits = bits
        output_projection(layer).register_forward_pre_hook(lambda _, inputs: stored(_same, bits, *inputs))
    elif "mlp" in which and hasattr(layer, "gate_proj"):
        layer.forward = partial(_gated_mlp, layer, bits, recomputes, model.hidden_act == "silu")
    elif "mlp" in which and hasattr(layer, "c_fc"):
        is_by_tanh = model.activation_function in TANH_GELUS
        layer.act.forward = partial(_activation, layer, layer.act.forward, bits, recomputes, is_by_tanh)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _norm(
    layer: Any, forward: Function, bits: Bits, recomputes: bool, feeds_products: bool, x: torch.Tensor
) -> torch.Tensor:
    kernels = _triton_for(x.device)
    if kernels is None or (bits is not None and x.shape[-1] % BLOCK != 0):
        return stored(forward, bits, x, parameters=tuple(layer.parameters())) if recomputes else forward(x)
    # products would convert it themselves
    dtype = product_dtype(x) if feeds_products else torch.promote_types(x.dtype, layer.weight.dtype)
    return _kept(kernels.StoredNorm(layer, _if_recorded(bits), x, dtype), x, recomputes=recomputes)


def _gated_mlp(mlp: Any, bits: Bits, recomputes: bool, is_silu: bool, x: torch.Tensor) -> torch.Tensor:
    """down(act(gate(x)) · up(x))."""
    activation = mlp.act_fn
    gated = _activation(
        mlp, lambda gate, up: activation(gate) * up, bits, recomputes, is_silu, mlp.gate_proj(x), mlp.up_proj(x)
    )
    result: torch.Tensor = mlp.down_proj(gated)
    return result


def _activation(
    mlp: Any, function: Function, bits: Bits, recomputes: bool, has_kernel: bool, *inputs: torch.Tensor
) -> torch.Tensor:
    kernels = _triton_for(inputs[0].device) if has_kernel else None
    if kernels is not None:
        layer = kernels.StoredActivation(_if_recorded(bits), *inputs, gives_maxima=getattr(mlp, "gives_maxima", False))
        return _kept(layer, *inputs, recomputes=recomputes)
    return stored(function, bits, *inputs) if recomputes else function(*inputs)


def _stored_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """`keyed_attention` that keeps codes of Q, K and V."""
    random = module.attn_dropout.random
    name = random.current

    def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with random.pinned(name):
            return keyed_attention(module, query, key, value, *args, **kwargs)[0]

    return stored(attended, module.stored_bits, query, key, value), None


def _if_recorded(bits: Bits) -> Bits:
    """The bits in a forward pass that is recorded; one that is not computes the same, and keeps nothing."""
    return bits if torch.is_grad_enabled() else None


def _triton_for(device: torch.device) -> Any:
    """`stored_triton` where there are kernels, else None."""
    return importlib.import_module("tahq.memory.agoq.stored_triton") if has_kernels(device.type) else None


def has_kernels(device_type: str) -> bool:
    """Whether norms and activations are one kernel each: on CUDA with triton."""
    return device_type == "cuda" and has_triton()


def stored(
    function: Function, bits: Bits, *inputs: torch.Tensor, parameters: tuple[nn.Parameter, ...] = ()
) -> torch.Tensor:
    """function(*inputs), whose backward recomputes it from inputs in so many bits.

    `function` reads `parameters` itself. The result carries `kept`.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    layer = _Differentiated(function, bits, inputs, parameters)
    if bits is not None:
        return _kept(layer, *inputs)
    # autograd's own nodes, since a sum of several gradients depends on their order
    result: torch.Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    result.kept = _Kept(layer, [x.detach() for x in inputs], is_exact=True)  # type: ignore[attr-defined]
    return result


def _kept(layer: Layer, *inputs: torch.Tensor, recomputes: bool = True) -> torch.Tensor:
    """The layer's output, which carries `kept` if products recompute it."""
    with torch.no_grad():
        output, tensors = layer.run(*inputs)
    if not torch.is_grad_enabled():
        return output
    result: torch.Tensor = _Stored.apply(  # type: ignore[no-untyped-call]
        layer, len(tensors), output, *tensors, *inputs, *layer.parameters
    )
    let_recompute(result, layer, output, tensors, recomputes=recomputes)
    return result


def let_recompute(
    result: torch.Tensor, layer: Layer, output: torch.Tensor, tensors: Sequence[torch.Tensor], *, recomputes: bool
) -> None:
    """Tell products that take a result, a layer's output with a graph, the maxima of it and what recomputes it."""
    if hasattr(output, "maxima"):
        result.maxima = output.maxima  # type: ignore[attr-defined]
    if recomputes:
        result.kept = _Kept(layer, tensors, is_exact=layer.is_exact)  # type: ignore[attr-defined]


class _Differentiated:
    """Any function of tensors, differentiated by autograd under the autocast that it was called under."""

    def __init__(
        self, function: Function, bits: Bits, inputs: Sequence[torch.Tensor], parameters: tuple[nn.Parameter, ...]
    ) -> None:
        self._function, self._bits, self.parameters = function, bits, parameters
        self.is_exact = bits is None
        self._like = [(x.shape, x.dtype) for x in inputs]
        device = inputs[0].device.type
        self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        assert self._bits is not None
        kernels = _triton_for(inputs[0].device)
        quantize = quantize_blocks if kernels is None else kernels.quantize
        return self._function(*inputs), [tensor for x in inputs for tensor in quantize(x, self._bits)]

    def output(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._of(self._decoded(tensors))

    def gradients(
        self, tensors: Sequence[torch.Tensor], gradient: torch.Tensor, needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        with torch.enable_grad():
            inputs = [x.requires_grad_() for x in self._decoded(tensors)]
            output = self._of(inputs)
        at = [x for x, is_needed in zip((*inputs, *self.parameters), needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad(output, at, gradient) if at else ())
        return [next(found) if is_needed else None for is_needed in needed]

    def _decoded(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._bits is None:
            return [x.detach() for x in tensors]
        kernels = _triton_for(tensors[0].device)
        coded = zip(map(BlockCodes, tensors[::2], tensors[1::2]), self._like, strict=True)
        if kernels is not None:
            return [kernels.dequantize(each, shape, dtype) for each, (shape, dtype) in coded]
        return [dequantize_blocks(each, shape).to(dtype) for each, (shape, dtype) in coded]

    def _of(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        device, dtype, enabled = self._autocast
        with torch.autocast(device, dtype, enabled=enabled):
            return self._function(*inputs)


class _Kept:
    """What an output is recomputed from: a layer's call, and the codes of its inputs."""

    def __init__(self, layer: Layer, tensors: Sequence[torch.Tensor], *, is_exact: bool) -> None:
        self.tensors, self.is_exact = tensors, is_exact
        self._recomputation = _Recomputation(layer)

    def expect(self) -> "_Recomputation":
        """Announce one more product; returns what gives it the output again."""
        self._recomputation.num_expected += 1
        return self._recomputation


class _Recomputation:
    """Recomputes an output once for all products that take it, and drops it after the last."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self.num_expected = self._num_served = 0
        self._output: torch.Tensor | None = None

    @torch.no_grad()
    def rows(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The output, [..., C], in a product's dtype."""
        if self._output is None:
            self._output = self._layer.output(tensors).to(dtype)
        output = self._output
        self._num_served += 1
        if self._num_served % self.num_expected == 0:
            self._output = None
        return output


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, num_kept: int, output: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """`tensors`: codes and scales of each input, `num_kept` in all; the inputs; the parameters."""
        ctx.layer = layer
        ctx.save_for_backward(*tensors[:num_kept])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer, kept = ctx.layer, ctx.saved_tensors
        needed = ctx.needs_input_grad[3 + len(kept) :]
        return None, None, None, *[None] * len(kept), *layer.gradients(kept, gradients[0], needed)
