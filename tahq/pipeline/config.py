"""`training:` and `pipeline:` of cluster.yaml."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tahq.comm.topology import Grid
from tahq.errors import ScheduleError
from tahq.memory.config import AdamW8bitConfig, AdamWBf16Config, Fp8AdamWConfig, Fp8Config, QGaLoreConfig
from tahq.models.config import RouterLossKey
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


class EarlyStopping(Section):
    """Ends a run whose validation loss does not fall any more."""

    patience: int = Field(default=3, ge=1)
    """Evaluations in a row without a lower loss."""
    min_delta: float = Field(default=0.0, ge=0)
    """Lower by more than this, in nats per token."""


class LossScaleConfig(Section):
    """The factor of the loss under `precision: fp16`: halved after a step whose gradients overflow, which is skipped,
    and doubled after many without."""

    initial: float = Field(default=2.0**16, ge=1, le=2.0**100)
    """Of the first step; a power of two."""
    growth_steps: int = Field(default=2000, ge=1)
    """Steps without an overflow before it doubles."""

    @field_validator("initial")
    @classmethod
    def _rounds_nothing(cls, scale: float) -> float:
        if math.frexp(scale)[0] != 0.5:
            raise ValueError(f"{scale:g} is no power of two, so it would round gradients; use 65536, or another one")
        return scale


class SamplesConfig(Section):
    """Texts that the model continues every few steps, by the likeliest token."""

    every: int = Field(ge=1)
    """Steps between samples."""
    prompts: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1, max_length=16)
    """As they stand."""
    max_tokens: int = Field(default=32, ge=1, le=512)
    """New tokens."""

    def num_positions(self, seq_len: int) -> int:
        """Positions of the batch of all prompts, of `seq_len` at most; all stages know it, also without a tokenizer."""
        longest = 1 + max(len(prompt.encode()) for prompt in self.prompts)  # tokens are no shorter than a byte
        return min(seq_len, longest + self.max_tokens)


class DpoConfig(Section):
    """Direct Preference Optimization: chosen answers become likelier than rejected ones, compared with the model
    without adapters.

    Example: `training.dpo: {beta: 0.1}`
    """

    beta: float = Field(default=0.1, gt=0)
    """The lower, the further the model may move from the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs taken to be in the wrong order."""


class TrainingConfig(Section):
    """How the weights learn, and for how long: `steps` or `epochs`.

    Example: `training: {epochs: 3, global_batch: 32, lr: 1.0e-3}`
    """

    steps: int | None = Field(default=None, ge=1, le=10**9)
    """Optimizer steps of the whole run, those before a resume included."""
    epochs: float | None = Field(default=None, gt=0, le=10**6)
    """The same in passes over the training data; 1 if neither is given."""
    dpo: DpoConfig | None = None
    """Learn from pairs of answers, each a sample. Needs `adapter`. Not set: from texts."""
    global_batch: int = Field(default=32, ge=1)
    """Samples per optimizer step; a multiple of `micro_batch`."""
    micro_batch: int = Field(default=MICRO_BATCH, ge=1)
    """Samples that pass through the pipeline together. Not set: chosen before the first step."""
    optimizer: Literal["adamw", "sgd", "ema_sgd", "fp8_adamw", "adamw8bit", "adamw_bf16", "qgalore", "galore"] = "adamw"
    """`sgd` has torch's momentum, `ema_sgd` a moving average; `fp8_adamw`, `adamw8bit` and `adamw_bf16` are AdamW
    with smaller moments; `qgalore` and `galore` are AdamW in a low-rank subspace."""
    fp8_adamw: Fp8AdamWConfig = Fp8AdamWConfig()
    """Options of `fp8_adamw`."""
    adamw8bit: AdamW8bitConfig = AdamW8bitConfig()
    """Options of 8-bit moments."""
    adamw_bf16: AdamWBf16Config = AdamWBf16Config()
    """Options of `adamw_bf16`."""
    qgalore: QGaLoreConfig = QGaLoreConfig()
    """Options of `qgalore` and `galore`."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate. Not set beside `model.path`: 2e-5; with `adapter`: 2e-4; with `dpo`: 5e-6."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay of first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's ε, outside the root."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled; none on norms and biases."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Factor of the old momentum: torch's `momentum` (`sgd`), 1 − β₁ of TAH-Quant Eq. 6 (`ema_sgd`)."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """From `lr` to `min_lr` after the warm-up; `wsd` is warm-up, stable, decay."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises to `lr`."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Length of the decay of `wsd`. Not set: a tenth of all steps."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """How `wsd` decays when a share p of the decay is done: by p, or by √p."""
    min_lr: float = Field(default=0.0, ge=0)
    """Rate at the end of the decay."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest norm of the whole model's gradient; `null`: not clipped."""
    z_loss: float = Field(default=0.0, ge=0)
    """Factor of the square of log Σ exp(logits), added to each token's loss in the backward only (PaLM: 1e-4)."""
    router_aux_loss: RouterLossKey = "auto"
    """Loss that balances the load of experts, times the model's `router_aux_loss_coef`: over the routers of all layers
    (`pooled`, as transformers has it), or the mean of each layer's own (`per_layer`). `auto`: pooled where config.json
    has `output_router_logits: true`."""
    non_finite: Literal["skip", "halt"] = "skip"
    """What all stages do with a step whose loss or gradient is not finite: skip it, or end the run with status 5."""
    max_skipped_in_a_row: int = Field(default=10, ge=1)
    """More skipped steps than this in a row end the run with status 5."""
    eval_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations on the validation split. Not set: never."""
    eval_batches: int = Field(default=4, ge=1)
    """Global batches per evaluation and validation set."""
    best_set: str | None = None
    """Set whose loss, without codecs, decides. Not set: the share, else the first by name."""
    early_stopping: EarlyStopping | None = None
    """Not set: never."""
    samples: SamplesConfig | None = None
    """Not set: none."""
    seq_len_schedule: tuple[tuple[Count, Count], ...] = ()
    """Shorter sequences at first: `[[512, 1000], [1024, 2000]]` cuts samples into pieces of 512 tokens until step
    1000, of 1,024 until step 2000."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """`auto`: fp32 on CPU, bf16 autocast with fp32 weights on CUDA, fp16 autocast on GPUs older than Ampere. `fp8`:
    `bf16` with the matrix products of blocks in FP8."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Of `precision: fp16`."""
    fp8: Fp8Config = Fp8Config()
    """Options of `precision: fp8`."""
    compile: bool = False
    """Compute blocks by torch.compile, which takes up to a minute at the start; without zero-bubble's schedule."""

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
        if self.early_stopping is not None and self.eval_every is None:
            raise ValueError("early_stopping needs validation losses; set eval_every, the steps between them")
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
    def rows_per_sample(self) -> int:
        """Sequences of a sample: both answers of a pair."""
        return 1 if self.dpo is None else 2

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch."""
        return self.micro_batch * self.rows_per_sample

    @property
    def num_forwards(self) -> int:
        """Forwards of a micro-batch, that of DPO's reference included; their activations cross a cut as one tensor."""
        return 1 if self.dpo is None else 2

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.global_batch // self.micro_batch


