"""What the relay refuses, and in which words."""

import pytest

from tahq_netem.description import PathShape, plan_network, uniform
from tahq_netem.relay_limits import relay_obstacle


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (PathShape(loss=0.01), "loss"),
        (PathShape(jitter_s=0.001), "jitter"),
        (PathShape(delay_s=0.1, reorder=0.1), "reorder"),
    ],
)
def test_what_only_packets_can_have_is_named_with_the_path(shape, what):
    plan = plan_network(uniform(3)).with_path("host1", "host2", shape)
    assert relay_obstacle(plan.paths) == (
        f"from host1 to host2: a relay of TCP connections has no packets, and so no {what}"
    )


@pytest.mark.parametrize("shape", [PathShape(), PathShape(delay_s=0.1, rate_bits_per_s=1e6), PathShape(loss=1.0)])
def test_rates_delays_and_outages_are_no_obstacle(shape):
    assert relay_obstacle({("a", "b"): shape}) is None
