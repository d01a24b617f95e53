"""A stage has its codecs' kernels before its first step: nothing is compiled or loaded once it has said ready.

tests/gpu/test_codec_kernels.py says the same of Triton's kernels.
"""

import logging

import pytest
import torch
from support.compiled_kernels import compiled_kernels
from support.cuts import cross, cut_sides
from support.inproc_transport import InprocPair, VirtualClock

from tahq.comm.link.frame import Direction, Purpose
from tahq.errors import ConfigError, RemoteProtocolError
from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.pipeline.boundary import CodecTable
from tahq.pipeline.config import PipelineConfig, TrainingConfig
from tahq.pipeline.stage import Stage, StagePlan
from tahq.quant.config import WireConfig

CPU = torch.device("cpu")
CHANNELS = 64
WIRES = [
    {"activations": "tah", "gradients": "fixed:bits=8"},
    {"activations": "tah:alloc=token,low=2,high=3", "gradients": "fixed:bits=6,round=stochastic"},
    {"activations": "tah:tau=0", "gradients": "tah:adaptive=off,group=256", "threads": 2},
    {
        "activations": "fixed:bits=4",
        "gradients": "tah",
        "follow": {"activations": ["wf:bits=2", "fixed:bits=4", "raw"]},
    },
]


def make_stage(transports, wire, *, stages=2, stage=1):
    spec = load_spec(
        ModelConfig(family="gpt2", num_layers=2, hidden_size=CHANNELS, num_heads=2), vocab_size=256, seq_len=8
    )
    blocks = BlockRange(1, 2, 2) if stages == 2 else BlockRange(0, 2, 2)
    module = build_slice(spec, blocks, seed=0, device="cpu", random=RandomContext(0))
    plan = StagePlan(
        stage=stage,
        run=1,
        seed=3,
        seq_len=8,
        total_steps=1,
        training=TrainingConfig(steps=1, global_batch=4, micro_batch=2),
        pipeline=PipelineConfig(stages=stages),
        wire=wire,
        tie=False,
    )
    return Stage(plan, {stage: module}, None, transports, device=CPU, autocast=None)


def exchange(wire, shape):
    """What a step does with its codecs, with other values and keys each time, in both directions."""
    rungs = {Direction.FORWARD: wire.rungs()["activations"], Direction.BACKWARD: wire.rungs()["gradients"]}
    lower, upper = cut_sides(lambda: CodecTable(wire))
    for step in range(3):
        for side in (lower, upper):
            side.codecs.use(step, Direction.FORWARD, 1 + step % len(rungs[Direction.FORWARD]))
        for sender, receiver, direction in ((lower, upper, Direction.FORWARD), (upper, lower, Direction.BACKWARD)):
            for purpose in (Purpose.TRAIN, Purpose.EVAL_RAW):
                x = torch.randn(shape).transpose(0, 1).contiguous().transpose(0, 1)
                cross(sender, receiver, x, step=step, purpose=purpose, direction=direction)


@pytest.mark.parametrize("keys", WIRES, ids=lambda keys: keys["activations"])
def test_first_step_compiles_and_loads_nothing(keys, caplog):
    wire, pair = WireConfig(**keys), InprocPair(VirtualClock())
    with caplog.at_level(logging.INFO, "tahq.pipeline.stage"):
        make_stage({0: pair.transports[1]}, wire).prepare()
    assert "codecs ready in" in caplog.text
    before = compiled_kernels()
    assert before, "the cpu backend has kernels"
    exchange(wire, (2, 8, CHANNELS))
    assert compiled_kernels() == before


def test_stage_changes_the_codecs_of_its_own_cuts_and_refuses_malformed_rows():
    pair = InprocPair(VirtualClock())
    stage = make_stage({0: pair.transports[1]}, WireConfig(follow={}))
    stage.use_codecs(3, [[0, 1, 4], [7, 0, 99]])  # the second is of a link between others
    assert stage.take_codec_errors() == []
    for row in ([0, 1, 1], [0, 5, 1], [0, 1], [0, 0, 0]):
        with pytest.raises(RemoteProtocolError, match="invalid change of codecs"):
            stage.use_codecs(4, [row])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"backend": "triton"}, "stage 1: wire: codec wf: backend triton takes tensors on cuda, got one on cpu"),
        ({"activations": "tah:alloc=48"}, "stage 1: wire: .* alloc=48 does not fit 64 channels"),
    ],
)
def test_codec_that_does_not_fit_model_or_device_is_a_configuration_error(keys, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pair = InprocPair(VirtualClock())
    with pytest.raises(ConfigError, match=message):
        make_stage({0: pair.transports[1]}, WireConfig(**keys)).prepare()
