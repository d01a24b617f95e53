"""Neighbours that cannot dial each other train through the relay on the coordinator's host, over IPv4 and IPv6."""

import os
import signal

import pytest
from support.firewalled import Machines, firewalled, obstacle
from support.processes import children, command_line, wait_until
from support.runs import Run, environment, tiny, train, write_config
from support.warm_process import WarmProcess

from tahq_launch.plan.numbers import read_numbers

pytestmark = [pytest.mark.netns, pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))]

ADDRESSES = {"IPv4": ("10.98.0.1:7700", "10.98.0.2", "10.98.0.3"), "IPv6": ("[fd98::1]:7700", "fd98::2", "fd98::3")}
SMALL = tiny(
    pipeline={"stages": 2},
    model={"num_layers": 2, "hidden_size": 32},
    run={"peer_timeout": "5s", "join_timeout": "60s"},
)


@pytest.fixture(scope="module")
def machines():
    with firewalled() as machines:
        yield machines


class FirewalledRun:
    """A coordinator on the hub, and a worker behind each firewall."""

    def __init__(
        self,
        folder,
        machines: Machines,
        addresses: tuple[str, str, str],
        config: dict,
        command: tuple[str, ...] = ("coordinator", "cluster.yaml"),
    ) -> None:
        self._folder, (peer, *hosts) = folder, addresses
        config = {**config, "run": {**config["run"], "bind": peer}}
        write_config(folder, {**config, "hosts": [{"address": address} for address in hosts]})
        self._coordinator = (machines.hub, folder, "tahq", *command)
        self.coordinator = self._start(*self._coordinator)
        self.workers = []
        for stage, name in enumerate((machines.left, machines.right)):
            (own := folder / f"stage{stage}").mkdir(exist_ok=True)
            self.workers.append(self._start(name, own, "tahq-worker", "--stage", str(stage), "--peer", peer))

    def resume(self) -> None:
        self.coordinator = self._start(*self._coordinator, "--resume")

    def _start(self, namespace: str, folder, program: str, *arguments: str) -> WarmProcess:
        return WarmProcess(program, arguments, folder, environment(), namespace)

    def end(self) -> None:
        for process in (self.coordinator, *self.workers):
            process.kill()
            process.communicate(20)

    @property
    def metrics(self):
        return self._folder / "runs" / "tiny" / "metrics.jsonl"

    def wait_for_step(self, step: int) -> None:
        def is_done() -> bool:
            assert self.coordinator.poll() is None, self.coordinator.communicate()
            return self.metrics.exists() and len(self.metrics.read_text().splitlines()) >= step

        wait_until(is_done, 100, f"step {step}")

    def finish(self) -> Run:
        try:
            stdout, stderr = self.coordinator.communicate(150)
        finally:
            self.end()
        assert self.coordinator.returncode == 0, stdout + stderr
        return Run(self.metrics.parent, 0, stdout, stderr)


@pytest.mark.ci
def test_path_between_hosts_behind_drop_inbound_is_measured_through_the_relay(tmp_path, machines):
    command = ("measure", "cluster.yaml", "--micro-batch", "2", "--codecs", "raw", "--seconds", "0.3")
    done = FirewalledRun(tmp_path, machines, ADDRESSES["IPv4"], SMALL, command).finish()
    numbers = read_numbers(tmp_path / "measured.yaml")
    assert [path.relayed for path in numbers.paths] == [True, True]
    for path in numbers.paths:
        assert path.rate > 1e6
        assert 0 < path.round_trip < 1
    assert min(numbers.relay.up, numbers.relay.down) >= max(path.rate for path in numbers.paths)
    assert "as neighbours 10.98.0.2 and 10.98.0.3 would be relayed through the coordinator's machine" in done.stdout
    assert "(relayed)" in done.stdout


@pytest.mark.ci
def test_run_that_measures_first_is_planned_and_trains_over_the_relay(tmp_path, machines):
    config = {**SMALL, "pipeline": {"stages": 2}}
    run = FirewalledRun(tmp_path, machines, ADDRESSES["IPv4"], config).finish()
    assert "planned for" in run.stdout
    assert "the link between 10.98.0.2 and 10.98.0.3 is relayed through the coordinator's machine" in run.stdout
    assert run.metrics[-1]["relayed_bytes"] > 0


@pytest.mark.parametrize("family", ADDRESSES)
def test_neighbours_behind_drop_inbound_train_through_the_relay(tmp_path, machines, family):
    run = FirewalledRun(tmp_path, machines, ADDRESSES[family], SMALL).finish()
    assert run.losses == train(tmp_path / "local", SMALL).losses
    assert "link 0 between stage 0" in run.stdout
    assert "is relayed" in run.stdout
    for row in run.metrics:
        assert all(link["relayed_bytes"] > 0 for link in row["links"])
        assert row["relayed_bytes"] == sum(link["relayed_bytes"] for link in row["links"])
    links = [link for row in run.metrics for link in row["links"]]
    relayed, sent = (sum(link[name] for link in links) for name in ("relayed_bytes", "wire_bytes"))
    assert sent < relayed < 1.5 * sent


def relays(coordinator: WarmProcess) -> list[int]:
    return [pid for pid in children(coordinator.pid) if "tahq.comm.relay.forwarding" in command_line(pid)]


@pytest.mark.ci
def test_relay_that_dies_is_survived(tmp_path, machines):
    config = {**SMALL, "training": {**SMALL["training"], "steps": 60}}
    run = FirewalledRun(tmp_path, machines, ADDRESSES["IPv4"], config)
    run.wait_for_step(10)
    (before,) = relays(run.coordinator)
    os.kill(before, signal.SIGKILL)
    done = run.finish()
    assert "the relay has died" in done.stdout
    assert done.losses == train(tmp_path / "local", config).losses


@pytest.mark.ci
def test_restarted_coordinator_opens_its_relay_again(tmp_path, machines):
    config = {**SMALL, "training": {**SMALL["training"], "steps": 60}}
    run = FirewalledRun(tmp_path, machines, ADDRESSES["IPv4"], config)
    run.wait_for_step(10)
    run.coordinator.kill()
    run.coordinator.communicate(20)
    run.resume()
    done = run.finish()
    assert done.losses == train(tmp_path / "local", config).losses
    assert done.metrics[-1]["relayed_bytes"] > 0
