"""`training:` and `pipeline:` of cluster.yaml."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tahq.comm.topology import Grid
from tahq.errors import ScheduleError
from tahq.memory.config import AdamW8bitConfig, AdamWBf16Config, Fp8AdamWConfig, Fp8Config, QGaLoreConfig
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Schedule
from tahq.units import Duration, Section

Count = Annotated[int, Field(ge=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
MICRO_BATCH = 4


@dataclass(frozen=True, slots=True)
class Phases:
    """Phases of a run with a fixed number of steps; `decay_steps` 0: the decay is a share of the run."""

    warmup_steps: int = 0
    decay_steps: int = 0
    short_steps: int = 0
    """The first steps, whose sequences are shorter than `data.seq_len`."""

    def misfit(self, num_steps: int, length: str) -> str:
        """An error message, which calls `num_steps` `length`, if they do not fit into so many steps; else empty."""
        if self.short_steps > num_steps:
            return f"seq_len_schedule ends with step {self.short_steps}, which does not fit into {length}"
        if self.warmup_steps + self.decay_steps <= num_steps:
            return ""
        decay = f" and decay_steps {self.decay_steps}" if self.decay_steps else ""
        return f"warmup_steps {self.warmup_steps}{decay} do not fit into {length}"


_REMOVED_OPTIMIZERS = {
    "bnb_adamw8bit": "adamw8bit",
    "torchao_adamw8bit": "adamw8bit",
    "torchao_adamw_fp8": "fp8_adamw",
}
"""Names that version 0.1 accepted, and the replacement for each."""


class TrainingConfig(Section):
    """How weights are trained. One of `steps` and `epochs` gives the length."""

    steps: int | None = Field(default=None, ge=1, le=10**9)
    epochs: float | None = Field(default=None, gt=0, le=10**6)
    """1 if neither is given."""
    global_batch: int = Field(default=32, ge=1)
    """Samples per optimizer step."""
    micro_batch: int = Field(default=MICRO_BATCH, ge=1)
    """Samples that pass through the pipeline together; not set: chosen before the first step if hosts are measured,
    else the largest divisor of `global_batch` up to 4, or all of it where the backward updates."""
    optimizer: Literal["adamw", "sgd", "ema_sgd", "fp8_adamw", "adamw8bit", "adamw_bf16", "qgalore", "galore"] = "adamw"
    """`sgd` has torch's momentum; `ema_sgd` the moving average of TAH-Quant Eq. 6; `fp8_adamw` (COAT), `adamw8bit` and
    `adamw_bf16` are AdamW with moments of fewer bits; `qgalore` and `galore` are AdamW in a low-rank subspace."""
    fp8_adamw: Fp8AdamWConfig = Fp8AdamWConfig()
    adamw8bit: AdamW8bitConfig = AdamW8bitConfig()
    adamw_bf16: AdamWBf16Config = AdamWBf16Config()
    qgalore: QGaLoreConfig = QGaLoreConfig()
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate; not set: 2e-5 for a model in a folder."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled; not applied to norms and biases."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Factor of the old momentum (sgd), or 1 − β₁ of TAH-Quant Eq. 6 (ema_sgd)."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int | None = Field(default=None, ge=1)
    """Length of `wsd`'s decay; None: a tenth of the steps."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """How `wsd` decays: by p or √p, where p is the share of the decay's steps that are done."""
    min_lr: float = Field(default=0.0, ge=0)
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest global gradient norm; None: no clipping."""
    z_loss: float = Field(default=0.0, ge=0)
    """Factor of lse², lse = log Σ exp(logits), which is added to the loss of a token where it is differentiated."""
    non_finite: Literal["skip", "halt"] = "skip"
    """What to do with a step whose loss or gradients are NaN or infinite: skip it, or end the run."""
    max_skipped_in_a_row: int = Field(default=10, ge=1)
    eval_every: int | None = Field(default=None, ge=1)
    eval_batches: int = Field(default=4, ge=1)
    """Global batches of the validation split per evaluation."""
    seq_len_schedule: tuple[tuple[Count, Count], ...] = ()
    """[tokens, last step], in order: until then each sample is cut into pieces of so many tokens, which do not see each
    other. Later steps, and evaluations, have whole samples of `data.seq_len`. Source: LLMQ App. A.4."""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """`auto`: fp32 on CPU; bf16 autocast with fp32 master weights on CUDA. `fp8`: `bf16` with the blocks' products with
    weights in FP8 (LLMQ)."""
    fp8: Fp8Config = Fp8Config()

    @field_validator("optimizer", mode="before")
    @classmethod
    def _refuse_removed(cls, name: object) -> object:
        if replacement := _REMOVED_OPTIMIZERS.get(str(name)):
            raise ValueError(f"{name} was removed, because its states cannot be checkpointed; use {replacement}")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> "TrainingConfig":
        if self.steps is not None and self.epochs is not None:
            raise ValueError("has both steps and epochs; remove one")
        if self.steps is None and self.epochs is None:
            self.set_default("epochs", 1.0)
        if "micro_batch" not in self.model_fields_set:
            most = self.global_batch if self.is_fused else MICRO_BATCH
            size = max(each for each in range(1, most + 1) if self.global_batch % each == 0)
            self.set_default("micro_batch", size)
        if self.global_batch % self.micro_batch:
            raise ValueError(f"global_batch {self.global_batch} is not divisible by micro_batch {self.micro_batch}")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}")
        for (shorter, earlier), (longer, later) in pairwise(self.seq_len_schedule):
            if shorter >= longer or earlier >= later:
                raise ValueError(
                    f"seq_len_schedule: {[longer, later]} follows {[shorter, earlier]}; both numbers must rise"
                )
        # with `epochs`, the coordinator checks this once it knows the number of steps
        misfit = self.phases.misfit(self.steps, f"steps {self.steps}") if self.steps is not None else ""
        if misfit:
            raise ValueError(misfit)
        if not self.is_fused:
            return self
        if self.num_micro_batches > 1:
            raise ValueError(
                f"qgalore.fused updates within the backward of the only micro-batch, but there are "
                f"{self.num_micro_batches}; set micro_batch to global_batch ({self.global_batch}), or fused to false"
            )
        if self.clip_norm is not None:
            raise ValueError(
                "qgalore.fused updates before the norm of all gradients is known; set clip_norm to null, "
                "or fused to false"
            )
        if self.non_finite != "halt":
            raise ValueError(
                "qgalore.fused cannot skip a non-finite step, because part of it is applied already; "
                "set non_finite to halt, or fused to false"
            )
        return self

    @property
    def phases(self) -> Phases:
        """Warm-up, the decay of `wsd`, and shorter sequences."""
        short_steps = self.seq_len_schedule[-1][1] if self.seq_len_schedule else 0
        return Phases(self.warmup_steps, (self.decay_steps or 0) if self.lr_schedule == "wsd" else 0, short_steps)

    def num_pieces(self, step: int, seq_len: int) -> int:
        """Pieces that samples of `seq_len` tokens are cut into in a step, which is counted from 0."""
        return seq_len // next((length for length, last in self.seq_len_schedule if step < last), seq_len)

    @property
    def is_low_rank(self) -> bool:
        """Whether the matrices of blocks are low-rank weights, as `qgalore` configures."""
        return self.optimizer in ("qgalore", "galore")

    @property
    def has_bf16_weights(self) -> bool:
        """Whether matrices are trained in bf16, without an fp32 copy."""
        return self.optimizer == "adamw_bf16" and self.adamw_bf16.weights == "bf16"

    @property
    def has_small_states(self) -> bool:
        """Whether a low-rank optimizer keeps its moments in 8 bits."""
        return (self.qgalore.states or ("int8" if self.optimizer == "qgalore" else "fp32")) == "int8"

    @property
    def is_fused(self) -> bool:
        """Whether the backward itself updates weights."""
        return self.is_low_rank and self.qgalore.fused

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.global_batch // self.micro_batch


