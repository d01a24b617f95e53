"""tahq itself: its coordinator and workers, started by their own commands, on the hosts of a network.

The coordinator runs on the first stage's host, as it usually does; so every other host's part of a step's commit
crosses the network.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tahq.comm.keys import SecurityConfig
from tahq.comm.zmq.addresses import format_address
from tahq.config.file import dump_yaml
from tahq_netem.programs import module_argv
from tahq_netem.runtimes.session import GrowingLines, HostProcesses, Session, SessionRequest, StepRecord

CONTROL_PORT = 7700
DATA_PORT = 7701
Names = tuple[str, ...]
_FORWARD, _BACKWARD = ("forward",), ("backward", "input_gradient", "weight_gradient")
_ENCODE, _DECODE = ("encode", "beside:encode"), ("decode", "beside:decode")
_TAHQ = "tahq_launch.cli"
_STDIN_WATCH = "tahq_netem.programs"


class TahqSession(Session):
    """A run of tahq."""

    def __init__(self, request: SessionRequest) -> None:
        super().__init__(HostProcesses(request))
        config = request.config
        self._num_cuts = config.pipeline.stages - 1
        self._metrics = GrowingLines(request.folder / config.run.dir / config.run.name / "metrics.jsonl")
        # Without CURVE, like everything that it is compared with.
        plain = config.model_copy(update={"security": SecurityConfig(curve=False)})
        (request.folder / "cluster.yaml").write_text(dump_yaml(plain), encoding="utf-8")
        try:
            self._start(request)
        except BaseException:
            self.close()
            raise

    def steps_so_far(self) -> list[StepRecord]:
        """The lines of metrics.jsonl since the last call."""
        return [self._record(row) for row in self._metrics.read()]

    def _start(self, request: SessionRequest) -> None:
        network, hosts = request.network, request.hosts
        peer = format_address(network.address(hosts[0]), CONTROL_PORT)
        coordinator = module_argv(_STDIN_WATCH, _TAHQ, "coordinator", "cluster.yaml", "--bind", peer)
        self._processes.start("coordinator", hosts[0], coordinator)
        for stage, host in enumerate(hosts):
            core = request.cores[stage] if request.cores else None
            bind = format_address(network.address(host), DATA_PORT)
            places = ("--stage", str(stage), "--peer", peer, "--bind", bind)
            worker = module_argv(_TAHQ, "worker", *places, "--no-curve", "--exit-with-stdin")
            self._processes.start(f"stage {stage}", host, worker, core=core)

    def _record(self, row: Mapping[str, Any]) -> StepRecord:
        timings = [stage["timing_s"] for stage in row["stages"]]
        return StepRecord(
            step=int(row["step"]),
            seconds=float(row["step_time_s"]),
            loss=row["loss"],
            activation_nbytes=_by_cut(row["links"], "activations", self._num_cuts),
            gradient_nbytes=_by_cut(row["links"], "gradients", self._num_cuts),
            compute_s=_pairs(timings, _FORWARD, _BACKWARD),
            codec_s=_pairs(timings, _ENCODE, _DECODE),
        )


def _pairs(timings: Iterable[Mapping[str, Any]], one: Names, other: Names) -> tuple[tuple[float, float], ...]:
    """Seconds of two kinds of activity, by stage."""

    def seconds(timing: Mapping[str, Any], names: Names) -> float:
        return sum(float(timing.get(name, 0.0)) for name in names)

    return tuple((seconds(timing, one), seconds(timing, other)) for timing in timings)


def _by_cut(links: Iterable[Mapping[str, Any]], direction: str, num_cuts: int) -> tuple[float, ...]:
    nbytes = {link["link"]: float(link["payload_bytes"]) for link in links if link["direction"] == direction}
    return tuple(nbytes.get(cut, 0.0) for cut in range(num_cuts))
