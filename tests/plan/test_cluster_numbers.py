"""Numbers of a cluster, written by hand as often as not: what makes no sense is refused by name."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.planner_problems import cluster, host

from tahq.errors import ConfigError
from tahq.plan.cluster_numbers import ClusterNumbers, CodecTimes, HostNumbers, LayerTimes, PathNumbers
from tahq.typed_yaml.mistakes import read_section

TIMES = CodecTimes(encode_per_element=1e-9, decode_per_element=1e-9)


def test_codecs_are_known_by_their_full_spec_however_they_are_written():
    written = HostNumbers(name="a", compute=host("a").compute, codecs={"wf": TIMES, "fixed:bits=6": TIMES})
    assert list(written.codecs) == ["wf:bits=4,group=128,center=on", "fixed:bits=6,group=64,round=nearest"]


@pytest.mark.parametrize(
    ("codecs", "message"),
    [
        ({"nonsense": TIMES}, "nonsense"),
        ({"wf": TIMES, "wf:bits=4": TIMES}, "wf:bits=4 is wf:.* which is listed already"),
    ],
)
def test_codecs_that_there_are_not_or_twice_are_refused(codecs, message):
    with pytest.raises(ValidationError, match=message):
        HostNumbers(name="a", compute=host("a").compute, codecs=codecs)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"block_forward": 0, "block_backward": 0}, "a block takes no time"),
        ({"block_forward": 1, "block_backward": 2, "block_input_gradient": 3}, "at most block_backward, 2; got 3"),
        ({"block_forward": float("inf"), "block_backward": 2}, "finite"),
    ],
)
def test_times_that_make_no_sense_are_refused(times, message):
    with pytest.raises(ValidationError, match=message):
        LayerTimes(micro_batch=1, **times)


def test_a_path_either_carries_or_fails():
    with pytest.raises(ValidationError, match="a to b has a rate and a failure"):
        PathNumbers(source="a", target="b", rate=1e6, failure="no route")


def test_a_path_is_listed_once():
    there, back = (PathNumbers(source=one, target=other, rate=1e6) for one, other in ("ab", "ba"))
    assert cluster(host("a"), host("b"), paths=[there, back]).paths == [there, back]
    with pytest.raises(ValidationError, match="a to b is listed 2 times"):
        ClusterNumbers(hosts=[host("a"), host("b")], paths=[there, back, there])


FILE = """\
hosts:
- name: a
  compute: [{micro_batch: 1, block_forward: 1, block_backward: 2}]
paths:
- source: a
  target: 192.0.2.2
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", "numbers.yaml:6: paths.0.target: unknown host or site 192.0.2.2"),
        (
            "target: 192.0.2.2\n",
            "target: a\n- {source: a, target: a}\n",
            "numbers.yaml:4: paths: a to a is listed 2 times",
        ),
    ],
)
def test_paths_of_a_file_that_do_not_fit_are_named(tmp_path, monkeypatch, old, new, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numbers.yaml").write_text(FILE.replace(old, new) if old else FILE)
    with pytest.raises(ConfigError) as caught:
        read_section(ClusterNumbers, Path("numbers.yaml"), "hosts")
    assert str(caught.value).startswith(message)
