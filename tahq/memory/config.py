"""Configuration of memory: the section `memory:`, and the sections of `training:` that belong to one optimizer."""

from collections.abc import Mapping
from typing import Literal, get_args

from pydantic import Field, ValidationError, model_validator

from tahq.units import Section

COAT_FAMILIES = ("llama", "qwen2", "mistral")
"""Families with Llama's block: two RMSNorms, a gated SiLU, nothing between projections and rotary embedding."""
READ_BF16_GRADIENTS = ("adamw", "adamw8bit", "adamw_bf16")
"""Optimizers that take gradients in bf16."""
MIN_ELEMENTS = 4096
Gradients = Literal["auto", "fp32", "bf16", "fp8"]
"""`memory.gradients`; `auto` counts as fp32 where nothing was chosen."""
Recompute = Literal["none", "swiglu", "norm", "ffn", "qkv", "att", "block"]
"""`memory.recompute`; each includes those before it."""
Offload = Literal["residual", "m", "v", "master", "weights", "gradients"]
"""What `memory.offload` may list."""
Shard = Literal["optimizer", "gradients", "weights"]
"""What `memory.shard` may list."""
NEEDS_BF16 = (
    "master keeps fp32 weights on the host beside bf16 copies on the device, but products in fp32 read the weights "
    "themselves; offload weights instead, or set training.precision: bf16"
)
EXACTLY_STORED: Mapping[Recompute, tuple[str, ...]] = {
    "swiglu": ("mlp",),
    "norm": ("norms", "mlp"),
    "ffn": ("norms",),
}
"""By level, the layers whose inputs are kept unchanged, outside of what is checkpointed."""


class CoatConfig(Section):
    """`memory.coat`: options of `activations: coat`."""

    backward_products: Literal["e5m2", "e4m3", "bf16"] = "e5m2"
    """Format of an output's gradient in the backward products of a linear layer; gradients themselves stay bf16."""
    keep_weight_codes: bool = True
    """Keep the weights' FP8 codes for all micro-batches of a step; otherwise only their scales are kept, and the
    weights are coded again for every product."""


class AgoqConfig(Section):
    """`memory.agoq`: options of `activations: agoq`."""

    bits: Literal["auto", 4, 5, 6, 8] | list[Literal[4, 5, 6, 8]] = "auto"
    """Of a stored number, on all stages or by stage. `auto`: 4 on the stage with most layers times micro-batches in
    flight, and as many more on others as fit in the same bytes. A run's config.yaml lists what was chosen."""
    rounding: Literal["paper", "strict"] = "strict"
    """Of the bits of `auto`: `paper` to the nearest of 4, 5, 6 and 8, `strict` down."""
    stored: tuple[Literal["norms", "mlp", "attention"], ...] = ("norms", "mlp")
    """Layers whose inputs are stored in few bits: norms; the MLP's activation; attention and its output projection,
    which the paper advises against."""

    def bits_of(self, stage: int) -> int:
        """A stage's bits; `auto`: the fewest that it may be given."""
        bits = self.bits[stage] if isinstance(self.bits, list) else self.bits
        return 4 if bits == "auto" else bits


