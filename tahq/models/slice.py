"""A stage's part of a model: its own blocks, with the embedding or the head at the ends.

The parts are transformers' own modules, created on the meta device and given memory one slice at a time, so no process
ever holds the whole model. Modules keep the whole model's names (`transformer.h.3.attn.c_attn.weight`): random
weights, checkpoints, dropout and export all use these canonical names.

Random weights depend on the seed and the parameter's name only, never on the cut. Their distributions are those of
transformers' `_init_weights`: matrices and embeddings are normal with standard deviation `initializer_range`, divided
by √(2 · num_layers) for GPT-2's projections into the residual stream; norms are 1, biases 0, a padding token's
embedding 0. torch's CPU generator uses the low 32 bits of a seed, so two of n matrices share their values with
probability n² / 2³³.

Shapes: B samples, S positions, C hidden channels, V vocabulary.
"""

import copy
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tahq.errors import ModelError
from tahq.models.adapters.config import is_adapter
from tahq.models.adapters.lora import add_adapters, initial_values, use_adapters
from tahq.models.deferred_gradients import (
    DeferredGradients,
    WeightCopies,
    let_own_products,
    own_products,
    product_dtype,
    recording,
    set_gradient_dtype,
    shared_copies,
    sharing_weight_copies,
)
from tahq.models.experts.expert_products import EXPERTS_NAME, Routed, own_routers, register_experts
from tahq.models.experts.load_balance import Balance
from tahq.models.keyed_dropout import (
    ATTENTION_NAME,
    RandomContext,
    attention_mask,
    key_dropout,
    keyed_attention,
    register_attention,
)
from tahq.models.loss import chunked_cross_entropy, cross_entropy, cross_entropy_of_rows, soft_capped
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.weights import FilledWeight, FolderWeights, one_line
from tahq.randomness import derive_seed

HEAD_WEIGHT = "lm_head.weight"
MOST_DRAWN = 8
"""Random weights that are in memory at once, at most."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Blocks and ends of a slice."""

    blocks: range
    embedding: bool = False
    head: bool = False

    @classmethod
    def of(cls, blocks: "BlockRange | Parts") -> "Parts":
        """The blocks of a range, and the ends that belong to them; or these parts."""
        if isinstance(blocks, Parts):
            return blocks
        return cls(range(blocks.start, blocks.stop), blocks.first, blocks.last)


