"""Sweeps for tests: a small one as plain values, and a world in which a step takes no time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from support.loopback_network import LoopbackNetwork
from tahq_netem.measure.machine import BusyCores
from tahq_netem.runtimes.session import RuntimeLostError, RuntimeSession, RuntimeStep, SessionRequest
from tahq_netem.sweep.results import ResultFile
from tahq_netem.sweep.runner import Outside, SweepOutcome, SweepRun
from tahq_netem.sweep.spec import SweepConfig

SMALL: dict[str, Any] = {
    "name": "small",
    "model": {"family": "gpt2", "num_layers": 4, "hidden_size": 64, "num_heads": 2, "vocab_size": 256},
    "seq_len": 32,
    "global_batch": 8,
    "micro_batches": [2],
    "stages": [2],
    "compute": [{"forward": 0.01, "backward": 0.02}],
    "rates": [None, 20e6],
    "runtimes": [{"name": "tahq", "wires": ["raw:dtype=fp32", "tah / fixed:bits=6"]}],
    "steps": {"settle": 1, "at_least": 2, "at_most": 2},
}


def small(**changes: Any) -> SweepConfig:
    """The small sweep with some keys changed."""
    return SweepConfig.model_validate({**SMALL, **changes})


class ScriptedSession(RuntimeSession):
    """Steps that take as long as the network's slowest rate says, and failures when the world says so."""

    def __init__(self, request: SessionRequest, world: "World") -> None:
        super().__init__(request)
        self._world = world
        self._step = 0
        if world.starts_fail:
            raise RuntimeLostError("it did not start")

    def _start_all(self) -> None:
        self.is_closed = False

    def steps_so_far(self) -> list[RuntimeStep]:
        rate = next(iter(self.request.network.plan.host_shapes.values())).up_bits_per_s
        if rate in self._world.losing_rates:
            raise RuntimeLostError(f"lost at {rate}")
        self._step += 1
        cuts = len(self.request.hosts) - 1
        seconds = 1.0 if rate is None else 1.0 + 1e8 / rate
        self._world.now_s += seconds
        return [RuntimeStep(self._step, seconds, 5.0 / self._step, (1000.0,) * cuts, (2000.0,) * cuts)]

    def close(self) -> None:
        self.is_closed = True


class HalfACore:
    """A meter that always reads the same."""

    def read(self) -> BusyCores:
        return BusyCores(own=0.5, machine=0.6)


class World:
    """Networks, sessions and a clock, all of them made up; what happened is noted."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.networks: list[LoopbackNetwork] = []
        self.sessions: list[ScriptedSession] = []
        self.calibrated: list[float | None] = []
        self.losing_rates: set[float | None] = set()
        self.starts_fail = False
        self.bad_network: Exception | None = None
        self.is_ending: Callable[[], bool] = lambda: False

    def outside(self) -> Outside:
        return Outside(
            runtimes=dict.fromkeys(("tahq", "torch", "bare"), self._start),
            open_network=self._open,
            calibrate_network=self._calibrate,
            clock=lambda: self.now_s,
            busy_meter=HalfACore,
            is_ending=lambda: self.is_ending(),
        )

    def sweep(self, config: SweepConfig, results: Path, limit_s: float | None = None) -> SweepOutcome:
        """One call of a sweep in this world."""
        with ResultFile(results) as file:
            return SweepRun(config, file, Console(quiet=True), self.outside(), limit_s).run()

    def _start(self, request: SessionRequest) -> ScriptedSession:
        self.sessions.append(ScriptedSession(request, self))
        return self.sessions[-1]

    def _open(self, config: Any, sweep: SweepConfig) -> LoopbackNetwork:
        self.networks.append(LoopbackNetwork(config))
        return self.networks[-1]

    def _calibrate(self, network: LoopbackNetwork) -> dict[str, Any]:
        rate = next(iter(network.plan.host_shapes.values())).up_bits_per_s
        self.calibrated.append(rate)
        if self.bad_network is not None and rate is not None:
            raise self.bad_network
        return {"network": network.describe()}
