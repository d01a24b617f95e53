"""What --dry-run prints, held against the things themselves."""

import math
import re

import pytest
import torch
from support.cluster_files import EXAMPLES

from tahq.comm.group.ends import ANNOUNCEMENT_NBYTES
from tahq.comm.link.frame import HEADER_NBYTES, Direction
from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config, resolve
from tahq.errors import ConfigError, ModelError
from tahq.models.model_spec import load_spec
from tahq.pipeline.schedule.generators import generate
from tahq.quant import get_codec
from tahq_launch.plan.dry_run import WIDTH, dry_run
from tahq_launch.plan.step_traffic import host_traffic, link_speeds, step_flows, wire_only_step_s


def load(*overrides: str, example: str = "gpt2") -> ClusterConfig:
    return load_config(EXAMPLES / f"{example}.yaml", ["run.device=cpu", *overrides])


def section(text: str, title: str) -> list[list[str]]:
    """Rows of the table under a title, split at two blanks or more."""
    part = next(part for part in text.split("\n\n") if part.startswith(title))
    return [re.split(r"\s{2,}", line.strip()) for line in part.splitlines()[1:]]


def spec_of(config: ClusterConfig):
    return load_spec(config.model, vocab_size=256, seq_len=config.data.seq_len)


# -- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["qgalore", "galore"])
def test_parameters_are_counted_whatever_they_are_kept_in(optimizer):
    texts = [dry_run(load(f"training.optimizer={name}")) for name in ("adamw", optimizer)]
    layers = [section(text, "Layers") for text in texts]
    assert layers[0] == layers[1]


# -- traffic -------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_encoded_tensors():
    config = load()
    for flow in step_flows(config, spec_of(config)):
        payload = get_codec(flow.codec, backend="reference").encode(torch.randn(4, 256, 256), key=1)
        assert flow.payload_nbytes == payload.numel()
        assert flow.frame_nbytes == payload.numel() + HEADER_NBYTES * math.ceil(payload.numel() / config.links.piece)
        assert flow.step_nbytes == 8 * flow.frame_nbytes


def test_frames_of_a_group_have_one_header_whatever_their_length():
    config = load("links={inside: gloo}")
    for flow in step_flows(config, spec_of(config)):
        assert flow.frame_nbytes == flow.payload_nbytes + ANNOUNCEMENT_NBYTES


def test_links_inside_a_site_are_named_with_what_carries_them():
    hosts = "hosts=[{address: a, site: x}, {address: b, site: x}, {address: c}, {address: d}]"
    assert "  gloo carries link 0, ZMQ 1, 2" in dry_run(load("links={inside: gloo}", hosts)).splitlines()
    assert "  gloo carries links 0, 1, 2" in dry_run(load("links={inside: gloo}")).splitlines()
    assert "carries link" not in dry_run(load())


def test_every_cut_has_a_flow_each_way():
    config = load()
    flows = step_flows(config, spec_of(config))
    assert [(flow.link, flow.source, flow.target) for flow in flows] == [
        (0, 0, 1), (0, 1, 0), (1, 1, 2), (1, 2, 1), (2, 2, 3), (2, 3, 2),
    ]  # fmt: skip
    assert {flow.direction: flow.codec for flow in flows} == {
        Direction.FORWARD: "tah",
        Direction.BACKWARD: "fixed:bits=8",
    }


def test_the_word_paper_takes_the_papers_bits():
    config = load("wire=paper")
    forward, backward = step_flows(config, spec_of(config))[:2]
    assert forward.bits_per_element == pytest.approx(4.41, abs=0.01)
    assert backward.bits_per_element == pytest.approx(8.25, abs=0.01)


def test_smaller_pieces_have_more_headers():
    whole, pieces = (step_flows(c, spec_of(c))[0] for c in (load(), load("links.piece=4KiB")))
    assert pieces.frame_nbytes - whole.frame_nbytes == HEADER_NBYTES * (math.ceil(whole.payload_nbytes / 4096) - 1)


def test_tied_embeddings_have_a_link_of_their_own():
    config = load("model.tie=sync", "model.family=gpt2")
    tied = [flow for flow in step_flows(config, spec_of(config)) if flow.is_tie]
    assert [(flow.link, flow.source, flow.target, flow.num_frames) for flow in tied] == [(3, 0, 3, 1), (3, 3, 0, 1)]
    assert tied[0].payload_nbytes == 4 * 256 * 256
    assert "tied embedding" in dry_run(config)


