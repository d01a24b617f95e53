"""What a worker says to the coordinator, made of what it has: HELLO and PREPARE; and what it hears, in words."""

import torch

from tahq import __version__
from tahq.comm.control.messages import Assign, Hello, Plan, Prepare, Refuse
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash
from tahq.pipeline.engine import StepResult
from tahq.pipeline.stage import Stage
from tahq.pipeline.step_meter import StepMeter
from tahq.worker.assembly import Assembly


def greeting(assign: Assign, assembly: Assembly, address: str, files_address: str) -> Hello:
    """What was made of the configuration; `address` is where links are dialled, `files_address` where files are had."""
    return Hello(
        stage=assign.stage,
        version=__version__,
        config_hash=config_hash(assembly.config),
        tokenizer_hash=assembly.tokenizer_hash,
        data_hash=assembly.data_hash,
        address=address,
        device=str(assembly.device),
        torch_version=str(torch.__version__),
        num_parameters=assembly.num_parameters,
        num_train_samples=assembly.num_train_samples,
        next_sample=assembly.next_sample,
        arithmetic_changes=assembly.arithmetic_changes,
        start_step=assign.start_step,
        files_address=files_address,
    )


def greeting_without_model(assign: Assign, config: ClusterConfig, address: str, device: torch.device) -> Hello:
    """HELLO of a worker that only measures."""
    return Hello(
        stage=assign.stage,
        version=__version__,
        config_hash=config_hash(config),
        tokenizer_hash="",
        data_hash="",
        address=address,
        device=str(device),
        torch_version=str(torch.__version__),
        num_parameters=0,
        num_train_samples=0,
    )


def peers_of(plan: Plan) -> dict[int, int]:
    """The stage at the other end of each link."""
    return {int(link): int(peer_stage) for link, peer_stage, *_ in plan.links}


def prepare_of(step: int, stage: Stage, result: StepResult, meter: StepMeter) -> Prepare:
    """This stage's part of a step that is computed; takes what was measured of it."""
    meter.note(stage.take_link_stats())
    with stage.stopwatch.measure("norms"):
        norm2 = stage.update.squared_norms()
    timing = dict(result.timing)
    for activity, seconds in stage.stopwatch.take().items():
        timing[activity] = timing.get(activity, 0.0) + seconds
    return Prepare(
        step=step,
        stage=stage.plan.stage,
        norm2=norm2,
        finite=result.finite,
        loss_sum=result.loss_sum,
        tokens=result.tokens,
        batch_digest=result.batch_digest,
        timing=timing,
        links=meter.take_rows(),
        codec_state_bytes=stage.codec_state_nbytes,
        active_s=meter.active_s,
        codec_errors=[[float(e.link), float(e.direction), e.relative_error] for e in stage.take_codec_errors()],
    )


def refusal_text(refuse: Refuse) -> str:
    """Why this worker was refused, with every difference."""
    rows = "; ".join(f"{field}: here {mine}, expected {theirs}" for field, mine, theirs in refuse.differences)
    return f"{refuse.reason}: {rows}" if rows else refuse.reason
