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
from tahq_netem.runtimes.session import GrowingLines, RuntimeSession, RuntimeStep

CONTROL_PORT = 7700
DATA_PORT = 7701
_FORWARD, _BACKWARD = ("forward",), ("backward", "input_gradient", "weight_gradient")
_ENCODE, _DECODE = ("encode", "beside:encode"), ("decode", "beside:decode")
_TAHQ = "tahq_launch.cli"


class TahqSession(RuntimeSession):
    """A run of tahq."""

    def _start_all(self) -> None:
        config, network, hosts = self.request.config, self.request.network, self.request.hosts
        self._metrics = GrowingLines(self.request.folder / config.run.dir / config.run.name / "metrics.jsonl")
        # Without CURVE, like everything that it is compared with.
        plain = config.model_copy(update={"security": SecurityConfig(curve=False)})
        (self.request.folder / "cluster.yaml").write_text(dump_yaml(plain), encoding="utf-8")
        peer = format_address(network.address(hosts[0]), CONTROL_PORT)
        coordinator = ("coordinator", "cluster.yaml", "--bind", peer)
        self.start("coordinator", hosts[0], module_argv("tahq_netem.programs", _TAHQ, *coordinator))
        for stage, host in enumerate(hosts):
            bind = format_address(network.address(host), DATA_PORT)
            places = ("--stage", str(stage), "--peer", peer, "--bind", bind)
            worker = module_argv(_TAHQ, "worker", *places, "--no-curve", "--exit-with-stdin")
            self.start(f"stage {stage}", host, worker, stage=stage)

    def steps_so_far(self) -> list[RuntimeStep]:
        """The lines of metrics.jsonl since the last call."""
        return [self._record(row) for row in self._metrics.read()]

    def _record(self, row: Mapping[str, Any]) -> RuntimeStep:
        num_cuts = self.request.config.pipeline.stages - 1

        def seconds(*kinds: Iterable[str]) -> tuple[Any, ...]:
            """Seconds of two kinds of activity, by stage."""
            timings = [stage["timing_s"] for stage in row["stages"]]
            return tuple(tuple(sum(float(timing.get(n, 0.0)) for n in names) for names in kinds) for timing in timings)

        def nbytes(direction: str) -> tuple[float, ...]:
            """Payload by cut."""
            links = {link["link"]: link["payload_bytes"] for link in row["links"] if link["direction"] == direction}
            return tuple(float(links.get(cut, 0.0)) for cut in range(num_cuts))

        return RuntimeStep(
            step=int(row["step"]),
            seconds=float(row["step_time_s"]),
            loss=row["loss"],
            activation_nbytes=nbytes("activations"),
            gradient_nbytes=nbytes("gradients"),
            compute_s=seconds(_FORWARD, _BACKWARD),
            codec_s=seconds(_ENCODE, _DECODE),
        )
