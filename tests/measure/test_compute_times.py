"""Timing the parts of real models on this machine's CPU, and codecs."""

import pytest
import torch
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.errors import CodecError
from tahq.memory.coat.fp8_linear import OutputGradient
from tahq.memory.free_memory import free_bytes
from tahq.memory.saved_tensors import MicroBatchShape, saved_by_block
from tahq.models.model_spec import load_spec
from tahq.quant.config import WireConfig
from tahq.worker import measuring
from tahq.worker.measuring import ComputeMeasurement, DeviceTimer, seconds_per_element

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
    assert all(
        value > 0
        for value in (
            times.block_forward,
            times.first_forward,
            times.first_backward,
            times.last_forward,
            times.last_backward,
        )
    )
    assert said == [f"timing {part}, micro-batches of 2" for part in ("a block", "the embedding", "the head")]


@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_activations_are_counted_as_they_are_kept(checkpointing):
    config = configured(training={"activation_checkpointing": checkpointing})
    times, _ = times_of(config)
    spec = load_spec(config.model, vocab_size=256, seq_len=32)
    whole = saved_by_block(spec, 0, MicroBatchShape(2, 32))
    assert times.block_activation_bytes == (whole if checkpointing == "none" else 4 * 2 * 32 * 64)


def test_a_block_with_fp8_flow_is_timed_and_counted_as_one(monkeypatch):
    products = []
    of_weight = OutputGradient.of_weight
    monkeypatch.setattr(OutputGradient, "of_weight", lambda *args: products.append(args) or of_weight(*args))
    model = {"family": "llama", "num_kv_heads": 1, "intermediate_size": 96, "vocab_size": 256}
    config = configured(model=model, memory={"activations": "coat"})
    times, _ = times_of(config)
    spec = load_spec(config.model, vocab_size=256, seq_len=32)
    assert times.block_activation_bytes == saved_by_block(spec, 0, MicroBatchShape(2, 32, coat=True))
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
    config = configured(model={"vocab_size": 256, "sleep": sleep}, pipeline={"stages": 2})
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


def test_a_codec_that_does_not_run_here_says_so():
    with pytest.raises(CodecError, match="triton"):
        seconds_per_element("fixed:bits=4", WireConfig(backend="triton"), (2, 32, 64), CPU)


def test_free_memory_is_some():
    assert 2**20 < free_bytes(CPU) < 2**50


def test_medians_are_of_each_lap_but_the_first():
    laps = iter([(100.0, 100.0), (1.0, 6.0), (3.0, 5.0), (2.0, 4.0)])
    clock = iter([0.0, 1.0])
    assert DeviceTimer(CPU, lambda: next(clock)).medians_s(lambda: next(laps)) == (2.0, 5.0)
