"""From command line and configuration to the coordinator's options: overrides, resumption, reachability, codecs."""

import json
import re
import shlex
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config, resolve
from tahq.coordinator.link_codecs import LinkKey
from tahq.errors import ConfigError
from tahq_launch.start.codec_choice import codec_options
from tahq_launch.start.local_checks import check_reachable
from tahq_launch.start.prepared_run import StartRequest, continued_config, prepared_run, with_run_name
from tahq_launch.start.resolution import resolve_for_run

OLD_RUN = Path(__file__).parents[1] / "integration" / "runs_5e6a489" / "gpt2"
TINY = ClusterConfig.model_validate(tiny(pipeline={"stages": 2}))
REACHABLE, UNREACHABLE = nullcontext(), pytest.raises(ConfigError, match=r"run\.bind is .*run\.advertise")


def changed(config: ClusterConfig, section: str, **values) -> ClusterConfig:
    content = config.model_dump(mode="json")
    return ClusterConfig.model_validate({**content, section: {**content[section], **values}})


def test_resume_command_survives_a_shell_and_bind_wins_over_other_overrides():
    request = StartRequest(Path("my cluster.yaml"), ("wire.gradients=fixed:bits=8", "run.name=a b"), bind="127.0.0.1:1")
    assert shlex.split(request.resume_command) == [
        *("tahq-launch", "my cluster.yaml", "--bind", "127.0.0.1:1", "--resume"),
        *("--set", "wire.gradients=fixed:bits=8", "--set", "run.name=a b"),
    ]
    advertised = replace(request, overrides=("run.bind=127.0.0.1:2",), advertise="a.example:3")
    assert advertised.all_overrides == (
        "run.bind=127.0.0.1:2",
        'run.bind="127.0.0.1:1"',
        'run.advertise="a.example:3"',
    )
    seen = StartRequest(Path("cluster.yaml"), seen_at="[2001:db8::1]:7700")
    assert seen.all_overrides == ('run.bind="[2001:db8::1]:7700"',)
    assert seen.resume_command == "tahq-launch cluster.yaml --resume"  # it asks the hosts again


def test_run_without_a_name_is_named_after_its_file_and_resumed_by_that(tmp_path):
    path = tmp_path / "my cluster, 2.yaml"
    path.write_text(f"run: {{dir: '{tmp_path}'}}\nmodel: {{path: x}}\ndata: {{text: stdlib}}\n")
    *others, name = with_run_name(path, ("training.steps=1",), resume=False)
    assert others == ["training.steps=1"]
    assert re.fullmatch(r"run\.name=my-cluster-2-\d{8}-\d{6}", name)
    assert with_run_name(path, (), resume=True) == ("run.name=run",)
    for day in (10, 12, 11):
        (tmp_path / f"my-cluster-2-202611{day}-000000").mkdir()
    assert with_run_name(path, (), resume=True) == ("run.name=my-cluster-2-20261112-000000",)
    for resume in (False, True):
        assert with_run_name(path, ("run={name: a}",), resume=resume) == ("run={name: a}",)


@pytest.mark.parametrize(
    ("run", "address", "expectation"),
    [
        ({}, "localhost", REACHABLE),
        ({}, "192.0.2.7", UNREACHABLE),
        ({"bind": "0.0.0.0:0"}, "192.0.2.7", REACHABLE),
        ({"bind": "127.0.0.1:5555", "advertise": "relay.example:5555"}, "192.0.2.7", REACHABLE),
    ],
)
def test_hosts_must_be_able_to_dial_the_coordinator(run, address, expectation):
    hosts = [{"address": "127.0.0.1"}, {"address": address}]
    config = ClusterConfig.model_validate({**tiny(pipeline={"stages": 2}, run=run), "hosts": hosts})
    with expectation:
        check_reachable(config)


@pytest.mark.parametrize(
    ("run", "own", "expectation"),
    [
        ({"bind": "192.0.2.1:7700"}, {}, REACHABLE),
        ({"bind": "0.0.0.0:7700"}, {"address": "192.0.2.1"}, REACHABLE),
        (
            {"bind": "0.0.0.0:7700"},
            {},
            pytest.raises(ConfigError, match=r"^hosts.1: 192.0.2.7 must reach this machine"),
        ),
    ],
)
def test_hosts_must_be_able_to_dial_the_worker_of_this_machine(run, own, expectation):
    hosts = [{"address": "192.0.2.7"}, {"local": True, **own}]
    config = ClusterConfig.model_validate({**tiny(pipeline={"stages": 2}, run=run), "hosts": hosts})
    with expectation:
        check_reachable(config)


