"""Links that only the relay can make: what the check of hosts and --dry-run say of them, and their bytes."""

from types import SimpleNamespace

import pytest
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.plan.cluster_numbers import ClusterNumbers
from tahq.units import format_size
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.dry_run import dry_run
from tahq_launch.plan.step_traffic import Relaying, link_speeds, relayed_nbytes, step_flows, wire_only_step_s
from tahq_launch.start.machine_checks import Finding
from tahq_launch.start.preflight import _Preflight
from tahq_launch.start.resolution import resolve_for_run

BLOCKED = {"stage 0": "no answer in 5 s"}


def configuration(advertise: str | None = None, relay: str = "auto") -> ClusterConfig:
    hosts = [{"address": f"10.0.0.{stage}", "advertise": advertise} for stage in range(3)]
    given = tiny(pipeline={"stages": 3}, model={"num_layers": 3, "hidden_size": 32}, run={"relay": relay})
    return resolve_for_run(ClusterConfig.model_validate({**given, "hosts": hosts}))


def conclusions(config: ClusterConfig, failures: dict, relay_trouble: str = "") -> list[Finding]:
    """What follows from what hosts 0 and 1 have dialled in vain, of a coordinator at 10.0.0.9."""
    dials = {0: {"stage 1": "10.0.0.1:7701"}, 1: {"stage 0": "10.0.0.0:7701"}}
    dialled = {0: "10.0.0.0:7701", 1: "10.0.0.1:7701"}
    relay = "" if relay_trouble else "10.0.0.9:7699"
    checks = _Preflight(config, is_deep=False)
    checks._joined((0, 1), dialled, dials, failures, SimpleNamespace(relay=relay, relay_trouble=relay_trouble))
    return checks.findings


def test_links_between_hosts_that_only_dial_out_count_twice_on_the_relay():
    config = configuration("none")
    flows = step_flows(config, resolved_spec(config, None))
    pairs = Relaying.of(config).pairs
    assert pairs == {(0, 1), (1, 2)}
    assert relayed_nbytes(flows, pairs) == sum(flow.step_nbytes for flow in flows)
    assert relayed_nbytes(flows, [(1, 0)]) == sum(flow.step_nbytes for flow in flows if flow.link == 0)
    assert not Relaying.of(configuration("none", relay="never")).pairs
    assert not Relaying.of(configuration()).pairs


def test_dry_run_says_what_the_coordinators_host_relays():
    config = configuration("none")
    nbytes = sum(flow.step_nbytes for flow in step_flows(config, resolved_spec(config, None)))
    assert f"the coordinator's host relays {format_size(nbytes)} per step" in dry_run(config)
    assert "relays" not in dry_run(configuration())


def numbers_with(relay: dict) -> ClusterNumbers:
    """As measured: hosts 0 and 1 meet at the relay only."""
    block = {"micro_batch": 2, "block_forward": 0.1, "block_backward": 0.2}
    hosts = [{"name": f"10.0.0.{stage}", "compute": [block]} for stage in range(3)]
    ends = [("10.0.0.0", "10.0.0.1"), ("10.0.0.1", "10.0.0.0")]
    paths = [{"source": source, "target": target, "relayed": True} for source, target in ends]
    return ClusterNumbers.model_validate({"hosts": hosts, "paths": paths, "relay": relay})


@pytest.mark.parametrize(("host", "stage"), [(None, None), ("10.0.0.2", 2)])
def test_wire_time_of_a_dry_run_knows_the_measured_relay(host, stage):
    config = configuration()
    config = config.model_copy(update={"emulate": config.emulate.model_copy(update={"rate": 1e9})})
    flows = step_flows(config, resolved_spec(config, None))
    relaying = Relaying.of(config, numbers := numbers_with({"host": host, "up": "1mbit"}))
    assert (relaying.pairs, relaying.stage) == ({(0, 1)}, stage)
    schedule = config.pipeline.actions(config.training.num_micro_batches)
    direct_s, relayed_s = (
        wire_only_step_s(config, link_speeds(config), schedule, flows, each) for each in (Relaying(), relaying)
    )
    relay_s = 8 * relayed_nbytes(flows, relaying.pairs) / 1e6
    assert direct_s < relay_s / 10
    assert relay_s <= relayed_s < 3 * relay_s
    assert f"a step would take {relayed_s:.3f} s" in dry_run(config, figures=numbers)


def test_pair_that_can_only_meet_at_the_relay_is_noted_with_its_bytes():
    config = configuration()
    (finding,) = conclusions(config, {0: {"stage 1": "refused"}, 1: dict(BLOCKED)})
    nbytes = relayed_nbytes(step_flows(config, resolved_spec(config, None)), [(0, 1)])
    assert (finding.level, finding.stage) == ("warning", 1)
    assert f"relays the link between stage 0 and stage 1, {format_size(nbytes)} per step" in finding.found


def test_pair_of_which_one_can_dial_the_other_is_not_relayed():
    (finding,) = conclusions(configuration(), {0: {}, 1: dict(BLOCKED)})
    assert (finding.level, finding.stage, finding.found) == ("fine", 0, "dials stage 1 at 10.0.0.1:7701")


@pytest.mark.parametrize(
    ("relay", "failures", "trouble", "host", "expected"),
    [
        ("auto", {"relay": "refused"}, "", "10.0.0.0", "it cannot dial the relay at 10.0.0.9:7699: refused"),
        ("auto", {}, "the port is taken", "10.0.0.1", "and the port is taken"),
        ("never", {}, "", "10.0.0.1", "stage 1 cannot dial stage 0 at 10.0.0.0:7701: no answer in 5 s"),
    ],
)
def test_pair_that_cannot_meet_at_the_relay_either_is_a_fault(relay, failures, trouble, host, expected):
    tried = {0: {"stage 1": "refused", **failures}, 1: dict(BLOCKED)}
    (finding,) = conclusions(configuration(relay=relay), tried, trouble)
    assert finding.level == "fault"
    assert finding.host.startswith(host)
    assert expected in finding.found
