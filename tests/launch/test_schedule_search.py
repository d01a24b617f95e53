"""The search for a schedule during a run: from a step's figures, within the stages' memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import stage_estimate
from tahq.coordinator.observer import LinkRecord, StageRecord, StageSplit, StepRecord
from tahq.coordinator.schedule_choice import ScheduleChoice
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.schedule_search import measured_run, schedule_search
from tahq_launch.start.prepared_run import resolved_run

pytestmark = pytest.mark.ci

STAGES, MICRO_BATCHES = 4, 8
PRESENT = ScheduleChoice("1f1b")
NO_LIMIT = [0] * STAGES


def config(pipeline=None, training=None, **sections):
    given = tiny(training={"global_batch": MICRO_BATCHES, "micro_batch": 1, **(training or {})}, **sections)
    return resolved_run(ClusterConfig.model_validate(given | {"pipeline": {"stages": STAGES, **(pipeline or {})}}))


def step(forward_s=0.07, backward_s=0.15, round_trip_s=0.0, wire_s=0.0):
    """What stages that compute so long per micro-batch report; frames of 8 kB."""
    split = StageSplit(forward_s=MICRO_BATCHES * forward_s, backward_s=MICRO_BATCHES * backward_s)
    stages = tuple(StageRecord(stage, {}, 0, split) for stage in range(STAGES))
    nbytes, elements = MICRO_BATCHES * 8192, MICRO_BATCHES * 2048
    links = [
        LinkRecord(
            cut, *ends, direction, MICRO_BATCHES, nbytes, nbytes, elements, 1.0, 1.0, MICRO_BATCHES * wire_s, 1.0,
            round_trip_s=round_trip_s,
        )
        for cut in range(STAGES - 1)
        for ends, direction in (((cut, cut + 1), "activations"), ((cut + 1, cut), "gradients"))
    ]  # fmt: skip
    return StepRecord(3, 1.0, 256, 4.0, 1.0, 1.0, False, False, stages, links)


def test_stages_on_one_gpu_are_simulated_as_taking_turns_in_what_a_step_leaves_them():
    shown = step()
    alone, shared = (
        measured_run(config(run={"name": "tiny", "device": name}), shown, PRESENT, NO_LIMIT)[0].problem.cluster.hosts
        for name in ("cpu", "cuda:0")
    )
    assert [host.device for host in (*alone, *shared)] == [None] * STAGES + ["cuda:0"] * STAGES
    times = {host.compute[0] for host in shared}
    assert len(times) == 1
    (each,) = times
    blocks_s, head_s = STAGES * (each.block_forward + each.block_backward), each.last_forward + each.last_backward
    assert MICRO_BATCHES * (blocks_s + head_s) == pytest.approx(shown.step_time_s)


@pytest.mark.parametrize(
    ("emulate", "shown"),
    [({"rate": "1mbit"}, {}), ({"delay": "100ms"}, {}), ({}, {"round_trip_s": 0.2}), ({}, {"wire_s": 0.06})],
    ids=str,
)
def test_slow_links_get_more_in_flight(emulate, shown):
    found = schedule_search(config(emulate=emulate))([step(**shown)], PRESENT, NO_LIMIT)
    assert found.step_s < 0.85 * found.present_s
    assert sum(found.choice.depths) > sum(range(STAGES + 1))


@pytest.mark.parametrize(("rate", "best_s"), [("19.1mbit", 17.7), ("95.6mbit", 3.9)])
def test_frames_as_long_as_compute_get_the_best_depths_of_all(rate, best_s):
    # fp32 frames of 2 MB; `best_s` is of all 1,332 schedules and profiles of depths, simulated with frames in pieces
    slow = config(
        model={"hidden_size": 512, "num_heads": 8},
        data={"seq_len": 256},
        training={"global_batch": 4 * MICRO_BATCHES, "micro_batch": 4},
        wire={"activations": "raw:dtype=fp32", "gradients": "raw:dtype=fp32"},
        emulate={"rate": rate},
    )
    found = schedule_search(slow)([step(0.073, 0.152)], PRESENT, NO_LIMIT)
    assert found.step_s < 1.01 * best_s


def test_free_links_need_only_a_shorter_bubble():
    found = schedule_search(config())([step()], PRESENT, NO_LIMIT)
    assert found.choice.schedule == "zero-bubble"
    # 1F1B: 11 rounds of 0.22 s; the weight gradients, half of each backward, fill most of the bubble of 3
    assert found.present_s == pytest.approx(11 * 0.22, rel=0.01)
    assert found.step_s < 9.5 * 0.22


@pytest.mark.parametrize(
    "pipeline", [{"schedule": "1f1b"}, {"schedule": "gpipe"}, {"schedule": "zero-bubble", "in_flight": 5}]
)
def test_schedule_that_is_set_stays(pipeline):
    assert schedule_search(config(pipeline)) is None


def test_depths_that_are_set_stay():
    present = ScheduleChoice("1f1b", (4, 4, 3, 3))
    found = schedule_search(config({"in_flight": [4, 4, 3, 3]}, emulate={"rate": "1mbit"}))([step()], present, NO_LIMIT)
    assert found.choice.depths == present.depths


def test_checkpointing_keeps_backwards_whole():
    found = schedule_search(config(memory={"recompute": "block"}, emulate={"rate": "1mbit"}))(
        [step()], PRESENT, NO_LIMIT
    )
    assert found.choice.schedule == "1f1b"


def test_present_depths_are_simulated_as_they_are():
    """More in flight than micro-batches, whose weight gradients lag behind."""
    present = ScheduleChoice("zero-bubble", (12, 12, 12, 4))
    deep = config({"in_flight": [12, 12, 12, 4]}, emulate={"rate": "1mbit"})
    found = schedule_search(deep)([step()], present, NO_LIMIT)
    assert (found.choice, found.step_s) == (present, found.present_s)


@pytest.mark.parametrize("pipeline", [{}, {"in_flight": [4, 3, 2, 1]}])
def test_nothing_is_proposed_where_nothing_fits(pipeline):
    present = ScheduleChoice("1f1b", (4, 3, 2, 1))
    found = schedule_search(config(pipeline, emulate={"rate": "1mbit"}))([step()], present, [1] * STAGES)
    assert found.choice == present


@settings(max_examples=5)
@given(
    st.lists(st.integers(1, 30), min_size=STAGES, max_size=STAGES),
    st.sampled_from([{"rate": "1mbit"}, {"delay": "100ms"}, {}]),
    st.sampled_from([{}, {"recompute": ["block", "none", "norm", "none"], "offload": [["m", "v"], [], [], ["v"]]}]),
)
def test_what_is_proposed_fits_wherever_one_micro_batch_does(room, emulate, memory):
    """`room`: quarters of a micro-batch in flight that fit beside what one needs."""
    given = config(emulate=emulate, memory=memory)
    spec = resolved_spec(given, None)

    def nbytes(choice):
        pipeline = given.pipeline.model_copy(
            update={"schedule": choice.schedule, "in_flight": list(choice.depths) or None}
        )
        changed = given.model_copy(update={"pipeline": pipeline})
        return [stage_estimate(changed, spec, stage, device="cpu").total for stage in range(STAGES)]

    one, two = nbytes(ScheduleChoice("1f1b", (1,) * STAGES)), nbytes(ScheduleChoice("1f1b", (2,) * STAGES))
    limits = [a + quarters * (b - a) // 4 for a, b, quarters in zip(one, two, room, strict=True)]
    found = schedule_search(given)([step()], PRESENT, limits)
    if found.choice != PRESENT and found.choice.depths != (4, 3, 2, 1):
        assert all(need <= 1.02 * has for need, has in zip(nbytes(found.choice), limits, strict=True))
