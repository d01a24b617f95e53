"""What --dry-run prints, and its figures against the codecs and the schedule themselves."""

import math

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
from tahq_launch.start.resolution import resolve_for_run


def load(*overrides: str, example: str = "gpt2") -> ClusterConfig:
    return load_config(EXAMPLES / f"{example}.yaml", ["run.device=cpu", *overrides])


def flows_of(config: ClusterConfig):
    return step_flows(config, load_spec(config.model, vocab_size=256, seq_len=config.data.seq_len))


@pytest.fixture
def load_text(tmp_path):
    """The example over a text of 40 samples of 256 tokens."""
    (tmp_path / "text.txt").write_text("x" * (256 * 40 + 1))
    return lambda *overrides: resolve(load(f"data.text={tmp_path / 'text.txt'}", "data.validation=0", *overrides))


NETWORK = (
    "emulate={rate: 100mbit, delay: 20ms, hosts: {host1: {up: 5mbit, site: home, loss: 0.01}}, "
    "pairs: [{between: [home, host3], delay: 1s}]}"
)
TWO_SITES = "hosts=[{address: a, site: x}, {address: b, site: x}, {address: c}, {local: true}]"
TIED = ("model.tie=sync", "model.family=gpt2", "wire=paper", "pipeline.schedule=zero-bubble")
CASES = {
    "plain": (),
    "no checkpoints": (
        "emulate={}",
        "run.checkpoint_every=never",
        "training.optimizer=sgd",
        "training.global_batch=256",
    ),
    "two sites": ("emulate={}", "links={inside: gloo}", TWO_SITES, "pipeline.layers=[1,2,2,3]"),
    "tied and capped": (*TIED, "emulate.delay=0", "links.cap_up=20mbit"),
    "network": ("hosts=namespaces", NETWORK, "pipeline.schedule=gpipe", "run.checkpoint_buffers=0"),
    "one stage": ("pipeline.stages=1", "training.steps=null", "training.epochs=2"),
    "cache": ("wire.activations=aqsgd:cache=file", "training.steps=100"),
    "remote": (),
}


@pytest.mark.parametrize("case", CASES)
def test_text_of_an_example_is_the_golden_one(golden, load_text, monkeypatch, case):
    monkeypatch.setattr("tahq_launch.plan.dry_run.installed_nbytes", lambda device: 10**12)
    example = "llama_remote" if case == "remote" else "gpt2"
    text = dry_run(load_text(*CASES[case]) if case == "cache" else load(*CASES[case], example=example))
    assert max(map(len, text.splitlines())) <= WIDTH
    golden(f"dry_run/{case.replace(' ', '_')}.txt", f"{text}\n")


def test_what_a_start_refuses_and_improbable_rates_are_warned_of():
    warnings = " ".join(dry_run(load("training.lr=3", TWO_SITES)).split())
    assert "warning: training.lr 3 is high for adamw: above 0.02 losses usually diverge" in warnings
    assert "warning: the start will be refused: run.bind is 127.0.0.1:0, which a cannot reach" in warnings
    assert "warning" not in dry_run(load("training.lr=0.02"))


def test_frozen_layers_are_cut_for_their_cost_and_get_no_gradients():
    config = resolve_for_run(load("model.frozen_layers=4", "model.vocab_size=256"))
    assert config.pipeline.layers[0] > load().model.num_layers // 4
    flows = flows_of(config)
    behind = [sum(config.pipeline.layers[: flow.link + 1]) for flow in flows]
    for flow, blocks in zip(flows, behind, strict=True):
        is_sent = flow.direction is Direction.FORWARD or blocks > 4
        assert bool(flow.step_nbytes) == is_sent
    rows = [line.split() for line in dry_run(config).splitlines() if " gradients " in line]
    assert "0" in next(row for row in rows if row[0] == "0")[-2:]


def test_bits_of_stored_activations_are_listed_by_stage():
    text = dry_run(load("memory.activations=agoq", "pipeline.schedule=1f1b"))
    assert "  stored activations in 4 5 8 8 bits, by stage (memory.agoq.bits)\n" in text


def test_memory_that_this_machine_lacks_is_named(monkeypatch):
    monkeypatch.setattr("tahq_launch.plan.dry_run.installed_nbytes", lambda device: 10**6)
    assert "or more; it has 1 MB" in dry_run(load())


def test_nothing_is_allocated(monkeypatch):
    def no_memory(*args, **kwargs):
        raise AssertionError("a dry run built a slice")

    monkeypatch.setattr("tahq.models.slice.ModelSlice.materialise", no_memory)
    # 96 layers of 12,288 channels: 700 GB of weights, were they allocated.
    sizes = ("model.num_layers=96", "model.hidden_size=12288", "model.num_heads=96")
    assert "173,970,972,672 parameters" in dry_run(load(*sizes))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("data.seq_len", "expected at most 16777216; got"),
        ("training.steps", "expected at most 1000000000; got"),
        ("training.global_batch", "at most 65536 micro-batches"),
    ],
)
def test_impossible_sizes_are_refused(key, message):
    with pytest.raises(ConfigError, match=rf"{key}.* {message}"):
        load(f"{key}={2**62}")


def test_missing_data_or_model_folder_is_named(load_text, tmp_path):
    with pytest.raises(DataError, match="nothing"):
        dry_run(load_text("wire.activations=aqsgd", f"data.text={tmp_path / 'nothing'}"))
    with pytest.raises(ModelError, match="is not a folder"):
        dry_run(load_config(EXAMPLES / "recipes/lora.yaml", [f"model={tmp_path}/none"]))


def test_bytes_are_those_of_the_encoded_tensors_with_a_header_per_piece_or_one_over_a_group():
    config = load("links.piece=4KiB")
    for flow, in_a_group in zip(flows_of(config), flows_of(load("emulate={}", "links={inside: gloo}")), strict=True):
        payload = get_codec(flow.codec, backend="reference").encode(torch.randn(4, 256, 256), key=1)
        assert flow.payload_nbytes == payload.numel()
        assert flow.frame_nbytes == payload.numel() + HEADER_NBYTES * math.ceil(payload.numel() / 4096)
        assert in_a_group.frame_nbytes == payload.numel() + ANNOUNCEMENT_NBYTES


def test_wire_only_step_is_between_the_busiest_host_and_all_frames_in_a_row():
    config = load()
    flows = flows_of(config)
    step_s = wire_only_step_s(config, link_speeds(config), generate("1f1b", 4, 8), flows)
    assert host_traffic(flows, 1)[0] == flows[1].step_nbytes + flows[2].step_nbytes
    busiest_s = max(8 * nbytes / 1e8 for stage in range(4) for nbytes in host_traffic(flows, stage))
    in_a_row_s = sum(8 * flow.step_nbytes / 1e8 + 8 * 0.02 for flow in flows)
    assert busiest_s + 2 * 3 * 0.02 < step_s < in_a_row_s
    no_rate = load("emulate={delay: 20ms}")
    # GPipe: 3 cuts there, 3 back, then a round trip to the coordinator.
    step_s = wire_only_step_s(no_rate, link_speeds(no_rate), generate("gpipe", 4, 8), flows_of(no_rate))
    assert step_s == pytest.approx((3 + 3 + 2) * 0.02)


@pytest.mark.parametrize(
    ("length", "seen"), [(["training.steps=2"], 40), (["training.steps=null", "training.epochs=0.5"], 20)]
)
def test_run_shorter_than_an_epoch_sees_fewer_samples(load_text, length, seen):
    assert seen_samples(load_text(*length)) == seen
