"""Overhead of runtime and codecs in a step, from its trace.

Every moment of a step on a stage, from commit to commit, is covered by a forward or a backward (by marks in the
device's queue, on a GPU), by a wait for a frame, by training's own work between steps (data, norms, optimizer), or by
the wait for the commit; anything else is overhead: waits for codecs, gaps between actions, Python.
"""

import json
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine_rows import wire_text
from harness import Table, append_row

from tahq.config.cluster import ClusterConfig
from tahq.config.file import resolve
from tahq.observe.trace_file import FIRST_STAGE_PID, trace_path
from tahq_netem.backends.choice import build_network
from tahq_netem.runtimes.session import SessionRequest, TahqSession
from tahq_netem.sweep.points import NetworkChoice, sweep_points
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.workload import session_config

MICRO_BATCHES = 32
TRACED = (6, 10)
"""The first step and the last; those before warm up."""
UPDATE = frozenset({"data", "norms", "optimizer"})
COMPUTING = frozenset({"forward", "backward", "input_gradient", "weight_gradient"})
"""Categories of spans."""
FRAME_WAITS = ("wait for stage", "wait for room")
"""Both end when a frame arrives; during the latter a deeper pipeline would have had work."""
CODEC_WAIT = "wait for the codec"
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StageOverhead:
    """One stage in one step, as shares of the step; a moment that belongs to two of these counts for the first."""

    stage: int
    compute: float
    frames: float
    update: float
    commit: float
    codec: float
    rest: float

    @property
    def overhead(self) -> float:
        return self.codec + self.rest


def trace_run(model: Mapping[str, Any], wire: tuple[str, str], options: Namespace, piece: int, results: Path) -> None:
    """Train some steps over open links, and append the medians of their stages' shares to a file of JSON lines."""
    in_flight = (*(2 * left for left in range(options.stages, 1, -1)), 1)
    sweep = SweepConfig.model_validate(
        {
            **model,
            "name": "trace",
            "global_batch": MICRO_BATCHES,
            "micro_batches": [1],
            "stages": [options.stages],
            "device": options.device,
            "runtimes": [{"name": "tahq", "wires": [" / ".join(wire)], "in_flight": [in_flight]}],
            "tcp_slow_start_after_idle": False,
            "piece": piece,
        }
    )
    key = sweep_points(sweep)[0].session
    network_config = NetworkChoice(None).config(options.stages, "cubic", False)
    with build_network(network_config) as network, tempfile.TemporaryDirectory(prefix="tahq-trace-") as name:
        folder = Path(name)
        values = session_config(sweep, key, folder, None).model_dump()
        values["run"] |= {"trace_steps": list(TRACED)}
        config = resolve(ClusterConfig.model_validate(values))
        hosts = tuple(network.plan.hosts)
        with TahqSession(SessionRequest(config, key.schedule, network, hosts, folder)) as session:
            records = [session.next_step(180.0) for _ in range(TRACED[1] + 1)]
        traces = folder / config.run.dir / config.run.name / "trace"
        steps = range(TRACED[0], TRACED[1] + 1)
        found = [overheads(json.loads(trace_path(traces, step).read_text())) for step in steps]
    row = {
        "wire": f"`{wire_text(*wire)}`",
        "step_s": statistics.median(records[step - 1].seconds for step in steps),
        "stages": [asdict(_median(of_stage)) for of_stage in zip(*found, strict=True)],
    }
    append_row(results, row)


def overheads(trace: Mapping[str, Any]) -> list[StageOverhead]:
    """Of each stage, from a trace file's object."""
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    begin, end = next(_interval(event) for event in events if event["cat"] == "step")
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    result = []
    for stage in sorted({event["pid"] - FIRST_STAGE_PID for event in events if event["pid"] >= FIRST_STAGE_PID}):
        mine = [e for e in events if e["pid"] == stage + FIRST_STAGE_PID and lanes[e["pid"], e["tid"]] == "compute"]
        parts = (
            [e for e in mine if e["cat"] in COMPUTING],
            [e for e in mine if e["name"].startswith(FRAME_WAITS)],
            [e for e in mine if e["cat"] in UPDATE],
            [e for e in mine if e["cat"] == "commit"],
            [e for e in mine if e["name"].startswith(CODEC_WAIT)],
        )
        so_far: list[Interval] = []
        reached = [0.0]
        for part in parts:  # what each adds to those before it
            so_far += [(max(begin, first), min(end, last)) for first, last in map(_interval, part)]
            reached.append(covered(so_far))
        shares = [(late - early) / (end - begin) for early, late in pairwise([*reached, end - begin])]
        result.append(StageOverhead(stage, *shares))
    return result


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _median(stages: Sequence[StageOverhead]) -> StageOverhead:
    shares = zip(*(astuple(stage)[1:] for stage in stages), strict=True)
    return StageOverhead(stages[0].stage, *map(statistics.median, shares))


def overhead_rows(runs: Sequence[Mapping[str, Any]]) -> Table:
    """The table of what `trace_run` has written, the newest run of each wire."""
    rows = []
    for run in {run["wire"]: run for run in runs}.values():
        for stage in (StageOverhead(**each) for each in run["stages"]):
            shares = (stage.compute, stage.frames, stage.update, stage.commit, stage.overhead, stage.codec)
            rows.append([run["wire"], f"{run['step_s']:.3f}", stage.stage, *(f"{share:.1%}" for share in shares)])
    return Table(
        ("wire", "step, s", "stage", "computing", "waiting for frames", "update", "commit", "overhead", "codec"),
        rows,
        "Open links; twice as many micro-batches in flight as 1F1B has, but one on the last stage. Shares of the step "
        f"on each stage, medians of steps {TRACED[0]} to {TRACED[1]}. *update*: data, norms and optimizer. *overhead*: "
        "everything else: waiting for a codec, listed as *codec*, and gaps between actions.",
        "Overhead of runtime and codecs, by trace",
    )
