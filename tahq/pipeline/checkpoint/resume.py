"""What may change when a run is resumed, and whether it then still gives the bits that it would have given.

`exact` means: every later step has the losses and weights that the uninterrupted, unchanged run would have
had, on the same machines. Each key of the configuration has one rule, found by the longest prefix of its
dotted name; a key without a rule is refused, so a new one cannot slip through.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any

from tahq.errors import SnapshotError
from tahq.quant.spec import AqsgdSpec, CodecSpec, RawSpec

Config = Mapping[str, Any]
"""A configuration as nested plain values, such as JSON gives."""

Condition = Callable[[Config, Config], bool]
"""(old, new) -> whether a rule applies."""


class Verdict(Enum):
    """What a change does to the continuation."""

    EXACT = "exact"
    INEXACT = "no longer exact"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Rule:
    """The verdict on a change of some keys, and why.

    A condition looks at both configurations: where `allowed_if` does not hold the change is refused, where
    that of `exact_if` holds it is exact, for the reason beside it.
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
    """A key whose value is another than in the snapshot."""

    key: str
    old: Any
    new: Any
    verdict: Verdict
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r} ({self.verdict.value}: {self.reason})"


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """All differences between a snapshot's configuration and the one to go on with, and what they cost beside."""

    changed: tuple[Change, ...]
    refused: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    follows: bool = False
    """Whether codecs are chosen by what is measured, and so perhaps otherwise than they would have been."""

    @property
    def inexact(self) -> tuple[Change, ...]:
        """The changes that are allowed but cost the promise of equal bits."""
        return tuple(change for change in self.changed if change.verdict is Verdict.INEXACT)

    @property
    def exact(self) -> bool:
        """Whether the continuation is, to the bit, what the unchanged run would have given."""
        return not self.refused and not self.inexact and not self.follows

    def check(self) -> None:
        """Raise SnapshotError that lists every refused key, its values and what to do; else do nothing."""
        if not self.refused:
            return
        keys = "; ".join(f"{c.key} was {c.old!r}, is {c.new!r} ({c.reason})" for c in self.refused)
        raise SnapshotError(
            f"cannot resume with another {', '.join(c.key for c in self.refused)}: {keys}. "
            "Set them back, or start a new run under another run.name"
        )

    def lines(self) -> list[str]:
        """For the user: one line a change, and one that says whether the continuation is exact."""
        if not self.changed and not self.refused:
            unchanged = "resuming with the configuration of the snapshot"
            return [f"{unchanged}: {_FOLLOWS if self.follows else 'exact'}"]
        summary = "the continuation is exact" if self.exact else "the continuation is no longer exact, to the bit"
        return [*(str(change) for change in (*self.refused, *self.changed)), *self.notes, summary]


