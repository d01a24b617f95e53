"""What a run is started with: options of the command line, what a resumed run keeps, who can dial whom."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_hash, load_config
from tahq.errors import ConfigError
from tahq.memory.galore.qgalore import low_rank_weights
from tahq.models.slice import ModelSlice
from tahq_launch.start.origin import continued_config
from tahq_launch.start.prepared_run import StartRequest, check_reachable, prepared_run
from tahq_launch.start.resolution import resolve_for_run

OLD_RUN = Path(__file__).parents[1] / "integration" / "runs_5e6a489" / "gpt2"
TINY = ClusterConfig.model_validate(tiny(pipeline={"stages": 2}))


def changed(config: ClusterConfig, section: str, **values) -> ClusterConfig:
    content = config.model_dump(mode="json")
    return ClusterConfig.model_validate({**content, section: {**content[section], **values}})


def test_resume_command_survives_a_shell():
    request = StartRequest(Path("my cluster.yaml"), ("wire.gradients=fixed:bits=8", "run.name=a b"), bind="127.0.0.1:1")
    assert shlex.split(request.resume_command) == [
        *("tahq-launch", "my cluster.yaml", "--bind", "127.0.0.1:1", "--resume"),
        *("--set", "wire.gradients=fixed:bits=8", "--set", "run.name=a b"),
    ]


def test_bind_and_advertise_win_over_other_overrides():
    request = StartRequest(Path("c.yaml"), ("run.bind=127.0.0.1:1",), bind="127.0.0.1:2", advertise="a.example:3")
    assert request.all_overrides == ("run.bind=127.0.0.1:1", "run.bind=127.0.0.1:2", "run.advertise=a.example:3")


def test_resolving_writes_out_vocabulary_and_layers_and_is_idempotent():
    resolved = resolve_for_run(TINY)
    assert resolved.model.vocab_size == 256
    assert resolved.pipeline.layers == [2, 2]
    assert config_hash(resolve_for_run(resolved)) == config_hash(resolved)


def test_cap_that_is_a_share_of_nothing_known_starts_no_run():
    hosts = [{"address": "192.0.2.1"}, {"address": "192.0.2.2"}]
    values = TINY.model_dump(mode="json") | {"hosts": hosts, "links": {"cap_up": "60%"}}
    with pytest.raises(ConfigError, match=r"links\.cap_up: 60% .*tahq measure"):
        resolve_for_run(ClusterConfig.model_validate(values))


def test_order_on_an_uplink_that_nothing_holds_back_is_warned_of(caplog):
    resolve_for_run(changed(TINY, "links", first="gradients", rate=1e8))
    assert "links.first" not in caplog.text
    resolve_for_run(changed(TINY, "links", first="gradients"))
    assert "links.first: gradients has little effect on stage 0's host" in caplog.text


@pytest.mark.parametrize(
    ("sections", "bf16"),
    [
        ({"training": {"precision": "bf16", "activation_checkpointing": "block"}}, True),
        ({"memory": {"activations": "coat"}}, False),
        ({"training": {"optimizer": "qgalore"}}, False),
    ],
    ids=["bf16, computed again", "coat", "low rank"],
)
def test_measured_balance_times_what_a_stage_computes(sections, bf16, monkeypatch):
    timed = []
    model = {"family": "llama", "intermediate_size": 96}
    config = ClusterConfig.model_validate(tiny(model=model, pipeline={"stages": 2, "balance": "measured"}, **sections))
    forward = ModelSlice.forward
    monkeypatch.setattr(ModelSlice, "forward", lambda part, x: timed.append((part, is_bf16())) or forward(part, x))
    resolve_for_run(config)
    blocks = {part for part, _ in timed if part.parts.blocks}
    assert {autocast for _, autocast in timed} == {bf16}
    assert {part.checkpoint_blocks for part in blocks} == {config.training.activation_checkpointing == "block"}
    assert {bool(low_rank_weights(part)) for part in blocks} == {config.training.is_low_rank}
    kinds = {type(block).__name__ for part in blocks for block in part._blocks()}
    assert all((kind == "CoatBlock") == (config.memory.activations == "coat") for kind in kinds)


def is_bf16() -> bool:
    return torch.is_autocast_enabled("cpu")


def test_measured_balance_divides_all_layers():
    resolved = resolve_for_run(changed(TINY, "pipeline", balance="measured"))
    assert sum(resolved.pipeline.layers) == TINY.model.num_layers
    assert min(resolved.pipeline.layers) >= 1


@pytest.mark.parametrize("damage", [None, b"\xff\xfe", b"run: ["])
def test_run_without_a_readable_config_yaml_is_resumed_from_its_checkpoint(tmp_path, monkeypatch, damage):
    shutil.copytree(OLD_RUN, tmp_path / "runs" / "gpt2")
    shutil.copy(OLD_RUN / "text.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "runs" / "gpt2" / "config.yaml"
    kept.unlink() if damage is None else kept.write_bytes(damage)
    request = StartRequest(OLD_RUN / "cluster.yaml", ("training.steps=8",), resume=True)
    with prepared_run(request, lambda config: None) as prepared:
        assert prepared.options.start_step == 4
        assert any("the configuration is that of the checkpoint after step 4" in note for note in prepared.notes)
    assert load_config(kept).training.steps == 8


def test_continued_run_keeps_its_cuts_while_it_is_divided_the_same_way():
    old = changed(TINY, "pipeline", layers=[3, 1]).model_dump(mode="json")
    assert continued_config(old, TINY).pipeline.layers == [3, 1]
    assert continued_config(old, changed(TINY, "pipeline", stages=1)).pipeline.layers is None
    assert continued_config(old, changed(TINY, "pipeline", layers=[1, 3])).pipeline.layers == [1, 3]


def test_continued_run_is_divided_anew_when_its_stages_get_other_chunks():
    two_each = changed(TINY, "pipeline", chunks=2, schedule="interleaved")
    old = changed(two_each, "pipeline", layers=[1, 1, 1, 1]).model_dump(mode="json")
    assert continued_config(old, two_each).pipeline.layers == [1, 1, 1, 1]
    assert continued_config(old, TINY).pipeline.layers is None
    older = changed(TINY, "pipeline", layers=[3, 1]).model_dump(mode="json")
    del older["pipeline"]["chunks"]  # as versions without interleaved schedules wrote it
    assert continued_config(older, TINY).pipeline.layers == [3, 1]
    assert continued_config(older, two_each).pipeline.layers is None


def test_continued_run_keeps_its_positions_when_samples_get_shorter():
    old = resolve_for_run(TINY).model_dump(mode="json")
    assert continued_config(old, changed(TINY, "data", seq_len=16)).model.max_seq_len == 32


@pytest.mark.parametrize(
    ("run", "address", "reachable"),
    [
        ({}, "127.0.0.1", True),
        ({}, "localhost", True),
        ({}, "192.0.2.7", False),
        ({"bind": "localhost:0"}, "gpu1.example", False),
        ({"bind": "0.0.0.0:0"}, "192.0.2.7", True),
        ({"bind": "127.0.0.1:5555", "advertise": "relay.example:5555"}, "192.0.2.7", True),
    ],
)
def test_hosts_must_be_able_to_dial_the_coordinator(run, address, reachable):
    hosts = [{"address": "127.0.0.1"}, {"address": address}]
    config = ClusterConfig.model_validate({**tiny(pipeline={"stages": 2}, run=run), "hosts": hosts})
    if reachable:
        check_reachable(config)
        return
    with pytest.raises(ConfigError, match=r"run\.bind is .*run\.advertise"):
        check_reachable(config)


def test_samples_longer_than_the_snapshots_model_are_refused_in_one_line():
    old = resolve_for_run(TINY).model_dump(mode="json")
    longer = changed(TINY, "data", seq_len=2 * TINY.data.seq_len)
    with pytest.raises(
        ConfigError, match=r"checkpoint.s model.*: data\.seq_len 64 is longer than model\.max_seq_len 32$"
    ):
        continued_config(old, longer)
