"""Real workers compute what a plain loop computes, to the bit: losses, norms and final weights."""

import pytest
import torch
from integration.test_replicas import check_killed_worker
from support.exactness import assert_equal_to_the_bit, plain
from support.plain_loop import PlainRun
from support.runs import launch, overrides, tiny, train
from support.small_slices import EXPERTS

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
LOSSY = {"activations": "tah", "gradients": "fixed:bits=8"}


@pytest.fixture(scope="module")
def uncut() -> PlainRun:
    return plain(tiny())


PIPELINES = [
    {"stages": 1, "schedule": "gpipe"},
    {"stages": 2, "schedule": "1f1b"},
    {"stages": 4, "schedule": "1f1b", "in_flight": [4, 3, 3, 2]},
    pytest.param({"stages": 4, "schedule": "gpipe"}, marks=pytest.mark.acceptance),
    {"stages": 3, "schedule": "zero-bubble"},
    {"stages": 2, "schedule": "interleaved", "chunks": 2},
]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda keys: f"{keys['schedule']}-{keys['stages']}")
def test_raw_codec_gives_the_plain_loop_at_every_number_of_stages(tmp_path, uncut, pipeline):
    run = launch(tmp_path, tiny(pipeline=pipeline))
    assert_equal_to_the_bit(run, uncut)


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("interleaved", marks=pytest.mark.acceptance)])
def test_lossy_codecs_give_the_plain_loop_with_codecs_at_the_cuts(tmp_path, schedule):
    parts = {"stages": 2, "chunks": 2} if schedule == "interleaved" else {"stages": 4}
    config = tiny(wire=LOSSY, pipeline={"schedule": schedule, **parts})
    assert_equal_to_the_bit(launch(tmp_path, config), plain(config, cut=True))


def test_stochastic_rounding_and_dropout_are_keyed_the_same_everywhere(tmp_path):
    config = tiny(
        model={"dropout": 0.1},
        wire={"activations": "fixed:bits=6,round=stochastic", "gradients": "fixed:bits=6,round=stochastic"},
        pipeline={"stages": 2},
        memory={"recompute": "block"},
    )
    assert_equal_to_the_bit(launch(tmp_path, config), plain(config, cut=True))


def test_a_llama_under_a_learning_rate_schedule_gives_the_plain_loop(tmp_path):
    config = tiny(
        model={"family": "llama", "num_kv_heads": 1, "intermediate_size": 96},
        training={"lr_schedule": "cosine", "warmup_steps": 2, "min_lr": 1e-4, "clip_norm": 0.25},
        pipeline={"stages": 2},
    )
    assert_equal_to_the_bit(launch(tmp_path, config), plain(config))


@pytest.mark.parametrize(
    "schedule", ["zero-bubble", *(pytest.param(each, marks=pytest.mark.acceptance) for each in ("1f1b", "interleaved"))]
)
def test_stages_with_different_exact_options_give_the_plain_loop(tmp_path, schedule):
    llama = {"family": "llama", "num_kv_heads": 1, "intermediate_size": 96}
    pipeline = {"stages": 2, "chunks": 2} if schedule == "interleaved" else {"stages": 4}
    levels = ["swiglu", "att", "none", "qkv"] if schedule == "zero-bubble" else ["norm", "ffn", "qkv", "block"]
    offload = [["m", "weights"], ["residual", "v"], [], ["gradients", "residual", "weights"]]
    by_stage = {"recompute": levels[: pipeline["stages"]], "offload": offload[: pipeline["stages"]]}
    config = tiny(model=llama, pipeline={"schedule": schedule, **pipeline}, memory={**by_stage, "attention_chunks": 3})
    assert_equal_to_the_bit(launch(tmp_path, config), plain(tiny(model=llama)))


@pytest.mark.acceptance
@pytest.mark.parametrize("family", ["olmo2", "gemma2"])
def test_blocks_of_other_layers_are_recomputed_and_offloaded_to_the_bit(tmp_path, family):
    model = {"family": family, "num_kv_heads": 1, "intermediate_size": 96}
    memory = {"recompute": ["none", "block"], "offload": ["residual", "weights", "m"], "loss_chunks": 1}
    config = tiny(model=model, pipeline={"stages": 2, "schedule": "zero-bubble"}, memory=memory)
    assert_equal_to_the_bit(launch(tmp_path, config), plain(tiny(model=model)))


EXPERTS_MODEL = {
    "family": "qwen3_moe",
    "num_kv_heads": 1,
    "overrides": {**EXPERTS["qwen3_moe"], "mlp_only_layers": [2], **BALANCED},
}
"""Its third block has no experts."""


