"""Timing the parts of real models on this machine's CPU, codecs, and a worker's answers to measuring orders."""

import math
import socket
from contextlib import closing

import pytest
import torch
from support.runs import tiny

from tahq.comm.control.messages import Assign, MeasureCompute, MeasurePaths
from tahq.config.cluster import ClusterConfig
from tahq.errors import RemoteProtocolError
from tahq.memory.coat.fp8_codes import OutputGradient
from tahq.memory.saved_tensors import MicroBatchShape, saved_by_block
from tahq.models.model_spec import load_spec
from tahq.plan.cluster_numbers import LayerTimes
from tahq.plan.measure.measurement import RELAY
from tahq.plan.measure.meter import MeterServer
from tahq.quant.config import WireConfig
from tahq.worker import measuring
from tahq.worker.measuring import ComputeMeasurement, DeviceTimer, MeasuringMember, seconds_per_element

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(measuring, "BUDGET_S", 0.0)


def configured(**sections):
    sections = {"model": {"vocab_size": 256}, **sections}
    return ClusterConfig.model_validate(tiny(**sections))


def times_of(config, micro_batch=2, stage=0):
    said = []
    times = ComputeMeasurement(config, stage, CPU, said.append).layer_times(micro_batch)
    return times, said


def test_every_part_takes_time_and_the_input_gradient_is_part_of_the_backward():
    times, said = times_of(configured())
    assert times.micro_batch == 2
    assert 0 < times.block_input_gradient <= times.block_backward
    ends = (times.first_forward, times.first_backward, times.last_forward, times.last_backward)
    assert min(times.block_forward, *ends) > 0
    assert said == [f"timing {part}, micro-batches of 2" for part in ("a block", "the embedding", "the head")]


@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_activations_are_counted_as_they_are_kept(checkpointing):
    config = configured(memory={"recompute": checkpointing})
    times, _ = times_of(config)
    spec = load_spec(config.model, vocab_size=256, seq_len=32)
    whole = saved_by_block(spec, 0, MicroBatchShape(2, 32))
    assert times.block_activation_bytes == (whole if checkpointing == "none" else 4 * 2 * 32 * 64)


@pytest.mark.parametrize(
    ("sections", "shape"),
    [
        ({"memory": {"activations": "coat"}}, MicroBatchShape(2, 32, coat=True)),
        ({"training": {"precision": "fp8"}}, MicroBatchShape(2, 32, True, fp8=True)),
    ],
    ids=["coat", "fp8"],
)
def test_a_block_with_products_in_fp8_is_timed_and_counted_as_one(monkeypatch, sections, shape):
    products = []
    of_weight = OutputGradient.of_weight
    monkeypatch.setattr(OutputGradient, "of_weight", lambda *args: products.append(args) or of_weight(*args))
    model = {"family": "llama", "num_kv_heads": 1, "intermediate_size": 96, "vocab_size": 256}
    config = configured(model=model, **sections)
    times, _ = times_of(config)
    spec = load_spec(config.model, vocab_size=256, seq_len=32)
    assert times.block_activation_bytes == saved_by_block(spec, 0, shape)
    assert 0 < times.block_input_gradient <= times.block_backward
    # Seven matrices in each of the laps of a whole backward, none in those of the input's gradient alone.
    assert len(products) == 7 * (1 + measuring.FEWEST)


def test_blocks_with_different_windows_are_all_timed():
    """Mistral's and Qwen2's blocks may have two kinds of attention."""
    model = {"family": "qwen2", "num_kv_heads": 1, "intermediate_size": 64, "vocab_size": 256}
    overrides = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    times, said = times_of(configured(model={**model, "overrides": overrides}))
    assert said.count("timing a block, micro-batches of 2") == 2
    assert times.block_forward > 0


def test_a_stage_that_sleeps_takes_what_was_set():
    """Two stages of two blocks; a nap is late by a scheduler's whim, never early."""
    sleep = {"forward": "20ms", "backward": ["10ms", "40ms"]}
    config = configured(model={"vocab_size": 256}, emulate={"sleep": sleep}, pipeline={"stages": 2})
    times, _ = times_of(config, stage=1)
    assert 0.010 <= times.block_forward < 0.020
    assert 0.020 <= times.block_backward < 0.035
    assert times.block_input_gradient is None
    assert (times.first_forward, times.last_backward) == (0.0, 0.0)


@pytest.mark.parametrize("spec", ["raw:dtype=fp32", "fixed:bits=4", "aqsgd:bits=4"])
def test_codecs_take_time_both_ways(spec):
    encode_s, decode_s = seconds_per_element(spec, WireConfig(backend="reference"), (2, 32, 64), CPU)
    assert 0 < encode_s < 1e-3
    assert 0 < decode_s < 1e-3


def test_medians_are_of_each_lap_but_the_first():
    laps = iter([(100.0, 100.0), (1.0, 6.0), (3.0, 5.0), (2.0, 4.0)])
    clock = iter([0.0, 9.0, 10.0, 12.0])
    timer = DeviceTimer(CPU, lambda: next(clock))
    assert timer.medians_s(lambda: next(laps)) == (2.0, 5.0)
    assert timer.compiled_s == 9.0 - 3.0 / 3


