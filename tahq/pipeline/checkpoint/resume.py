"""Which keys may change when a run is resumed, and whether the continuation is still bit-exact.

`exact` means: every later step has the losses and weights that the uninterrupted, unchanged run would have had, on the
same machines. Each key of the configuration has one rule, found by the longest prefix of its dotted name; a key without
a rule is refused, so a new one cannot slip through.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any

from tahq.errors import SnapshotError
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
class Rule:
    """The verdict on a change of some keys, and the reason.

    Conditions look at both configurations: if `allowed_if` does not hold, the change is refused; if the condition of
    `exact_if` holds, it is exact, for the reason given there.
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
    """All differences between a checkpoint's configuration and the new one, and what else is lost."""

    changed: tuple[Change, ...]
    refused: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    follows: bool = False
    """Whether codecs are chosen from measurements, and so perhaps differently than without the interruption."""

    @property
    def inexact(self) -> tuple[Change, ...]:
        """Changes that are allowed but not bit-exact."""
        return tuple(change for change in self.changed if change.verdict is Verdict.INEXACT)

    @property
    def exact(self) -> bool:
        """Whether the continuation has the bits of the unchanged run."""
        return not self.refused and not self.inexact and not self.follows

    def check(self) -> None:
        """Raise SnapshotError if a change is refused; it lists every such key, its values and what to do."""
        if not self.refused:
            return
        keys = "; ".join(f"{c.key} was {c.old!r}, is {c.new!r} ({c.reason})" for c in self.refused)
        raise SnapshotError(
            f"cannot resume with another {', '.join(c.key for c in self.refused)}: {keys}. "
            "Set them back, or start a new run under another run.name"
        )

    def lines(self) -> list[str]:
        """For the user: one line per change, and one that says whether the continuation is exact."""
        if not self.changed and not self.refused:
            unchanged = "resuming with the configuration of the checkpoint"
            return [f"{unchanged}: {_FOLLOWS if self.follows else 'exact'}"]
        summary = "the continuation is exact" if self.exact else "the continuation is no longer exact, to the bit"
        return [*(str(change) for change in (*self.refused, *self.changed)), *self.notes, summary]


