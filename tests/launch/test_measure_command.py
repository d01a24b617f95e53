"""`tahq measure` from end to end on this machine."""

import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
from support.runs import finish, tiny, write_config

from tahq.config.cluster import ClusterConfig
from tahq.plan.cluster_numbers import ClusterNumbers
from tahq.typed_yaml.positions import parse_yaml
from tahq.units import WRITTEN_BY_HAND
from tahq_launch.plan.measure import micro_batches_of, write_numbers

from .conftest import assert_one_line

CODECS = ["fixed:bits=8,group=64,round=nearest", "raw:dtype=fp32"]
THREE = tiny(pipeline={"stages": 3})


def read(path):
    return ClusterNumbers.model_validate(parse_yaml(path.read_text()).value, context=WRITTEN_BY_HAND)


@pytest.mark.acceptance
@pytest.mark.serial
def test_three_workers_measure_themselves_and_each_other(tmp_path):
    path = str(write_config(tmp_path, {**THREE, "emulate": {"rate": "300mbit", "delay": "5ms"}}))
    options = ["--micro-batch", "2", "--micro-batch", "4", "--codecs", CODECS[0], "--codecs", "raw", "--seconds", "0.3"]
    done = finish(tmp_path, "tahq", "measure", path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = read(tmp_path / "measured.yaml")
    assert [host.name for host in numbers.hosts] == ["host0", "host1", "host2"]
    for host in numbers.hosts:
        assert [times.micro_batch for times in host.compute] == [2, 4]
        assert host.compute[0].block_input_gradient <= host.compute[0].block_backward
        assert sorted(host.codecs) == CODECS
        assert host.up == host.down == 300e6
    assert len({(path.source, path.target) for path in numbers.paths}) == 6
    # Loopback is far faster than emulate.rate, to which a run's workers keep, and has hardly any delay.
    assert all(path.rate == 300e6 and 0.010 <= path.round_trip < 0.020 for path in numbers.paths)
    assert "measuring 3/3" in done.stdout
    assert re.search(r"host0 +host1 +300 Mbit/s", done.stdout)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cluster.yaml", "measured.yaml"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.ci
def test_unreachable_host_is_named_and_the_other_figures_are_written(tmp_path, start):
    """Workers by hand: the first advertises a closed port, the second only dials out, and nothing is relayed."""
    address, dead = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    hosts = [
        {"address": "127.0.0.1", "bind": "127.0.0.1:0", "advertise": dead},
        {"address": "localhost", "advertise": "none"},
    ]
    config = tiny(pipeline={"stages": 2}, run={"bind": address, "relay": "never"})
    path = str(write_config(tmp_path, {**config, "hosts": hosts}))
    (tmp_path / "out.yaml").write_text("last year's figures")
    options = ["--output", "out.yaml", "--micro-batch", "2", "--codecs", "raw", "--seconds", "0.3"]
    coordinator = start("tahq", "measure", path, *options)
    workers = [start("tahq-worker", "--stage", str(stage), "--peer", address) for stage in range(2)]
    out, err = coordinator.communicate(60)
    outputs = [worker.communicate(30) for worker in workers]
    assert coordinator.returncode == 3, (out, err, outputs)
    assert f"start stage 1 on localhost with: tahq-worker --stage 1 --peer {address}" in out
    assert f"tahq measure: from localhost to 127.0.0.1: 127.0.0.1 ({dead}): Connection refused\n" in err
    assert (tmp_path / "out.yaml").read_text() == "last year's figures"
    logs = Path(re.search("the workers' logs are in (.*)", out).group(1))
    assert (logs / "measure" / "logs" / "launcher.log").is_file()
    shutil.rmtree(logs)
    numbers = read(tmp_path / "out.partial.yaml")
    assert len(numbers.hosts) == 2
    assert all("Connection refused" in path.failure for path in numbers.paths)


def test_signal_before_the_first_measurement_leaves_no_file(tmp_path, start):
    path = write_config(tmp_path, {**THREE, "hosts": [{"address": "127.0.0.1"}] * 3})
    process = start("tahq", "measure", str(path))
    lines = [process.stdout.readline() for _ in range(2)]
    assert lines[0] == "importing libraries\n"
    assert "measuring 3 hosts" in lines[1] or "start stage 0" in lines[1]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(30)
    assert process.returncode == 130
    assert "the coordinator got SIGINT before the first step" in err
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.yaml"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--output", "nowhere/measured.yaml"], "cannot write nowhere/measured.yaml: expected a file in a writable f"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--connections", "1"], "--connections must be 2 to 32; got 1"),
        (["--set", "hosts=namespaces", "--set", "emulate.backend=relay"], "the backend relay was removed"),
    ],
)
def test_mistake_is_one_line(tahq, tmp_path, options, words):
    write_config(tmp_path, THREE)
    assert_one_line(tahq("tahq", "measure", "cluster.yaml", *options), 2, words)


def test_micro_batches_are_half_the_same_and_twice_where_they_divide_the_batch():
    for size, whole, sizes in ((2, 8, (1, 2, 4)), (8, 8, (4, 8)), (3, 9, (3,))):
        config = tiny(training={"micro_batch": size, "global_batch": whole})
        assert micro_batches_of(ClusterConfig.model_validate(config)) == sizes


def test_written_numbers_read_back_and_incomplete_ones_replace_no_file(tmp_path):
    compute = [{"micro_batch": 1, "block_forward": 0.01, "block_backward": 1e-7}]
    numbers = ClusterNumbers.model_validate({"hosts": [{"name": "host0", "compute": compute}], "source": "invented"})
    path = tmp_path / "m.yaml"
    assert write_numbers(numbers, path, is_complete=False) == path
    assert read(path) == numbers
    assert "block_backward: 1.0e-07" in path.read_text()
    assert write_numbers(numbers, path, is_complete=False) == tmp_path / "m.partial.yaml"
    assert write_numbers(numbers, path, is_complete=True) == path
