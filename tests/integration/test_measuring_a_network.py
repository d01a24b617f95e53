"""`tahq measure` on a network whose rates and delays are known."""

import pytest
from support.runs import finish, tiny, write_config

from tahq.comm.network_model import GOODPUT_SHARE
from tahq.plan.cluster_numbers import ClusterNumbers
from tahq.typed_yaml.positions import parse_yaml
from tahq.units import WRITTEN_BY_HAND

pytestmark = [pytest.mark.netns, pytest.mark.serial, pytest.mark.ci]

ATTEMPTS = 3
"""A machine that is busy with something else makes a network slower than it was set."""
CONFIG = {
    **tiny(pipeline={"stages": 2}),
    "emulate": {
        "up": "50mbit",
        "down": "50mbit",
        "delay": "10ms",
        "hosts": {"host0": {"down": "20mbit"}},
        "sleep": {"forward": "20ms", "backward": "40ms"},
    },
    "hosts": "namespaces",
}
RATES = {("host0", "host1"): 50e6, ("host1", "host0"): 20e6}


def measured(folder):
    """The measurement, or the error."""
    options = ["--micro-batch", "2", "--codecs", "raw"]
    done = finish(folder, "tahq", "measure", str(write_config(folder, CONFIG)), *options)
    if done.returncode:
        return done.stderr
    values = parse_yaml((folder / "measured.yaml").read_text()).value
    return ClusterNumbers.model_validate(values, context=WRITTEN_BY_HAND)


def test_rates_and_round_trips_are_those_that_were_set(tmp_path):
    found = []
    for _ in range(ATTEMPTS):
        found.append(measured(tmp_path))
        if not isinstance(found[-1], str) and all(map(is_as_set, found[-1].paths)):
            break
    else:
        pytest.fail(f"not as set, {ATTEMPTS} times: {found}")
    numbers = found[-1]
    assert {(path.source, path.target) for path in numbers.paths} == set(RATES)
    for host in numbers.hosts:
        # Of two blocks each; a nap is late at times, and never early.
        assert 0.010 <= host.compute[0].block_forward < 0.015
        assert 0.020 <= host.compute[0].block_backward < 0.030


def is_as_set(path):
    expected = GOODPUT_SHARE * RATES[path.source, path.target]
    # A network of this machine may hand a packet on some tenths of a millisecond early.
    return path.rate == pytest.approx(expected, rel=0.15) and path.round_trip == pytest.approx(0.020, abs=0.003)
