"""The planner's question (a model, a cluster, and what may be chosen) and its answer, a `PipelinePlan`.

Sizes are bytes, times seconds. A stage's memory is that of `tahq.memory.estimate`, divided into the needs of a block
and of each end of the model, so that any division can be weighed without building it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from tahq.comm.link.frame import HEADER_NBYTES
from tahq.comm.link.spec import First
from tahq.memory.config import Offload, Recompute
from tahq.plan.cluster_numbers import ClusterNumbers
from tahq.quant import get_codec
from tahq.quant.config import FP8


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """What a stage keeps of each micro-batch in flight, and once for the one that it computes.

    block, first, last: activations of a block, of the embedding, of the final norm, the head and the loss.
    block_put_off, last_put_off: what is kept beyond that while only gradients of weights are missing. stage: what any
    stage keeps, rotary tables and masks. tensor: what crosses a cut, in fp32. workspace: the logits of the last stage,
    and its head where that is low-rank, once. again: a block that is recomputed, and its largest matrix where that is
    low-rank, once; never while there are logits. With gradients in 8 bits both include the largest in fp32. streamed: a
    block's residual stream that is in host memory instead.
    """

    block: float = 0.0
    first: float = 0.0
    last: float = 0.0
    block_put_off: float = 0.0
    last_put_off: float = 0.0
    stage: float = 0.0
    tensor: float = 0.0
    workspace: float = 0.0
    again: float = 0.0
    streamed: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryOption:
    """What a stage keeps, and copies, under one choice of `memory.recompute` and `memory.offload`.

    `held` is by micro-batch size. `block_nbytes`, `first_nbytes` and `last_nbytes` are weights, gradients and optimizer
    on the device, of a block and of what each end of the model adds; `host_block_nbytes`, `host_first_nbytes` and
    `host_last_nbytes` those in host memory; `frozen_nbytes` and `host_frozen_nbytes` of a block that is not trained.
    Bytes of a block that are copied: `fetched`, its weights, for every forward and backward pass; `exchanged`, its
    gradients, to the device and back for every backward pass; `updated`, each way for every update, as what the ends
    have there. `repeated`: share of a block's forward that its backward computes again. `splits`: whether zero-bubble
    may use it. `stages`: those that have it, because they are set; None: any may.
    """

    held: Mapping[int, HeldBytes]
    block_nbytes: float = 0.0
    first_nbytes: float = 0.0
    last_nbytes: float = 0.0
    host_block_nbytes: float = 0.0
    host_first_nbytes: float = 0.0
    host_last_nbytes: float = 0.0
    frozen_nbytes: float = 0.0
    host_frozen_nbytes: float = 0.0
    fetched: float = 0.0
    exchanged: float = 0.0
    updated: float = 0.0
    repeated: float = 0.0
    splits: bool = True
    recompute: Recompute = "none"
    offload: tuple[Offload, ...] = ()
    stages: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """A model as the planner sees it: `num_layers` equal blocks and two ends.

    Attributes:
        first_trainable: blocks before it have a forward only, and so has the embedding where there are such blocks.
        options: of which each stage takes the fastest that fits; all with the same micro-batch sizes, those that may be
            chosen.
        seq_len: tokens of a sample, of a pair of answers those of both.
        num_forwards: of a micro-batch, see `TrainingConfig.num_forwards`.
        attached_nbytes: most bytes that travel behind a tensor (`training.router_aux_loss`).
        trained: elements that are trained of a block from `first_trainable` on, and of each end of the model; replicas
            sum their gradients.
    """

    num_layers: int
    hidden_size: int
    seq_len: int
    global_batch: int
    options: tuple[MemoryOption, ...]
    first_trainable: int = 0
    attached_nbytes: int = 0
    trained: tuple[float, float, float] = (0.0, 0.0, 0.0)
    num_forwards: int = 1

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Sizes that may be chosen, ascending."""
        return tuple(sorted(self.options[0].held))

    def with_sizes(self, sizes: Collection[int]) -> "ModelNumbers":
        """The same with fewer micro-batch sizes."""
        options = (
            replace(option, held={size: held for size, held in option.held.items() if size in sizes})
            for option in self.options
        )
        return replace(self, options=tuple(options))


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """Everything that a plan is made from.

    Attributes:
        activations, gradients: codecs that may be chosen forward and backward, the most faithful first.
        schedules: names, see `tahq.pipeline.schedule.generators`.
        num_stages: the number of stages; None: the best one.
        in_order: whether all hosts are used, in the order of the list.
        max_replicas: most pipelines side by side, on separate hosts.
        all_reduce: codec of the gradients that they sum.
        chunks_per_stage: of an interleaved schedule.
        piece_nbytes: a frame's largest piece; None: frames are whole.
        firsts: which frames may go first on an uplink; the search takes the first of them.
    """

    model: ModelNumbers
    cluster: ClusterNumbers
    activations: tuple[str, ...] = ("wf",)
    gradients: tuple[str, ...] = ("eden",)
    schedules: tuple[str, ...] = ("1f1b", "gpipe")
    num_stages: int | None = None
    in_order: bool = False
    max_replicas: int = 1
    all_reduce: str = FP8
    chunks_per_stage: int = 2
    piece_nbytes: int | None = None
    firsts: tuple[First, ...] = ("oldest",)

    def frame_nbytes(self, codec: str, micro_batch: int, num_forwards: int = 1) -> float:
        """Bytes of a frame on the wire, its pieces' headers included; of so many forwards, or of a gradient."""
        shape = (num_forwards * micro_batch, self.model.seq_len, self.model.hidden_size)
        return _frame_nbytes(codec, shape, self.model.attached_nbytes, self.piece_nbytes or 1 << 62)

    def num_elements(self, micro_batch: int) -> int:
        """Elements of the tensor that crosses a cut."""
        return micro_batch * self.model.seq_len * self.model.hidden_size

    def tokens_per_step(self) -> int:
        """Tokens of a training step."""
        return self.model.global_batch * self.model.seq_len

    @property
    def has_choice_of_codecs(self) -> bool:
        """Whether there is more than one codec for a direction."""
        return len(self.activations) + len(self.gradients) > 2

    @property
    def fewest_bits(self) -> tuple[str, str]:
        """The codec of the shortest frames in each direction; of equally short ones the more faithful."""
        nbytes = partial(self.frame_nbytes, micro_batch=self.model.micro_batches[0])
        return min(self.activations, key=nbytes), min(self.gradients, key=nbytes)