class FirstSchedule(Section):
    """What a run begins with where `pipeline.schedule` is `auto`; the planner's choice, in the run's config.yaml."""

    schedule: Literal["gpipe", "1f1b", "zero-bubble"]
    in_flight: list[Count] | None = None


class PipelineConfig(Section):
    """How the model is divided, and in which order its parts are computed."""

    stages: int = Field(default=4, ge=1, le=256)
    schedule: Literal["auto", "gpipe", "1f1b", "zero-bubble", "interleaved"] = "auto"
    """`auto` begins with `first` and changes schedule and depths, where `in_flight` leaves them open, between steps."""
    first: FirstSchedule | None = None
    """None: 1F1B with its own depths."""
    in_flight: Count | list[Count] | None = None
    """Micro-batches that a stage may hold at once, one number or a list by stage; under `interleaved`, pairs of a
    chunk and a micro-batch. None: under `auto` what makes steps shortest and fits the memory, else the schedule's
    default, which hides no latency."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Pipelines side by side, each with its part of the batch; they sum their gradients before every update. Their
    stages are numbered through: stage s of replica r has the number r · `stages` + s."""
    replicas_wait: Duration | None = None
    """How long the other replicas wait for a lost worker; then they skip the step and share the batch of its replica
    until it is back. None: they wait, and nothing is skipped."""
    replay: str | None = Field(default=None, min_length=1)
    """metrics.jsonl of another run, whose steps the same replicas compute, or skip, again."""
    chunks: int = Field(default=1, ge=1, le=16)
    """Pieces of the model per stage; `interleaved` needs 2 or more, other schedules have 1."""
    layers: list[Count] | None = None
    """Transformer blocks of each chunk, in order; None: divided by cost."""
    balance: Literal["counted", "measured"] = "measured"
    """`measured`: before the first step hosts measure themselves, and the planner chooses what is not set: layers, the
    order of listed hosts, micro-batch, codecs, and the first schedule. `counted`: layers are divided by multiplications
    counted, and nothing is measured."""

    @model_validator(mode="after")
    def _consistent(self) -> "PipelineConfig":
        if self.layers is not None and "stages" not in self.model_fields_set:
            self.set_default("stages", len(self.layers) // self.chunks)
        if self.layers is not None and len(self.layers) != self.num_chunks:
            of = f"{self.stages} times {self.chunks} chunks" if self.chunks > 1 else f"stages is {self.stages}"
            raise ValueError(f"layers lists {len(self.layers)} {'chunks' if self.chunks > 1 else 'stages'}, {of}")
        try:
            self.actions(1)  # depths are checked against the step's micro-batches by the whole configuration
        except ScheduleError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def num_chunks(self) -> int:
        """Pieces that the model is cut into; chunk c is on stage c mod `stages`."""
        return self.stages * self.chunks

    @property
    def num_workers(self) -> int:
        """Stages of all replicas."""
        return self.stages * self.replicas

    def grid(self, *, tie_link: bool) -> Grid:
        """The stages of all replicas and their links; `tie_link`: one joins the copies of a tied embedding."""
        return Grid(self.stages, self.replicas, self.chunks, tie_link)

    @property
    def first_schedule(self) -> str:
        """The schedule that a run begins with."""
        if self.schedule != "auto":
            return self.schedule
        return "1f1b" if self.first is None else self.first.schedule

    @property
    def first_depths(self) -> list[int] | None:
        """The depths that a run begins with."""
        if self.depths is not None or self.schedule != "auto" or self.first is None:
            return self.depths
        return self.first.in_flight

    @property
    def depths(self) -> list[int] | None:
        """`in_flight` as a list by stage; None: the schedule's default."""
        return [self.in_flight] * self.stages if isinstance(self.in_flight, int) else self.in_flight

    def actions(self, num_micro_batches: int) -> Schedule:
        """A replica's schedule of a step with this many micro-batches; ScheduleError: unsuitable depths."""
        depths, chunks, count = self.first_depths, self.chunks, max(1, num_micro_batches // self.replicas)
        return generate(self.first_schedule, self.stages, count, depths=depths, chunks_per_stage=chunks)
