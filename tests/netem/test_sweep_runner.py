"""A sweep in a world where a step takes no time: what is measured, kept, tried again, and given up."""

import json

import pytest
from support.sweeps import World, small

from tahq.errors import ConfigError, NetworkError
from tahq_netem.measure.machine import BusyCores
from tahq_netem.sweep import runner as sweep_runner
from tahq_netem.sweep.measurement import RejectedMeasurementError, check_busy, num_steps
from tahq_netem.sweep.results import read_results
from tahq_netem.sweep.spec import StepsConfig


@pytest.fixture
def world():
    return World()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def test_every_point_is_measured_in_one_session_a_wire(world, path):
    outcome = world.sweep(small(rates=[None, 20e6, 100e6]), path)
    assert (outcome.num_done, outcome.num_failed, outcome.num_left) == (6, 0, 0)
    assert len(world.sessions) == 2
    assert all(session.is_closed for session in world.sessions)
    assert len(world.networks) == 1
    assert all(network.is_closed for network in world.networks)
    by_rate = {row["point"]["rate_bits_per_s"]: row for row in read_results(path).values()}
    assert by_rate[None]["tokens_per_s"] == 8 * 32 / 1.0
    assert by_rate[20e6]["tokens_per_s"] == pytest.approx(8 * 32 / 6.0)


def test_row_says_what_it_was_measured_with(world, path):
    world.sweep(small(rates=[20e6]), path)
    row = next(iter(read_results(path).values()))
    assert row["calibration"]["network"]["backend"] == "loopback"
    assert row["machine"]["cores"] >= 1
    assert row["machine"]["torch"]
    assert len(row["steps"]) == 2
    assert row["activation_nbytes"] == [1000.0]
    assert 0 < row["bound_s"] < row["step_s"]
    assert row["share_of_bound"] == pytest.approx(row["bound_s"] / row["step_s"])
    assert row["stage_times"] == [[0.01, 0.02]] * 2


def test_steps_that_began_under_another_network_do_not_count(world, path):
    world.sweep(small(rates=[None, 20e6], steps={"settle": 2, "at_least": 2, "at_most": 2}), path)
    first = next(iter(read_results(path).values()))
    # 1 at the start, 1 that had finished when the network was changed, 2 that settle
    assert [step["step"] for step in first["steps"]] == [5, 6]


def test_second_call_measures_nothing_again(world, path):
    config = small()
    world.sweep(config, path)
    before = path.read_bytes()
    world.sessions.clear()
    outcome = world.sweep(config, path)
    assert outcome.num_done == 4
    assert not world.sessions
    assert path.read_bytes() == before


def test_call_without_time_leaves_the_rest_for_the_next(world, path):
    config = small(rates=[None, 20e6, 50e6])
    first = world.sweep(config, path, limit_s=40.0)
    assert 0 < first.num_done < 6
    assert first.num_left == 6 - first.num_done
    second = world.sweep(config, path)
    assert (second.num_done, second.num_left) == (6, 0)
    assert len(path.read_text().splitlines()) == 6


def test_sweep_that_is_told_to_end_begins_no_further_point(world, path):
    world.is_ending = lambda: path.read_text().count("\n") == 1
    outcome = world.sweep(small(), path)
    assert (outcome.num_done, outcome.num_left) == (1, 3)


def test_notes_on_an_error_are_kept(world, path):
    world.bad_network = NetworkError("goodput is 12 % off")
    world.bad_network.add_note("and the link could not be joined again")
    world.sweep(small(rates=[20e6]), path)
    errors = {row["error"] for row in read_results(path).values()}
    assert errors == {"NetworkError: goodput is 12 % off; and the link could not be joined again"}


def test_point_that_cannot_end_in_time_is_not_begun(world, path):
    # a sample of 8 · 32 · 64 numbers in fp32 at 10 kbit/s: a minute each way
    config = small(rates=[None, 1e4], runtimes=[{"name": "tahq"}])
    outcome = world.sweep(config, path, limit_s=100.0)
    assert (outcome.num_done, outcome.num_left) == (1, 1)
    assert next(iter(read_results(path).values()))["point"]["rate_bits_per_s"] is None


