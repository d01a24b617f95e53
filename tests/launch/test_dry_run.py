"""The text of --dry-run against the model, the codecs and the schedule themselves."""

import math
import re

import pytest
import torch
from support.cluster_files import EXAMPLES

from tahq.comm.group.ends import ANNOUNCEMENT_NBYTES
from tahq.comm.link.frame import HEADER_NBYTES, Direction
from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config, resolve
from tahq.errors import ConfigError, DataError, ModelError
from tahq.models.model_spec import load_spec
from tahq.pipeline.schedule.generators import generate
from tahq.quant import get_codec
from tahq_launch.plan.dry_run import WIDTH, dry_run, seen_samples
from tahq_launch.plan.step_traffic import host_traffic, link_speeds, step_flows, wire_only_step_s


def load(*overrides: str, example: str = "gpt2") -> ClusterConfig:
    return load_config(EXAMPLES / f"{example}.yaml", ["run.device=cpu", *overrides])


def section(text: str, title: str) -> list[list[str]]:
    """Rows of the table under a title, split at two blanks or more; none if there is no such title."""
    part = next((part for part in text.split("\n\n") if part.startswith(title)), "")
    return [re.split(r"\s{2,}", line.strip()) for line in part.splitlines()[1:]]


def flows_of(config: ClusterConfig):
    return step_flows(config, load_spec(config.model, vocab_size=256, seq_len=config.data.seq_len))


def test_bytes_are_those_of_the_encoded_tensors():
    config = load()
    for flow in flows_of(config):
        payload = get_codec(flow.codec, backend="reference").encode(torch.randn(4, 256, 256), key=1)
        assert flow.payload_nbytes == payload.numel()
        assert flow.frame_nbytes == payload.numel() + HEADER_NBYTES * math.ceil(payload.numel() / config.links.piece)
        assert flow.step_nbytes == 8 * flow.frame_nbytes


def test_frames_have_a_header_per_piece_over_zmq_and_one_over_a_group():
    whole, pieces = (flows_of(config)[0] for config in (load(), load("links.piece=4KiB")))
    assert pieces.frame_nbytes - whole.frame_nbytes == HEADER_NBYTES * (math.ceil(whole.payload_nbytes / 4096) - 1)
    for flow in flows_of(load("links={inside: gloo}")):
        assert flow.frame_nbytes == flow.payload_nbytes + ANNOUNCEMENT_NBYTES


def test_links_inside_a_site_are_named_with_their_transport():
    hosts = "hosts=[{address: a, site: x}, {address: b, site: x}, {address: c}, {address: d}]"
    assert "  gloo carries link 0, ZMQ 1, 2" in dry_run(load("links={inside: gloo}", hosts)).splitlines()
    assert "  gloo carries links 0, 1, 2" in dry_run(load("links={inside: gloo}")).splitlines()
    assert "carries link" not in dry_run(load())


def test_every_cut_has_a_flow_in_each_direction():
    flows = flows_of(load())
    rows = section(dry_run(load()), "Bytes per step")[1:7]
    assert rows[0] == ["0", "0 → 1", "activations", "8", "144,528", "4.411", "1,157,024", f"{8 * 1157024 / 1e8:.3f}"]
    assert [(flow.link, flow.source, flow.target) for flow in flows] == [
        (0, 0, 1), (0, 1, 0), (1, 1, 2), (1, 2, 1), (2, 2, 3), (2, 3, 2),
    ]  # fmt: skip
    assert {flow.direction: flow.codec for flow in flows} == {
        Direction.FORWARD: "tah",
        Direction.BACKWARD: "fixed:bits=8",
    }


def test_tied_embeddings_have_their_own_link():
    config = load("model.tie=sync", "model.family=gpt2")
    tied = [flow for flow in flows_of(config) if flow.is_tie]
    assert [(flow.link, flow.source, flow.target, flow.num_frames) for flow in tied] == [(3, 0, 3, 1), (3, 3, 0, 1)]
    assert tied[0].payload_nbytes == 4 * 256 * 256
    assert "tied embedding" in dry_run(config)


