"""What all chunks of a stage keep together, held against the schedule action by action."""

from dataclasses import replace

import pytest
import torch
from support.cluster_files import EXAMPLES
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config
from tahq.config.stage_estimate import autocast_dtype, block_ranges, chunks_of, stage_estimate, with_memory_choices
from tahq.errors import ModelError
from tahq.memory.saved_tensors import MicroBatchShape, deferred_by_slice, saved_by_slice
from tahq.models.slice import slice_parameters
from tahq.pipeline.schedule.schedule import ActionKind
from tahq.worker.assembly import resolved_spec

TENSOR = 4 * 2 * 32 * 64
"""Bytes of what crosses a cut, 4·T·C."""


def configured(**sections) -> ClusterConfig:
    model = {"vocab_size": 256, "num_layers": 8} | sections.pop("model", {})
    training = {"global_batch": 32} | sections.pop("training", {})
    return ClusterConfig.model_validate(tiny(model=model, training=training, **sections))


def estimated(config: ClusterConfig, stage: int):
    return stage_estimate(config, resolved_spec(config, None), stage, device="cpu")


def bits(rounding: str = "strict", spare: tuple[float, ...] = (), **pipeline) -> list[int]:
    config = configured(pipeline=pipeline, memory={"activations": {"kind": "agoq", "rounding": rounding}})
    return with_memory_choices(config, resolved_spec(config, None), spare).memory.agoq.bits


@pytest.mark.parametrize(
    ("capability", "keys", "expected"),
    [
        ((7, 5), {}, torch.float16),
        ((8, 0), {}, torch.bfloat16),
        ((7, 5), {"precision": "bf16"}, torch.bfloat16),
        ((7, 5), {"optimizer": "qgalore"}, torch.bfloat16),  # which is refused under fp16
        ((9, 0), {"precision": "fp16"}, torch.float16),
    ],
)
def test_gpu_without_bf16_multiplies_in_fp16_by_default(capability, keys, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert autocast_dtype(configured(training=keys), torch.device("cuda:0")) == expected


def test_bits_of_stored_activations_fill_what_the_fullest_stage_takes():
    # in flight, of all chunks: 11, 9, 7, 5, so that 4·11/9 = 4.9 bits, 6.3, 8.8
    interleaved = {"schedule": "interleaved", "chunks": 2}
    assert bits(**interleaved) == [4, 4, 6, 8]
    assert bits("paper", **interleaved) == [4, 5, 6, 8]
    assert bits(schedule="1f1b") == [4, 5, 8, 8]  # 4, 3, 2, 1 in flight
    assert bits(schedule="1f1b", in_flight=[8, 8, 6, 6]) == [4, 4, 5, 5]
    assert bits(schedule="1f1b", layers=[1, 2, 2, 3]) == [6, 4, 6, 8]  # 4, 6, 4, 3 layers times micro-batches
    assert bits(schedule="gpipe") == [4, 4, 4, 4]
    assert bits(schedule="1f1b", spare=(0, 0, 1e3, 1e9)) == [4, 4, 4, 8]


def test_strict_bits_never_store_more_than_the_fullest_stage():
    config = configured(pipeline={"schedule": "1f1b", "in_flight": [8, 7, 5, 3]}, memory={"activations": "agoq"})
    spec = resolved_spec(config, None)
    plain = configured(pipeline=config.pipeline.model_dump())
    stored, kept = (
        [stage_estimate(each, spec, stage, device="cpu").activations for stage in range(4)]
        for each in (with_memory_choices(config, spec), plain)
    )
    assert max(stored) == stored[0] < kept[0]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "interleaved", "chunks": 2},
        {"schedule": "interleaved", "chunks": 2, "in_flight": 8},
        {"schedule": "1f1b"},
        {"schedule": "gpipe"},
    ],
    ids=["interleaved", "deep", "1f1b", "gpipe"],
)
def test_activations_are_those_of_the_fullest_moment_of_the_schedule(pipeline, stage):
    config = configured(pipeline=pipeline)
    spec = resolved_spec(config, None)
    ranges, row = block_ranges(config, spec), config.pipeline.actions(16).actions[stage]
    kept, always = {}, 0
    for chunk in chunks_of(config, stage):
        blocks = ranges[chunk]
        saved = saved_by_slice(spec, blocks, MicroBatchShape(2, 32))
        # an output, and a raw frame each way at each cut; beside them a gradient received and one to send
        kept[chunk] = saved + TENSOR * (not blocks.last) + 2 * TENSOR * ((not blocks.first) + (not blocks.last))
        always += TENSOR * ((not blocks.first) + (not blocks.last))
    now = most = 0
    for action in row:
        now += kept[action.chunk] if action.kind is ActionKind.F else 0
        most = max(most, now)
        now -= kept[action.chunk] if action.kind is ActionKind.B else 0
    memory = estimated(config, stage)
    assert memory.activations + memory.boundary == most + always