# -- implausible figures -------------------------------------------------------------------------


def measured(**block_ms):
    """Blocks' milliseconds for 1, 2 and 4 samples; for each size, those of one measurement after the other.

    Returns the milliseconds that count, the sizes measured again, and the notes.
    """
    left = {int(size.removeprefix("of_")): list(times) for size, times in block_ms.items()}
    rows, again = [], []

    def measure(size):
        again.append(size)
        block_s = left[size].pop(0) / 1000
        return LayerTimes(micro_batch=size, block_forward=block_s / 3, block_backward=block_s * 2 / 3)

    for size in list(left):
        rows.append(measure(size))
        again.pop()
        measuring.measure_again(rows, measure)
    counted = [1000 * measuring.sample_s(row) * row.micro_batch for row in rows]
    return [round(ms, 6) for ms in counted], again, measuring.implausible(rows)


@pytest.mark.parametrize(
    "block_ms",
    [
        pytest.param([1.4, 2.8, 5.7], id="as long for each sample"),
        pytest.param([5.0, 5.0, 5.1], id="as long in all"),
        pytest.param([5.0, 4.8, 5.0], id="noise"),
        pytest.param([1.0, 2.5, 6.3], id="a little longer for each sample"),
    ],
)
def test_plausible_times_are_not_measured_again(block_ms):
    of_1, of_2, of_4 = block_ms
    assert measured(of_1=[of_1], of_2=[of_2], of_4=[of_4]) == (block_ms, [], [])


@pytest.mark.parametrize(
    ("block_ms", "again"),
    [
        pytest.param({"of_1": [1.4], "of_2": [180, 2.8], "of_4": [5.7]}, [2], id="between others"),
        pytest.param({"of_1": [180, 1.4], "of_2": [2.8], "of_4": [5.7]}, [1], id="smallest"),
        pytest.param({"of_1": [1.4], "of_2": [2.8], "of_4": [180, 90, 5.7]}, [4, 4], id="largest, twice"),
        pytest.param({"of_1": [180, 1.4], "of_2": [90, 2.8], "of_4": [5.7]}, [1, 2], id="two sizes"),
        pytest.param({"of_1": [10, 1.4], "of_2": [20, 2.8], "of_4": [5.7]}, [2, 1], id="two sizes alike"),
        pytest.param({"of_1": [1.4], "of_2": [180] * 4 + [2.8], "of_4": [5.7]}, [2] * 4, id="for long"),
    ],
)
def test_a_time_beside_other_work_is_measured_again(block_ms, again):
    assert measured(**block_ms) == ([1.4, 2.8, 5.7], again, [])


def test_the_fastest_of_several_measurements_counts():
    """Later ones are no better; timing size 4 is another occasion."""
    (_, twos, _), again, _ = measured(of_1=[1.4], of_2=[180, 6, 5, 90, 90, 90, 90], of_4=[10])
    assert (twos, again) == (5, [2] * 2 * measuring.AGAIN)


def test_times_that_stay_implausible_are_noted_once():
    """Size 2 fits neither beside 1 nor beside 4."""
    times, again, notes = measured(of_1=[1.4], of_2=[180] * 7, of_4=[5.7])
    assert (times, again) == ([1.4, 180, 5.7], [2] * 2 * measuring.AGAIN)
    assert notes == [
        "implausible times, even when measured again: a sample takes 1.4 ms in micro-batches of 1, "
        "90 ms in micro-batches of 2, 1.43 ms in micro-batches of 4; was the machine busy at 2?"
    ]


# -- orders --------------------------------------------------------------------------------------

CONFIG = ClusterConfig.model_validate(tiny(model={"vocab_size": 256, "num_layers": 2}, pipeline={"stages": 2}))
RAW = "raw:dtype=fp32"


@pytest.fixture
def members():
    listening = ("127.0.0.1:0", None)
    assigned = [Assign(stage, 7, "", "", is_measuring=True) for stage in range(2)]
    made = [MeasuringMember(assign, CONFIG, CPU, listening, lambda activity: None) for assign in assigned]
    with made[0], made[1]:
        yield made


def order_to(*peers, least_s=0.2):
    return MeasurePaths(5, [list(peer) for peer in peers], least_s, 0.4)


def test_compute_is_timed_for_every_size(members, monkeypatch):
    """Whatever times a busy machine gives, they are plausible here."""
    monkeypatch.setattr(measuring, "MOST_SLOWER", math.inf)
    monkeypatch.setattr(measuring, "NO_FASTER", 0.0)
    figures = members[1].carry_out(MeasureCompute([4, 2, 2], [RAW]))
    assert [row["micro_batch"] for row in figures.times] == [2, 4]
    assert (figures.stage, list(figures.codecs), figures.notes) == (1, [RAW], [])
    assert figures.memory_bytes > 0