def compare_configs(old: Config, new: Config) -> ResumeReport:
    """Judge every difference between two resolved configurations.

    Args:
        old: the checkpoint's (`Manifest.config`).
        new: the one to continue with.
    """
    before, after = _flatten(keep_model_sizes(old, old)), _flatten(keep_model_sizes(old, new))
    changes = [
        Change(key, before.get(key), after.get(key), *_rule(key).judge(old, new))
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    changed = tuple(change for change in changes if change.verdict is not Verdict.REFUSED)
    refused = tuple(change for change in changes if change.verdict is Verdict.REFUSED)
    return ResumeReport(changed, refused, forgotten_samples(old, new), follows=_chooses_codecs(new))


def keep_model_sizes(old: Config, new: Config) -> dict[str, Any]:
    """The new configuration, with the checkpoint's values for model sizes that it does not set.

    An unset `model.max_seq_len` follows `data.seq_len`, but the number of positions of a trained model must not change
    with the length of its next samples; likewise its vocabulary.
    """
    model = dict(new["model"])
    for key, size in (("max_seq_len", longest_sequence(old)), ("vocab_size", _get(old, "model.vocab_size"))):
        if model.get(key) is None:
            model[key] = size
    return {**new, "model": model}


def longest_sequence(config: Config) -> int | None:
    """Positions of a configuration's model, in tokens; None: its folder says."""
    length = _get(config, "model.max_seq_len")
    if length is None and _get(config, "model.path") is None:
        length = _get(config, "data.seq_len")
    return None if length is None else int(length)


def _rule(key: str) -> Rule:
    """The rule with the longest prefix of a dotted key."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in RULES:
            return RULES[prefix]
    return Rule(Verdict.REFUSED, "this version of tahq has no rule for it")


def _flatten(config: Config, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; a list is a leaf."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            leaves |= _flatten(value, f"{key}.")
        else:
            leaves[key] = list(value) if isinstance(value, tuple) else value
    return leaves


def _get(config: Config, key: str) -> Any:
    return _flatten(config).get(key)


def _both(key: str, test: Callable[[Any], bool]) -> Condition:
    """The condition that a key's value passes a test in both configurations."""
    return lambda old, new: all(test(_get(config, key)) for config in (old, new))


def _neither(condition: Condition) -> Condition:
    return lambda old, new: not condition(old, new)


def _same(value: Callable[[Config], Any]) -> Condition:
    """The condition that both configurations have the same value."""
    return lambda old, new: bool(value(old) == value(new))


def _codecs(config: Config) -> list[CodecSpec]:
    return [CodecSpec.parse(_get(config, f"wire.{direction}")) for direction in ("activations", "gradients")]


def _coding(config: Config) -> tuple[Any, list[CodecSpec]]:
    """Everything about codecs that changes a number: the backend too, which may break ties of entropies differently."""
    return _get(config, "wire.backend"), [
        # not where AQ-SGD keeps its samples
        replace(spec, cache="memory") if isinstance(spec, AqsgdSpec) and spec.has_cache else spec
        for spec in _codecs(config)
    ]


def forgotten_samples(old: Config, new: Config) -> tuple[str, ...]:
    """What AQ-SGD forgets of the samples it remembers, for the user.

    A cut keeps its samples as long as it is before the same block and samples have the same length.
    """
    before, after = _remembers_samples(old), _remembers_samples(new)
    if not after:
        return ("the samples that AQ-SGD remembered are dropped",) if before else ()
    anew = "it sends each sample whole, in fp16, at its next visit"
    if not before or _get(old, "data.seq_len") != _get(new, "data.seq_len"):
        return (f"AQ-SGD starts empty at every cut: {anew}",)
    added = sorted(_cuts(new) - _cuts(old))
    blocks = ", ".join(map(str, added))
    return (f"AQ-SGD starts empty at the cuts before block {blocks} (from 0): {anew}",) if added else ()


def _chooses_codecs(config: Config) -> bool:
    wire = config["wire"]
    return wire.get("follow") is not None and wire.get("replay") is None


def _remembers_samples(config: Config) -> bool:
    return any(isinstance(spec, AqsgdSpec) and spec.has_cache for spec in _codecs(config))


def _cuts(config: Config) -> set[int]:
    """Blocks before each cut; empty if the layers are not divided yet."""
    layers = _get(config, "pipeline.layers") or []
    return set(accumulate(layers[:-1]))


def _has_8bit_states(config: Config) -> bool:
    """Whether moments are stored as `training.adamw8bit` says; also those beside low-rank weights, unless in fp32."""
    optimizer, states = _get(config, "training.optimizer"), _get(config, "training.qgalore.states")
    if optimizer in ("qgalore", "galore"):
        return bool((states or ("int8" if optimizer == "qgalore" else "fp32")) == "int8")
    return bool(optimizer == "adamw8bit")


def _sequence_fits(old: Config, new: Config) -> bool:
    longest = longest_sequence(old)
    return longest is None or int(_get(new, "data.seq_len")) <= longest


def _machines(config: Config) -> object:
    """What computes, as far as the configuration says: this machine, or addresses and devices in order."""
    hosts = config.get("hosts")
    return [(host["address"], host.get("device")) for host in hosts] if isinstance(hosts, list) else "this machine"


_UNUSED = "not used by this optimizer"
_IS_SGD = _both("training.optimizer", lambda name: name in ("sgd", "ema_sgd"))
_IS_NOT_LOW_RANK = _both("training.optimizer", lambda name: name not in ("qgalore", "galore"))
_LOW_RANK_FORMAT = Rule(
    Verdict.REFUSED, "the checkpoint has weights and states in that format", (_IS_NOT_LOW_RANK, _UNUSED)
)
_IS_NOT_FP8_ADAMW = (_both("training.optimizer", lambda name: name != "fp8_adamw"), _UNUSED)
_HAS_NO_8BIT_STATES = (lambda old, new: not (_has_8bit_states(old) or _has_8bit_states(new)), _UNUSED)
_IS_NOT_WSD = (_both("training.lr_schedule", lambda name: name != "wsd"), "only wsd uses it")
_IS_NOT_COAT = (_both("memory.activations", lambda name: name != "coat"), "only coat uses it")
_SAME_ACTIVATIONS = (_same(lambda config: _get(config, "memory.activations") or "none"), "it is the default")
_FOLLOWS = "codecs keep following the links, so it is exact only if they are chosen alike"
_SEEN = "which samples were seen, and which are held out, would no longer be known"
_DECAY_LENGTH = "the rate decays over another number of steps"
_IS_CONSTANT = (_both("training.lr_schedule", lambda name: name == "constant"), "the rate is constant")
_IS_LOSSLESS = (
    lambda old, new: all(spec == RawSpec("fp32") for config in (old, new) for spec in _codecs(config)),
    "nothing is rounded at a cut",
)
_UPDATES = "every later update differs"
_CUTS = "with a lossy codec other tensors are rounded; raw:dtype=fp32 in both directions would keep it exact"
_NOT_ARITHMETIC = "it has no part in the arithmetic"
_NO_EFFECT = "an evaluation changes no weight and draws no shared randomness"

RULES: Mapping[str, Rule] = {
    "run": Rule(Verdict.EXACT, _NOT_ARITHMETIC),
    "run.seed": Rule(Verdict.REFUSED, "the order of the data, dropout and codec keys depend on it"),
    "run.threads": Rule(Verdict.INEXACT, "sums inside an operation may be split differently"),
    "run.device": Rule(Verdict.INEXACT, "another device adds in another order"),
    "model": Rule(Verdict.REFUSED, "the checkpoint's weights are of that model"),
    "data": Rule(Verdict.REFUSED, _SEEN),
    "data.tokenizer": Rule(Verdict.REFUSED, "the embedding has a row for each of its tokens"),
    "data.seq_len": Rule(
        Verdict.INEXACT,
        "samples are cut differently, up to the model's length",
        allowed_if=_sequence_fits,
    ),
    "training.steps": Rule(Verdict.INEXACT, _DECAY_LENGTH, _IS_CONSTANT),
    "training.epochs": Rule(Verdict.INEXACT, _DECAY_LENGTH, _IS_CONSTANT),
    "training.global_batch": Rule(Verdict.REFUSED, "the position in the data counts steps of that size"),
    "training.micro_batch": Rule(Verdict.INEXACT, "gradients are summed over other groups of samples"),
    "training.optimizer": Rule(Verdict.REFUSED, "the checkpoint has that optimizer's states"),
    "training.fp8_adamw": Rule(Verdict.REFUSED, "the checkpoint has moments in those formats", _IS_NOT_FP8_ADAMW),
    "training.adamw8bit": Rule(Verdict.REFUSED, "the checkpoint's states are stored that way", _HAS_NO_8BIT_STATES),
    "training.qgalore": Rule(Verdict.INEXACT, _UPDATES, (_IS_NOT_LOW_RANK, _UNUSED)),
    "training.qgalore.rank": _LOW_RANK_FORMAT,
    "training.qgalore.queue": _LOW_RANK_FORMAT,
    "training.qgalore.weights": _LOW_RANK_FORMAT,
    "training.qgalore.projections": _LOW_RANK_FORMAT,
    "training.qgalore.states": _LOW_RANK_FORMAT,
    "training.qgalore.ends": _LOW_RANK_FORMAT,
    "training.qgalore.fused": Rule(Verdict.EXACT, "weights get the same bits within the backward and after it"),
    "training.lr": Rule(Verdict.INEXACT, _UPDATES),
    "training.betas": Rule(Verdict.INEXACT, _UPDATES, (_IS_SGD, _UNUSED)),
    "training.epsilon": Rule(Verdict.INEXACT, _UPDATES, (_IS_SGD, _UNUSED)),
    "training.momentum": Rule(Verdict.INEXACT, _UPDATES, (_neither(_IS_SGD), _UNUSED)),
    "training.weight_decay": Rule(Verdict.INEXACT, _UPDATES),
    "training.lr_schedule": Rule(Verdict.INEXACT, _UPDATES),
    "training.warmup_steps": Rule(Verdict.INEXACT, "rates during or after the warm-up differ"),
    "training.decay_steps": Rule(Verdict.INEXACT, _DECAY_LENGTH, _IS_NOT_WSD),
    "training.min_lr": Rule(Verdict.INEXACT, "the rate decays to another value", _IS_CONSTANT),
    "training.clip_norm": Rule(Verdict.INEXACT, "steps above either norm are scaled differently"),
    "training.non_finite": Rule(Verdict.EXACT, "it matters only at a step with NaN or infinity"),
    "training.max_skipped_in_a_row": Rule(Verdict.EXACT, "it matters only at steps with NaN or infinity"),
    "training.eval_every": Rule(Verdict.EXACT, _NO_EFFECT),
    "training.eval_batches": Rule(Verdict.EXACT, _NO_EFFECT),
    "training.precision": Rule(Verdict.INEXACT, "products are rounded differently"),
    "training.activation_checkpointing": Rule(Verdict.EXACT, "recomputed activations have the same bits"),
    "pipeline.stages": Rule(Verdict.INEXACT, f"the cuts move: {_CUTS}", _IS_LOSSLESS),
    "pipeline.layers": Rule(Verdict.INEXACT, f"the cuts move: {_CUTS}", _IS_LOSSLESS),
    "pipeline.balance": Rule(Verdict.INEXACT, f"the cuts may move: {_CUTS}", _IS_LOSSLESS),
    "pipeline.chunks": Rule(Verdict.INEXACT, f"the cuts move: {_CUTS}", _IS_LOSSLESS),
    "pipeline.in_flight": Rule(Verdict.EXACT, "gradients are added in the same order at every depth"),
    "pipeline.schedule": Rule(Verdict.EXACT, "gradients are added in the same order under every schedule"),
    "memory.activations": Rule(Verdict.INEXACT, "activations and products are rounded differently", _SAME_ACTIVATIONS),
    "memory.coat.backward_products": Rule(Verdict.INEXACT, "gradients are rounded differently", _IS_NOT_COAT),
    "memory.coat.keep_weight_codes": Rule(Verdict.EXACT, "weights that are encoded again have the same codes"),
    "wire": Rule(
        Verdict.INEXACT, "tensors at cuts are rounded differently", (_same(_coding), "the codecs are equivalent")
    ),
    "wire.follow": Rule(Verdict.INEXACT, "codecs change at other steps"),
    "wire.replay": Rule(Verdict.INEXACT, "codecs change at other steps"),
    "links": Rule(Verdict.EXACT, "the time at which bytes arrive does not matter"),
    "security": Rule(Verdict.EXACT, _NOT_ARITHMETIC),
    "hosts": Rule(
        Verdict.INEXACT, "other machines may round differently", (_same(_machines), "the same machines compute")
    ),
}
"""The rule of each key of cluster.yaml, by the longest prefix of its dotted name."""
