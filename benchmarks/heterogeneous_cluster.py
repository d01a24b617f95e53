"""A cluster whose hosts differ, and ways to lay a pipeline over it; nothing here measures.

Compute is 1 : 2 : 4, links are 50 to 1000 Mbit/s and not the same up and down. Stages sleep as long as their
layers would take their host, so every host costs this machine the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from tahq.comm.network_config import HostConfig, NetworkConfig
from tahq.comm.network_model import GOODPUT_SHARE
from tahq.errors import ConfigError
from tahq.typed_yaml.section_file import read_section_file
from tahq.units import Section
from tahq_netem.sweep.points import SessionKey
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.stage_times import StageTimes

NUM_LAYERS = 12
MICRO_BATCH = 4
"""That the layers' seconds are of; others take in proportion."""
LAYER_FORWARD_S, LAYER_BACKWARD_S = 0.030, 0.060
"""Of a micro-batch, on a host of speed 1."""
HIDDEN_SIZE, SEQ_LEN, GLOBAL_BATCH = 512, 256, 64
WIRE = ("tah", "fixed:bits=6")


@dataclass(frozen=True, slots=True)
class Machine:
    """A host: how many times as fast as the slowest it computes, and its link in bit/s."""

    name: str
    speed: float
    up_bits_per_s: float
    down_bits_per_s: float


CLUSTER = (
    Machine("desk", 1, 50e6, 200e6),
    Machine("tower", 4, 300e6, 1000e6),
    Machine("laptop", 2, 100e6, 500e6),
    Machine("server", 1, 1000e6, 1000e6),
)
"""In the order in which somebody might list them."""


class ChosenPlan(Section):
    """A pipeline over the cluster: who runs which layers, in which order and how.

    As `tahq plan` has it, or written by hand:

        hosts: [desk, tower, laptop]
        layers: [2, 7, 3]
        schedule: 1f1b
        depths: [6, 4, 2]
        activations: tah
        gradients: "fixed:bits=6"
    """

    hosts: Annotated[list[str], Field(min_length=2)]
    layers: list[Annotated[int, Field(ge=1)]]
    micro_batch: int = Field(default=MICRO_BATCH, ge=1)
    schedule: str = "1f1b"
    depths: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list)
    """Micro-batches under way, by stage; empty: as the schedule has it."""
    activations: str = WIRE[0]
    gradients: str = WIRE[1]
    explanation: str = ""
    """What the planner says about it; kept with the result."""

    @model_validator(mode="after")
    def _fits_the_cluster(self) -> "ChosenPlan":
        known = [machine.name for machine in CLUSTER]
        unknown = [host for host in self.hosts if host not in known]
        if unknown or len(set(self.hosts)) < len(self.hosts):
            raise ValueError(f"hosts are some of {', '.join(known)}, each once; got {', '.join(self.hosts)}")
        if len(self.layers) != len(self.hosts) or sum(self.layers) != NUM_LAYERS:
            raise ValueError(f"{len(self.hosts)} hosts share {NUM_LAYERS} layers; got {self.layers}")
        if GLOBAL_BATCH % self.micro_batch:
            raise ValueError(f"micro_batch divides {GLOBAL_BATCH}; got {self.micro_batch}")
        if self.depths and len(self.depths) != len(self.hosts):
            raise ValueError(f"depths are one for each of {len(self.hosts)} hosts; got {self.depths}")
        return self

    @property
    def num_micro_batches(self) -> int:
        """Of a step."""
        return GLOBAL_BATCH // self.micro_batch

    @property
    def in_flight(self) -> tuple[int, ...] | None:
        """The depths; None: as the schedule has it."""
        return tuple(self.depths) or None

    def times(self) -> StageTimes:
        """Seconds that each stage sleeps."""
        speeds = {machine.name: machine.speed for machine in CLUSTER}
        shares = [
            layers * self.micro_batch / MICRO_BATCH / speeds[host]
            for host, layers in zip(self.hosts, self.layers, strict=True)
        ]
        return StageTimes(
            tuple(share * LAYER_FORWARD_S for share in shares), tuple(share * LAYER_BACKWARD_S for share in shares)
        )

    def key(self) -> SessionKey:
        """The session that trains so."""
        times = self.times()
        return SessionKey(
            runtime="tahq",
            schedule=self.schedule,
            activations=self.activations,
            gradients=self.gradients,
            stages=len(self.hosts),
            micro_batch=self.micro_batch,
            compute="sleep",
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            in_flight=self.in_flight,
        )

    def sweep(self, *, num_steps: int, settle: int, backend: str, max_busy_cores: float | None) -> SweepConfig:
        """What the session's configuration and its measurement are made from."""
        times = self.times()
        return SweepConfig.model_validate(
            {
                "name": "heterogeneous",
                "model": {
                    "family": "gpt2",
                    "num_layers": NUM_LAYERS,
                    "hidden_size": HIDDEN_SIZE,
                    "num_heads": 8,
                    "vocab_size": 257,
                },
                "seq_len": SEQ_LEN,
                "global_batch": GLOBAL_BATCH,
                "micro_batches": [self.micro_batch],
                "stages": [len(self.hosts)],
                "compute": [{"forward": list(times.forward_s), "backward": list(times.backward_s)}],
                "runtimes": [{"name": "tahq"}],
                "steps": {"settle": settle, "at_least": num_steps, "at_most": num_steps},
                "backend": backend,
                "max_busy_cores": max_busy_cores,
            }
        )


