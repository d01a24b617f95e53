"""A stage's memory, estimated before anything is allocated.

The total is a lower bound for the process: Python, torch, workspaces of kernels, the data and the allocator's
fragmentation are not counted.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass

from tahq.memory.agoq.stored_gradients import DECODED_AT_A_TIME
from tahq.memory.config import Gradients, Offload, Shard
from tahq.memory.galore.low_rank_weight import LowRankSettings
from tahq.memory.galore.qgalore import Covered, LowRankBytes, divided_parameters, low_rank_bytes
from tahq.memory.saved_tensors import (
    MicroBatchShape,
    copied_by_block,
    copied_by_head,
    deferred_by_slice,
    head_workspace,
    recomputed_by_block,
    saved_by_slice,
)
from tahq.memory.shares import Shape, is_block_matrix, shares_of
from tahq.memory.small_floats.block_codes import stored_nbytes
from tahq.memory.small_floats.nf4 import nf4_nbytes
from tahq.memory.stored_slice import decoded_nbytes, is_in_4_bits
from tahq.models.adapters.config import is_adapter
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import HEAD_WEIGHT, slice_parameters

_FP32 = 4
_BF16 = 2
_OF_TRAINED: tuple[Shard, ...] = ("gradients", "optimizer")
"""What only weights that are trained have."""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The inputs of a stage's estimate other than the model.

    `in_flight`: micro-batches whose activations are held at once (`Schedule.max_in_flight`).
    `optimizer_nbytes`: shapes of fp32 parameters -> bytes of their optimizer states.
    `frame_nbytes`: encoded bytes of one micro-batch on all the stage's cuts, both directions.
    `low_rank`: format of the matrices of blocks, and possibly of the ends; None: ordinary weights.
    `gradients`: `memory.gradients`.
    """

    shape: MicroBatchShape
    in_flight: int
    optimizer_nbytes: Callable[[Iterable[tuple[int, ...]]], int]
    frame_nbytes: int
    kept_code_nbytes: int = 0  # Bytes of FP8 codes per element of a block's matrix
    low_rank: LowRankSettings | None = None
    splits_backward: bool = False  # Whether gradients of weights are computed separately from those of inputs
    put_off: int = 0  # Micro-batches in flight that only lack gradients of weights
    is_fused: bool = False  # Whether each weight is updated within the backward, and its gradient freed
    gradients: Gradients = "fp32"
    offload: Collection[Offload] = ()  # `memory.offload`
    moments_nbytes: Callable[[Iterable[tuple[int, ...]]], int] = lambda shapes: 0  # Of `optimizer_nbytes`, offloaded
    shards: Collection[Shard] = ()  # `memory.shard`
    replicas: int = 1  # that divide these
    num_forwards: int = 1  # Of a micro-batch, DPO's reference included
    ahead_nbytes: int = 0  # Encoded activations that may wait for the next stage, or for this one, in a whole step


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes that a stage keeps, by kind."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    boundary: int
    workspace: int
    copies: int = 0  # Part of weights here and on the host: bf16 copies and FP8 codes, which are not checkpointed
    untrained: int = 0  # Part of weights here and on the host: those that never change, which are not checkpointed
    host_weights: int = 0
    host_gradients: int = 0
    host_optimizer: int = 0
    host_activations: int = 0

    def kinds(self) -> dict[str, int]:
        """Bytes on the device by kind; their sum is the total."""
        others = ("copies", "untrained", *(f"host_{name}" for name in self.host_kinds()))
        return {name: nbytes for name, nbytes in asdict(self).items() if name not in others}

    def host_kinds(self) -> dict[str, int]:
        """Bytes of `memory.offload` in host memory, by kind."""
        kinds = ("weights", "gradients", "optimizer", "activations")
        return {name: getattr(self, f"host_{name}") for name in kinds}

    @property
    def total(self) -> int:
        """The sum of all kinds on the device."""
        return sum(self.kinds().values())

    @property
    def host_total(self) -> int:
        """The sum of all kinds on the host."""
        return sum(self.host_kinds().values())

    @property
    def snapshot(self) -> int:
        """Bytes in a checkpoint: weights that are trained, and optimizer states."""
        weights = self.weights + self.host_weights - self.copies - self.untrained
        return weights + self.optimizer + self.host_optimizer


def combined(memories: Iterable[tuple[StageMemory, int]]) -> StageMemory:
    """The sum of (memory, count) pairs, kind by kind."""
    rows = ([nbytes * num for nbytes in astuple(memory)] for memory, num in memories)
    return StageMemory(*map(sum, zip(*rows, strict=True)))


