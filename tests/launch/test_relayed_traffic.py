"""Links that only the relay can make: what the check of hosts and --dry-run say of them, and their bytes."""

from types import SimpleNamespace

import pytest
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.units import format_size
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.dry_run import dry_run
from tahq_launch.plan.step_traffic import relayed_by_configuration, relayed_nbytes, step_flows
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
    pairs = relayed_by_configuration(config)
    assert pairs == {(0, 1), (1, 2)}
    assert relayed_nbytes(flows, pairs) == sum(flow.step_nbytes for flow in flows)
    assert relayed_nbytes(flows, [(1, 0)]) == sum(flow.step_nbytes for flow in flows if flow.link == 0)
    assert not relayed_by_configuration(configuration("none", relay="never"))
    assert not relayed_by_configuration(configuration())


def test_dry_run_says_what_the_coordinators_host_relays():
    config = configuration("none")
    nbytes = sum(flow.step_nbytes for flow in step_flows(config, resolved_spec(config, None)))
    assert f"the coordinator's host relays {format_size(nbytes)} per step" in dry_run(config)
    assert "relays" not in dry_run(configuration())


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