def naive_plan() -> ChosenPlan:
    """The hosts as they are listed, as many layers for each, and 1F1B."""
    share = NUM_LAYERS // len(CLUSTER)
    return ChosenPlan(hosts=[machine.name for machine in CLUSTER], layers=[share] * len(CLUSTER))


def load_plan(path: Path) -> ChosenPlan:
    """A plan from a file: what `tahq plan --json` has written, or the keys of `ChosenPlan`.

    Raises:
        ConfigError: the file cannot be read, or is no plan for this cluster; one line.
    """
    file = read_section_file(path, "hosts")
    return (file.with_values(_of_tahq_plan(path, file.values)) if "plan" in file.values else file).check(ChosenPlan)


def _of_tahq_plan(path: Path, written: Mapping[str, Any]) -> dict[str, Any]:
    plan = written["plan"]
    wires = {way: sorted(set(plan[way])) for way in ("activations", "gradients")}
    if any(len(specs) > 1 for specs in wires.values()):
        raise ConfigError(f"{path}: codecs differ by link, {wires}; a run has one in each direction")
    needed = written["bottleneck"]
    what = f"{needed['resource']} of stage {needed['index']}, needed for {needed['share']:.0%} of the step"
    return {
        **{key: plan[key] for key in ("hosts", "layers", "micro_batch", "schedule")},
        "depths": plan["in_flight"],
        **{way: specs[0] for way, specs in wires.items()},
        "explanation": f"`tahq plan` predicts {plan['tokens_per_s']:,.0f} tokens/s; bottleneck: {what}",
    }


def network_config() -> NetworkConfig:
    """The hosts' links, without delay; cubic, as bench_engine takes it there."""
    hosts = {machine.name: HostConfig(up=machine.up_bits_per_s, down=machine.down_bits_per_s) for machine in CLUSTER}
    return NetworkConfig(hosts=hosts, congestion_control="cubic", tcp_slow_start_after_idle=False)


def cluster_numbers(micro_batches: Sequence[int] = (2, 4, 8)) -> dict[str, Any]:
    """The cluster as the planner reads it (`tahq.plan.cluster_numbers`): rates as TCP has them."""

    def compute(machine: Machine, size: int) -> dict[str, Any]:
        scale = size / MICRO_BATCH / machine.speed
        return {
            "micro_batch": size,
            "block_forward": LAYER_FORWARD_S * scale,
            "block_backward": LAYER_BACKWARD_S * scale,
        }

    return {
        "hosts": [
            {
                "name": machine.name,
                "up": f"{GOODPUT_SHARE * machine.up_bits_per_s:.0f}bit",
                "down": f"{GOODPUT_SHARE * machine.down_bits_per_s:.0f}bit",
                "compute": [compute(machine, size) for size in micro_batches],
            }
            for machine in CLUSTER
        ],
        "source": "made up for benchmarks/bench_heterogeneous.py",
    }