@pytest.mark.acceptance
@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": {"stages": 1}},
        {"pipeline": {"stages": 4, "schedule": "zero-bubble"}},
        {
            "pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2},
            "memory": {"recompute": ["block", "none"], "offload": ["residual", "weights", "m"]},
        },
    ],
    ids=["1", "4", "2, interleaved"],
)
def test_experts_and_their_pooled_load_do_not_depend_on_the_cut(tmp_path, options):
    run = launch(tmp_path, tiny(model=EXPERTS_MODEL, **options))
    assert_equal_to_the_bit(run, plain(tiny(model=EXPERTS_MODEL)))
    tensor = 4 * 2 * 32 * 64
    for link in run.metrics[0]["links"]:  # four micro-batches; counts and probabilities of 8 experts, or counts alone
        assert link["payload_bytes"] == 4 * (tensor + (64 if link["direction"] == "activations" else 32))


@pytest.mark.acceptance
@pytest.mark.parametrize("key", ["per_layer", "pooled"])
def test_replicas_balance_experts_of_each_micro_batch(tmp_path, key):
    config = tiny(
        model=EXPERTS_MODEL,
        training={"router_aux_loss": key},
        pipeline={"stages": 2, "replicas": 2},
        wire={"all_reduce_inside": "raw:dtype=fp32"},
        memory={"shard": ["optimizer", "gradients", "weights"]},
    )
    assert_equal_to_the_bit(launch(tmp_path, config), plain(config, cut=True))


@pytest.mark.acceptance
def test_a_returning_worker_gets_the_counts_of_experts_again(tmp_path, monkeypatch):
    sections = {"model": EXPERTS_MODEL, "pipeline": {"stages": 4}, "run": {"checkpoint_every": 2}}
    config = tiny(**sections, training={"steps": 5}, wire=LOSSY)
    check_killed_worker(tmp_path, monkeypatch, config, "kill@backward:stage=2:step=3")


@pytest.mark.ci
def test_z_loss_gives_the_plain_loop_that_adds_it_to_the_gradient_only(tmp_path, uncut):
    config = tiny(pipeline={"stages": 2}, training={"z_loss": 0.1})
    assert_equal_to_the_bit(launch(tmp_path, config), expected := plain(config))
    assert expected.losses[0] == uncut.losses[0]
    assert expected.losses[1:] != uncut.losses[1:]


def test_a_run_is_resumed_with_and_without_offload(tmp_path, uncut):
    everything = ["residual", "m", "v", "weights", "gradients"]
    config = tiny(pipeline={"stages": 2}, training={"steps": 2}, memory={"offload": everything})
    train(tmp_path, config)
    run = launch(tmp_path, config, "--resume", *overrides("training.steps=4", "memory.offload=[]"))
    assert "no longer exact" not in run.stdout
    assert_equal_to_the_bit(run, uncut)


@pytest.mark.ci
def test_every_option_at_once_trains_and_offload_changes_no_bit_of_it(tmp_path):
    arithmetic = {"gradients": "bf16", "residual": "bf16", "loss_chunks": 2}
    training = {
        "precision": "fp8",
        "optimizer": "adamw_bf16",
        "adamw_bf16": {"weights": "bf16"},
        "z_loss": 1e-4,
        "steps": 8,
        "seq_len_schedule": [[8, 2], [16, 4]],
        "lr_schedule": "wsd",
        "decay_shape": "sqrt",
    }
    exact = {"recompute": "block", "attention_chunks": 2, "offload": ["residual", "m", "v", "weights", "gradients"]}
    runs = []
    for number, options in enumerate(({}, exact)):
        folder = tmp_path / str(number)
        folder.mkdir()
        runs.append(train(folder, tiny(training=training, memory={**arithmetic, **options})))
    plain_run, run = runs
    assert run.losses == plain_run.losses
    assert [name for name in run.weights if not torch.equal(run.weights[name], plain_run.weights[name])] == []
    assert run.losses[-1] < run.losses[0]


@pytest.mark.acceptance
@pytest.mark.parametrize("gradients", ["fp32", "fp8"])
def test_loss_in_chunks_does_not_depend_on_stages_or_schedule(tmp_path, uncut, gradients):
    runs = []
    for pipeline in ({"stages": 1, "schedule": "gpipe"}, {"stages": 3, "schedule": "zero-bubble"}):
        folder = tmp_path / pipeline["schedule"]
        folder.mkdir()
        config = tiny(pipeline=pipeline, memory={"loss_chunks": 3, "gradients": gradients}, training={"eval_every": 2})
        runs.append(train(folder, config))
    one, other = runs
    assert one.losses == other.losses
    assert [row.get("validation") for row in one.metrics] == [row.get("validation") for row in other.metrics]
    weights = one.weights, other.weights
    assert [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])] == []
    assert one.losses == pytest.approx(uncut.losses, rel=1e-5 if gradients == "fp32" else 0.01)
    assert one.losses != uncut.losses