class MemoryConfig(Section):
    """What a stage keeps in memory, and in which format."""

    recompute: Literal["auto", Recompute] | list[Recompute] = "auto"
    """What of a block the backward computes again, with the same bits (LLMQ): `swiglu` the MLP's activation, `norm`
    norms, `ffn` the MLP with its norm, `qkv` Q, K and V with their norm, `att` attention, `block` everything. On all
    stages or by stage. `auto`: none, unless memory is what limits a plan. A run's config.yaml says what was chosen."""
    offload: Literal["auto"] | tuple[Offload, ...] | tuple[tuple[Offload, ...], ...] = "auto"
    """What a stage keeps of its blocks in pinned host memory, with the same bits (LLMQ): `residual`, the residual
    stream; of matrices `m` and `v`, optimizer moments, `gradients` between micro-batches, `master`, fp32 weights under
    bf16, and `weights`, those that products read. On all stages, or a list for each. `auto`: nothing, unless memory is
    what limits a plan. A run's config.yaml says what was chosen."""
    activations: Literal["none", "coat", "agoq"] = "none"
    """`none`: as torch saves them; `coat`: FP8 (COAT), for Llama and models built like it; `agoq`: 4 to 8 bits (AGoQ),
    for all models."""
    gradients: Gradients = "auto"
    """What gradients are kept as between micro-batches; `fp8`: in blocks of 128 (AGoQ); `bf16`: those of matrices
    (LLMQ), for three optimizers. `auto`: fp32, unless the planner finds that only fp8 fits. A run's config.yaml says
    what was chosen."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Type of the residual stream within a stage; `bf16` (LLMQ) needs products in bf16, and changes nothing on the
    wire."""
    loss_chunks: int | None = Field(default=None, ge=1)
    """Parts of a micro-batch's tokens whose logits are computed one after the other, with their loss and gradients
    (LLMQ). None: as many as keep logits below 2 GiB in fp32; 1 with low-rank weights. A run's config.yaml has the
    number."""
    attention_chunks: int = Field(default=1, ge=1)
    """Calls of attention's kernel for a micro-batch, each for some of its samples and heads, forward and backward, so
    that the kernel's workspace is smaller (LLMQ)."""
    shard: tuple[Shard, ...] = ()
    """What `pipeline.replicas` divide among themselves instead of each keeping all of it (LLMQ). Each replica has the
    states of the `optimizer` for a share of the parameters, updates these, and sends the others the new weights. Of
    blocks' matrices it alone keeps the sums of `gradients`, and the `weights`, which it lends the others."""
    coat: CoatConfig = CoatConfig()
    agoq: AgoqConfig = AgoqConfig()

    @model_validator(mode="after")
    def _combines(self) -> "MemoryConfig":
        levels = self.recompute if isinstance(self.recompute, list) else [self.recompute]
        refused = next((level for level in levels if level not in ("auto", "none", "block")), None)
        if self.activations != "none" and refused is not None:
            raise ValueError(
                f"recompute {refused} does not combine with activations {self.activations}, which recomputes "
                "norms and the MLP's activation from what it stores; use recompute none or block"
            )
        if self.shard and "optimizer" not in self.shard:
            raise ValueError(
                f"shard {' and '.join(self.shard)} needs optimizer, since only the replica that keeps a parameter's "
                f"sum or values can update it; use shard [optimizer, {', '.join(self.shard)}]"
            )
        if "weights" in self.shard and self.activations == "coat":
            raise ValueError(
                "shard weights does not combine with activations coat, which keeps FP8 codes of all weights during a "
                "step; leave weights out, or use another kind of activations"
            )
        offload = self.all_offload
        if "residual" in offload and self.activations != "none" and set(levels) != {"block"}:
            raise ValueError(
                f"offload residual does not combine with activations {self.activations}, which stores the residual "
                "stream in another form; use recompute block, or leave residual out"
            )
        if self.activations == "coat" and not offload.isdisjoint(("master", "weights")):
            raise ValueError(
                "offload master and weights do not combine with activations coat, which codes the fp32 weights in FP8 "
                "for each product; offload m, v or gradients, or use another kind of activations"
            )
        if "gradients" in offload and self.gradients == "fp8":
            raise ValueError(
                "offload gradients keeps gradients in fp32 on the host, gradients: fp8 in codes on the device; choose "
                "one of them"
            )
        return self

    @property
    def all_offload(self) -> frozenset[Offload]:
        """What at least one stage keeps in host memory."""
        listed = () if self.offload == "auto" else self.offload
        return frozenset(name for each in listed for name in ((each,) if isinstance(each, str) else each))

    def offload_of(self, stage: int | None = None) -> frozenset[Offload]:
        """What a stage keeps in host memory; None: what all stages keep there."""
        by_stage = [frozenset(each) for each in self.offload if isinstance(each, tuple)]
        if not by_stage:
            return self.all_offload
        return frozenset.intersection(*by_stage) if stage is None else by_stage[stage]

    def recompute_of(self, stage: int | None = None) -> Recompute:
        """A stage's level; None: the lowest of all stages, which keeps most. What is open is none."""
        if not isinstance(self.recompute, list):
            return "none" if self.recompute == "auto" else self.recompute
        levels: tuple[Recompute, ...] = get_args(Recompute)
        return min(self.recompute, key=levels.index) if stage is None else self.recompute[stage]

    @model_validator(mode="before")
    @classmethod
    def _kind_with_options(cls, given: object) -> object:
        """`activations: {kind: agoq, bits: 5}` stands for `activations: agoq` with `agoq: {bits: 5}`."""
        if not isinstance(given, dict) or not isinstance(given.get("activations"), dict):
            return given
        options = dict(given["activations"])
        kind = options.pop("kind", None)
        sections: dict[object, type[Section]] = {"coat": CoatConfig, "agoq": AgoqConfig}
        if kind not in sections:
            raise ValueError("activations with options needs kind: coat or kind: agoq")
        merged = {**given.get(kind, {}), **options}
        try:
            sections[kind].model_validate(merged)
        except ValidationError as error:
            first = error.errors()[0]
            known = f"; known are kind, {', '.join(sections[kind].model_fields)}" * (first["type"] == "extra_forbidden")
            raise ValueError(f"activations.{first['loc'][0]}: {first['msg']}; got {first['input']!r}{known}") from error
        return given | {"activations": kind, kind: merged}


