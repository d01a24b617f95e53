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
    """Options of `memory.activations: coat`.

    Example: `memory.coat: {backward_products: bf16}`
    """

    backward_products: Literal["e5m2", "e4m3", "bf16"] = "e5m2"
    """Format of an output's gradient in the backward products of a linear layer."""
    keep_weight_codes: bool = True
    """Keep the weights' FP8 codes for all micro-batches of a step. `false`: code them again for every product."""


class AgoqConfig(Section):
    """Options of `memory.activations: agoq`.

    Example: `memory.agoq: {bits: [4, 4, 6, 8]}`
    """

    bits: Literal["auto", 4, 5, 6, 8] | list[Literal[4, 5, 6, 8]] = "auto"
    """Of a stored number: 4, 5, 6 or 8, on all stages or by stage. `auto`: 4 on the fullest stage, on others as many
    as fit the same bytes."""
    rounding: Literal["paper", "strict"] = "strict"
    """Of the bits of `auto`: `strict` down, `paper` to the nearest."""
    stored: tuple[Literal["norms", "mlp", "attention"], ...] = ("norms", "mlp")
    """Layers whose inputs are stored in few bits; the paper advises against `attention`."""

    def bits_of(self, stage: int) -> int:
        """A stage's bits; `auto`: the fewest that it may be given."""
        bits = self.bits[stage] if isinstance(self.bits, list) else self.bits
        return 4 if bits == "auto" else bits


class MemoryConfig(Section):
    """What a stage keeps in memory, and in which format.

    Example: `memory: {activations: agoq, gradients: fp8}`
    """

    recompute: Literal["auto", Recompute] | list[Recompute] = "auto"
    """What of a block the backward computes again, with the same bits, on all stages or by stage; each level
    includes those before it. `auto`: nothing, unless memory limits the plan."""
    offload: Literal["auto"] | tuple[Offload, ...] | tuple[tuple[Offload, ...], ...] = "auto"
    """What a stage keeps of its blocks in pinned host memory, with the same bits: `residual`, optimizer moments `m`
    and `v`, `master` (fp32 weights under bf16), `weights` (those that products read), `gradients`. On all stages, or
    a list for each. `auto`: nothing, unless memory limits the plan."""
    activations: Literal["none", "coat", "agoq"] = "none"
    """How activations wait for their backward. `coat`: FP8, for Llama, Qwen2 and Mistral. `agoq`: 4 to 8 bits, for
    all models."""
    gradients: Gradients = "auto"
    """Type of gradients between micro-batches. `bf16` is for `adamw`, `adamw8bit` and `adamw_bf16`. `auto`: fp32,
    unless only `fp8` fits."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Type of the residual stream within a stage; `bf16` needs products in bf16."""
    loss_chunks: int | None = Field(default=None, ge=1)
    """Parts of a micro-batch's tokens whose logits exist one after the other. Not set: as many as keep them below 2
    GiB in fp32."""
    attention_chunks: int = Field(default=1, ge=1)
    """Calls of attention's kernel for a micro-batch, each with a smaller workspace."""
    shard: tuple[Shard, ...] = ()
    """What replicas divide among themselves: states of the `optimizer`; with it, of blocks, `gradients` and
    `weights`."""
    coat: CoatConfig = CoatConfig()
    """Options of `activations: coat`."""
    agoq: AgoqConfig = AgoqConfig()
    """Options of `activations: agoq`."""

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
    """How `optimizer: fp8_adamw` keeps AdamW's two moments (COAT §4): FP8 in groups of 128 with a scale.

    Example: `training.fp8_adamw: {second: e5m2, expand_first: false}`
    """

    first: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of the first moment, m."""
    second: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of the second moment, v."""
    expand_first: bool = True
    """Raise groups of m to the power at which they fill the format's range."""
    expand_second: bool = True
    """The same for v."""


class Fp8Config(Section):
    """How `training.precision: fp8` multiplies.

    Example: `training.fp8: {backward: e5m2}`
    """

    backward: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of an output's gradient; weights and inputs are E4M3."""


class AdamW8bitConfig(Section):
    """How 8-bit moments are laid out, under `adamw8bit` and beside the low-rank matrices of `qgalore`.

    Example: `training.adamw8bit: {block: 128, min_elements: 0}`
    """

    block: Literal[64, 128, 256, 512, 1024, 2048] = 256
    """Elements that share an fp32 scale."""
    min_elements: int = Field(default=MIN_ELEMENTS, ge=0)
    """Parameters with fewer elements keep fp32 moments."""


class AdamWBf16Config(Section):
    """What `optimizer: adamw_bf16` keeps in bf16, and how it is rounded (LLMQ §3.1). Needs torch 2.10.

    Example: `training.adamw_bf16: {weights: bf16}`
    """

    weights: Literal["fp32", "bf16"] = "fp32"
    """Type of matrices and embeddings; there is no other copy. Norms and biases stay fp32."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Of moments, and of weights in bf16, after an update. `nearest` loses small updates."""


class QGaLoreConfig(Section):
    """How `optimizer: qgalore` and `galore` train the matrices of attention and MLP; AdamW trains the rest.

    Example: `training.qgalore: {gap: 100, svd: exact}`
    """

    rank: int | None = Field(default=None, ge=1)
    """Of the subspace. Not set: a quarter of a matrix's smaller dimension."""
    scale: float = Field(default=0.25, gt=0)
    """Factor of an update when it is projected back."""
    gap: int = Field(default=200, ge=1)
    """Steps from one search for a subspace to the next."""
    max_gap: int | None = Field(default=None, ge=1)
    """Largest gap after doubling. Not set: 16 times `gap`."""
    queue: int = Field(default=5, ge=1)
    """The gap doubles after this many searches in a row found the leading vector unchanged."""
    threshold: float = Field(default=0.4, gt=0, le=1)
    """Least cosine of the old and the new leading vector that counts as unchanged."""
    lazy: bool | None = None
    """Whether gaps double. Not set: only under `qgalore`."""
    weights: Literal["int8", "bf16", "fp32"] | None = None
    """Type of the matrices. Not set: `int8` under `qgalore`, `fp32` under `galore`."""
    projections: Literal["int4", "bf16", "fp32"] | None = None
    """Type of the subspaces' bases. Not set: `int4`, or `fp32`."""
    states: Literal["int8", "fp32"] | None = None
    """Type of all AdamW moments. Not set: `int8`, or `fp32`."""
    ends: Literal["int8", "bf16", "fp32"] | None = None
    """Type of embedding and head. Not set: `bf16`, or `fp32`."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """Of `int8` weights, and of `ends` in `bf16`, after an update."""
    svd: Literal["exact", "randomised"] = "randomised"
    """How a subspace is found; `exact` takes minutes for a model of 7 billion parameters."""
    fused: bool = False
    """Update each weight within the backward pass. Needs one stage, one micro-batch, `clip_norm: null` and
    `non_finite: halt`."""

    @model_validator(mode="after")
    def _consistent(self) -> "QGaLoreConfig":
        if self.max_gap is not None and self.max_gap < self.gap:
            raise ValueError(f"max_gap {self.max_gap} is below gap {self.gap}")
        return self