def compare_configs(old: Config, new: Config) -> ResumeReport:
    """Judge every difference between two resolved configurations.

    Args:
        old: the snapshot's, as nested plain values (`Manifest.config`).
        new: the one to go on with, likewise; best after `keep_model_sizes`.

    Returns:
        The changes that are allowed, and those that are not.
    """
    before, after = _flatten(keep_model_sizes(old, old)), _flatten(keep_model_sizes(old, new))
    changes = [
        _judge(key, before.get(key), after.get(key), old, new)
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    changed = tuple(change for change in changes if change.verdict is not Verdict.REFUSED)
    refused = tuple(change for change in changes if change.verdict is Verdict.REFUSED)
    return ResumeReport(changed, refused, forgotten_samples(old, new), follows=_chooses_codecs(new))


def keep_model_sizes(old: Config, new: Config) -> dict[str, Any]:
    """The new configuration, with sizes of the model that it leaves open as the snapshot has them.

    `model.max_seq_len` follows `data.seq_len` where it is not set; but how many positions a model has must
    not change with the length of the samples that it is trained on next. So with its vocabulary.
    """
    model = dict(new["model"])
    for key, size in (("max_seq_len", longest_sequence(old)), ("vocab_size", _get(old, "model.vocab_size"))):
        if model.get(key) is None:
            model[key] = size
    return {**new, "model": model}


def longest_sequence(config: Config) -> int | None:
    """Positions that the model of a configuration has, in tokens; None: its folder says."""
    length = _get(config, "model.max_seq_len")
    if length is None and _get(config, "model.path") is None:
        length = _get(config, "data.seq_len")
    return None if length is None else int(length)


def _judge(key: str, before: Any, after: Any, old: Config, new: Config) -> Change:
    verdict, reason = _rule(key).judge(old, new)
    return Change(key, before, after, verdict, reason)


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


def _lossless_wire(old: Config, new: Config) -> bool:
    """Whether every tensor crosses every cut unchanged, so that it does not matter where the cuts are."""
    return all(spec == RawSpec("fp32") for config in (old, new) for spec in _codecs(config))


def _same_codecs(old: Config, new: Config) -> bool:
    """Another backend may rank two tiles otherwise whose entropies lie within rounding of each other."""
    same_backend = _get(old, "wire.backend") == _get(new, "wire.backend")
    return same_backend and list(map(_arithmetic, _codecs(old))) == list(map(_arithmetic, _codecs(new)))


def _arithmetic(spec: CodecSpec) -> CodecSpec:
    """A spec without what changes no number: where AQ-SGD keeps what it remembers."""
    return replace(spec, cache="memory") if isinstance(spec, AqsgdSpec) and spec.has_cache else spec


def _codecs(config: Config) -> list[CodecSpec]:
    return [CodecSpec.parse(_get(config, f"wire.{direction}")) for direction in ("activations", "gradients")]


def forgotten_samples(old: Config, new: Config) -> tuple[str, ...]:
    """What is lost of the samples that AQ-SGD remembers, for the user; nothing if nothing is.

    A cut keeps what its ends remember as long as it lies before the same block and samples have the same length.
    """
    before, after = _remembers_samples(old), _remembers_samples(new)
    if not after:
        return ("what AQ-SGD remembered of the samples is left behind",) if before else ()
    anew = "there each sample is sent whole, in fp16, at its next visit"
    if not before or _get(old, "data.seq_len") != _get(new, "data.seq_len"):
        return (f"AQ-SGD starts with nothing at every cut: {anew}",)
    added = sorted(_cuts(new) - _cuts(old))
    blocks = ", ".join(map(str, added))
    return (f"AQ-SGD starts with nothing at the cuts before block {blocks} (from 0): {anew}",) if added else ()


def _chooses_codecs(config: Config) -> bool:
    wire = config["wire"]
    return wire.get("follow") is not None and wire.get("replay") is None


def _remembers_samples(config: Config) -> bool:
    return any(isinstance(spec, AqsgdSpec) and spec.has_cache for spec in _codecs(config))


def _cuts(config: Config) -> set[int]:
    """Blocks before each cut; none where the layers are not yet divided."""
    layers = _get(config, "pipeline.layers") or []
    return set(accumulate(layers[:-1]))


def _constant_rate(old: Config, new: Config) -> bool:
    return all(_get(config, "training.lr_schedule") == "constant" for config in (old, new))


def _no_wsd(old: Config, new: Config) -> bool:
    return all(_get(config, "training.lr_schedule") != "wsd" for config in (old, new))


def _has_momentum(old: Config, new: Config) -> bool:
    """Whether the optimizer is SGD of some kind; every other one is an AdamW."""
    return all(_get(config, "training.optimizer") in ("sgd", "ema_sgd") for config in (old, new))


def _is_adamw(old: Config, new: Config) -> bool:
    return not _has_momentum(old, new)


def _is_not_fp8_adamw(old: Config, new: Config) -> bool:
    return all(_get(config, "training.optimizer") != "fp8_adamw" for config in (old, new))


def _has_no_8bit_states(old: Config, new: Config) -> bool:
    return not any(map(_has_8bit_states, (old, new)))


def _has_8bit_states(config: Config) -> bool:
    """Whether moments are laid out as `training.adamw8bit` says; those beside low-rank weights are, unless in fp32."""
    optimizer, states = _get(config, "training.optimizer"), _get(config, "training.qgalore.states")
    if optimizer in ("qgalore", "galore"):
        return bool((states or ("int8" if optimizer == "qgalore" else "fp32")) == "int8")
    return bool(optimizer == "adamw8bit")


def _is_not_low_rank(old: Config, new: Config) -> bool:
    return all(_get(config, "training.optimizer") not in ("qgalore", "galore") for config in (old, new))


def _activations(config: Config) -> str:
    """`memory.activations`, which a snapshot of an older version does not have."""
    return _get(config, "memory.activations") or "none"


def _same_activations(old: Config, new: Config) -> bool:
    return _activations(old) == _activations(new)


def _no_coat(old: Config, new: Config) -> bool:
    return all(_activations(config) != "coat" for config in (old, new))


def _sequence_fits(old: Config, new: Config) -> bool:
    longest = longest_sequence(old)
    return longest is None or int(_get(new, "data.seq_len")) <= longest


def _same_machines(old: Config, new: Config) -> bool:
    return _machines(old) == _machines(new)


def _machines(config: Config) -> object:
    """What computes, as far as the configuration tells: this machine, or addresses and devices in order."""
    hosts = config.get("hosts")
    return [(host["address"], host.get("device")) for host in hosts] if isinstance(hosts, list) else "this machine"


_UNUSED = "not used by this optimizer"
_LOW_RANK_FORMAT = Rule(
    Verdict.REFUSED,
    "the snapshot has weights and states of that form",
    (_is_not_low_rank, _UNUSED),
    allowed_if=_is_not_low_rank,
)
_FOLLOWS = "codecs go on following the links, so it is exact only as far as they are chosen alike"
_SEEN = "which samples were seen, and which are held out, would no longer be known"
_DECAY_LENGTH = "the rate's decay is spread over another length"
_IS_CONSTANT = (_constant_rate, "the rate is constant")
_IS_LOSSLESS = (_lossless_wire, "nothing is rounded at a cut")
_BITS_OF_A_STEP = "every later update differs"
_CUTS = "with a lossy codec other tensors are rounded; raw:dtype=fp32 both ways would keep it exact"
_NOT_IN_THE_ARITHMETIC = "has no part in the arithmetic"

RULES: Mapping[str, Rule] = {
    "run": Rule(Verdict.EXACT, _NOT_IN_THE_ARITHMETIC),
    "run.seed": Rule(Verdict.REFUSED, "order of the data, dropout and codec keys follow from it"),
    "run.threads": Rule(Verdict.INEXACT, "sums inside an operation may be split in another way"),
    "run.device": Rule(Verdict.INEXACT, "another device adds in another order"),
    "model": Rule(Verdict.REFUSED, "the snapshot's weights are of that model"),
    "data": Rule(Verdict.REFUSED, _SEEN),
    "data.tokenizer": Rule(Verdict.REFUSED, "the embedding has a row for each of its tokens"),
    "data.seq_len": Rule(
        Verdict.INEXACT,
        "samples are cut anew, up to the length that the model was made for",
        allowed_if=_sequence_fits,
    ),
    "training.steps": Rule(Verdict.INEXACT, _DECAY_LENGTH, _IS_CONSTANT),
    "training.epochs": Rule(Verdict.INEXACT, _DECAY_LENGTH, _IS_CONSTANT),
    "training.global_batch": Rule(Verdict.REFUSED, "the place in the data counts steps of that many samples"),
    "training.micro_batch": Rule(Verdict.INEXACT, "gradients are summed over other groups of samples"),
    "training.optimizer": Rule(Verdict.REFUSED, "the snapshot has that optimizer's states"),
    "training.fp8_adamw": Rule(
        Verdict.REFUSED, "the snapshot has moments in those formats", (_is_not_fp8_adamw, _UNUSED)
    ),
    "training.adamw8bit": Rule(
        Verdict.REFUSED, "the snapshot's states are laid out by it", (_has_no_8bit_states, _UNUSED)
    ),
    "training.qgalore": Rule(Verdict.INEXACT, _BITS_OF_A_STEP, (_is_not_low_rank, _UNUSED)),
    "training.qgalore.rank": _LOW_RANK_FORMAT,
    "training.qgalore.queue": _LOW_RANK_FORMAT,
    "training.qgalore.weights": _LOW_RANK_FORMAT,
    "training.qgalore.projections": _LOW_RANK_FORMAT,
    "training.qgalore.states": _LOW_RANK_FORMAT,
    "training.qgalore.ends": _LOW_RANK_FORMAT,
    "training.qgalore.fused": Rule(Verdict.EXACT, "weights get the same bits within the backward and after it"),
    "training.lr": Rule(Verdict.INEXACT, _BITS_OF_A_STEP),
    "training.betas": Rule(Verdict.INEXACT, _BITS_OF_A_STEP, (_has_momentum, _UNUSED)),
    "training.epsilon": Rule(Verdict.INEXACT, _BITS_OF_A_STEP, (_has_momentum, _UNUSED)),
    "training.momentum": Rule(Verdict.INEXACT, _BITS_OF_A_STEP, (_is_adamw, _UNUSED)),
    "training.weight_decay": Rule(Verdict.INEXACT, _BITS_OF_A_STEP),
    "training.lr_schedule": Rule(Verdict.INEXACT, _BITS_OF_A_STEP),
    "training.warmup_steps": Rule(Verdict.INEXACT, "rates of the warm-up, or of what follows it, differ"),
    "training.decay_steps": Rule(Verdict.INEXACT, _DECAY_LENGTH, (_no_wsd, "only wsd uses it")),
    "training.min_lr": Rule(Verdict.INEXACT, "the rate decays to another end", _IS_CONSTANT),
    "training.clip_norm": Rule(Verdict.INEXACT, "steps above either norm are scaled differently"),
    "training.non_finite": Rule(Verdict.EXACT, "matters only at a step with NaN or infinity"),
    "training.max_skipped_in_a_row": Rule(Verdict.EXACT, "matters only at steps with NaN or infinity"),
    "training.eval_every": Rule(Verdict.EXACT, "an evaluation changes no weight and draws no shared randomness"),
    "training.eval_batches": Rule(Verdict.EXACT, "an evaluation changes no weight and draws no shared randomness"),
    "training.precision": Rule(Verdict.INEXACT, "products are rounded differently"),
    "training.activation_checkpointing": Rule(Verdict.EXACT, "what is computed again has the same bits"),
    "pipeline.stages": Rule(Verdict.INEXACT, f"the cuts move: {_CUTS}", _IS_LOSSLESS),
    "pipeline.layers": Rule(Verdict.INEXACT, f"the cuts move: {_CUTS}", _IS_LOSSLESS),
    "pipeline.balance": Rule(Verdict.INEXACT, f"the cuts may move: {_CUTS}", _IS_LOSSLESS),
    "pipeline.chunks": Rule(Verdict.INEXACT, f"the cuts move: {_CUTS}", _IS_LOSSLESS),
    "pipeline.in_flight": Rule(Verdict.EXACT, "gradients are added in the same order at every depth"),
    "pipeline.schedule": Rule(Verdict.EXACT, "gradients are added in the same order under every schedule"),
    "memory.activations": Rule(
        Verdict.INEXACT, "activations and products are rounded differently", (_same_activations, "as it was before")
    ),
    "memory.coat.backward_products": Rule(
        Verdict.INEXACT, "gradients are rounded differently", (_no_coat, "only coat uses it")
    ),
    "memory.coat.keep_weight_codes": Rule(Verdict.EXACT, "weights coded again have the same codes"),
    "wire": Rule(
        Verdict.INEXACT, "what crosses a cut is rounded differently", (_same_codecs, "the same codecs in other words")
    ),
    "wire.follow": Rule(Verdict.INEXACT, "codecs change at other steps"),
    "wire.replay": Rule(Verdict.INEXACT, "codecs change at other steps"),
    "links": Rule(Verdict.EXACT, "when bytes arrive does not matter"),
    "security": Rule(Verdict.EXACT, _NOT_IN_THE_ARITHMETIC),
    "hosts": Rule(
        Verdict.INEXACT, "other machines may round differently", (_same_machines, "the same machines compute")
    ),
}
"""The rule of each key of cluster.yaml, by the longest prefix of its dotted name."""
