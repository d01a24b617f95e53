"""What a worker does with orders: two of them in this process, over loopback."""

import socket

import pytest
import torch
from support.runs import tiny

from tahq.comm.control.messages import Assign, MeasureCompute, MeasurePaths
from tahq.config.cluster import ClusterConfig
from tahq.errors import RemoteProtocolError
from tahq.quant.config import WireConfig
from tahq.worker import measuring
from tahq.worker.measuring import MeasuringMember

CONFIG = ClusterConfig.model_validate(tiny(model={"vocab_size": 256, "num_layers": 2}, pipeline={"stages": 2}))
RAW = "raw:dtype=fp32"


@pytest.fixture
def members(monkeypatch):
    monkeypatch.setattr(measuring, "BUDGET_S", 0.0)
    said = []
    listening = ("127.0.0.1:0", None)
    assigned = [Assign(stage, 7, "", "", is_measuring=True) for stage in range(2)]
    made = [MeasuringMember(assign, CONFIG, torch.device("cpu"), listening, said.append) for assign in assigned]
    with made[0], made[1]:
        yield made


def order_to(*peers, least_s=0.2):
    return MeasurePaths(5, [list(peer) for peer in peers], least_s, 0.4)


def test_compute_is_timed_for_every_size(members):
    figures = members[1].carry_out(MeasureCompute([4, 2, 2], [RAW]))
    assert [row["micro_batch"] for row in figures.times] == [2, 4]
    assert (figures.stage, list(figures.codecs), figures.notes) == (1, [RAW], [])
    assert figures.memory_bytes > 0


def test_a_size_that_does_not_fit_is_left_out_with_a_note(members):
    figures = members[0].carry_out(MeasureCompute([2, 2**40], []))
    assert [row["micro_batch"] for row in figures.times] == [2]
    assert figures.notes == [f"micro-batches of {2**40} do not fit into the memory of cpu"]


def test_a_codec_that_does_not_run_here_is_left_out_with_a_note():
    config = CONFIG.model_copy(update={"wire": WireConfig(backend="triton")})
    assign = Assign(0, 7, "", "", is_measuring=True)
    with MeasuringMember(assign, config, torch.device("cpu"), ("127.0.0.1:0", None), lambda activity: None) as member:
        figures = member.carry_out(MeasureCompute([2], ["fixed:bits=8,group=64,round=nearest", RAW]))
    assert list(figures.codecs) == [RAW]
    assert len(figures.notes) == 1
    assert "triton" in figures.notes[0]


def test_a_way_has_a_round_trip_and_two_rates(members):
    figures = members[1].carry_out(order_to((0, "host0", members[0].address)))
    assert (figures.stage, figures.order, figures.error) == (1, 5, "")
    assert [len(row) for row in (figures.round_trips, figures.outward, figures.inward)] == [1, 1, 1]


def test_who_cannot_be_reached_is_an_answer_too(members):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = f"127.0.0.1:{taken.getsockname()[1]}"
    figures = members[1].carry_out(order_to((0, "host0", gone)))
    assert figures.error == f"host0 ({gone}): Connection refused"
    assert figures.round_trips == figures.outward == figures.inward == []


@pytest.mark.parametrize(
    "order",
    [
        MeasureCompute([], []),
        MeasureCompute([0], []),
        order_to(),
        order_to((0, "host0", "127.0.0.1:1"), least_s=1.0),
        order_to((0, "host0", "")),
        order_to(("0", "host0", "127.0.0.1:1")),
        order_to((0, "host0")),
        MeasurePaths(1, [[0, "host0", "127.0.0.1:1"]], 0.1, 1e9),
    ],
)
def test_an_order_that_there_is_not_is_the_coordinators_fault(members, order):
    with pytest.raises(RemoteProtocolError):
        members[0].carry_out(order)