def test_wire_only_step_is_between_the_busiest_host_and_all_frames_in_a_row():
    config = load()
    flows = flows_of(config)
    step_s = wire_only_step_s(config, link_speeds(config), generate("1f1b", 4, 8), flows)
    assert host_traffic(flows, 1)[0] == flows[1].step_nbytes + flows[2].step_nbytes
    busiest_s = max(8 * nbytes / 1e8 for stage in range(4) for nbytes in host_traffic(flows, stage))
    in_a_row_s = sum(8 * flow.step_nbytes / 1e8 + 8 * 0.02 for flow in flows)
    assert busiest_s + 2 * 3 * 0.02 < step_s < in_a_row_s
    no_rate = load("links={delay: 20ms}")
    # GPipe: 3 cuts there, 3 back, then a round trip to the coordinator.
    step_s = wire_only_step_s(no_rate, link_speeds(no_rate), generate("gpipe", 4, 8), flows_of(no_rate))
    assert step_s == pytest.approx((3 + 3 + 2) * 0.02)


def test_layers_parameters_and_hosts_are_those_of_the_configuration():
    text = dry_run(load())
    rows = section(text, "Layers")[1:]
    assert [row[4] for row in rows] == ["embedding + 0-1", "2-3", "4-5", "6-7 + norm, head"]
    block = 12 * 256 * 256 + 13 * 256
    expected = [2 * block + 2 * 256 * 256, 2 * block, 2 * block, 2 * block + 2 * 256 + 256 * 256]
    assert [int(row[5].replace(",", "")) for row in rows] == expected
    assert f"{sum(expected):,} parameters" in text
    given = section(dry_run(load("pipeline.layers=[1,2,2,3]")), "Layers")[1:]
    assert [row[4] for row in given] == ["embedding + 0", "1-2", "3-4", "5-7 + norm, head"]
    listed = section(dry_run(load(example="llama_remote")), "Layers")[1:]
    assert [row[1] for row in listed] == ["198.51.100.20", "203.0.113.30", "laptop.example.net"]
    assert [row[3] for row in listed] == ["fp32", "fp32", "bf16"]


def test_memory_falls_with_the_stage_under_1f1b_and_not_under_gpipe():
    rows = {name: section(dry_run(load(f"pipeline.schedule={name}")), "Peak")[1:] for name in ("1f1b", "gpipe")}
    assert [row[1] for row in rows["1f1b"]] == ["4", "3", "2", "1"]
    assert [row[1] for row in rows["gpipe"]] == ["8", "8", "8", "8"]


@pytest.mark.parametrize(("overrides", "factor"), [(["training.optimizer=sgd", "training.momentum=0"], 0), ([], 2)])
def test_optimizer_memory_follows_the_optimizer(overrides, factor):
    for row in section(dry_run(load(*overrides)), "Peak")[1:]:
        weights, optimizer = (float(cell.split()[0]) for cell in (row[2], row[4]))
        assert optimizer == pytest.approx(factor * weights, rel=0.01)


def test_checkpoint_buffers_are_counted_if_there_are_any_during_the_run():
    assert "checkpoints:" not in dry_run(load())
    for num_buffers, said in ((0, "training waits"), (1, "one copy"), (2, "at most 2 copies")):
        text = dry_run(load("run.snapshot_every=5", f"run.snapshot_buffers={num_buffers}"))
        (line,) = [line for line in text.splitlines() if line.startswith("  checkpoints:")]
        assert said in line


@pytest.mark.parametrize(("installed", "warned"), [(10**6, True), (10**12, False)])
def test_stages_on_this_machine_are_compared_with_its_memory(monkeypatch, installed, warned):
    monkeypatch.setattr("tahq_launch.plan.dry_run.installed_nbytes", lambda device: installed)
    assert ("this machine together need" in dry_run(load("run.device=cpu"))) is warned
    assert not warned or "it has 1 MB" in dry_run(load("run.device=cpu"))


