"""A run whose links are reset and cut while it trains: every step and every bit as if nothing had happened."""

from pathlib import Path

import pytest

from tahq.config.cluster import ClusterConfig
from tahq.config.file import resolve
from tahq_netem.backends.choice import build_network, probe
from tahq_netem.network.faults import Timeline, play
from tahq_netem.runtimes.session import SessionRequest, TahqSession
from tahq_netem.sweep.points import NetworkChoice

pytestmark = [pytest.mark.netns, pytest.mark.acceptance, pytest.mark.timeout(180)]

NUM_STEPS = 8
FAULTS = """
- {step: 2, link: host1, what: reset}
- {step: 3, link: host2, what: reset}
- {step: 4, link: host1, what: down, for: 1s}
- {step: 5, link: host0, what: reset}
"""


def config(folder: Path) -> ClusterConfig:
    values = {
        "run": {"name": "run", "dir": "runs", "seed": 3, "peer_timeout": "20s"},
        "model": {"family": "gpt2", "num_layers": 3, "hidden_size": 64, "num_heads": 2},
        "data": {"text": "stdlib", "seq_len": 128},
        "training": {"steps": 1000, "global_batch": 16, "micro_batch": 2},
        "pipeline": {"stages": 3, "in_flight": [8, 4, 1]},
        "wire": {"activations": "tah", "gradients": "fixed:bits=6"},
        "hosts": "local",
    }
    return resolve(ClusterConfig.model_validate(values))


def losses(folder: Path, timeline: str) -> tuple[list[float], int]:
    """Of the first steps, and how many connections were reset."""
    folder.mkdir()
    steps = []
    network_config = NetworkChoice(20e6).config(3, "cubic", False)
    with build_network(network_config) as network:
        request = SessionRequest(config(folder), "1f1b", network, tuple(network.plan.hosts)[:3], folder)
        with (
            TahqSession(request) as session,
            play(Timeline.parse(timeline), network, step_source=lambda: len(steps)) as player,
        ):
            while len(steps) < NUM_STEPS:
                steps.append(session.next_step(60.0))
            num_reset = sum(event.num_connections or 0 for event in player.log)
    return [step.loss for step in steps], num_reset


def test_resets_and_an_outage_cost_time_and_nothing_else(tmp_path):
    if not probe().parts["tcp-reset"]:
        pytest.skip("this kernel cannot reset connections")
    calm, _ = losses(tmp_path / "calm", "[]")
    broken, num_reset = losses(tmp_path / "broken", FAULTS)
    assert num_reset >= 6  # of two links with a neighbour or one, and of the coordinator's, three times
    assert broken == calm
    told = (tmp_path / "broken" / "coordinator.log").read_text()
    assert "is degraded: messages were lost" in told
    assert "works again after" in told