def stage_memory(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers) -> StageMemory:
    """Estimate a stage's peak memory.

    Blocks below the first that is trained have weights and their copies, and nothing else of this.

    With N parameters, n micro-batches in flight, T = B·S tokens, C channels, V vocabulary:

    - weights 4·N and gradients 4·N, fp32 under bf16 autocast too, or 2 per element of matrices in bf16 (adapters are
      fp32), `nf4_nbytes` of those in 4 bits, and their optimizer states; `low_rank_bytes` for low-rank weights; of
      gradients only the largest where the update is fused, 1.03·N where they are stored in 8 bits; where replicas
      divide them, those of the replica with most; counted as weights, the FP8 codes and autocast's copies of matrices.
      With checkpointing copies are not shared: those of one block, and one of the head per micro-batch in flight (one
      in all with split backwards);
    - activations n · `saved_by_slice`, or `deferred_by_slice` where only gradients of weights are missing and it is
      more;
    - boundary: outputs kept for their backward, n · r·T·C (not the last stage), with r bytes per element of the
      residual stream; a received gradient (not the last) and one to send (not the first), 4·T·C each; n encoded frames,
      or all of a step behind a stage that does not wait for gradients; of DPO's reference, r·T·C each, an input (not
      the first), and an output beside the tensor that both outputs are sent as (not the last);
    - workspace for one micro-batch: what of one block is computed again, `recomputed_by_block`; on the last stage
      `head_workspace`; with low-rank weights the largest decoded matrix of a block and its gradient, and with the
      logits the head's; with adapters `decoded_nbytes`; `fp32_gradient`; what is lent of the host's memory,
      `OnHost.lent_to_blocks`, or if an update needs more, `OnHost.lent_to_update`; the largest gradient on its way to
      the replica that keeps the sum, and what replicas lend.
    """
    ordinary, covered = divided_parameters(spec, blocks, numbers.low_rank)
    low_rank = {name: low_rank_bytes(each.shape, each.settings) for name, each in covered.items()}
    numels = {name: math.prod(shape) for name, shape in ordinary.items() if spec.is_trained(name)}
    numels |= {name: each.gradient // _FP32 for name, each in low_rank.items()}
    weights, gradients, optimizer = max(_by_replica(spec, ordinary, [*low_rank.values()], numbers), key=sum)
    saved = saved_by_slice(spec, blocks, numbers.shape)
    deferred = deferred_by_slice(spec, blocks, numbers.shape)
    codes = numbers.kept_code_nbytes * len(blocks) * spec.layout.block_weights(spec.hf_config)
    copies = codes + _copies(spec, blocks, numbers)
    host = on_host(spec, blocks, numbers)
    saved -= host.stream * blocks.num_trained(spec.first_trainable)
    workspace = _workspace(spec, blocks, numbers, covered) + fp32_gradient(spec, numels, numbers.gradients)
    if "gradients" in numbers.shards:
        workspace += max((_gradients([shape], (), numbers) for shape in _trained_matrices(spec, ordinary)), default=0)
    return StageMemory(
        weights=weights + copies - host.values - host.copies,
        gradients=gradients - host.gradients,
        optimizer=optimizer - host.moments,
        activations=numbers.in_flight * saved + numbers.put_off * max(0, deferred - saved),
        boundary=_boundary(spec, blocks, numbers),
        workspace=max(workspace + host.lent_to_blocks, host.lent_to_update) + _lent_by_replicas(spec, blocks, numbers),
        copies=copies,
        untrained=_untrained(spec, ordinary, numbers),
        host_weights=host.values + host.copies,
        host_gradients=host.gradients,
        host_optimizer=host.moments,
        host_activations=numbers.in_flight * blocks.num_trained(spec.first_trainable) * host.stream,
    )


def _untrained(spec: ModelSpec, ordinary: Mapping[str, Shape], numbers: StepNumbers) -> int:
    """Bytes of weights that never change, of which a replica has at least its part."""
    frozen = {name: shape for name, shape in ordinary.items() if not spec.is_trained(name)}
    nbytes = _weight_nbytes(spec, frozen, numbers)
    return nbytes // (numbers.replicas if "weights" in numbers.shards else 1)


def _weight_nbytes(spec: ModelSpec, shapes: Mapping[str, Shape], numbers: StepNumbers) -> int:
    """Bytes of ordinary weights: fp32, the type of matrices, or 4 bits with their scales."""

    def nbytes(name: str, shape: Shape) -> int:
        if is_in_4_bits(spec, name, shape):
            return nf4_nbytes(math.prod(shape)) + _FP32  # what stands in its place
        is_narrow = len(shape) >= 2 and not is_adapter(name)
        return (numbers.shape.weight_nbytes if is_narrow else _FP32) * math.prod(shape)

    return sum(nbytes(name, shape) for name, shape in shapes.items())


def _by_replica(
    spec: ModelSpec, ordinary: Mapping[str, Shape], low_rank: Sequence[LowRankBytes], numbers: StepNumbers
) -> Iterator[tuple[int, int, int]]:
    """Bytes of weights, gradients and optimizer states that each replica keeps."""
    shares = shares_of(spec, ordinary, numbers.replicas, numbers.shards)
    for replica in range(numbers.replicas):
        kept = {name: shape for name, shape in ordinary.items() if shares[name].is_had(replica, "weights")}
        trained = {name: shape for name, shape in ordinary.items() if spec.is_trained(name)}
        summed, updated = (
            [shape for name, shape in trained.items() if shares[name].is_had(replica, shard)] for shard in _OF_TRAINED
        )
        yield (
            _weight_nbytes(spec, kept, numbers) + sum(each.weight for each in low_rank),
            _gradients(summed, [each.gradient for each in low_rank], numbers),
            numbers.optimizer_nbytes(updated) + sum(each.states for each in low_rank),
        )


def _lent_by_replicas(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers) -> int:
    """What others lend a replica at a time under `memory.shard`: what products read, of two blocks."""
    if "weights" not in numbers.shards:
        return 0
    elements = spec.layout.block_weights(spec.hf_config)
    block = copied_by_block(spec, numbers.shape) or numbers.shape.weight_nbytes * elements
    return min(2, len(blocks)) * block * (numbers.replicas - 1) // numbers.replicas


@dataclass(frozen=True, slots=True)
class OnHost:
    """Bytes of a slice in host memory, and what is lent of them at a time.

    `stream`: of one block and micro-batch. `lent_to_blocks`: weights and residual stream of two blocks, and three
    gradients of the largest matrix. `lent_to_update`: two parts of an update.
    """

    values: int = 0
    copies: int = 0
    gradients: int = 0
    moments: int = 0
    stream: int = 0
    lent_to_blocks: int = 0
    lent_to_update: int = 0


def keeps_copies(which: Collection[Offload]) -> bool:
    """Whether bf16 copies of matrices outlive a step."""
    return "master" in which or "weights" in which


def on_host(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers) -> OnHost:
    """What `memory.offload` keeps of a slice on the host, of one micro-batch in flight."""
    which, shape, num_blocks = numbers.offload, numbers.shape, len(blocks)
    if not which or not num_blocks:
        return OnHost()
    if numbers.low_rank is not None:
        return _low_rank_on_host(spec, blocks, numbers)
    parameters = slice_parameters(spec, blocks)
    matrices, trained = _block_matrices(spec, parameters), _trained_matrices(spec, parameters)
    ends = [
        each
        for name, each in parameters.items()
        if len(each) > 1 and not is_block_matrix(spec, name, each) and spec.is_trained(name)
    ]
    elements, largest = sum(map(math.prod, matrices)), max(map(math.prod, matrices))
    keeps_values = "master" in which or ("weights" in which and not shape.reads_copies)
    values = shape.weight_nbytes * elements if keeps_values else 0
    copies = _BF16 * elements if shape.reads_copies and "weights" in which else 0
    gradient = _BF16 if numbers.gradients == "bf16" else _FP32
    gradients = gradient * sum(map(math.prod, trained)) if "gradients" in which else 0
    moments, of_ends = numbers.moments_nbytes(trained), numbers.moments_nbytes(ends)
    stream = streamed_by_block(spec, shape, which)
    two = min(2, num_blocks)
    products = copies if shape.reads_copies else values
    share = min(1.0, two * max(DECODED_AT_A_TIME, largest) / elements)
    return OnHost(
        values,
        copies,
        gradients,
        moments + of_ends,
        stream,
        two * (products // num_blocks + stream) + (3 * gradient * largest if gradients else 0),
        max(of_ends, math.ceil(share * (values + copies + gradients + moments))),
    )


def _low_rank_on_host(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers) -> OnHost:
    """The same with low-rank weights, of which `m` and `v` are as large as each other."""
    ordinary, covered = divided_parameters(spec, blocks, numbers.low_rank)
    num_moments = len({"m", "v"} & set(numbers.offload))
    moments = [low_rank_bytes(each.shape, each.settings).moments * num_moments // 2 for each in covered.values()]
    moments += [numbers.moments_nbytes([shape]) for shape in ordinary.values() if len(shape) > 1]
    stream = streamed_by_block(spec, numbers.shape, numbers.offload)
    of_update = min(sum(moments), max(4 * DECODED_AT_A_TIME, sum(sorted(moments)[-2:])))
    lent = 2 * stream + (max(moments) if numbers.is_fused else 0)
    return OnHost(moments=sum(moments), stream=stream, lent_to_blocks=lent, lent_to_update=of_update)


def fp32_gradient(spec: ModelSpec, numels: Mapping[str, int], gradients: Gradients) -> int:
    """Bytes of the largest gradient that is there in fp32 before it is kept in fewer bits; `numels`: elements by name.

    Of gradients kept in bf16 that is the embedding's; products compute the others in bf16.
    """
    if gradients == "fp8":
        return _FP32 * max(numels.values(), default=0)
    return _FP32 * numels.get(spec.layout.embedding_weight, 0) if gradients == "bf16" else 0


def _block_matrices(spec: ModelSpec, shapes: Mapping[str, Shape]) -> list[Shape]:
    return [shape for name, shape in shapes.items() if is_block_matrix(spec, name, shape)]


def _trained_matrices(spec: ModelSpec, shapes: Mapping[str, Shape]) -> list[Shape]:
    return _block_matrices(spec, {name: shape for name, shape in shapes.items() if spec.is_trained(name)})


def divided_nbytes(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers) -> int:
    """Bytes of gradients and weights of a slice of which replicas each have a part (`memory.shard`)."""
    matrices = _block_matrices(spec, slice_parameters(spec, blocks))
    elements, shape = sum(map(math.prod, matrices)), numbers.shape
    weights = shape.weight_nbytes * elements + len(blocks) * copied_by_block(spec, shape)
    gradients = _gradients(_trained_matrices(spec, slice_parameters(spec, blocks)), (), numbers)
    return weights * ("weights" in numbers.shards) + gradients * ("gradients" in numbers.shards)


def _gradients(shapes: Collection[Sequence[int]], low_rank: Sequence[int], numbers: StepNumbers) -> int:
    """What is kept of the gradients of weights of these shapes, and of low-rank ones of so many bytes in fp32."""
    matrix = _BF16 if numbers.gradients == "bf16" else _FP32
    each = [(matrix if len(shape) >= 2 else _FP32) * math.prod(shape) for shape in shapes] + [*low_rank]
    if numbers.is_fused:
        return max(each, default=0)
    if numbers.gradients == "fp8":
        each = [stored_nbytes(nbytes // _FP32, 8, scale_nbytes=_FP32) for nbytes in each]
    return sum(each)


def streamed_by_block(spec: ModelSpec, shape: MicroBatchShape, which: Collection[Offload]) -> int:
    """Bytes of the residual stream that a block keeps of a micro-batch on the host: its input, and the MLP part's."""
    is_input_only = shape.recompute == "block" or spec.layout.layers_like is None
    num = 0 if "residual" not in which else 1 if is_input_only else 2
    return num * shape.residual_nbytes * shape.num_tokens * spec.hidden_size


def _copies(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers) -> int:
    are_shared = numbers.shape.recompute != "block"
    num_blocks = len(blocks) if are_shared or keeps_copies(numbers.offload) else min(1, len(blocks))
    copied = num_blocks * copied_by_block(spec, numbers.shape)
    if "weights" in numbers.shards:  # of its own part; `_lent_by_replicas` has the rest
        copied = len(blocks) * copied_by_block(spec, numbers.shape) // numbers.replicas
    num_heads = 1 if are_shared or numbers.splits_backward else numbers.in_flight
    head = copied_by_head(spec, numbers.shape) if blocks.last else 0
    return copied + num_heads * head


def _boundary(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers) -> int:
    elements = numbers.shape.num_tokens * spec.hidden_size
    output, first = numbers.shape.residual_nbytes * elements, spec.first_trainable
    outputs = 0 if blocks.last else numbers.in_flight * output
    receives, sends = not blocks.last and not blocks.is_frozen(first), blocks.sends_gradient(first)
    outputs += (numbers.num_forwards - 1) * (sends + 3 * receives) * output
    return (
        outputs
        + (receives + sends) * _FP32 * elements
        + numbers.in_flight * numbers.frame_nbytes
        + numbers.ahead_nbytes
    )


def _workspace(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers, covered: Mapping[str, Covered]) -> int:
    every = range(max(blocks.start, spec.first_trainable), blocks.stop)
    again = max((recomputed_by_block(spec, block, numbers.shape) for block in every), default=0)
    adds_in_place = numbers.splits_backward or numbers.gradients == "fp8"
    logits = head_workspace(spec, numbers.shape, adds_in_place=adds_in_place) if blocks.last else 0
    matrix = 2 * numbers.shape.element_nbytes
    largest = max((math.prod(each.shape) for each in covered.values() if not each.settings.is_end), default=0)
    head = math.prod(covered[HEAD_WEIGHT].shape) if HEAD_WEIGHT in covered else 0
    again += decoded_nbytes(spec, numbers.shape.element_nbytes, numbers.shape.weight_nbytes) if len(blocks) else 0
    # The head's backward ends before a block is recomputed.
    return max(again + matrix * largest, logits + matrix * head)
