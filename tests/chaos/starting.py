"""Runs of real processes, started by the launcher or by hand, here or on hosts of a network of their own."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from support.runs import tiny, write_config

from chaos.program import Program, warm
from chaos.scene import Scene, watched
from tahq.comm.network_config import NetworkConfig
from tahq.comm.zmq.addresses import format_address
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.network import Network
from tahq_netem.network.description import uniform
from tahq_netem.network.fault_player import FaultPlayer, play
from tahq_netem.network.faults import Timeline

COORDINATOR = "coordinator"


def small_run(
    num_steps: int, *, peer_timeout: str = "10s", stages: int = 3, **sections: dict[str, Any]
) -> dict[str, Any]:
    """A GPT-2 of as many blocks as stages, 8 micro-batches of 2 × 128 tokens a step, TAH-Quant's codecs.

    Args:
        num_steps: steps of the run.
        stages: of the pipeline.
        sections: keys to change.
    """
    own: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "seed": 3, "peer_timeout": "10s", "snapshot_every": 4},
        "model": {"num_layers": stages},
        "data": {"seq_len": 128},
        "training": {"steps": num_steps, "global_batch": 16, "micro_batch": 2},
        "pipeline": {"stages": stages, "in_flight": [8, 4, 2, 1][:stages] if stages <= 4 else None},
        "wire": {"activations": "tah", "gradients": "fixed:bits=6"},
    }
    return tiny(**{name: {**own.get(name, {}), **sections.get(name, {})} for name in {**own, **sections}})


@contextmanager
def launched(
    folder: Path, config: Mapping[str, Any], *arguments: str, extra: Mapping[str, str] | None = None
) -> Iterator[Scene]:
    """`tahq-launch` and its workers on this machine."""
    path = write_config(folder, dict(config))
    with warm("tahq-launch", folder, "tahq-launch", str(path), *arguments, extra=extra) as leader:
        scene = Scene(_run_folder(folder, config), leader, num_stages=config["pipeline"]["stages"])
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
    extra: Mapping[str, str] | None = None,
) -> Iterator[Scene]:
    """A coordinator and hand-started workers, on the hosts of a network if there is one.

    Args:
        folder: of all of them.
        config: what the coordinator reads.
        network: of host0, host1, … and the coordinator's; None: this machine.
        start_worker: told stage and the coordinator's address, in place of the usual `tahq-worker`.
        port: that the coordinator listens on; 0: any free one.
        extra: added to the coordinator's environment.
    """
    write_config(folder, dict(config))
    with ExitStack() as stack:
        leader = stack.enter_context(start_coordinator(folder, network, port=port, extra=extra))
        peer = leader.line_with("--peer", 60).split()[-1]
        scene = Scene(_run_folder(folder, config), leader, num_stages=config["pipeline"]["stages"], peer=peer)
        for stage in range(config["pipeline"]["stages"]):
            worker = _worker(folder, stage, peer, network) if start_worker is None else start_worker(stage, peer)
            scene.workers.append(stack.enter_context(worker))
        with watched(scene):
            yield scene


def start_coordinator(
    folder: Path,
    network: Network | None = None,
    *arguments: str,
    port: int = 0,
    extra: Mapping[str, str] | None = None,
) -> Program:
    """`tahq coordinator cluster.yaml --bind …` on its host."""
    bind = format_address("127.0.0.1" if network is None else network.address(COORDINATOR), port)
    command = ("coordinator", "cluster.yaml", "--bind", bind, *arguments)
    return warm(COORDINATOR, folder, "tahq", *command, extra=extra, namespace=_namespace(network, COORDINATOR))


@contextmanager
def shaped_network(stages: int, **shape: Any) -> Iterator[Network]:
    """Hosts for the stages, alike, and the coordinator's, which differs from them in nothing."""
    names = [*(f"host{stage}" for stage in range(stages)), COORDINATOR]
    config: NetworkConfig = uniform(len(names), names=names, **shape)
    with build_network(config) as network:
        yield network


@contextmanager
def faults(scene: Scene, network: Network, timeline: str) -> Iterator[FaultPlayer]:
    """Play a timeline on the run's network; times count from now."""
    with play(Timeline.parse(timeline), network, step_source=lambda: scene.num_steps) as player:
        yield player


def _worker(folder: Path, stage: int, peer: str, network: Network | None) -> Program:
    host = f"host{stage}"
    places = () if network is None else ("--bind", format_address(network.address(host), 0))
    arguments = ("--stage", str(stage), "--peer", peer, *places)
    return warm(f"stage {stage}", folder, "tahq-worker", *arguments, namespace=_namespace(network, host))


def _namespace(network: Network | None, host: str) -> str | None:
    return None if network is None else network.namespace(host)


def _run_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    return folder / "runs" / str(config["run"]["name"])
