"""A stage's memory, estimated before anything is allocated.

The total is a lower bound for the process: Python, torch, workspaces of kernels, the data and the allocator's
fragmentation are not counted.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass

from tahq.memory.agoq.stored_gradients import stored_gradient_nbytes
from tahq.memory.galore.low_rank_weight import LowRankSettings
from tahq.memory.galore.qgalore import Covered, divided_parameters, low_rank_bytes
from tahq.memory.saved_tensors import (
    MicroBatchShape,
    copied_by_block,
    copied_by_head,
    deferred_by_slice,
    head_workspace,
    recomputed_by_block,
    saved_by_slice,
)
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import HEAD_WEIGHT

_FP32 = 4


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The inputs of a stage's estimate other than the model.

    `in_flight`: micro-batches whose activations are held at once (`Schedule.max_in_flight`).
    `optimizer_nbytes`: shapes of fp32 parameters -> bytes of their optimizer states.
    `frame_nbytes`: encoded bytes of one micro-batch on all the stage's cuts, both directions.
    `low_rank`: format of the matrices of blocks, and possibly of the ends; None: fp32.
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
    stores_gradients: bool = False  # Whether they are kept in 8 bits


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes that a stage keeps, by kind."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    boundary: int
    workspace: int
    copies: int = 0  # Part of `weights`: autocast's copies and FP8 codes of matrices, which are not checkpointed

    def kinds(self) -> dict[str, int]:
        """Bytes by kind; their sum is the total."""
        return {name: nbytes for name, nbytes in asdict(self).items() if name != "copies"}

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(self.kinds().values())

    @property
    def snapshot(self) -> int:
        """Bytes in a checkpoint: weights and optimizer states."""
        return self.weights - self.copies + self.optimizer


def combined(memories: Iterable[tuple[StageMemory, int]]) -> StageMemory:
    """The sum of (memory, count) pairs, kind by kind."""
    rows = ([nbytes * num for nbytes in astuple(memory)] for memory, num in memories)
    return StageMemory(*map(sum, zip(*rows, strict=True)))


def stage_memory(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers) -> StageMemory:
    """Estimate a stage's peak memory.

    With N parameters, n micro-batches in flight, T = B·S tokens, C channels, V vocabulary:

    - weights 4·N and gradients 4·N, fp32 under bf16 autocast too, and their optimizer states; `low_rank_bytes` for
      low-rank weights; of gradients only the largest where the update is fused, 1.03·N where they are stored in 8 bits;
      counted as weights, the FP8 codes and autocast's copies of matrices. With checkpointing copies are not shared:
      those of one block, and one of the head per micro-batch in flight (one in all with split backwards);
    - activations n · `saved_by_slice`, or `deferred_by_slice` where only gradients of weights are missing and it is
      more;
    - boundary: outputs kept for their backward, n · 4·T·C (not the last stage); a received gradient (not the last) and
      one to send (not the first), 4·T·C each; n encoded frames;
    - workspace for one micro-batch: what of one block is computed again, `recomputed_by_block`; on the last stage
      `head_workspace`; with low-rank weights the largest decoded matrix of a
      block and its gradient, and with the logits the head's; the largest gradient in fp32 where they are stored.
    """
    ordinary, covered = divided_parameters(spec, blocks, numbers.low_rank)
    low_rank = [low_rank_bytes(each.shape, each.settings) for each in covered.values()]
    weights = [_FP32 * math.prod(shape) for shape in ordinary.values()]
    gradients = [0, *weights, *(each.gradient for each in low_rank)]
    saved = saved_by_slice(spec, blocks, numbers.shape)
    deferred = deferred_by_slice(spec, blocks, numbers.shape)
    codes = numbers.kept_code_nbytes * len(blocks) * spec.layout.block_weights(spec.hf_config)
    copies = codes + _copies(spec, blocks, numbers)
    return StageMemory(
        weights=sum(weights) + copies + sum(each.weight for each in low_rank),
        gradients=_gradients(gradients, numbers),
        optimizer=numbers.optimizer_nbytes(ordinary.values()) + sum(each.states for each in low_rank),
        activations=numbers.in_flight * saved + numbers.put_off * max(0, deferred - saved),
        boundary=_boundary(spec, blocks, numbers),
        workspace=_workspace(spec, blocks, numbers, covered) + (max(gradients) if numbers.stores_gradients else 0),
        copies=copies,
    )


def _gradients(each: Sequence[int], numbers: StepNumbers) -> int:
    """What is kept of gradients that take so many bytes in fp32."""
    if numbers.is_fused:
        return max(each)
    return sum(stored_gradient_nbytes(nbytes // _FP32) if numbers.stores_gradients else nbytes for nbytes in each)


def _copies(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers) -> int:
    are_shared = numbers.shape.recompute != "block"
    num_blocks = len(blocks) if are_shared else min(1, len(blocks))
    num_heads = 1 if are_shared or numbers.splits_backward else numbers.in_flight
    head = copied_by_head(spec, numbers.shape) if blocks.last else 0
    return num_blocks * copied_by_block(spec, numbers.shape) + num_heads * head


def _boundary(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers) -> int:
    tensor = _FP32 * numbers.shape.num_tokens * spec.hidden_size
    num_tensors = (0 if blocks.last else numbers.in_flight + 1) + (0 if blocks.first else 1)
    return num_tensors * tensor + numbers.in_flight * numbers.frame_nbytes


def _workspace(spec: ModelSpec, blocks: BlockRange, numbers: StepNumbers, covered: Mapping[str, Covered]) -> int:
    every = range(blocks.start, blocks.stop)
    again = max((recomputed_by_block(spec, block, numbers.shape) for block in every), default=0)
    adds_in_place = numbers.splits_backward or numbers.stores_gradients
    logits = head_workspace(spec, numbers.shape, adds_in_place=adds_in_place) if blocks.last else 0
    matrix = 2 * numbers.shape.element_nbytes
    largest = max((math.prod(each.shape) for each in covered.values() if not each.settings.is_end), default=0)
    head = math.prod(covered[HEAD_WEIGHT].shape) if HEAD_WEIGHT in covered else 0
    # The head's backward ends before a block is recomputed.
    return max(again + matrix * largest, logits + matrix * head)