@pytest.mark.parametrize("stage", range(4))
def test_tensors_for_weight_gradients_count_where_they_exceed_checkpointed_inputs(stage):
    model, memory = {"family": "llama", "intermediate_size": 128}, {"recompute": "block"}
    config = configured(model=model, memory=memory, pipeline={"schedule": "zero-bubble"})
    spec = resolved_spec(config, None)
    blocks, row = block_ranges(config, spec)[stage], config.pipeline.actions(16).actions[stage]
    shape = MicroBatchShape(2, 32, recompute="block")
    saved = saved_by_slice(spec, blocks, shape)
    left = deferred_by_slice(spec, blocks, shape)
    assert left > 2 * saved
    now = most = 0
    for action in row:
        now += {ActionKind.F: saved, ActionKind.I: left - saved}.get(action.kind, 0)
        most = max(most, now)
        now -= left if action.kind is ActionKind.W else 0
    assert estimated(config, stage).activations == most > config.pipeline.actions(16).max_in_flight(stage) * saved


def test_stages_without_anything_to_train_have_weights_and_little_else():
    model, wire = {"frozen_layers": 5}, {"activations": "wf", "gradients": "eden"}
    frozen, half, trained, last = (
        estimated(configured(model=model, wire=wire, pipeline={"layers": [4, 2, 1, 1]}), stage) for stage in range(4)
    )
    assert frozen.weights == frozen.untrained > 0
    assert frozen.gradients == frozen.optimizer == frozen.activations == frozen.workspace == frozen.snapshot == 0
    assert frozen.boundary < 16 * TENSOR / 4  # sixteen frames that may wait
    assert half.gradients == trained.gradients == half.weights / 2
    assert half.snapshot == trained.snapshot == trained.weights + trained.optimizer
    assert half.activations < estimated(configured(wire=wire, pipeline={"layers": [4, 2, 1, 1]}), 1).activations
    assert last == estimated(configured(wire=wire, pipeline={"layers": [4, 2, 1, 1]}), 3)


def test_chunks_take_turns_at_their_workspace():
    """Blocks are computed again one at a time, whichever chunk they are of."""
    memory = {"recompute": "block"}
    one = estimated(configured(memory=memory), 1)
    two = estimated(configured(memory=memory, pipeline={"schedule": "interleaved", "chunks": 2}), 1)
    assert two.workspace == one.workspace > 0
    assert two.weights == one.weights


@pytest.mark.parametrize(
    ("sections", "chunks"),
    [
        ({"data": {"seq_len": 2048}}, 1),
        ({"data": {"seq_len": 8192}}, 4),
        ({"data": {"seq_len": 8192}, "memory": {"loss_chunks": 2}}, 2),
        ({"data": {"seq_len": 8192}, "training": {"optimizer": "galore"}}, 1),
    ],
)
def test_loss_is_divided_where_its_logits_are_large_and_a_run_keeps_that(sections, chunks):
    """2·2048·2¹⁷ logits of fp32 are 2 GiB."""
    config = configured(model={"vocab_size": 2**17}, **sections)
    spec = resolved_spec(config, None)
    assert with_memory_choices(config, spec).memory.loss_chunks == chunks


