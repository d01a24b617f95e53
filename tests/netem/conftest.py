"""Networks for tests: built on demand, closed afterwards, with a check that nothing is left."""

import os
import subprocess
from contextlib import ExitStack

import pytest
from support.real_networks import BUILDERS

from tahq_netem.backends.choice import probe
from tahq_netem.backends.namespace_group import NamespaceGroup
from tahq_netem.backends.namespaces import list_namespaces, owner_pid
from tahq_netem.measure import calibration
from tahq_netem.measure.calibration import QUICK, PathMeasurements
from tahq_netem.network.description import plan_network


@pytest.fixture
def own_namespaces():
    """The names of this process's namespaces, now; the test must leave none behind."""

    def names() -> list[str]:
        return [name for name in list_namespaces() if owner_pid(name) == os.getpid()]

    before = names()
    yield names
    assert names() == before


@pytest.fixture
def namespace(own_namespaces):
    """A namespace without devices."""
    group = NamespaceGroup(["a"])
    yield group["a"]
    group.close()


@pytest.fixture
def build(own_namespaces, monkeypatch):
    """build(backend, config) is a network, closed at the end of the test with all that ran on it."""
    processes = []

    def recording(popen):
        def start(*arguments, **options) -> subprocess.Popen:
            processes.append(popen(*arguments, **options))
            return processes[-1]

        return start

    with ExitStack() as networks:

        def begin(backend, config):
            plan = plan_network(config)
            if obstacle := probe().obstacle(backend, plan):
                pytest.skip(f"{obstacle}; make test-netem-vm runs this on a kernel that has it")
            network = networks.enter_context(BUILDERS[backend](plan))
            monkeypatch.setattr(network, "popen", recording(network.popen))
            return network

        yield begin
    for process in processes:
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def measure(build, monkeypatch):
    """measure(network, effort) is the calibration's measurements of it.

    Slow figures are measured more often than a user would wait for: noise makes networks slower, for minutes at a time
    on a virtual machine whose host is busy, and one that is shaped wrongly is too slow at every attempt.
    """
    monkeypatch.setattr(calibration, "ATTEMPTS", 25)
    with ExitStack() as started:
        yield lambda network, effort=QUICK: started.enter_context(PathMeasurements(network, effort))


@pytest.fixture
def judge(record_property):
    """judge(figure) keeps it for the report of the virtual machine, and fails if it is off."""

    def keep(figure) -> None:
        record_property(figure.what, figure.line())
        assert figure.is_within, figure.line()

    return keep
