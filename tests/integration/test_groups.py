"""Whole runs over process groups: the same numbers as over ZMQ, to the bit."""

import pytest
from support.runs import launch, tiny, train

from tahq.comm.group.ends import ANNOUNCEMENT_NBYTES
from tahq.comm.link.frame import HEADER_NBYTES

pytestmark = pytest.mark.ci

THREE = tiny(
    pipeline={"stages": 3},
    training={"steps": 3},
    model={"num_layers": 3, "hidden_size": 32},
    wire={"activations": "tah"},
)


@pytest.fixture(scope="module")
def over_zmq(tmp_path_factory):
    return train(tmp_path_factory.mktemp("zmq"), THREE)


def header_nbytes(run):
    """Header bytes per frame of each link, which differ between gloo and ZMQ; every frame is one piece here."""
    rows = [row for step in run.metrics for row in step["links"]]
    return {row["link"]: (row["wire_bytes"] - row["payload_bytes"]) / row["frames"] for row in rows}


def assert_same_numbers(run, over_zmq):
    assert run.losses == over_zmq.losses
    assert [row["grad_norm"] for row in run.metrics] == [row["grad_norm"] for row in over_zmq.metrics]


@pytest.mark.acceptance
def test_run_over_gloo_learns_the_same_as_over_zmq(tmp_path, over_zmq):
    run = train(tmp_path, {**THREE, "links": {"inside": "gloo"}})
    assert_same_numbers(run, over_zmq)
    assert header_nbytes(run) == {0: ANNOUNCEMENT_NBYTES, 1: ANNOUNCEMENT_NBYTES}


@pytest.mark.netns
def test_gloo_inside_a_site_and_zmq_between_learn_the_same(tmp_path, over_zmq):
    hosts = {"host0": {"site": "home"}, "host1": {"site": "home"}}
    emulate = {"rate": "100mbit", "delay": "5ms", "hosts": hosts}
    run = train(tmp_path, {**THREE, "emulate": emulate, "links": {"inside": "gloo"}, "hosts": "namespaces"})
    assert_same_numbers(run, over_zmq)
    assert header_nbytes(run) == {0: ANNOUNCEMENT_NBYTES, 1: HEADER_NBYTES}


def test_nccl_on_a_cpu_is_refused_with_advice(tmp_path):
    run = launch(tmp_path, {**THREE, "links": {"inside": "nccl"}, "run": {**THREE["run"], "device": "cpu"}})
    assert run.returncode == 2
    assert "links.inside: nccl joins CUDA devices, but stage 0" in run.stderr
    assert "use links.inside: gloo or zmq" in run.stderr