class FirstSchedule(Section):
    """What a run begins with where `pipeline.schedule` is `auto`; the plan writes it into the run's config.yaml.

    Example: `pipeline.first: {schedule: zero-bubble, in_flight: [8, 6, 4, 2]}`
    """

    schedule: Literal["gpipe", "1f1b", "zero-bubble"]
    """Schedule of the first steps."""
    in_flight: list[Count] | None = None
    """Micro-batches in flight, by stage."""


class PipelineConfig(Section):
    """How the model is divided, and in which order its parts are computed.

    Example: `pipeline: {stages: 3, layers: [9, 9, 6]}`
    """

    stages: int = Field(default=4, ge=1, le=256)
    """Parts of the model, one worker each. Not set: as many as `layers` or `hosts` lists, at most one per layer."""
    schedule: Literal["auto", "gpipe", "1f1b", "zero-bubble", "interleaved"] = "auto"
    """`auto` changes schedule and depths between steps to what makes them shortest. `gpipe`: all forwards, then all
    backwards. `1f1b`: in turn. `zero-bubble`: backwards in two parts. `interleaved`: several `chunks` per stage."""
    first: FirstSchedule | None = None
    """What `auto` begins with; written by the plan. Not set: 1F1B."""
    in_flight: Count | list[Count] | None = None
    """Most micro-batches that a stage holds at once, for all stages or by stage; more hide a longer round trip and
    take more memory. Not set: chosen."""
    replicas: int = Field(default=1, ge=1, le=64)
    """Pipelines side by side that sum their gradients. Stage s of replica r has the number r · `stages` + s."""
    replicas_wait: Duration | None = None
    """How long the other replicas wait for a lost worker before they share its batch. Not set: until it is back."""
    replay: str | None = Field(default=None, min_length=1)
    """metrics.jsonl of another run, whose steps the same replicas compute, or skip, again."""
    chunks: int = Field(default=1, ge=1, le=16)
    """Pieces of the model per stage; `interleaved` needs 2 or more."""
    layers: list[Count] | None = None
    """Transformer blocks of each chunk, in order. Not set: chosen."""
    balance: Literal["counted", "measured"] = "measured"
    """`measured`: before the first step hosts measure themselves, and what is not set is chosen. `counted`: nothing
    is measured."""

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

    @property
    def is_open(self) -> bool:
        """Whether a run chooses its plan, before its first step, from measurements."""
        return self.balance == "measured" and self.layers is None and self.chunks == 1

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

    def actions(self, num_micro_batches: int, num_frozen: int = 0) -> Schedule:
        """A replica's schedule of a step with this many micro-batches; ScheduleError: unsuitable depths.

        `num_frozen`: chunks without a backward.
        """
        name, depths, count = self.first_schedule, self.first_depths, max(1, num_micro_batches // self.replicas)
        chunks = self.chunks
        return generate(name, self.stages, count, depths=depths, chunks_per_stage=chunks, num_frozen=num_frozen)
