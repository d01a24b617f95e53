"""Which keys may change when a run is resumed, and whether the continuation is still bit-exact.

`exact` means that every later step has the losses and weights of the uninterrupted, unchanged run on the same
machines. Each key of the configuration has one rule, found by the longest prefix of its dotted name; a key without
a rule is refused, so a new one cannot slip through.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any

from tahq.errors import SnapshotError
from tahq.pipeline.checkpoint.renamed_keys import with_present_names
from tahq.quant.config import FP8
from tahq.quant.spec import AqsgdSpec, CodecSpec, RawSpec

Config = Mapping[str, Any]
"""A configuration as nested plain values, as from JSON."""

Condition = Callable[[Config, Config], bool]
"""(old, new) -> whether a rule applies."""


class Verdict(Enum):
    """The effect of a change on the continuation."""

    EXACT = "exact"
    INEXACT = "no longer exact"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The verdict on a change of some keys, and the reason.

    If `allowed_if` does not hold, the change is refused; if the condition of `exact_if` does, it is exact, for the
    reason given there.
    """

    verdict: Verdict
    reason: str
    exact_if: tuple[Condition, str] | None = None
    allowed_if: Condition | None = None

    def judge(self, old: Config, new: Config) -> tuple[Verdict, str]:
        """Verdict and reason for these two configurations."""
        if self.allowed_if is not None and not self.allowed_if(old, new):
            return Verdict.REFUSED, self.reason
        if self.exact_if is not None and self.exact_if[0](old, new):
            return Verdict.EXACT, self.exact_if[1]
        return self.verdict, self.reason


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs from the checkpoint's."""

    key: str
    old: Any
    new: Any
    verdict: Verdict
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r} ({self.verdict.value}: {self.reason})"


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """All differences between a checkpoint's configuration and the new one, and what else is lost.

    With `follows`, codecs are chosen from measurements, and so perhaps differently than without the interruption.
    """

    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    follows: bool = False

    @property
    def refused(self) -> list[Change]:
        """Changes that are not allowed."""
        return [change for change in self.changes if change.verdict is Verdict.REFUSED]

    @property
    def exact(self) -> bool:
        """Whether the continuation has the bits of the unchanged run."""
        return not self.follows and all(change.verdict is Verdict.EXACT for change in self.changes)

    def check(self) -> None:
        """Raise SnapshotError if a change is refused; it lists every such key, its values and what to do."""
        if self.refused:
            keys = "; ".join(f"{c.key} was {c.old!r}, is {c.new!r} ({c.reason})" for c in self.refused)
            raise SnapshotError(
                f"cannot resume with another {', '.join(c.key for c in self.refused)}: {keys}. "
                "Set them back, or start a new run under another run.name"
            )

    def lines(self) -> list[str]:
        """For the user: one line per change, and one that says whether the continuation is exact."""
        if not self.changes:
            unchanged = "resuming with the configuration of the checkpoint"
            return [f"{unchanged}: {_FOLLOWS if self.follows else 'exact'}"]
        allowed = [change for change in self.changes if change.verdict is not Verdict.REFUSED]
        summary = "the continuation is exact" if self.exact else "the continuation is no longer exact, to the bit"
        return [*(str(change) for change in (*self.refused, *allowed)), *self.notes, summary]


