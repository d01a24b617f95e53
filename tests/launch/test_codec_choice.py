"""The codecs that the coordinator gets, from a resolved configuration."""

import json

import pytest
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.config.file import resolve
from tahq.coordinator.link_policy import LinkKey
from tahq.errors import ConfigError
from tahq_launch.start.codec_choice import codec_options

UP = ["wf:bits=2", "wf:bits=4"]


def config(**wire) -> ClusterConfig:
    values = tiny(
        model={"num_layers": 2}, pipeline={"stages": 2}, wire={"activations": "wf", "gradients": "eden"} | wire
    )
    return resolve(ClusterConfig.model_validate(values))


def record(path, codec: str, link: int = 0):
    links = [{"link": link, "direction": "gradients", "codec": codec}]
    path.write_text(json.dumps({"step": 1, "links": links}) + "\n")
    return str(path)


def test_without_follow_codecs_are_named_and_stay():
    options = codec_options(config(), {})
    assert options.start == {"activations": "wf:bits=4,group=128,center=on", "gradients": "eden:bits=3,group=256"}
    assert options.rules is None


def test_follow_becomes_rules_with_the_length_of_every_rung():
    follow = {"activations": UP, "raise_after": 7, "lower_after": 2, "guard": {"max_error": None, "hold": 9}}
    rules = codec_options(config(follow=follow), {}).rules
    assert rules is not None
    assert rules.ladders["activations"].specs == tuple(f"{spec},group=128,center=on" for spec in UP)
    short, long = rules.ladders["activations"].nbytes
    assert long - short == 2 * 2 * 32 * 64 // 8  # two bits more for each of 2 × 32 × 64 elements
    assert (rules.raise_after, rules.lower_after, rules.max_error, rules.loss_rise, rules.hold) == (7, 2, None, 0.1, 9)


def test_a_record_is_read_without_the_link_of_tied_embeddings(tmp_path):
    path = record(tmp_path / "metrics.jsonl", "eden:bits=4,group=256")
    assert codec_options(config(follow={}, replay=path), {}).replay == {
        1: {LinkKey(0, "gradients"): "eden:bits=4,group=256"}
    }
    tied = record(tmp_path / "tied.jsonl", "raw:dtype=fp32", link=1)
    assert codec_options(config(follow={}, replay=tied), {}).replay == {1: {}}


def test_a_record_of_other_ladders_is_refused(tmp_path):
    path = record(tmp_path / "metrics.jsonl", "eden:bits=8")
    with pytest.raises(ConfigError, match=r"has eden:bits=8 for gradients at step 1, which is not on the ladder eden:"):
        codec_options(config(follow={}, replay=path), {})