COAT = {"model": {"family": "llama", "num_kv_heads": 1, "intermediate_size": 96}, "memory": {"activations": "coat"}}


@pytest.fixture(scope="module")
def uncut_fp8() -> PlainRun:
    return plain(tiny(**COAT))


@pytest.mark.parametrize(
    ("pipeline", "memory"),
    [
        pytest.param({"stages": 1, "schedule": "gpipe"}, {}, marks=pytest.mark.acceptance),
        ({"stages": 2, "schedule": "zero-bubble"}, {}),
        pytest.param({"stages": 4}, {"recompute": "block"}, marks=pytest.mark.acceptance),
    ],
    ids=["1", "2, split backward", "4, checkpointed"],
)
def test_fp8_flow_gives_the_plain_loop_at_every_number_of_stages(tmp_path, uncut_fp8, pipeline, memory):
    sections = {**COAT, "memory": {**COAT["memory"], **memory}}
    assert_equal_to_the_bit(launch(tmp_path, tiny(**sections, pipeline=pipeline)), uncut_fp8)


@pytest.mark.ci
def test_fp8_flow_is_resumed_to_the_bit(tmp_path, uncut_fp8):
    halfway = tiny(**COAT, training={"steps": 2}, pipeline={"stages": 2})
    train(tmp_path, halfway)
    run = launch(tmp_path, halfway, "--resume", *overrides("training.steps=4", "pipeline.stages=3"))
    assert "no longer exact" not in run.stdout
    assert_equal_to_the_bit(run, uncut_fp8)


@pytest.mark.acceptance
def test_fp8_flow_trains_with_tah_on_the_wire_as_well_as_fp32(tmp_path, uncut_fp8):
    training = {"steps": 8, "lr": 3e-3}
    run = train(tmp_path, tiny(**COAT, wire=LOSSY, training=training))
    without = plain(tiny(model=COAT["model"], training=training))
    fallen = without.losses[0] - without.losses[-1]
    assert fallen > 0.3
    # What FP8 and TAH change of the loss at any step is less than a tenth of what training does to it.
    assert max(abs(a - b) for a, b in zip(run.losses, without.losses, strict=True)) < 0.1 * fallen
    assert run.losses != without.losses


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "pipeline", "memory"),
    [
        ("gpt2", {"stages": 2, "schedule": "zero-bubble"}, {}),
        pytest.param(
            *("llama", {"stages": 4, "schedule": "1f1b"}, {"recompute": ["none", "norm", "qkv", "block"]}),
            marks=pytest.mark.acceptance,
        ),
    ],
    ids=["gpt2, split backward", "llama, recomputed"],
)
def test_fp8_products_give_the_plain_loop(tmp_path, family, pipeline, memory):
    config = tiny(model={"family": family}, training={"precision": "fp8"}, pipeline=pipeline, memory=memory)
    assert_equal_to_the_bit(launch(tmp_path, config), plain(config))


AGOQ = {"activations": {"kind": "agoq", "bits": 4}, "gradients": "fp8"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "pipeline"),
    [
        pytest.param("gpt2", {"stages": 2, "schedule": "zero-bubble"}, marks=pytest.mark.acceptance),
        ("qwen3", {"stages": 3, "schedule": "1f1b"}),
    ],
    ids=str,
)
def test_stored_activations_and_gradients_give_the_plain_loop(tmp_path, family, pipeline):
    # clipping would multiply scales here and decoded gradients there
    config = tiny(model={"family": family}, memory=AGOQ, training={"clip_norm": None}, pipeline=pipeline)
    expected = plain(config)
    assert_equal_to_the_bit(launch(tmp_path, config), expected)
    assert expected.losses != plain(config | {"memory": {}}).losses


@pytest.mark.ci
def test_how_links_are_used_changes_nothing(tmp_path, uncut):
    links = {"first": "gradients", "connections": 3, "cap_up": "50mbit", "cap_down": "60%"}
    assert_equal_to_the_bit(
        launch(tmp_path, tiny(pipeline={"stages": 3}, links=links, emulate={"rate": "100mbit"})), uncut
    )


def test_lossy_codecs_change_the_result(tmp_path, uncut):
    assert plain(tiny(wire=LOSSY), cut=True).losses != uncut.losses
