"""Numbers of a cluster, often written by hand: nonsense is refused by name."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.planner_problems import cluster, host

from tahq.errors import ConfigError
from tahq.plan.cluster_numbers import ClusterNumbers, CodecTimes, HostNumbers, LayerTimes, PathNumbers
from tahq.typed_yaml.mistakes import read_section

TIMES = CodecTimes(encode_per_element=1e-9, decode_per_element=1e-9)
THERE, BACK = (PathNumbers(source=one, target=other, rate=1e6) for one, other in ("ab", "ba"))


def test_codecs_are_known_by_their_full_spec_however_they_are_written():
    written = HostNumbers(name="a", compute=host("a").compute, codecs={"wf": TIMES, "fixed:bits=6": TIMES})
    assert list(written.codecs) == ["wf:bits=4,group=128,center=on", "fixed:bits=6,group=64,round=nearest"]


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (HostNumbers, {"codecs": {"nonsense": TIMES}}, "nonsense"),
        (HostNumbers, {"codecs": {"wf": TIMES, "wf:bits=4": TIMES}}, "wf:bits=4 is wf:.* which is listed already"),
        (LayerTimes, {"block_forward": 0, "block_backward": 0}, "a block takes no time"),
        (LayerTimes, {"block_backward": 2, "block_input_gradient": 3}, "at most block_backward, 2; got 3"),
        (LayerTimes, {"block_forward": float("inf")}, "finite"),
        (PathNumbers, {"rate": 1e6, "failure": "no route"}, "a to b has a rate and a failure"),
        (ClusterNumbers, {"paths": [THERE, BACK, THERE]}, "a to b is listed 2 times"),
        (
            ClusterNumbers,
            {"paths": [THERE.model_copy(update={"relayed": True})]},
            "relay is missing, but a path is relayed",
        ),
        (ClusterNumbers, {"relay": {"host": "c"}}, "relay.host: unknown host c"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(kind, values, message):
    whole = {
        HostNumbers: {"name": "a", "compute": host("a").compute},
        LayerTimes: {"micro_batch": 1, "block_forward": 1, "block_backward": 2},
        PathNumbers: {"source": "a", "target": "b"},
        ClusterNumbers: {"hosts": [host("a"), host("b")]},
    }
    with pytest.raises(ValidationError, match=message):
        kind(**(whole[kind] | values))


def test_paths_there_and_back_are_two():
    assert cluster(host("a"), host("b"), paths=[THERE, BACK]).paths == [THERE, BACK]


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