def test_interruption_loses_the_point_that_was_measured_and_no_other(world, path, monkeypatch):
    config = small(rates=[None, 20e6])
    real, calls = sweep_runner.measure_point, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(sweep_runner, "measure_point", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.sweep(config, path)
    assert len(read_results(path)) == 1
    assert all(session.is_closed for session in world.sessions)
    assert all(network.is_closed for network in world.networks)
    monkeypatch.undo()
    assert world.sweep(config, path).num_done == 4
    assert len(path.read_text().splitlines()) == 4


def test_session_that_is_lost_costs_one_point_and_is_started_again(world, path):
    world.losing_rates = {50e6}
    outcome = world.sweep(small(rates=[None, 50e6, 20e6]), path)
    assert (outcome.num_done, outcome.num_failed) == (4, 2)
    assert len(world.sessions) == 4
    failed = [row for row in read_results(path).values() if row["status"] == "failed"]
    assert all("RuntimeLostError: lost at 50000000.0" in row["error"] for row in failed)
    world.losing_rates = set()
    again = world.sweep(small(rates=[None, 50e6, 20e6]), path)
    assert (again.num_done, again.num_failed) == (6, 0)


def test_session_that_does_not_start_is_tried_once(world, path):
    world.starts_fail = True
    outcome = world.sweep(small(), path)
    assert (outcome.num_done, outcome.num_failed) == (0, 4)
    assert all("it did not start" in row["error"] for row in read_results(path).values())
    world.starts_fail = False
    assert world.sweep(small(), path).num_done == 4


def test_network_that_is_off_is_not_measured_on(world, path):
    world.bad_network = NetworkError("goodput is 12 % off")
    outcome = world.sweep(small(rates=[None, 20e6]), path)
    assert (outcome.num_done, outcome.num_failed) == (2, 2)
    assert world.calibrated == [None, 20e6, 20e6]  # off once may be a disturbance, so the next session looks again
    failed = [row for row in read_results(path).values() if row["status"] == "failed"]
    assert all(row["error"] == "NetworkError: goodput is 12 % off" for row in failed)


def test_network_is_not_measured_if_nobody_wants_it(world, path):
    world.bad_network = NetworkError("never asked for")
    assert world.sweep(small(calibrate=False), path).num_done == 4
    assert not world.calibrated


def test_point_with_busy_cores_is_rejected_and_its_figures_kept(world, path):
    outcome = world.sweep(small(max_busy_cores=0.4), path)
    assert outcome.num_failed == 4
    for row in read_results(path).values():
        assert "cores were busy, the limit is 0.40" in row["error"]
        assert row["tokens_per_s"] > 0


def test_real_compute_may_be_as_busy_as_it_likes(world, path):
    assert world.sweep(small(compute=["real"], max_busy_cores=0.4), path).num_done == 4


def test_limit_of_two_cores_is_one_point_two(monkeypatch):
    monkeypatch.setattr("tahq_netem.sweep.measurement.num_usable_cores", lambda: 2)
    check_busy(BusyCores(1.19, 2.0), None)
    with pytest.raises(RejectedMeasurementError, match=r"1\.21 of 2 cores were busy, the limit is 1\.20"):
        check_busy(BusyCores(1.21, 2.0), None)


def test_compute_is_timed_once_for_each_size(world, path, monkeypatch):
    asked = []

    def timed(config):
        asked.append((config.pipeline.stages, config.training.micro_batch))
        stages = config.pipeline.stages
        return sweep_runner.StageTimes((0.01,) * stages, (0.02,) * stages)

    monkeypatch.setattr(sweep_runner, "calibrate_compute", timed)
    outcome = world.sweep(small(compute=["calibrated"], micro_batches=[1, 2]), path)
    assert outcome.num_done == 8
    assert sorted(asked) == [(2, 1), (2, 2)]
    slept = [session.request.config.model.sleep for session in world.sessions]
    assert all(sleep.of(1) == (0.01, 0.02) for sleep in slept)


def test_delays_get_a_network_of_their_own(world, path):
    world.sweep(small(round_trips=[0.0, 0.05, 0.1]), path)
    assert len(world.networks) == 2
    delays = [max(path.delay_s for path in network.plan.paths.values()) for network in world.networks]
    assert sorted(delays)[0] == 0.0


@pytest.mark.parametrize(("expected_s", "count"), [(0.0, 5), (1.0, 5), (4.0, 3), (100.0, 2)])
def test_as_many_steps_as_fit(expected_s, count):
    assert num_steps(StepsConfig(at_least=2, at_most=5, about=15.0), expected_s) == count


def test_results_are_lines_of_plain_json(world, path):
    world.sweep(small(), path)
    for line in path.read_text().splitlines():
        assert json.loads(line)["sweep"] == "small"


def test_point_whose_fault_did_not_happen_has_no_result(world, path):
    later = {"at": 3600.0, "link": "host0", "what": "rate", "to": "1mbit"}
    outcome = world.sweep(small(rates=[None], faults=[later]), path)
    assert (outcome.num_done, outcome.num_failed) == (0, 2)
    assert all("raise steps.at_least" in row["error"] for row in read_results(path).values())


def test_fault_of_a_host_that_a_point_lacks_is_refused_before_anything_starts(world, path):
    with pytest.raises(ConfigError, match="host2"):
        world.sweep(small(faults=[{"step": 1, "link": "host2", "what": "rate", "to": "1mbit"}]), path)
    assert not world.networks