def compare_configs(old: Config, new: Config) -> ResumeReport:
    """Judge every difference between two resolved configurations, the checkpoint's and the one to continue with."""
    old = with_present_names(old)
    before, after = _flatten(keep_model_sizes(old, old)), _flatten(keep_model_sizes(old, new))
    changes = [
        Change(key, before.get(key), after.get(key), *_rule(key).judge(old, new))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    follows = new["wire"].get("follow") is not None and new["wire"].get("replay") is None
    return ResumeReport(tuple(changes), _forgotten_samples(old, new), follows)


def keep_model_sizes(old: Config, new: Config) -> dict[str, Any]:
    """The new configuration, with the checkpoint's values for model sizes that it does not set.

    An unset `model.max_seq_len` follows `data.seq_len`, but the number of positions of a trained model must not change
    with the length of its next samples; likewise its vocabulary.
    """
    model = dict(new["model"])
    for key, size in (("max_seq_len", _longest_sequence(old)), ("vocab_size", old["model"].get("vocab_size"))):
        if model.get(key) is None:
            model[key] = size
    return {**new, "model": model}


def _longest_sequence(config: Config) -> int | None:
    """Positions of a configuration's model, in tokens; None: its folder says."""
    model = config["model"]
    if model.get("max_seq_len") is not None:
        return int(model["max_seq_len"])
    return int(config["data"]["seq_len"]) if model.get("path") is None else None


def _rule(key: str) -> KeyRule:
    """The rule with the longest prefix of a dotted key."""
    prefix = key
    while prefix not in RULES:
        prefix, dot, _ = prefix.rpartition(".")
        if not dot:
            return KeyRule(Verdict.REFUSED, "this version of tahq has no rule for it")
    return RULES[prefix]


def _flatten(config: Config, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; a list is a leaf."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            leaves |= _flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return leaves


# -- conditions --------------------------------------------------------------------------------------


def _get(config: Config, key: str) -> Any:
    return _flatten(config).get(key)


def _outside(key: str, *values: object, reason: str = "not used by this optimizer") -> tuple[Condition, str]:
    """The condition that a key has none of these values in either configuration, and why a change is exact then."""
    return lambda old, new: _get(old, key) not in values and _get(new, key) not in values, reason


def _codecs(config: Config) -> list[CodecSpec]:
    return [CodecSpec.parse(_get(config, f"wire.{direction}")) for direction in ("activations", "gradients")]


def _coding(config: Config) -> tuple[Any, list[CodecSpec]]:
    """Everything about codecs that changes a number: the backend too, which may break ties of entropies differently."""
    return _get(config, "wire.backend"), [
        # where AQ-SGD keeps its samples changes nothing
        replace(spec, cache="memory") if isinstance(spec, AqsgdSpec) and spec.has_cache else spec
        for spec in _codecs(config)
    ]


def _sums_exactly(config: Config) -> bool:
    """Whether there is one pipeline, or sums over replicas are sent in fp32."""
    far, near = _get(config, "wire.all_reduce"), _get(config, "wire.all_reduce_inside")
    specs = {far, near or far}
    is_exact = FP8 not in specs and all(CodecSpec.parse(spec) == RawSpec("fp32") for spec in specs)
    return is_exact or _get(config, "pipeline.replicas") == 1


def _sharding(config: Config) -> set[str]:
    """What of `memory.shard` has an effect on sums over replicas."""
    shards = set(_get(config, "memory.shard") or ())
    if not shards or _get(config, "pipeline.replicas") == 1:
        return set()
    return shards - ({"optimizer", "weights"} if _sums_exactly(config) else {"weights"})


def _forgotten_samples(old: Config, new: Config) -> tuple[str, ...]:
    """The samples that AQ-SGD forgets, for the user: a cut at the same block keeps them if they keep their length."""
    before, after = (any(isinstance(s, AqsgdSpec) and s.has_cache for s in _codecs(config)) for config in (old, new))
    if not after:
        return ("the samples that AQ-SGD remembered are dropped",) if before else ()
    anew = "it sends each sample whole, in fp16, at its next visit"
    if not before or _get(old, "data.seq_len") != _get(new, "data.seq_len"):
        return (f"AQ-SGD starts empty at every cut: {anew}",)
    # blocks before each cut; no layers are listed if they are not divided yet
    kept, wanted = (set(accumulate((_get(config, "pipeline.layers") or [])[:-1])) for config in (old, new))
    blocks = ", ".join(map(str, sorted(wanted - kept)))
    return (f"AQ-SGD starts empty at the cuts before block {blocks} (from 0): {anew}",) if blocks else ()


def _has_8bit_states(config: Config) -> bool:
    """Whether moments are stored as `training.adamw8bit` says; also those beside low-rank weights, unless in fp32."""
    optimizer, states = _get(config, "training.optimizer"), _get(config, "training.qgalore.states")
    if optimizer in ("qgalore", "galore"):
        return bool((states or ("int8" if optimizer == "qgalore" else "fp32")) == "int8")
    return bool(optimizer == "adamw8bit")


def _has_bf16_weights(config: Config) -> bool:
    used = (_get(config, f"training.{key}") for key in ("optimizer", "adamw_bf16.weights"))
    return tuple(used) == ("adamw_bf16", "bf16")


def _sequence_fits(old: Config, new: Config) -> bool:
    longest = _longest_sequence(old)
    return longest is None or int(_get(new, "data.seq_len")) <= longest


def _packing(config: Config) -> object:
    """`data.packing` of records; checkpoints of version 0.1 have none, and records are padded."""
    return False if _get(config, "data.records") is None else _get(config, "data.packing") or False


def _truncation(config: Config) -> object:
    return "end" if _get(config, "data.records") is None else _get(config, "data.truncation") or "end"


def _held_out(config: Config) -> float:
    """The share of the data that is not trained on."""
    named = config["data"].get("validation", 0.0)
    values = named.values() if isinstance(named, Mapping) else [named]
    return next((each for each in values if isinstance(each, float)), 0.0)


def _activations(config: Config) -> str:
    return str(_get(config, "memory.activations") or "none")


def _machines(config: Config) -> object:
    """The machines that compute, by the configuration: this one, or addresses and devices in order."""
    hosts, here = config.get("hosts"), "this machine"
    if not isinstance(hosts, list):
        return here
    return [(here if host.get("local") else host["address"], host.get("device")) for host in hosts]


_IS_NOT_SGD = _outside("training.optimizer", "sgd", "ema_sgd")
_IS_SGD = (lambda old, new: not _IS_NOT_SGD[0](old, new), _IS_NOT_SGD[1])
_IS_NOT_LOW_RANK = _outside("training.optimizer", "qgalore", "galore")
_LOW_RANK_FORMAT = KeyRule(Verdict.REFUSED, "the checkpoint has weights and states in that format", _IS_NOT_LOW_RANK)
_IS_NOT_FP8_ADAMW = _outside("training.optimizer", "fp8_adamw")
_HAS_NO_8BIT_STATES = (lambda old, new: not (_has_8bit_states(old) or _has_8bit_states(new)), _IS_NOT_LOW_RANK[1])
_IS_NOT_WSD = _outside("training.lr_schedule", "wsd", reason="only wsd uses it")
_IS_CONSTANT = (
    lambda old, new: _get(old, "training.lr_schedule") == _get(new, "training.lr_schedule") == "constant",
    "the rate is constant",
)
_IS_NOT_FP8 = _outside("training.precision", "fp8", reason="only fp8 uses it")
_IS_NOT_COAT = _outside("memory.activations", "coat", reason="only coat uses it")
_IS_NOT_AGOQ = _outside("memory.activations", "agoq", reason="only agoq uses it")
_IS_LOSSLESS = (
    lambda old, new: all(spec == RawSpec("fp32") for config in (old, new) for spec in _codecs(config)),
    "nothing is rounded at a cut",
)
_SUMS = KeyRule(
    Verdict.INEXACT,
    "sums over replicas are rounded differently",
    _outside("pipeline.replicas", *range(2, 65), reason="there is one pipeline"),
)
_FOLLOWS = "codecs keep following the links, so it is exact only if they are chosen alike"
_DECAY_LENGTH = "the rate decays over another number of steps"
_UPDATES = "every later update differs"
_CUTS = "with a lossy codec other tensors are rounded; raw:dtype=fp32 in both directions would keep it exact"
_NOT_ARITHMETIC = "it does not affect the arithmetic"
_FROZEN = "model.frozen_layers"
_NO_EFFECT = "an evaluation changes no weight and draws no shared randomness"

RULES: Mapping[str, KeyRule] = {
    "run": KeyRule(Verdict.EXACT, _NOT_ARITHMETIC),
    "run.seed": KeyRule(Verdict.REFUSED, "the order of the data, dropout and codec keys depend on it"),
    "run.threads": KeyRule(Verdict.INEXACT, "sums inside an operation may be split differently"),
    "run.device": KeyRule(Verdict.INEXACT, "another device adds in another order"),
    "model": KeyRule(Verdict.REFUSED, "the checkpoint's weights are of that model"),
    "model.frozen_layers": KeyRule(
        Verdict.REFUSED,
        "the checkpoint has weights and states of the others only",
        (lambda old, new: not (_get(old, _FROZEN) or _get(new, _FROZEN)), "none is frozen"),
    ),
    "adapter": KeyRule(Verdict.REFUSED, "the checkpoint has what that trained"),
    "adapter.dropout": KeyRule(Verdict.INEXACT, "other inputs of adapters are dropped"),
    "data": KeyRule(Verdict.REFUSED, "which samples were seen, and which are held out, would no longer be known"),
    "data.validation": KeyRule(
        Verdict.EXACT,
        _NO_EFFECT,
        allowed_if=lambda old, new: _held_out(old) == _held_out(new),
    ),
    "data.tokenizer": KeyRule(Verdict.REFUSED, "the embedding has a row for each of its tokens"),
    "data.seq_len": KeyRule(
        Verdict.INEXACT,
        "samples are cut differently, up to the model's length",
        allowed_if=_sequence_fits,
    ),
    "data.packing": KeyRule(
        Verdict.REFUSED,
        "records would be in other rows",
        (lambda old, new: _packing(old) == _packing(new), "records are in the same rows"),
    ),
    "data.truncation": KeyRule(
        Verdict.REFUSED,
        "records would be cut in another place",
        (lambda old, new: _truncation(old) == _truncation(new), "records are cut in the same places"),
    ),
    "training.steps": KeyRule(Verdict.INEXACT, _DECAY_LENGTH, _IS_CONSTANT),
    "training.epochs": KeyRule(Verdict.INEXACT, _DECAY_LENGTH, _IS_CONSTANT),
    "training.dpo": KeyRule(
        Verdict.INEXACT,
        "the gradient is that of another loss",
        allowed_if=lambda old, new: (_get(old, "training.dpo") is None) == (_get(new, "training.dpo") is None),
    ),
    "training.global_batch": KeyRule(Verdict.REFUSED, "the position in the data counts steps of that size"),
    "training.micro_batch": KeyRule(Verdict.INEXACT, "gradients are summed over other groups of samples"),
    "training.optimizer": KeyRule(Verdict.REFUSED, "the checkpoint has that optimizer's states"),
    "training.fp8_adamw": KeyRule(Verdict.REFUSED, "the checkpoint has moments in those formats", _IS_NOT_FP8_ADAMW),
    "training.adamw8bit": KeyRule(Verdict.REFUSED, "the checkpoint's states are stored that way", _HAS_NO_8BIT_STATES),
    "training.adamw_bf16.weights": KeyRule(
        Verdict.REFUSED,
        "the checkpoint has weights of that type",
        (lambda old, new: not (_has_bf16_weights(old) or _has_bf16_weights(new)), "weights are fp32"),
    ),
    "training.adamw_bf16.rounding": KeyRule(
        Verdict.INEXACT, "bf16 is rounded differently", _outside("training.optimizer", "adamw_bf16")
    ),
    "training.qgalore": KeyRule(Verdict.INEXACT, _UPDATES, _IS_NOT_LOW_RANK),
    "training.qgalore.rank": _LOW_RANK_FORMAT,
    "training.qgalore.queue": _LOW_RANK_FORMAT,
    "training.qgalore.weights": _LOW_RANK_FORMAT,
    "training.qgalore.projections": _LOW_RANK_FORMAT,
    "training.qgalore.states": _LOW_RANK_FORMAT,
    "training.qgalore.ends": _LOW_RANK_FORMAT,
    "training.qgalore.fused": KeyRule(Verdict.EXACT, "weights get the same bits within the backward and after it"),
    "training.lr": KeyRule(Verdict.INEXACT, _UPDATES),
    "training.betas": KeyRule(Verdict.INEXACT, _UPDATES, _IS_SGD),
    "training.epsilon": KeyRule(Verdict.INEXACT, _UPDATES, _IS_SGD),
    "training.momentum": KeyRule(Verdict.INEXACT, _UPDATES, _IS_NOT_SGD),
    "training.weight_decay": KeyRule(Verdict.INEXACT, _UPDATES),
    "training.lr_schedule": KeyRule(Verdict.INEXACT, _UPDATES),
    "training.warmup_steps": KeyRule(Verdict.INEXACT, "rates during or after the warm-up differ"),
    "training.decay_steps": KeyRule(Verdict.INEXACT, _DECAY_LENGTH, _IS_NOT_WSD),
    "training.decay_shape": KeyRule(Verdict.INEXACT, "the rate decays in another way", _IS_NOT_WSD),
    "training.seq_len_schedule": KeyRule(Verdict.INEXACT, "samples are cut into other pieces, or at other steps"),
    "training.min_lr": KeyRule(Verdict.INEXACT, "the rate decays to another value", _IS_CONSTANT),
    "training.clip_norm": KeyRule(Verdict.INEXACT, "steps above either norm are scaled differently"),
    "training.router_aux_loss": KeyRule(Verdict.INEXACT, "the gradient has another term"),
    "training.z_loss": KeyRule(Verdict.INEXACT, "the gradient has another term"),
    "training.non_finite": KeyRule(Verdict.EXACT, "it matters only at a step with NaN or infinity"),
    "training.max_skipped_in_a_row": KeyRule(Verdict.EXACT, "it matters only at steps with NaN or infinity"),
    "training.eval_every": KeyRule(Verdict.EXACT, _NO_EFFECT),
    "training.eval_batches": KeyRule(Verdict.EXACT, _NO_EFFECT),
    "training.best_set": KeyRule(Verdict.EXACT, _NO_EFFECT),
    "training.samples": KeyRule(Verdict.EXACT, _NO_EFFECT),
    "training.early_stopping": KeyRule(Verdict.EXACT, "it changes no step, only their number"),
    "training.precision": KeyRule(Verdict.INEXACT, "products are rounded differently"),
    "training.loss_scale": KeyRule(
        Verdict.INEXACT,
        "gradients overflow, or are lost, at other steps",
        _outside("training.precision", "fp16", "auto", reason="only fp16 uses it"),
    ),
    "training.loss_scale.initial": KeyRule(Verdict.EXACT, "a resumed run goes on with the scale of its checkpoint"),
    "training.compile": KeyRule(Verdict.INEXACT, "operations of blocks are fused and rounded differently"),
    "training.fp8": KeyRule(Verdict.INEXACT, "gradients are rounded differently", _IS_NOT_FP8),
    "pipeline.stages": KeyRule(Verdict.INEXACT, f"the cuts move: {_CUTS}", _IS_LOSSLESS),
    "pipeline.replicas": KeyRule(Verdict.INEXACT, "gradients are summed over other groups of samples"),
    "pipeline.replicas_wait": KeyRule(Verdict.EXACT, "it matters only where a worker is lost"),
    "pipeline.replay": KeyRule(Verdict.INEXACT, "gradients are summed over other groups of samples"),
    "pipeline.layers": KeyRule(Verdict.INEXACT, f"the cuts move: {_CUTS}", _IS_LOSSLESS),
    "pipeline.balance": KeyRule(Verdict.EXACT, "a resumed run is not planned again"),
    "pipeline.chunks": KeyRule(Verdict.INEXACT, f"the cuts move: {_CUTS}", _IS_LOSSLESS),
    "pipeline.first": KeyRule(Verdict.EXACT, "gradients are added in the same order under every schedule"),
    "pipeline.in_flight": KeyRule(Verdict.EXACT, "gradients are added in the same order at every depth"),
    "pipeline.schedule": KeyRule(Verdict.EXACT, "gradients are added in the same order under every schedule"),
    "memory.recompute": KeyRule(Verdict.EXACT, "recomputed activations have the same bits"),
    "memory.offload": KeyRule(Verdict.EXACT, "what is in host memory has the same bits"),
    "memory.activations": KeyRule(
        Verdict.INEXACT,
        "activations and products are rounded differently",
        (lambda old, new: _activations(old) == _activations(new), "it is the default"),
    ),
    "memory.coat.backward_products": KeyRule(Verdict.INEXACT, "gradients are rounded differently", _IS_NOT_COAT),
    "memory.coat.keep_weight_codes": KeyRule(Verdict.EXACT, "weights that are encoded again have the same codes"),
    "memory.gradients": KeyRule(
        Verdict.INEXACT,
        "gradients are rounded differently",
        (
            lambda old, new: {"fp8", "bf16"}.isdisjoint({_get(old, "memory.gradients"), _get(new, "memory.gradients")}),
            "both are fp32",
        ),
    ),
    "memory.residual": KeyRule(
        Verdict.INEXACT,
        "the residual stream is rounded differently",
        (lambda old, new: "bf16" not in {_get(old, "memory.residual"), _get(new, "memory.residual")}, "both are fp32"),
    ),
    "memory.loss_chunks": KeyRule(
        Verdict.INEXACT,
        "the head's gradient is summed in other parts",
        (
            lambda old, new: {_get(old, "memory.loss_chunks"), _get(new, "memory.loss_chunks")} <= {None, 1},
            "it is whole",
        ),
    ),
    "memory.attention_chunks": KeyRule(Verdict.EXACT, "a head is computed by itself"),
    "memory.shard": KeyRule(
        Verdict.INEXACT,
        "owners of parameters round sums over replicas once, not twice, or add gradients in another order",
        (lambda old, new: _sharding(old) == _sharding(new), "sums over replicas have the same bits"),
    ),
    "memory.agoq": KeyRule(Verdict.INEXACT, "stored activations are rounded differently", _IS_NOT_AGOQ),
    "memory.agoq.rounding": KeyRule(Verdict.EXACT, "a resumed run keeps its bits"),
    "wire": KeyRule(
        Verdict.INEXACT,
        "tensors at cuts are rounded differently",
        (lambda old, new: _coding(old) == _coding(new), "the codecs are equivalent"),
    ),
    "wire.all_reduce": _SUMS,
    "wire.all_reduce_inside": _SUMS,
    "wire.follow": KeyRule(Verdict.INEXACT, "codecs change at other steps"),
    "wire.replay": KeyRule(Verdict.INEXACT, "codecs change at other steps"),
    "links": KeyRule(Verdict.EXACT, "the time at which bytes arrive does not matter"),
    "emulate": KeyRule(Verdict.EXACT, "the time at which bytes arrive does not matter"),
    "emulate.sleep": KeyRule(Verdict.REFUSED, "the checkpoint's weights are those of stages that sleep, or do not"),
    "security": KeyRule(Verdict.EXACT, _NOT_ARITHMETIC),
    "hosts": KeyRule(
        Verdict.INEXACT,
        "other machines may round differently",
        (lambda old, new: _machines(old) == _machines(new), "the same machines compute"),
    ),
}
"""The rule of each key of cluster.yaml, by the longest prefix of its dotted name."""
