"""Ladders of codecs, and their keys in cluster.yaml."""

import re
from pathlib import Path

import pytest
import torch
from support.cluster_files import LEAST, ClusterFile

from tahq.errors import ConfigError
from tahq.quant import CodecSpec, get_codec
from tahq.quant.config import FollowConfig, WireConfig, _warn_of_wasted_bits
from tahq.quant.ladder import default_ladder, ladder_for

SHAPE = (2, 8, 256)


@pytest.fixture
def file(tmp_path, monkeypatch) -> ClusterFile:
    return ClusterFile(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("spec", "rungs"),
    [
        ("wf", ["wf:bits=3", "wf", "wf:bits=5"]),
        ("eden:bits=1", ["eden:bits=1", "eden:bits=2"]),
        ("eden:bits=5", ["eden:bits=4", "eden:bits=5"]),  # more bits are wasted
        ("eden:bits=7.5,group=64", ["eden:bits=6.5,group=64", "eden:bits=7.5,group=64"]),
        ("fixed", ["fixed:bits=6", "fixed", "fixed:bits=10"]),
        ("tah", ["tah:int4=0", "tah:int4=0.4", "tah", "tah:int4=1"]),
        ("tah:int4=1/2", ["tah:int4=0", "tah:int4=0.4", "tah:int4=0.5", "tah:int4=0.8", "tah:int4=1"]),
        ("tah:low=4", ["tah:low=4"]),
        ("aqsgd:cache=none", ["aqsgd:bits=3,cache=none", "aqsgd:cache=none", "aqsgd:bits=5,cache=none"]),
        ("raw", ["raw:dtype=bf16", "raw"]),
        ("raw:dtype=fp16", ["raw:dtype=fp16", "raw"]),
    ],
)
def test_the_usual_ladder_is_the_codec_with_fewer_and_more_bits(spec, rungs):
    ladder = default_ladder(spec)
    assert ladder == [str(CodecSpec.parse(rung)) for rung in rungs]
    assert ladder_for(ladder, SHAPE).nbytes == tuple(get_codec(rung).encoded_nbytes(SHAPE) for rung in rungs)


def test_a_rung_is_found_however_it_is_written():
    ladder = ladder_for(["wf:bits=2", "wf"], SHAPE)
    assert ladder.rung("wf:center=on,bits=4") == 1
    assert ladder.rung("wf:bits=3") is None


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (["wf", "wf:bits=3"], r"wf:bits=3\S* \(\d+ bytes per frame\) comes after wf:bits=4"),
        (["wf", "wf:group=128"], "from the fewest bits to the most"),
        (["wf:group=64", "tah:alloc=48"], "does not fit tensors of shape"),
        (["aqsgd", "raw"], "remembers the samples"),
    ],
)
def test_malformed_ladders_are_refused(specs, message):
    with pytest.raises(ConfigError, match=message):
        ladder_for(specs, SHAPE)


def test_follow_writes_its_rungs_out_when_it_is_resolved(file):
    config = file.load(
        LEAST, "wire={activations: tah:group=32, gradients: fixed:group=32, follow: true}"
    ).wire.resolved()
    assert config.follow is not None
    assert config.follow.activations == default_ladder("tah:group=32")
    assert config.follow.gradients == default_ladder("fixed:group=32")
    assert config.resolved() == config
    assert file.load(LEAST, "wire.gradients=raw", "wire.follow=true", "wire.follow=false").wire.follow is None


@pytest.mark.parametrize(
    ("follow", "message"),
    [
        ("{activations: [tah]}", "wire.activations is where a run begins and must be one of wire.follow.activations"),
        ("{activations: [raw, raw:dtype=bf16]}", "wire.follow.activations: rungs go from the fewest bits to the most"),
        ("{gradients: [aqsgd, raw]}", "remembers the samples that it has sent"),
        ("{gradients: [raww]}", "no codec 'raww'"),
        ("{gradients: []}", "wire.follow.gradients"),
        ("{raise_afer: 2}", "did you mean raise_after?"),
        ("{guard: {hold: 0}}", "wire.follow.guard.hold"),
    ],
)
def test_mistakes_in_follow_are_one_line(file, follow, message):
    assert message in file.refusal(LEAST, "wire.activations=raw", "wire.gradients=raw", f"wire.follow={follow}")


def test_follow_needs_stateless_codecs_and_a_replay_needs_ladders(file):
    wire = ("wire.activations=aqsgd", "wire.gradients=raw", "wire.follow=true")
    assert "'aqsgd' remembers the samples" in file.refusal(LEAST, *wire)
    assert "set wire.follow too" in file.refusal(LEAST, "wire.gradients=raw", "wire.replay=metrics.jsonl")


def test_the_examples_in_the_documentation_are_valid(file):
    doc = (Path(__file__).parents[2] / "docs" / "dev" / "link-policy.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", doc, re.DOTALL)
    wires = [file.load(f"{LEAST.replace('hidden_size: 32', 'hidden_size: 256')}{text}").wire for text in examples]
    assert [len(wire.rungs()["activations"]) for wire in wires] == [3, 4]


def test_eden_above_five_bits_is_accepted_with_a_warning_that_names_a_better_codec(caplog):
    _warn_of_wasted_bits.cache_clear()
    assert WireConfig(gradients="eden:bits=5").gradients == "eden:bits=5"
    FollowConfig(gradients=["eden:bits=3", "eden:bits=5"])
    assert not caplog.records
    for _ in range(2):  # files of version 0.1 may have it, so it is not refused
        assert WireConfig(gradients="eden:bits=5.5").gradients == "eden:bits=5.5"
    (record,) = caplog.records
    assert "eden:bits=5.5,group=256 wastes bits" in record.message
    assert "use fixed:bits=6,round=stochastic, which is unbiased too, or eden:bits=5" in record.message
    FollowConfig(gradients=["eden:bits=3", "eden:bits=6"])
    assert "eden:bits=6,group=256 wastes bits" in caplog.text


def test_fixed_is_better_than_eden_where_the_warning_says_so():
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(0))

    def error(spec):
        codec = get_codec(spec)
        return float((codec.decode(codec.encode(x, key=1), x.shape, key=1) - x).norm() / x.norm())

    assert error("fixed:bits=6,round=stochastic") < 0.8 * error("eden:bits=6")
    assert error("eden:bits=8") > 0.8 * error("eden:bits=6")