AroundBlock = Callable[[int, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]


class Graphs(Protocol):
    """Another way through the blocks of a slice."""

    def begin(self) -> None:
        """Before a step: no micro-batch is in flight."""

    def through_blocks(self, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """See `ModelSlice.through_blocks`."""


class ModelSlice(nn.Module):
    """Part of a causal language model, bit-equal to that part of the whole model.

    `checkpoint_blocks`: keep only each block's input for the backward pass and recompute the rest then; gradients are
    bit-equal, since all randomness is keyed.
    `deferred`: where the next forward pass leaves the gradients of its weights; None: its backward computes them.
    `owns_products`: matrix products are always `deferred_gradients.product`, whose casts of weights outlive autocast's
    contexts while parts are computed again, and which add to gradients in place on CUDA.
    `num_pieces`: equal parts that each sample is cut into; they do not see each other, and have positions of their own.
    `around_block`: computes a block, given its place in the slice, a function that computes it, and that function's
    argument; None: the function is called.
    `graphs`: the way through the blocks; None: kernel by kernel.
    `loss_chunks`: above 1, `forward` leaves out the head, and `loss` computes so many chunks of tokens one by one.
    `z_loss`: factor of z-loss, which is differentiated together with the loss.
    `residual`: type that the embedding's output, or the received activation, is converted to, and with it the residual
    stream; None: it is not converted, so it is fp32 in a run.
    `balance`: counts what the routers of the next forward pass choose, for their loss; None: nothing is counted.
    `matrices`: type of weights with two or more dimensions; all others, and all gradients at first, are fp32.
    """

    def __init__(
        self,
        spec: ModelSpec,
        blocks: BlockRange | Parts,
        random: RandomContext,
        matrices: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.matrices = matrices
        self.parts = Parts.of(blocks)
        self.random = random
        self.checkpoint_blocks = False
        self.around_block: AroundBlock | None = None
        self.graphs: Graphs | None = None
        self.owns_products = False
        self.num_pieces = 1
        self.loss_chunks = 1
        self.z_loss = 0.0
        self.residual: torch.dtype | None = None
        self.deferred: DeferredGradients | None = None
        self.balance: Balance | None = None
        self._config = copy.deepcopy(spec.hf_config)
        self._soft_cap: float | None = getattr(self._config, "final_logit_softcapping", None)
        self._rotary: Callable[..., Any] | None = None
        self.attend_by(ATTENTION_NAME, keyed_attention)
        if spec.layout.experts is not None:
            register_experts()
            self._config._experts_implementation = EXPERTS_NAME
        with torch.device("meta"):
            self._add_modules()
        for name, parameter in self.canonical_parameters().items():
            parameter.requires_grad_(self.is_trained(name))
        let_own_products(self)
        own_routers(self, self._routed)
        key_dropout(self, random)
        if spec.adapter is not None:
            use_adapters(self, spec.adapter)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens, int64 [B, S], or hidden states [B, S, C] to hidden states or logits [B, S, V]; see `loss_chunks`.

        `positions`, int64 [B, S]: of each token in its record, where rows have several; None: 0 … S−1.
        """
        shape = x.shape[:2]
        if self.num_pieces > 1:
            x = x.view(shape[0] * self.num_pieces, -1, *x.shape[2:])
        hidden = self._embed(x, positions) if self.parts.embedding else x
        hidden = hidden if self.residual is None else hidden.to(self.residual)
        hidden = (self if self.graphs is None else self.graphs).through_blocks(hidden, positions)
        if self.parts.head:
            with self._products(hidden, self.deferred, shared_copies()):
                hidden = self._part(self.spec.layout.final_norm)(hidden)
                hidden = soft_capped(self.lm_head(hidden), self._soft_cap) if self.loss_chunks == 1 else hidden
        return hidden if self.num_pieces == 1 else hidden.view(*shape, -1)

    def through_blocks(self, hidden: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [B, S, C] before the slice's blocks to those behind them; `positions` as of `forward`."""
        windows = [self.spec.layout.window(self._config, index) for index in self.parts.blocks]
        masks = self._attention_masks(hidden, positions)
        tables = self._rotary_tables(hidden, positions)
        for place, (index, window, block) in enumerate(zip(self.parts.blocks, windows, self.blocks(), strict=True)):
            run = partial(self._run, block, tables(index) | {"attention_mask": masks[window]})
            with torch.set_grad_enabled(torch.is_grad_enabled() and place >= self.num_frozen_blocks):
                hidden = run(hidden) if self.around_block is None else self.around_block(place, run, hidden)
        return hidden

    @property
    def num_frozen_blocks(self) -> int:
        """Its blocks below the first that is trained, which have a forward pass only."""
        blocks = self.parts.blocks
        return min(max(self.spec.first_trainable - blocks.start, 0), len(blocks))

    def is_trained(self, name: str) -> bool:
        """See `ModelSpec.is_trained`."""
        return self.spec.is_trained(name)

    def _attention_masks(
        self, hidden: torch.Tensor, positions: torch.Tensor | None
    ) -> dict[int | None, torch.Tensor | None]:
        """By window; blocks with the same one share a mask."""
        windows = {self.spec.layout.window(self._config, index) for index in self.parts.blocks}
        return {window: attention_mask(hidden, window, positions) for window in windows}

    def _rotary_tables(self, hidden: torch.Tensor, positions: torch.Tensor | None) -> Callable[[int], dict[str, Any]]:
        """The argument of each block with its rotary tables, of which there is one for each kind of block."""
        if self._rotary is None or not self.parts.blocks:
            return lambda index: {}
        # tables stay fp32 beside a converted stream
        like = hidden if self.residual is None else hidden.new_empty(0, dtype=torch.float32)
        by_type = self.spec.layout.rotates_by_layer_type
        positions = _position_ids(hidden) if positions is None else positions
        kinds = [(self._config.layer_types[index],) if by_type else () for index in self.parts.blocks]
        tables = {kind: {"position_embeddings": self._rotary(like, positions, *kind)} for kind in set(kinds)}
        first = self.parts.blocks.start
        return lambda index: tables[kinds[index - first]]

    def loss(self, y: torch.Tensor, labels: torch.Tensor, divisor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of an output of the last slice, summed over labelled tokens.

        Returns:
            It over `divisor` and with z-loss, for `backward`, which may overwrite `y`; and it itself, without a graph.
        """
        if self.loss_chunks > 1:
            weight, chunks = self.lm_head.weight, self.loss_chunks
            return chunked_cross_entropy(y, weight, labels, chunks, divisor, self.z_loss, self._soft_cap)
        return cross_entropy(y, labels, divisor, self.z_loss)

    def log_probs(self, y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Σ log p of the labels of each sample, fp32 [B], from an output of the last slice, which is as in `loss`."""
        if self.loss_chunks == 1:
            return -cross_entropy_of_rows(y, labels)
        samples = zip(torch.split(y, 1), torch.split(labels, 1), strict=True)
        return -torch.stack([self.loss(*sample)[0] for sample in samples])

    def logits(self, y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] behind one position of each sample, int64 [B], from an output of the last slice."""
        rows = y[torch.arange(len(places), device=y.device), places]
        if self.loss_chunks == 1:
            return rows
        with self._products(rows, None, None):
            return soft_capped(self.lm_head(rows), self._soft_cap)

    def attend_by(self, name: str, attention: Callable[..., tuple[torch.Tensor, None]]) -> None:
        """Make the blocks compute attention by a function like `keyed_attention`."""
        register_attention(name, attention)
        self._config._attn_implementation = name

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the whole Hugging Face model, in its order."""
        return dict(self.named_parameters())

    def is_decayed(self, name: str, param: torch.Tensor) -> bool:
        """Whether weight decay applies: to matrices and embeddings, not to norms and biases."""
        return param.ndim >= 2

    def blocks(self) -> Iterator[nn.Module]:
        """The slice's blocks, in order."""
        return self._part(self.spec.layout.blocks).children()

    def materialise(self, device: torch.device, placed: Callable[[nn.Module], None] = lambda block: None) -> None:
        """Allocate every parameter on `device`, uninitialised, and compute the buffers; `placed`: after each block."""
        for name, parameter in self.named_parameters():
            is_narrow = parameter.ndim >= 2 and not is_adapter(name)
            parameter.data = parameter.data.to(self.matrices if is_narrow else torch.float32)
        blocks = self._part(self.spec.layout.blocks)
        for block in self.blocks():
            block.to_empty(device=device)
            placed(block)
        inner = set(blocks.modules())
        for module in self.modules():
            if module not in inner:
                module.to_empty(device=device, recurse=False)
        narrow = (each for each in self.parameters() if each.requires_grad and each.dtype != torch.float32)
        set_gradient_dtype(narrow, torch.float32)
        layout = self.spec.layout
        if layout.rotary is not None:
            with torch.device("cpu"):
                self._rotary = _made(layout.layer_class(layout.rotary), config=self._config).to(device)

    def _add_modules(self) -> None:
        layout, config = self.spec.layout, self._config
        trunk = nn.Module()
        if self.parts.embedding:
            padding = None if layout.positions else config.pad_token_id
            trunk.add_module(layout.embedding, _made(nn.Embedding, config.vocab_size, config.hidden_size, padding))
            if layout.positions is not None:
                trunk.add_module(layout.positions, nn.Embedding(config.max_position_embeddings, config.hidden_size))
            if layout.embedding_dropout is not None:
                trunk.add_module("drop", nn.Dropout(getattr(config, layout.embedding_dropout)))
        block_class = layout.layer_class(layout.block)
        blocks = {str(index): _made(block_class, config, layer_idx=index) for index in self.parts.blocks}
        trunk.add_module(layout.blocks, nn.ModuleDict(blocks))
        if self.parts.head:
            norm = layout.layer_class(layout.norm)(config.hidden_size, eps=getattr(config, layout.norm_epsilon))
            trunk.add_module(layout.final_norm, norm)
        self.add_module(layout.trunk, trunk)
        if self.parts.head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if self.spec.adapter is not None:
            add_adapters(dict(zip(self.parts.blocks, self.blocks(), strict=True)), self.spec.adapter)

    def _part(self, name: str) -> nn.Module:
        return self.get_submodule(f"{self.spec.layout.trunk}.{name}")

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        layout = self.spec.layout
        hidden = self._rows(layout.embedding, tokens)
        if layout.embedding_scale is not None:
            hidden = hidden * layout.embedding_scale(self._config)
        if layout.positions is not None:
            positions = _position_ids(hidden) if positions is None else positions
            hidden = hidden + self._rows(layout.positions, positions)
        if layout.embedding_dropout is not None:
            hidden = self._part("drop")(hidden)
        return hidden

    def _rows(self, name: str, indices: torch.Tensor) -> torch.Tensor:
        """Rows of an embedding, in fp32 where its matrix has fewer bits."""
        embedding: Any = self._part(name)
        if self.matrices == torch.float32:
            rows: torch.Tensor = embedding(indices)
        else:
            rows = _WideRows.apply(indices, embedding.weight, embedding.padding_idx)  # type: ignore[no-untyped-call]
        return rows

    def _products(
        self, x: torch.Tensor, deferred: DeferredGradients | None, copies: WeightCopies | None
    ) -> AbstractContextManager[object]:
        """A context for products with x, in which weights are cast where autocast does not."""
        is_cast = self.matrices != torch.float32 and product_dtype(x) != self.matrices
        return own_products(deferred, copies) if self.owns_products or is_cast else recording(deferred)

    def _routed(self, result: Routed) -> Routed:
        # a recomputed block leaves a graph that is dropped, so the balance may be another micro-batch's
        return result if self.balance is None else self.balance.routed(result)

    def _run(self, block: nn.Module, arguments: Mapping[str, Any], hidden: torch.Tensor) -> torch.Tensor:
        name, deferred, copies = self.random.current, self.deferred, shared_copies()
        if not (self.checkpoint_blocks and torch.is_grad_enabled()):
            return _computed(block, hidden, arguments, deferred, self._products(hidden, deferred, copies))

        def run_named(hidden: torch.Tensor) -> torch.Tensor:
            """Under the draw name of the first computation: other micro-batches ran in between."""
            with self.random.pinned(name):
                return _computed(block, hidden, arguments, deferred, self._products(hidden, deferred, copies))

        output: torch.Tensor = checkpoint(run_named, hidden, use_reentrant=False, preserve_rng_state=False)
        return output


def sharing_copies_of(slices: Iterable[ModelSlice]) -> AbstractContextManager[None]:
    """`sharing_weight_copies`, unless blocks are recomputed: that drops the copies and is meant to save memory."""
    return nullcontext() if any(each.checkpoint_blocks for each in slices) else sharing_weight_copies()


class _WideRows(torch.autograd.Function):
    """A look-up in a table of fewer bits, whose gradient is summed in fp32."""

    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, table: torch.Tensor, padding: int | None) -> torch.Tensor:
        ctx.num_rows, ctx.padding = len(table), -1 if padding is None else padding
        ctx.save_for_backward(indices)
        return functional.embedding(indices, table).float()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        of_rows = torch.ops.aten.embedding_dense_backward
        return None, of_rows(gradients[0], indices, ctx.num_rows, ctx.padding, False), None


def _position_ids(hidden: torch.Tensor) -> torch.Tensor:
    return torch.arange(hidden.shape[1], device=hidden.device)[None]


def _computed(
    block: nn.Module,
    hidden: torch.Tensor,
    arguments: Mapping[str, Any],
    deferred: DeferredGradients | None,
    products: AbstractContextManager[object],
) -> torch.Tensor:
    """A block's hidden states; a block with its own autograd functions splits its backward itself."""
    if getattr(block, "splits_backward", False):
        output = block(hidden, **arguments, deferred=deferred)
    else:
        with products:
            output = block(hidden, **arguments)
    # some releases of transformers return them in a tuple
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states


def _made(module_class: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Construct a module; errors that transformers raises only here come from the configuration."""
    try:
        module: nn.Module = module_class(*args, **kwargs)
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        raise ModelError(
            f"{module_class.__name__} cannot be built from this configuration: {one_line(error)}; "
            "check model.overrides or the folder's config.json"
        ) from error
    return module


def fill_weights(
    spec: ModelSpec,
    parameters: Mapping[str, FilledWeight],
    seed: int,
    filled: Callable[[int], None] = lambda numel: None,
) -> None:
    """Fill parameters, by canonical name, from the spec's folder or at random; a tied head gets the embedding.

    torch draws one tensor in one thread, so as many as torch has threads are drawn at once and filled in in order.
    """
    with torch.no_grad():
        for name in filter(is_adapter, parameters):
            parameters[name].copy_(initial_values(name, parameters[name].shape, seed))
    parameters = {name: each for name, each in parameters.items() if not is_adapter(name)}
    if not parameters:
        return
    sources = {HEAD_WEIGHT: spec.layout.embedding_weight} if spec.tied else {}
    if spec.folder is not None:
        found = FolderWeights.find(spec.path, spec.layout)
        found.fetch((sources.get(name, name) for name in parameters), lambda *_: None)
        found.read_into(parameters, sources, filled)
        return
    threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)), MOST_DRAWN)
    with torch.no_grad(), ThreadPoolExecutor(threads) as pool:

        def draw(name: str) -> Future[torch.Tensor]:
            return pool.submit(random_weight, spec, sources.get(name, name), parameters[name].shape, seed)

        names = iter(parameters)
        draws = deque(map(draw, islice(names, threads)))
        for parameter in parameters.values():
            parameter.copy_(draws.popleft().result())  # freed before the next one is drawn
            draws.extend(map(draw, islice(names, 1)))
            filled(parameter.numel())


def random_weight(spec: ModelSpec, name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Random values of one parameter, in fp32 and on the CPU; only norms and biases have one dimension."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.full(shape, spec.layout.first_norm_weight)
    deviation = float(spec.hf_config.initializer_range)
    if name.endswith(spec.layout.residual_projections):
        deviation /= math.sqrt(2 * spec.num_layers)
    generator = torch.Generator("cpu")
    generator.manual_seed(derive_seed(seed, "init", name))
    weight = torch.empty(shape).normal_(0.0, deviation, generator=generator)
    padding = spec.hf_config.pad_token_id
    if name == spec.layout.embedding_weight and spec.layout.positions is None and padding is not None:
        weight[padding] = 0.0
    return weight


@lru_cache(256)  # a plan for GPUs asks hundreds of times, and all of GPT2-XL takes 0.06 s
def slice_parameters(spec: ModelSpec, block_range: BlockRange) -> Mapping[str, torch.Size]:
    """Names and shapes of a slice's parameters, in the whole model's order; allocates nothing."""
    model = ModelSlice(spec, block_range, RandomContext(0))
    return {name: parameter.shape for name, parameter in model.named_parameters()}