def test_no_larger_size_is_begun_after_the_limit(members):
    """Two sizes are always timed: one tells nothing of the next."""
    figures = members[0].carry_out(MeasureCompute([1, 2, 4, 8], [RAW], limit_s=1e-6))
    assert [row["micro_batch"] for row in figures.times] == [1, 2]
    assert list(figures.codecs) == [RAW]


def test_compiling_kernels_leaves_time_for_larger_sizes(members, monkeypatch):
    """On a GPU the first repetition of a size can take longer than all that is measured."""
    monkeypatch.setattr(measuring, "NO_FASTER", math.inf)
    monkeypatch.setattr(measuring.ComputeMeasurement, "compiled_s", property(lambda self: 1e6))
    figures = members[0].carry_out(MeasureCompute([1, 2, 4], [], limit_s=1e-6))
    assert [row["micro_batch"] for row in figures.times] == [1, 2, 4]


def test_no_larger_size_is_begun_where_samples_are_no_faster(members, monkeypatch):
    monkeypatch.setattr(measuring, "NO_FASTER", 0.0)
    figures = members[0].carry_out(MeasureCompute([1, 2, 4, 8], [], limit_s=3600.0))
    assert [row["micro_batch"] for row in figures.times] == [1, 2]


def test_activities_are_counted_though_a_size_is_measured_again(monkeypatch):
    """Every size is implausible beside the one before."""
    monkeypatch.setattr(measuring, "MOST_SLOWER", 0.0)
    said = []
    assign = Assign(0, 7, "", "", is_measuring=True)
    with MeasuringMember(assign, CONFIG, CPU, ("127.0.0.1:0", None), said.append) as member:
        figures = member.carry_out(MeasureCompute([1, 2], [RAW]))
    assert len(figures.notes) == 1
    blocks = [activity for activity in said if activity.startswith("timing a block")]
    of_two = ["timing a block, micro-batches of 2 (2/3)"] * (1 + measuring.AGAIN)
    assert blocks == ["timing a block, micro-batches of 1 (1/3)", *of_two]
    assert said[-2:] == [f"timing {RAW}, compiled first if new (3/3)", "waiting for the others"]


def test_a_size_that_does_not_fit_is_left_out_with_a_note(members):
    figures = members[0].carry_out(MeasureCompute([2, 2**40], []))
    assert [row["micro_batch"] for row in figures.times] == [2]
    assert figures.notes == [f"micro-batches of {2**40} do not fit into the memory of cpu"]


def test_a_codec_that_does_not_run_here_is_left_out_with_a_note():
    config = CONFIG.model_copy(update={"wire": WireConfig(backend="triton")})
    assign = Assign(0, 7, "", "", is_measuring=True)
    with MeasuringMember(assign, config, CPU, ("127.0.0.1:0", None), lambda activity: None) as member:
        figures = member.carry_out(MeasureCompute([2], ["fixed:bits=8,group=64,round=nearest", RAW]))
    assert list(figures.codecs) == [RAW]
    assert len(figures.notes) == 1
    assert "triton" in figures.notes[0]


def test_path_has_a_round_trip_and_two_rates(members):
    figures = members[1].carry_out(order_to((0, "host0", members[0].address)))
    assert (figures.stage, figures.order, figures.error) == (1, 5, "")
    assert [len(row) for row in (figures.round_trips, figures.outward, figures.inward)] == [1, 1, 1]


def test_path_to_the_relay_is_dialled_where_this_worker_reaches_the_coordinator():
    assign = Assign(0, 7, "", "", is_measuring=True)
    with (
        closing(MeterServer(7, RELAY, "127.0.0.1:0", None)) as relay,
        MeasuringMember(assign, CONFIG, CPU, ("127.0.0.1:0", "none"), lambda activity: None, "127.0.0.1") as member,
    ):
        port = relay.address.rpartition(":")[2]
        figures = member.carry_out(order_to((RELAY, "the coordinator's machine", f":{port}")))
    assert figures.error == ""
    assert [len(row) for row in (figures.round_trips, figures.outward, figures.inward)] == [1, 1, 1]


def test_unreachable_peer_is_reported(members):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = f"127.0.0.1:{taken.getsockname()[1]}"
    figures = members[1].carry_out(order_to((0, "host0", gone)))
    assert figures.error == f"host0 ({gone}): Connection refused"
    assert figures.round_trips == figures.outward == figures.inward == []


@pytest.mark.parametrize(
    "order",
    [
        MeasureCompute([0], []),
        order_to(),
        order_to((0, "host0", "127.0.0.1:1"), least_s=1.0),
        order_to((0, "host0", "")),
        order_to(("0", "host0", "127.0.0.1:1")),
        order_to((0, "host0")),
        MeasurePaths(1, [[0, "host0", "127.0.0.1:1"]], 0.1, 1e9),
    ],
)
def test_malformed_order_is_a_remote_protocol_error(members, order):
    with pytest.raises(RemoteProtocolError):
        members[0].carry_out(order)
