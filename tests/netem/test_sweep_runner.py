"""A sweep in a world where a step takes no time: what is measured, kept, tried again, and given up."""

import pytest
from support.sweeps import World, small

from tahq.errors import ConfigError, NetworkError
from tahq_netem.sweep import runner as sweep_runner
from tahq_netem.sweep.results import read_results


@pytest.fixture
def world():
    return World()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


@pytest.fixture
def sweep(world, path):
    """sweep(**changes): (done, failed, left) of a call of the small sweep with these changes."""

    def run(limit_s=None, **changes):
        outcome = world.sweep(small(**changes), path, limit_s)
        return outcome.num_done, outcome.num_failed, outcome.num_left

    return run


def rows_of(path):
    return list(read_results(path).values())


def test_every_point_is_measured_in_one_session_per_wire_and_only_once(world, path, sweep):
    assert sweep(rates=[None, 20e6, 100e6]) == (6, 0, 0)
    assert (len(world.sessions), len(world.networks)) == (2, 1)
    assert all(each.is_closed for each in (*world.sessions, *world.networks))
    by_rate = {row["point"]["rate_bits_per_s"]: row for row in rows_of(path)}
    assert by_rate[None]["tokens_per_s"] == 8 * 32 / 1.0
    assert by_rate[20e6]["tokens_per_s"] == pytest.approx(8 * 32 / 6.0)
    before = path.read_bytes()
    assert sweep(rates=[None, 20e6, 100e6]) == (6, 0, 0)
    assert len(world.sessions) == 2
    assert path.read_bytes() == before


def test_default_settings_start_anew_on_every_network_and_count_once_they_are_settled(world, path, sweep):
    assert sweep(runtimes=[{"name": "tahq", "schedules": ["auto"], "wires": ["auto"]}]) == (2, 0, 0)
    assert len(world.sessions) == 2
    for session, row in zip(world.sessions, rows_of(path), strict=True):
        assert not session.request.config.wire.model_fields_set
        assert "schedule" not in session.request.config.pipeline.model_fields_set
        assert row["steps"][0]["step"] > sweep_runner.PLANNED_STEPS


def test_row_has_the_conditions_of_its_measurement(path, sweep):
    sweep(rates=[20e6], steps={"settle": 2, "at_least": 2, "at_most": 2})
    row = rows_of(path)[0]
    assert row["sweep"] == "small"
    assert row["calibration"]["network"]["backend"] == "loopback"
    assert row["machine"]["cores"] >= 1
    assert row["machine"]["torch"]
    # 1 at the start, 1 that had finished when the network was changed, 2 that settle
    assert [step["step"] for step in row["steps"]] == [5, 6]
    assert row["activation_nbytes"] == [1000.0]
    assert 0 < row["bound_s"] < row["step_s"]
    assert row["share_of_bound"] == pytest.approx(row["bound_s"] / row["step_s"])
    assert row["stage_times"] == [[0.01, 0.02]] * 2


def test_call_without_time_leaves_the_rest_for_the_next(path, sweep):
    done, failed, left = sweep(limit_s=40.0, rates=[None, 20e6, 50e6])
    assert 0 < done < 6
    assert (failed, left) == (0, 6 - done)
    assert sweep(rates=[None, 20e6, 50e6]) == (6, 0, 0)
    assert len(path.read_text().splitlines()) == 6


def test_interruption_loses_the_point_that_was_measured_and_no_other(world, path, sweep, monkeypatch):
    real, calls = sweep_runner.measure_point, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(sweep_runner, "measure_point", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep()
    assert len(rows_of(path)) == 1
    assert all(each.is_closed for each in (*world.sessions, *world.networks))
    monkeypatch.undo()
    assert sweep() == (4, 0, 0)
    assert len(path.read_text().splitlines()) == 4


def test_session_that_is_lost_costs_one_point_and_is_started_again(world, path, sweep):
    world.losing_rates = {50e6}
    assert sweep(rates=[None, 50e6, 20e6]) == (4, 2, 0)
    assert len(world.sessions) == 4
    failed = [row for row in rows_of(path) if row["status"] == "failed"]
    assert all("RuntimeLostError: lost at 50000000.0" in row["error"] for row in failed)
    world.losing_rates = set()
    assert sweep(rates=[None, 50e6, 20e6]) == (6, 0, 0)


def test_session_that_does_not_start_is_tried_once_per_call(world, path, sweep):
    world.starts_fail = True
    assert sweep() == (0, 4, 0)
    assert all("it did not start" in row["error"] for row in rows_of(path))
    world.starts_fail = False
    assert sweep() == (4, 0, 0)


def test_points_of_a_network_that_is_off_fail_with_the_error_and_its_notes(world, path, sweep):
    world.bad_network = NetworkError("goodput is 12 % off")
    world.bad_network.add_note("and the link could not be joined again")
    assert sweep(rates=[None, 20e6]) == (2, 2, 0)
    assert world.calibrated == [None, 20e6, 20e6]  # off once may be a disturbance, so the next session looks again
    errors = {row["error"] for row in rows_of(path) if row["status"] == "failed"}
    assert errors == {"NetworkError: goodput is 12 % off; and the link could not be joined again"}


def test_point_of_sleeping_stages_with_busy_cores_is_rejected_and_its_figures_kept(path, sweep):
    assert sweep(compute=["real"], max_busy_cores=0.4) == (4, 0, 0)
    assert sweep(max_busy_cores=0.4)[1] == 4
    failed = [row for row in rows_of(path) if row["status"] == "failed"]
    assert all("cores were busy, the limit is 0.40" in row["error"] and row["tokens_per_s"] > 0 for row in failed)


def test_compute_is_timed_once_for_each_size(world, sweep, monkeypatch):
    asked = []

    def timed(config):
        asked.append((config.pipeline.stages, config.training.micro_batch))
        stages = config.pipeline.stages
        return sweep_runner.StageTimes((0.01,) * stages, (0.02,) * stages)

    monkeypatch.setattr(sweep_runner, "calibrate_compute", timed)
    assert sweep(compute=["calibrated"], micro_batches=[1, 2]) == (8, 0, 0)
    assert sorted(asked) == [(2, 1), (2, 2)]
    slept = [session.request.config.emulate.sleep for session in world.sessions]
    assert all(sleep.of(1) == (0.01, 0.02) for sleep in slept)


def test_fault_that_did_not_happen_fails_its_point_and_one_of_an_unknown_host_the_sweep(world, path, sweep):
    later = {"at": 3600.0, "link": "host0", "what": "rate", "to": "1mbit"}
    assert sweep(rates=[None], faults=[later]) == (0, 2, 0)
    assert all("raise steps.at_least" in row["error"] for row in rows_of(path))
    world.networks.clear()
    with pytest.raises(ConfigError, match="host2"):
        sweep(faults=[later | {"link": "host2"}])
    assert not world.networks
