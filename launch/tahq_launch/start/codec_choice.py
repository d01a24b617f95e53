"""The coordinator's options for the links' codecs: initial specs, ladders; and the records of runs to replay."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tahq.config.cluster import ClusterConfig
from tahq.coordinator.link_codecs import CodecOptions, FollowRules, LinkKey, Recorded
from tahq.coordinator.observer import Traffic
from tahq.errors import ConfigError, UserError
from tahq.observe.metrics_reader import read_lines
from tahq.quant.ladder import Ladder, ladder_for
from tahq.worker.assembly import resolved_spec


def codec_options(config: ClusterConfig, saved: Mapping[str, Any]) -> CodecOptions:
    """The codec options of a resolved configuration; `saved` are the links' codecs in the checkpoint, if any."""
    start = {cast(Traffic, direction): spec for direction, spec in config.wire.specs().items()}
    follow = config.wire.follow
    if follow is None:
        return CodecOptions(start, saved=saved, sums=config.sum_codecs)
    ladders = _ladders(config)
    guard = follow.guard.model_dump(include={"max_error", "loss_rise", "hold"})
    rules = FollowRules(ladders, follow.raise_after, follow.lower_after, **guard)
    num_links = config.pipeline.replicas * config.grid.num_cuts
    replay = _replay(Path(config.wire.replay), ladders, num_links) if config.wire.replay is not None else None
    return CodecOptions(start, rules, replay, saved, config.sum_codecs)


def _ladders(config: ClusterConfig) -> dict[Traffic, Ladder]:
    channels = config.model.hidden_size or resolved_spec(config, None).hidden_size
    shape = (config.training.rows, config.data.seq_len, channels)
    ladders: dict[Traffic, Ladder] = {}
    for name, rungs in config.wire.rungs().items():
        try:
            ladders[cast(Traffic, name)] = ladder_for(rungs, shape)
        except ConfigError as error:
            raise ConfigError(f"wire.follow.{name}: {error}") from error
    return ladders


def _replay(path: Path, ladders: Mapping[Traffic, Ladder], num_links: int) -> Recorded:
    """The record without the link of tied embeddings, which is never compressed."""
    recorded = {
        step: {key: spec for key, spec in specs.items() if key.link < num_links}
        for step, specs in recorded_codecs(path).items()
    }
    for step, specs in recorded.items():
        for key, spec in specs.items():
            if ladders[key.direction].rung(spec) is None:
                raise ConfigError(
                    f"wire.replay: {path} has {spec} for {key.direction} at step {step}, which is not on the ladder "
                    f"{', '.join(ladders[key.direction].specs)}; give wire.follow the ladders of that run"
                )
    return recorded


def recorded_codecs(path: Path) -> Recorded:
    """The codecs by step, counted from 1, and by link and direction; an incomplete last line is ignored."""
    try:
        recorded = dict(read_lines(path, _step, "the codecs of a step"))
    except UserError as error:
        raise ConfigError(f"wire.replay: {error}") from error
    if not recorded:
        raise ConfigError(f"wire.replay: {path} has no steps")
    return recorded


def _step(row: dict[str, Any]) -> tuple[int, dict[LinkKey, str]]:
    codecs = {}
    for link in row["links"]:
        if link["direction"] not in ("activations", "gradients"):
            raise ValueError(f"direction {link['direction']!r}")
        codecs[LinkKey(int(link["link"]), link["direction"])] = str(link["codec"])
    return int(row["step"]), codecs


def recorded_replicas(config: ClusterConfig) -> dict[int, Sequence[int]]:
    """By step, from 0, what `pipeline.replay` has: the replicas that computed it where not all did; none: abandoned."""
    path = config.pipeline.replay
    try:
        recorded = read_lines(Path(path), _computing, "the replicas of a step") if path is not None else []
    except UserError as error:
        raise ConfigError(f"pipeline.replay: {error}") from error
    most = max((max(computing, default=0) for _, computing in recorded), default=0)
    if most >= config.pipeline.replicas:
        raise ConfigError(
            f"pipeline.replay: {path} has replica {most}, pipeline.replicas is {config.pipeline.replicas}"
        )
    everything = range(config.pipeline.replicas)
    return {step: computing for step, computing in recorded if computing != tuple(everything)}


def _computing(row: dict[str, Any]) -> tuple[int, tuple[int, ...]]:
    return int(row["step"]) - 1, () if row["abandoned"] else tuple(map(int, row["computing"]))