@cache
def _frame_nbytes(codec: str, shape: tuple[int, int, int], attached_nbytes: int, piece_nbytes: int) -> float:
    payload = get_codec(codec).encoded_nbytes(shape) + attached_nbytes
    return float(payload + max(1, math.ceil(payload / piece_nbytes)) * HEADER_NBYTES)


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A complete plan of one pipeline.

    Attributes:
        hosts: index of each stage's host in the cluster's list, in order.
        layers: blocks of each stage.
        micro_batch: samples that travel together.
        depths: most micro-batches in flight, by stage; empty: the schedule's own.
        activations, gradients: codec of each cut, forward and backward.
        chunks_per_stage: more than one only under an interleaved schedule.
        first: which of the frames that wait for an uplink goes first.
        options: number of each stage's memory option; empty: the fastest that fit.
    """

    hosts: tuple[int, ...]
    layers: tuple[int, ...]
    micro_batch: int
    num_micro_batches: int
    schedule: str
    depths: tuple[int, ...] = ()
    activations: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    chunks_per_stage: int = 1
    first: First = "oldest"
    options: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.hosts)


def divisors(number: int) -> tuple[int, ...]:
    """Divisors of a positive whole number, ascending."""
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def named(problem: PlanProblem, hosts: Sequence[int]) -> tuple[str, ...]:
    """The hosts' names."""
    return tuple(problem.cluster.hosts[host].name for host in hosts)
