"""Start runs of real processes, with the launcher or by hand, here or on the hosts of an emulated network."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from support.runs import tiny, write_config

from chaos.program import Program, warm
from chaos.scene import Scene, watched
from tahq.comm.zmq.addresses import format_address
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.network import Network
from tahq_netem.network.description import uniform
from tahq_netem.network.faults import FaultPlayer, Timeline, play

COORDINATOR = "coordinator"
STAGES = 3
Environment = Mapping[str, str] | None
"""Variables in addition to the usual ones."""
LORA = {"rank": 4}
"""Adapters; the model's own weights are in no checkpoint."""


def small_run(num_steps: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """A GPT-2 of three blocks and stages, 8 micro-batches of 2 × 128 tokens per step, TAH-Quant's codecs."""
    own: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "seed": 3, "peer_timeout": "10s", "checkpoint_every": 4},
        "model": {"num_layers": STAGES},
        "data": {"seq_len": 128},
        "training": {"steps": num_steps, "global_batch": 16, "micro_batch": 2},
        "pipeline": {"stages": STAGES, "in_flight": [8, 4, 2]},
        "wire": {"activations": "tah", "gradients": "fixed:bits=6"},
    }
    return tiny(**{name: {**own.get(name, {}), **sections.get(name, {})} for name in {**own, **sections}})


@contextmanager
def launched(folder: Path, config: Mapping[str, Any], *arguments: str, extra: Environment = None) -> Iterator[Scene]:
    """`tahq-launch` and its workers on this machine."""
    path = write_config(folder, dict(config))
    with warm("tahq-launch", folder, "tahq-launch", str(path), *arguments, extra=extra) as leader:
        scene = Scene(folder / "runs" / "run", leader, STAGES)
        with watched(scene):
            yield scene


@contextmanager
def by_hand(
    folder: Path,
    config: Mapping[str, Any],
    network: Network | None = None,
    *,
    start_worker: Callable[[int, str], Program] | None = None,
    port: int = 0,
    extra: Environment = None,
) -> Iterator[Scene]:
    """A coordinator and hand-started workers, on the hosts of a network if there is one.

    `start_worker` is called with stage and the coordinator's address, in place of the usual `tahq-worker`; `extra` is
    added to the coordinator's environment.
    """
    write_config(folder, dict(config))
    with ExitStack() as stack:
        leader = stack.enter_context(start_coordinator(folder, network, port=port, extra=extra))
        scene = Scene(folder / "runs" / "run", leader, STAGES, leader.line_with("--peer", 60).split()[-1])
        for stage in range(STAGES):
            start = start_worker or (lambda stage, peer: usual_worker(folder, stage, peer, network=network))
            scene.workers.append(stack.enter_context(start(stage, scene.peer)))
        with watched(scene):
            yield scene


def start_coordinator(
    folder: Path, network: Network | None, *arguments: str, port: int = 0, extra: Environment = None
) -> Program:
    """`tahq coordinator cluster.yaml --bind …` on its host."""
    bind = format_address("127.0.0.1" if network is None else network.address(COORDINATOR), port)
    command = ("coordinator", "cluster.yaml", "--bind", bind, *arguments)
    namespace = None if network is None else network.namespace(COORDINATOR)
    return warm(COORDINATOR, folder, "tahq", *command, extra=extra, namespace=namespace)


def usual_worker(
    folder: Path,
    stage: int,
    peer: str,
    *arguments: str,
    extra: Environment = None,
    network: Network | None = None,
) -> Program:
    """`tahq-worker`, started by hand, on its host of a network if there is one."""
    name, host = f"stage {stage}", f"host{stage}"
    command = ("--stage", str(stage), "--peer", peer, *arguments)
    if network is None:
        return warm(name, folder, "tahq-worker", *command, extra=extra)
    bind = ("--bind", format_address(network.address(host), 0))
    return warm(name, folder, "tahq-worker", *command, *bind, extra=extra, namespace=network.namespace(host))


@contextmanager
def shaped_network(**shape: Any) -> Iterator[Network]:
    """Identical hosts for the stages and the coordinator."""
    names = [*(f"host{stage}" for stage in range(STAGES)), COORDINATOR]
    with build_network(uniform(len(names), names=names, **shape)) as network:
        yield network


@contextmanager
def faults(scene: Scene, network: Network, timeline: str) -> Iterator[FaultPlayer]:
    """Play a timeline on the run's network; times count from now."""
    with play(Timeline.parse(timeline), network, step_source=lambda: scene.num_steps) as player:
        yield player
