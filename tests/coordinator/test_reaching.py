"""Neighbours try which of them can dial the other before they are sent their links; else a link is relayed."""

import pytest

from tahq.comm.control import messages as say
from tahq.comm.relay.process import Relay
from tahq.coordinator.joining import reaching

LONE = "cannot be dialled from stage"


@pytest.fixture
def relay(tmp_path):
    relay = Relay("127.0.0.1", 0, secret="", run_id=7, num_links=2, log=tmp_path / "relay.log")
    yield relay
    relay.close()


def dials(scene, stage, order=say.Plan):
    """What the last plan of a stage says to dial, by link."""
    return {row[0]: row[3] for row in scene.server.told(scene.stages[stage].identity, order)[-1].links}


def test_direct_link_is_dialled_by_the_end_that_can(scene, relay):
    scene.workers(stage1={"cannot_dial": (0,)})
    assert scene.run(tries_links=True, relay=relay) == 0
    assert dials(scene, 0) == {0: "10.0.0.1:9000"}
    assert dials(scene, 1) == {0: "", 1: ""}
    assert dials(scene, 2) == {1: "10.0.0.1:9000"}
    assert "relayed" not in scene.warnings()


def test_link_is_relayed_if_neither_end_can_dial_the_other(scene, relay):
    scene.workers(stage0={"cannot_dial": (1,)}, stage1={"cannot_dial": (0,)})
    assert scene.run(tries_links=True, relay=relay) == 0
    assert (dials(scene, 0)[0], dials(scene, 1)[0]) == (relay.ticket(0, 1, 0), relay.ticket(0, 1, 1))
    assert dials(scene, 2) == {1: "10.0.0.1:9000"}
    assert f"link 0 between stage 0 (host0) and stage 1 (host1) is relayed through this machine: stage 0 {LONE} 1" in (
        scene.warnings()
    )


def test_hosts_that_only_dial_out_are_relayed_without_a_try(scene, relay):
    scene.workers(stage0={"hello": {"address": ""}}, stage1={"hello": {"address": ""}})
    assert scene.run(tries_links=True, relay=relay) == 0
    assert dials(scene, 0) == {0: relay.ticket(0, 1, 0)}
    tried = [row[0] for worker in scene.stages for order in scene.server.told(worker.identity, say.TryPeers)
             for row in order.peers]  # fmt: skip
    assert tried == [2]


def test_without_a_relay_such_a_link_ends_the_run_at_once_and_says_why(scene):
    scene.workers(stage0={"cannot_dial": (1,)}, stage1={"cannot_dial": (0,)})
    assert scene.run(tries_links=True) == 2
    assert "stage 0 cannot be dialled from stage 1: timed out; stage 1" in scene.end.message
    assert "run.relay: auto" in scene.end.message


def test_try_that_is_never_reported_counts_as_failed(scene, relay):
    scene.workers(stage0={"ignores": (say.TryPeers,)}, stage1={"ignores": (say.TryPeers,)})
    began_s = scene.clock()
    assert scene.run(tries_links=True, relay=relay) == 0
    assert dials(scene, 0) == {0: relay.ticket(0, 1, 0)}
    assert scene.clock() - began_s > reaching.REPORT_S


def test_peer_admits_a_key_before_its_owner_dials(scene, relay):
    scene.workers()
    scene.server.keys = {worker.identity: f"key-{worker.stage}" for worker in scene.stages}
    assert scene.run(tries_links=True, relay=relay) == 0
    orders = [
        (who, message) for who, message in scene.server.sent if isinstance(message, say.Admit | say.TryPeers | say.Plan)
    ]
    admitted = orders.index((b"worker-0", say.Admit(["key-1"])))
    tried = orders.index((b"worker-1", say.TryPeers([[0, "10.0.0.0:9000", "key-0"], [2, "10.0.0.2:9000", "key-2"]])))
    assert admitted < tried


def test_returning_worker_and_its_neighbour_get_tickets_of_the_new_epoch(scene, relay):
    behind = {"stage0": {"cannot_dial": (1,)}, "stage1": {"cannot_dial": (0,)}}
    coordinator = scene.build(tries_links=True, relay=relay)
    coordinator.restart = scene.restart
    scene.one_message_a_turn()
    scene.workers(**behind)
    scene.after(2, lambda: scene.kill(1))
    assert scene.run() == 0
    assert dials(scene, 0, say.Relink) == {0: relay.ticket(0, 2, 0)}
    assert dials(scene, 1)[0] == relay.ticket(0, 2, 1)