@pytest.mark.parametrize("damage", [None, b"\xff\xfe"])
def test_run_without_a_readable_config_yaml_is_resumed_from_its_checkpoint(tmp_path, monkeypatch, damage):
    shutil.copytree(OLD_RUN, tmp_path / "runs" / "gpt2")
    shutil.copy(OLD_RUN / "text.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "runs" / "gpt2" / "config.yaml"
    kept.unlink() if damage is None else kept.write_bytes(damage)
    request = StartRequest(OLD_RUN / "cluster.yaml", ("training.steps=8",), resume=True)
    with prepared_run(request) as prepared:
        assert prepared.options.start_step == 4
        assert any("using the configuration of the checkpoint after step 4" in note for note in prepared.notes)
    assert load_config(kept).training.steps == 8


def test_continued_run_keeps_its_cuts_while_it_is_divided_the_same_way():
    old = changed(TINY, "pipeline", layers=[3, 1]).model_dump(mode="json")
    assert continued_config(old, TINY).pipeline.layers == [3, 1]
    assert continued_config(old, changed(TINY, "pipeline", stages=1)).pipeline.layers is None
    assert continued_config(old, changed(TINY, "pipeline", layers=[1, 3])).pipeline.layers == [1, 3]
    two_each = changed(TINY, "pipeline", chunks=2, schedule="interleaved")
    del old["pipeline"]["chunks"]  # as versions without interleaved schedules wrote it
    assert continued_config(old, TINY).pipeline.layers == [3, 1]
    assert continued_config(old, two_each).pipeline.layers is None


def test_continued_run_keeps_its_positions():
    old = resolve_for_run(TINY).model_dump(mode="json")
    assert continued_config(old, changed(TINY, "data", seq_len=16)).model.max_seq_len == 32
    message = r"checkpoint.s model.*: data\.seq_len 64 is longer than model\.max_seq_len 32$"
    with pytest.raises(ConfigError, match=message):
        continued_config(old, changed(TINY, "data", seq_len=64))


def test_continued_run_of_a_version_without_packing_stays_unpacked():
    values = TINY.model_dump(mode="json", exclude_unset=True)
    pairs = ClusterConfig.model_validate(values | {"data": {"records": "pairs.jsonl", "seq_len": 32}})
    old = pairs.model_dump(mode="json")
    del old["data"]["packing"]
    assert continued_config(old, pairs).data.packing is False
    assert continued_config(pairs.model_dump(mode="json"), pairs).data.packing == "auto"
    assert continued_config(old, changed(pairs, "data", packing=True)).data.packing is True


RUNGS = ["wf:bits=2", "wf:bits=4"]


def with_wire(**wire) -> ClusterConfig:
    return resolve(changed(TINY, "wire", **({"activations": "wf", "gradients": "eden"} | wire)))


def record(path, codec: str, link: int = 0):
    links = [{"link": link, "direction": "gradients", "codec": codec}]
    path.write_text(json.dumps({"step": 1, "links": links}) + "\n")
    return str(path)


def test_follow_becomes_rules_with_the_length_of_every_rung():
    assert codec_options(with_wire(), {}).rules is None
    guard = {"max_error": None, "hold": 9}
    follow = {"activations": RUNGS, "raise_after": 7, "lower_after": 2, "guard": guard}
    rules = codec_options(with_wire(follow=follow), {}).rules
    assert rules.ladders["activations"].specs == tuple(f"{spec},group=128,center=on" for spec in RUNGS)
    short, long = rules.ladders["activations"].nbytes
    assert long - short == 2 * 2 * 32 * 64 // 8  # two bits more for each of 2 × 32 × 64 elements
    assert (rules.raise_after, rules.lower_after, rules.max_error, rules.loss_rise, rules.hold) == (7, 2, None, 0.1, 9)


def test_record_to_replay_is_read_without_the_link_of_tied_embeddings(tmp_path):
    path = record(tmp_path / "metrics.jsonl", "eden:bits=4,group=256")
    expected = {1: {LinkKey(0, "gradients"): "eden:bits=4,group=256"}}
    assert codec_options(with_wire(follow={}, replay=path), {}).replay == expected
    tied = record(tmp_path / "tied.jsonl", "raw:dtype=fp32", link=1)
    assert codec_options(with_wire(follow={}, replay=tied), {}).replay == {1: {}}
    other = record(tmp_path / "other.jsonl", "eden:bits=8")
    with pytest.raises(ConfigError, match=r"has eden:bits=8 for gradients at step 1, which is not on the ladder eden:"):
        codec_options(with_wire(follow={}, replay=other), {})