def test_hosts_add_up_what_their_links_carry():
    config = load()
    flows = step_flows(config, spec_of(config))
    first, second, *_ = host_traffic(flows, 4)
    assert (first.sent_nbytes, first.received_nbytes) == (flows[0].step_nbytes, flows[1].step_nbytes)
    assert second.sent_nbytes == flows[1].step_nbytes + flows[2].step_nbytes
    assert second.seconds(1e8, 2e8) == 8 * second.sent_nbytes / 1e8
    assert second.seconds(2e8, 5e7) == 8 * second.received_nbytes / 5e7


def test_wire_only_step_is_between_the_busiest_host_and_everything_in_a_row():
    config = load()
    flows = step_flows(config, spec_of(config))
    step_s = wire_only_step_s(config, link_speeds(config), generate("1f1b", 4, 8), flows)
    busiest_s = max(host.seconds(1e8, 1e8) for host in host_traffic(flows, 4))
    in_a_row_s = sum(8 * flow.step_nbytes / 1e8 + 8 * 0.02 for flow in flows)
    assert busiest_s + 2 * 3 * 0.02 < step_s < in_a_row_s


def test_wire_only_step_without_a_rate_is_made_of_delays():
    config = load("links={delay: 20ms}")
    # GPipe: 3 cuts there, 3 back, then a round trip to the coordinator.
    step_s = wire_only_step_s(config, link_speeds(config), generate("gpipe", 4, 8), step_flows(config, spec_of(config)))
    assert step_s == pytest.approx((3 + 3 + 2) * 0.02)


# -- text ----------------------------------------------------------------------------------------


def test_layers_and_parameters_are_those_of_the_model():
    rows = section(dry_run(load()), "Layers")[1:]
    assert [row[4] for row in rows] == ["embedding + 0-1", "2-3", "4-5", "6-7 + norm, head"]
    block = 12 * 256 * 256 + 13 * 256
    expected = [2 * block + 2 * 256 * 256, 2 * block, 2 * block, 2 * block + 2 * 256 + 256 * 256]
    assert [int(row[5].replace(",", "")) for row in rows] == expected
    assert f"{sum(expected):,} parameters" in dry_run(load())


def test_listed_layers_are_shown():
    rows = section(dry_run(load("pipeline.layers=[1,2,2,3]")), "Layers")[1:]
    assert [row[4] for row in rows] == ["embedding + 0", "1-2", "3-4", "5-7 + norm, head"]


def test_memory_falls_with_the_stage_under_1f1b_and_not_under_gpipe():
    rows = {name: section(dry_run(load(f"pipeline.schedule={name}")), "Memory")[1:] for name in ("1f1b", "gpipe")}
    assert [row[1] for row in rows["1f1b"]] == ["4", "3", "2", "1"]
    assert [row[1] for row in rows["gpipe"]] == ["8", "8", "8", "8"]


@pytest.mark.parametrize(
    ("overrides", "factor"),
    [(["training.optimizer=sgd"], 1), (["training.optimizer=sgd", "training.momentum=0"], 0), ([], 2)],
)
def test_optimizer_memory_follows_the_optimizer(overrides, factor):
    for row in section(dry_run(load(*overrides)), "Memory")[1:]:
        weights, optimizer = (float(cell.split()[0]) for cell in (row[2], row[4]))
        assert optimizer == pytest.approx(factor * weights, rel=0.01)


def test_links_show_bytes_and_seconds_at_the_rate():
    text = dry_run(load())
    rows = section(text, "Bytes per step")[1:7]
    assert rows[0] == ["0", "0 → 1", "activations", "8", "144,528", "4.411", "1,157,024", "0.093"]
    assert f"{8 * 1157024 / 1e8:.3f}" == rows[0][-1]
    assert "in 60 steps" in text


def test_caps_count_where_they_are_lower():
    text = dry_run(load("links={rate: 100mbit, cap_up: 20mbit}"))
    assert "s alone" in text
    assert "all its links together, at its rate or its cap" in text
    assert "s at 100 Mbit/s" in dry_run(load("links={rate: 100mbit, cap_up: 200mbit}"))