def test_loss_in_chunks_takes_the_same_memory_for_more_tokens():
    values = [
        {"model": {"vocab_size": 2**17}, "data": {"seq_len": seq_len}, "memory": {"loss_chunks": seq_len // 256}}
        for seq_len in (512, 1024)
    ]
    short, long = (estimated(configured(**each), 3) for each in values)
    assert short.workspace == long.workspace
    assert long.activations < 4 * 2 * 1024 * 2**17


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": {"activations": "agoq"}},
        {"memory": {"recompute": ["none", "norm", "block", "block"]}},
        {"training": {"precision": "fp8"}},
    ],
    ids=lambda changes: str(next(iter(changes.values()))),
)
def test_what_changes_layers_is_refused_where_they_are_not_known(changes):
    config = configured(model={"family": "olmo2"}, **changes)
    with pytest.raises(
        ModelError, match="is for the families gpt2, llama, qwen2, qwen3, mistral; olmo2 has other layers"
    ):
        resolved_spec(config, None)
    resolved_spec(configured(model={"family": "olmo2"}, memory={"recompute": "block"}), None)


@pytest.mark.parametrize(
    ("family", "training", "message"),
    [
        ("llama", {"router_aux_loss": "per_layer"}, "router_aux_loss: per_layer is for mixtures of experts, and llama"),
        (
            "mixtral",
            {"optimizer": "qgalore"},
            r"optimizer: qgalore has no subspace for the .* experts \(mixtral\): use",
        ),
    ],
)
def test_what_does_not_fit_experts_is_refused(family, training, message):
    with pytest.raises(ModelError, match=message):
        resolved_spec(configured(model={"family": family}, training=training), None)


def test_frames_of_pooled_loads_are_estimated_with_their_counts():
    config, plain = (
        configured(model={"family": "mixtral"}, training={"router_aux_loss": key}) for key in ("pooled", "none")
    )
    more = estimated(config, 1).boundary - estimated(plain, 1).boundary
    assert more % (2 * 4 * (8 + 16)) == 0 < more  # two cuts, 8 experts, for each micro-batch in flight


def test_llama_of_70_billion_parameters_in_4_bits_fits_eight_hosts_of_24_gb():
    config = load_config(EXAMPLES / "llama_70b_qlora.yaml", [])
    spec = resolved_spec(config, None)
    memories = [stage_estimate(config, spec, stage, device="cuda") for stage in range(8)]
    assert max(memory.total for memory in memories) < 20 * 2**30
    inner, block = memories[1], 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    per_weight = 1 / 2 + 1 / 64 + 4 / (64 * 256)
    trained = inner.gradients / 4
    of_base = inner.weights - 4 * trained - 4 * 2 * 8192 * 10  # norms
    assert of_base == pytest.approx(10 * block * per_weight, rel=1e-6)
    assert inner.snapshot == pytest.approx(12 * trained, rel=0.001)
    whole = replace(spec, adapter=spec.adapter.model_copy(update={"kind": "lora"}))
    in_bf16 = stage_estimate(config, whole, 1, device="cuda")
    # one decoded matrix in bf16
    assert inner.workspace - in_bf16.workspace == 2 * 8192 * 28672
    assert in_bf16.weights - inner.weights == pytest.approx(10 * block * (2 - per_weight), rel=1e-6)


def test_adapters_alone_have_gradients_and_states_and_are_checkpointed():
    plain, adapted = (configured(pipeline={"stages": 2}, **extra) for extra in ({}, {"adapter": {"rank": 4}}))
    spec = resolved_spec(adapted, None)
    shapes = slice_parameters(spec, block_ranges(adapted, spec)[1])
    trained = 4 * sum(shape.numel() for name, shape in shapes.items() if spec.is_trained(name))
    full, small = estimated(plain, 1), estimated(adapted, 1)
    assert small.weights == full.weights + trained
    assert small.gradients == trained < full.gradients / 10
    assert small.optimizer == pytest.approx(2 * trained, rel=0.01)
    assert small.snapshot == small.gradients + small.optimizer
    narrow = estimated(configured(pipeline={"stages": 2}, adapter={"rank": 4}, training={"precision": "bf16"}), 1)
    assert narrow.weights - trained < 0.52 * full.weights