@pytest.mark.parametrize(
    ("overrides", "shown", "hidden"),
    [
        ([], ["in 60 steps"], []),
        (["links={rate: 100mbit, cap_up: 20mbit}"], ["s alone", "over all its links, at its rate or cap"], []),
        (["links={}"], [], ["s at ", "Traffic of each host", "infinitely fast"]),
        (["pipeline.stages=1"], ["One stage: nothing is sent.", "embedding + 0-7 + norm, head"], []),
    ],
    ids=["rate", "lower cap", "no rate", "one stage"],
)
def test_times_of_the_traffic_follow_rates_and_caps(overrides, shown, hidden):
    text = dry_run(load(*overrides))
    assert [words for words in shown if words not in text] == []
    assert [words for words in hidden if words in text] == []


def test_grid_shows_every_action_of_every_stage():
    text = dry_run(load())
    grid = text[text.index("Schedule 1f1b") :]
    for stage, row in enumerate(generate("1f1b", 4, 8).actions):
        lines = [line for line in grid.splitlines() if line.startswith(f"stage {stage}")]
        drawn = " ".join(line.removeprefix(f"stage {stage}") for line in lines)
        positions = [drawn.index(str(action)) for action in row]
        assert positions == sorted(positions)
    long = dry_run(load("training.global_batch=256"))
    assert re.search(r"\(\d+ more parts of this width not shown\)$", long)


@pytest.mark.parametrize("example", ["gpt2", "demo", "minimal", "llama_remote"])
def test_text_is_narrow_and_the_same_every_time(example):
    text = dry_run(resolve(load(example=example)))
    assert text == dry_run(resolve(load(example=example)))
    assert max(map(len, text.splitlines())) <= WIDTH


def test_nothing_is_allocated(monkeypatch):
    def no_memory(*args, **kwargs):
        raise AssertionError("a dry run built a slice")

    monkeypatch.setattr("tahq.models.slice.build_slice", no_memory)
    monkeypatch.setattr("tahq.models.slice.ModelSlice.materialise", no_memory)
    # 96 layers of 12,288 channels: 700 GB of weights, were they allocated.
    sizes = ("model.num_layers=96", "model.hidden_size=12288", "model.num_heads=96")
    assert "173,970,972,672 parameters" in dry_run(load(*sizes))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.seq_len", 2**62, "expected at most 16777216; got"),
        ("training.global_batch", 2**62, "at most 65536 micro-batches"),
    ],
)
def test_impossible_sizes_are_refused(key, value, message):
    with pytest.raises(ConfigError, match=rf"{key}.* {message}"):
        load(f"{key}={value}")


@pytest.fixture
def load_text(tmp_path):
    """The example over a text of 40 samples of 256 tokens."""
    (tmp_path / "text.txt").write_text("x" * (256 * 40 + 1))
    return lambda *overrides: resolve(load(f"data.text={tmp_path / 'text.txt'}", "data.validation=0", *overrides))


def test_cache_of_every_stage_is_predicted(load_text):
    text = dry_run(load_text("wire.activations=aqsgd:cache=file", "training.steps=100"))
    rows = section(text, "Cache of aqsgd:bits=4,cache=file")
    end_nbytes = 40 * 256 * 256 * 2
    ends = enumerate((1, 2, 2, 1))
    assert [row[:3] for row in rows[1:5]] == [[str(i), str(n), f"{n * end_nbytes:,}"] for i, n in ends]
    assert rows[5][0].startswith("40 samples of 131 kB")
    # header, 4 records, 1,024 marks, 256 scales, 4 bits per element
    later = 16 + 4 * 16 + 128 + 512 + 4 * 256 * 256 // 2
    assert f"{later:,} bytes, 4.022 bits/element" in rows[6][0]


@pytest.mark.parametrize(
    ("length", "seen"),
    [
        (["training.steps=2", "training.epochs=null"], 40),
        (["training.steps=null", "training.epochs=0.5"], 20),
    ],
)
def test_run_shorter_than_an_epoch_sees_fewer_samples(load_text, length, seen):
    assert seen_samples(load_text(*length)) == seen


def test_missing_data_or_model_folder_is_named(load_text, tmp_path):
    with pytest.raises(DataError, match="nothing"):
        dry_run(load_text("wire.activations=aqsgd", f"data.text={tmp_path / 'nothing'}"))
    with pytest.raises(ModelError, match="is not a folder"):
        dry_run(load_config(EXAMPLES / "finetune_folder.yaml", [f"model.path={tmp_path}/none"]))