class Fp8AdamWConfig(Section):
    """How `fp8_adamw` stores AdamW's two moments (COAT §4)."""

    first: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of the first moment, m."""
    second: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of the second moment, v."""
    expand_first: bool = True
    """Raise groups of m to the power at which they fill the format's range."""
    expand_second: bool = True
    """The same for v."""


class Fp8Config(Section):
    """Matrix products under `training.precision: fp8`."""

    backward: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of an output's gradient; weights and inputs are E4M3."""


class AdamW8bitConfig(Section):
    """How `adamw8bit` stores its moments."""

    block: Literal[64, 128, 256, 512, 1024, 2048] = 256
    """Elements that share a scale."""
    min_elements: int = Field(default=MIN_ELEMENTS, ge=0)
    """Parameters with fewer elements keep fp32 moments."""


class AdamWBf16Config(Section):
    """What `adamw_bf16` keeps in bf16, and how it is rounded (LLMQ §3.1)."""

    weights: Literal["fp32", "bf16"] = "fp32"
    """Of matrices; there is no other copy. Norms and biases stay fp32."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Of moments, and of weights in bf16, after an update."""


class QGaLoreConfig(Section):
    """How `training.optimizer: qgalore` and `galore` train the matrices of attention and MLP.

    The three types and `lazy` default to int8, int4, int8 and true under `qgalore`, and to fp32, fp32, fp32 and false
    under `galore`.
    """

    rank: int | None = Field(default=None, ge=1)
    """Of the subspace; None: a quarter of a matrix's smaller dimension. From that dimension on nothing is projected."""
    scale: float = Field(default=0.25, gt=0)
    """Factor of an update when it is projected back."""
    gap: int = Field(default=200, ge=1)
    """Steps from one search for a subspace to the next, except to the second (`LazyRule.spread`)."""
    max_gap: int | None = Field(default=None, ge=1)
    """Largest gap, however stable the subspace; None: 16 times `gap`."""
    queue: int = Field(default=5, ge=1)
    """The gap doubles after this many similarities in a row ..."""
    threshold: float = Field(default=0.4, gt=0, le=1)
    """... of at least this."""
    lazy: bool | None = None
    """Whether the gap ever doubles."""
    weights: Literal["int8", "bf16", "fp32"] | None = None
    projections: Literal["int4", "bf16", "fp32"] | None = None
    states: Literal["int8", "fp32"] | None = None
    """Adam's moments, those of all other parameters included."""
    ends: Literal["int8", "bf16", "fp32"] | None = None
    """Type of embedding and head, which are not projected; None: see `low_rank_settings` in `pipeline/optimizer.py`."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Of updated int8 weights, and of ends in bf16."""
    svd: Literal["exact", "randomised"] = "randomised"
    """How a subspace is found; `exact` is the papers', and takes minutes for the matrices of 7B models."""
    fused: bool = False
    """Update each weight within the backward pass."""

    @model_validator(mode="after")
    def _consistent(self) -> "QGaLoreConfig":
        if self.max_gap is not None and self.max_gap < self.gap:
            raise ValueError(f"max_gap {self.max_gap} is below gap {self.gap}")
        return self