def test_links_without_a_rate_show_no_seconds():
    text = dry_run(load("links=null", "links={}"))
    assert "s at " not in text
    assert "Traffic of each host" not in text
    assert "if computing took no time" not in text


def test_one_stage_has_no_wire():
    text = dry_run(load("pipeline.stages=1"))
    assert "One stage: nothing crosses a wire." in text
    assert section(text, "Layers")[1][4] == "embedding + 0-7 + norm, head"


def test_grid_shows_every_action_of_every_stage():
    text = dry_run(load())
    grid = text[text.index("Schedule 1f1b") :]
    for stage, row in enumerate(generate("1f1b", 4, 8).actions):
        drawn = " ".join(
            line.removeprefix(f"stage {stage}") for line in grid.splitlines() if line.startswith(f"stage {stage}")
        )
        positions = [drawn.index(str(action)) for action in row]
        assert positions == sorted(positions)


def test_long_grid_is_cut_with_a_note():
    text = dry_run(load("training.global_batch=256"))
    assert re.search(r"\(\d+ more pictures of this width not shown\)$", text)


@pytest.mark.parametrize("example", ["gpt2", "demo", "minimal", "llama_remote"])
def test_text_is_narrow_and_the_same_every_time(example):
    text = dry_run(resolve(load(example=example)))
    assert text == dry_run(resolve(load(example=example)))
    assert max(map(len, text.splitlines())) <= WIDTH


def test_hosts_of_a_list_are_named_with_their_devices():
    rows = section(dry_run(load(example="llama_remote")), "Layers")[1:]
    assert [row[1] for row in rows] == ["198.51.100.20", "203.0.113.30", "laptop.example.net"]
    assert [row[3] for row in rows] == ["fp32", "fp32", "bf16"]


def test_nothing_is_allocated(monkeypatch):
    def no_memory(*args, **kwargs):
        raise AssertionError("a dry run built a slice")

    monkeypatch.setattr("tahq.models.slice.build_slice", no_memory)
    monkeypatch.setattr("tahq.models.slice.ModelSlice.materialise", no_memory)
    # 96 layers of 12,288 channels: 700 GB of weights, were they allocated.
    sizes = ("model.num_layers=96", "model.hidden_size=12288", "model.num_heads=96")
    assert "173,970,972,672 parameters" in dry_run(load(*sizes))


@pytest.mark.parametrize(("installed", "warned"), [(10**6, True), (10**12, False)])
def test_stages_that_share_this_machine_are_compared_with_its_memory(monkeypatch, installed, warned):
    monkeypatch.setattr("tahq_launch.plan.dry_run.installed_bytes", lambda device: installed)
    assert ("warning: the stages on this machine together need" in dry_run(load("run.device=cpu"))) is warned
    assert not warned or "it has 1 MB" in dry_run(load("run.device=cpu"))


@pytest.mark.parametrize("value", [2**62, 2**40, 0, -1])
def test_samples_of_impossible_length_are_refused(value):
    with pytest.raises(ConfigError, match=r"data\.seq_len: expected (at most 16777216|1 or more); got"):
        load(f"data.seq_len={value}")


@pytest.mark.parametrize("value", [2**62, 2**40, 10**6])
def test_steps_of_too_many_micro_batches_are_refused(value):
    with pytest.raises(ConfigError, match=r"training\.global_batch .* at most 65536 micro-batches"):
        load(f"training.global_batch={value}")


def test_model_folder_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ModelError, match="is not a folder"):
        dry_run(load_config(EXAMPLES / "finetune_folder.yaml", [f"model.path={tmp_path}/none"]))


@pytest.mark.parametrize(("num_buffers", "said"), [(0, "training waits"), (1, "one copy"), (2, "at most 2 copies")])
def test_memory_of_snapshots_is_said_where_there_are_any_on_the_way(num_buffers, said):
    assert "snapshots:" not in dry_run(load())
    text = dry_run(load("run.snapshot_every=5", f"run.snapshot_buffers={num_buffers}"))
    assert said in next(line for line in text.splitlines() if line.startswith("  snapshots:"))
    of_copies = [
        next(line for line in dry_run(load("run.snapshot_every=5", precision)).splitlines() if "  snapshots:" in line)
        for precision in ("training.precision=fp32", "training.precision=bf16")
    ]
    assert of_copies[0] == of_copies[1]  # no snapshot has bf16 copies
