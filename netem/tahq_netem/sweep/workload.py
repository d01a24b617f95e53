"""From a point of a sweep to its cluster.yaml, the same for every runtime, and to the expected duration of its steps.

`hosts` stays `local` in it: the network decides hosts and links, and workers do no shaping. Expected durations are the
steps' bounds, without real and calibrated compute, which is not known beforehand. These lower limits are good enough to
order points, to show progress, and to not start what cannot end in time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tahq.comm.config import LinksConfig
from tahq.config.cluster import ClusterConfig
from tahq.config.file import resolve
from tahq.config.run import RunConfig
from tahq.data.config import DataConfig
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import ConfigError
from tahq.models.config import SleepConfig
from tahq.models.sleeping_slice import INPUT_GRADIENT_SHARE
from tahq.pipeline.config import PipelineConfig, TrainingConfig
from tahq.pipeline.schedule.generators import GENERATORS
from tahq.plan.simulate.costs import StepWork
from tahq.quant import get_codec
from tahq.quant.config import WireConfig
from tahq_netem.sweep.measurement import num_steps
from tahq_netem.sweep.points import Point, SessionKey, by_session
from tahq_netem.sweep.prediction import step_bound_s
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.stage_times import StageTimes

MANY_STEPS = 1_000_000
"""A session trains until it is ended."""
NUM_BYTE_TOKENS = 256
SPLIT_SCHEDULES = ("zero-bubble",)
"""Schedules that compute the input gradient first and the weight gradient later."""


def session_config(sweep: SweepConfig, key: SessionKey, folder: Path, times: StageTimes | None) -> ClusterConfig:
    """The configuration of a session's workers; `folder` is for generated data, `times` is None if stages compute."""
    data = _absolute(sweep.data) if sweep.data is not None else _random_data(sweep, folder)
    sleep = None if times is None else SleepConfig(forward=list(times.forward_s), backward=list(times.backward_s))
    model = sweep.model.model_copy(update={"sleep": sleep})
    if model.path is None and model.vocab_size is None:
        model = model.model_copy(update={"vocab_size": load_tokenizer(data).vocab_size})
    # Schedules that only other runtimes have are passed to them by the session's name.
    schedule = key.schedule if key.schedule in GENERATORS else "1f1b"
    pipeline: dict[str, Any] = {"stages": key.stages, "schedule": schedule}
    if key.in_flight is not None:
        pipeline["in_flight"] = key.in_flight if isinstance(key.in_flight, int) else list(key.in_flight)
    values = ClusterConfig(
        run=RunConfig(name="session", dir="runs", threads=sweep.threads, device=sweep.device, peer_timeout=60.0),
        model=model,
        data=data,
        training=TrainingConfig(steps=MANY_STEPS, global_batch=sweep.global_batch, micro_batch=key.micro_batch),
        pipeline=PipelineConfig.model_validate(pipeline),
        wire=WireConfig(activations=key.activations, gradients=key.gradients),
        links=LinksConfig() if sweep.piece is None else LinksConfig(piece=sweep.piece),
    )
    return resolve(ClusterConfig.model_validate(values.model_dump()))


def planned_work(sweep: SweepConfig, key: SessionKey, times: StageTimes | None) -> StepWork:
    """The expected work of a step: the codecs' largest streams, and no time for real compute."""
    hidden_size = sweep.model.hidden_size
    if hidden_size is None:
        raise ConfigError("a sweep needs model.hidden_size: the time of a step is estimated from it")
    shape = (key.micro_batch, sweep.sample_len, hidden_size)
    activation_nbytes, gradient_nbytes = (
        (float(get_codec(spec).encoded_nbytes(shape)),) * (key.stages - 1) for spec in (key.activations, key.gradients)
    )
    nothing = (0.0,) * key.stages
    return StepWork(
        forward_s=times.forward_s if times is not None else nothing,
        backward_s=times.backward_s if times is not None else nothing,
        activation_nbytes=activation_nbytes,
        gradient_nbytes=gradient_nbytes,
        num_micro_batches=sweep.global_batch // key.micro_batch,
        input_gradient_s=input_gradients(key, times),
    )


def input_gradients(key: SessionKey, times: StageTimes | None) -> tuple[float, ...] | None:
    """Seconds of the input gradient by stage; 0 if not known, None if the schedule does not split backwards."""
    if key.schedule not in SPLIT_SCHEDULES:
        return None
    if times is None:
        return (0.0,) * key.stages
    return tuple(INPUT_GRADIENT_SHARE * seconds for seconds in times.backward_s)


def _absolute(data: DataConfig) -> DataConfig:
    """The data with absolute paths; relative ones start in the sweep's working folder."""

    def absolute(path: str) -> str:
        return path if path == "stdlib" else str(Path(path).absolute())

    changed: dict[str, Any] = {}
    for key in ("text", "tokens", "jsonl"):
        paths = getattr(data, key)
        if paths is not None:
            changed[key] = absolute(paths) if isinstance(paths, str) else [absolute(path) for path in paths]
    if data.tokenizer != "bytes":
        changed["tokenizer"] = absolute(data.tokenizer)
    return data.model_copy(update=changed)


def _random_data(sweep: SweepConfig, folder: Path) -> DataConfig:
    """One global batch of random bytes: a step is an epoch, so AQ-SGD has seen every sample after the first step."""
    path = folder / "tokens.bin"
    tokens = np.random.default_rng(0).integers(0, NUM_BYTE_TOKENS, sweep.global_batch * sweep.seq_len + 1)
    path.write_bytes(tokens.astype("<u2").tobytes())
    return DataConfig(tokens=str(path.absolute()), seq_len=sweep.seq_len, validation=0.0, shuffle=False)


START_S = 15.0
"""Expected time to start a session."""


def expected_step_s(config: SweepConfig, point: Point, times: StageTimes | None) -> float:
    """Seconds of a step; `times`: how long stages sleep, None if not known."""
    return step_bound_s(planned_work(config, point.session, times), point.network.plan(point.session.stages))


def expected_point_s(config: SweepConfig, point: Point, times: StageTimes | None) -> float:
    """Seconds of all steps of a point, including those that settle."""
    step_s = expected_step_s(config, point, times)
    return step_s * (config.steps.settle + num_steps(config.steps, step_s))


def expected_sweep_s(config: SweepConfig, points: Sequence[Point]) -> float:
    """Seconds of points and of their sessions' starts, as far as the configuration says."""
    seconds = START_S * len(by_session(points))
    for point in points:
        key = point.session
        times = StageTimes(key.forward_s, key.backward_s) if key.forward_s else None
        seconds += expected_point_s(config, point, times)
    return seconds
