import pytest

from tahq.config.cluster import ClusterConfig
from tahq.errors import SnapshotError
from tahq.models.adapters.config import AdapterConfig
from tahq.pipeline.checkpoint.resume import RULES, Verdict, _flatten, _rule, compare_configs, keep_model_sizes

LOSSLESS = {"wire.activations": "raw:dtype=fp32", "wire.gradients": "raw"}


def config(**changes):
    """The resolved configuration of a small run, with dotted keys set to other values."""
    sections = {
        "run": {"name": "demo", "seed": 3},
        "model": {"family": "gpt2", "num_layers": 8, "hidden_size": 32, "num_heads": 2},
        "data": {"text": "stdlib", "seq_len": 128},
        "training": {"steps": 60},
        "pipeline": {"stages": 4},
        "memory": {},
        "wire": {},
        "links": {},
    }
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if name:
            sections[section][name] = value
        else:
            sections[section] = value
    return ClusterConfig.model_validate(sections).model_dump(mode="json")


def compare(old, new):
    return compare_configs(config(**old), config(**new))


def test_equal_configurations_are_exact():
    assert (compare({}, {}).changes, compare({}, {}).exact) == ((), True)


# A change of the configuration, and in front of it the keys that both have, if the verdict depends on them.
EXACT = [
    {"run.name": "other"},
    {"run.dir": "elsewhere"},
    {"run.checkpoint_every": 10, "run.keep_checkpoints": 5, "run.peer_timeout": 3.0, "run.log_level": "debug"},
    {"training.steps": 90},
    {"data.packing": True, "data.truncation": "drop"},
    {"training.steps": None, "training.epochs": 2.0},
    {"training.eval_every": 5, "training.eval_batches": 9},
    {"training.non_finite": "halt", "training.max_skipped_in_a_row": 3},
    {"memory.recompute": "block"},
    {"training.momentum": 0.5},
    {"training.decay_steps": 5, "training.min_lr": 1e-5},
    ({"training.optimizer": "sgd"}, {"training.betas": (0.5, 0.5)}),
    {"training.fp8_adamw": {"first": "e5m2", "expand_first": False}},
    ({"training.optimizer": "fp8_adamw"}, {"training.momentum": 0.6}),
    {"training.qgalore": {"rank": 4, "gap": 7}},
    ({"training.optimizer": "qgalore"}, {"training.momentum": 0.6}),
    {"training.adamw8bit": {"block": 128}},
    ({"training.optimizer": "galore"}, {"training.adamw8bit": {"block": 128}}),
    (
        {"training.optimizer": "qgalore", "training.qgalore": {"states": "fp32"}},
        {"training.adamw8bit": {"min_elements": 0}},
    ),
    {"training.adamw_bf16": {"weights": "bf16", "rounding": "nearest"}},
    {"pipeline.schedule": "gpipe"},
    {"emulate": {"rate": "10mbit", "delay": "20ms"}},
    ({"wire.gradients": "fixed"}, {"wire.gradients": "fixed:group=64,bits=8"}),
    ({"wire.activations": "aqsgd"}, {"wire.activations": "aqsgd:cache=file"}),
    {"wire.threads": 2},
    (LOSSLESS, {"pipeline.stages": 2}),
    (LOSSLESS, {"pipeline.layers": [1, 2, 2, 3]}),
    {"pipeline.balance": "counted"},
    {"memory.shard": ["optimizer"]},
    ({"pipeline.replicas": 2, "wire.all_reduce": "raw"}, {"memory.shard": ["optimizer"]}),
    {"memory.shard": ["optimizer", "gradients"]},
    {"pipeline.first": {"schedule": "zero-bubble", "in_flight": [4, 3, 2, 1]}},
]
INEXACT = [
    ({"training.optimizer": "adamw_bf16"}, {"training.adamw_bf16": {"rounding": "nearest"}}),
    {"memory.gradients": "bf16"},
    {"memory.residual": "bf16"},
    ({"pipeline.replicas": 2}, {"memory.shard": ["optimizer"]}),
    ({"pipeline.replicas": 2, "wire.all_reduce": "raw"}, {"memory.shard": ["optimizer", "gradients"]}),
    (
        {"pipeline.replicas": 2, "wire.all_reduce": "raw", "wire.all_reduce_inside": "fp8"},
        {"memory.shard": ["optimizer"]},
    ),
    {"wire.gradients": "fixed:bits=10"},
    {"wire.backend": "reference"},
    {"wire.activations": "raw:dtype=fp16"},
    {"pipeline.stages": 2},
    ({"wire.activations": "raw:dtype=fp16"}, {"pipeline.stages": 2}),
    ({"wire.activations": "aqsgd"}, {"wire.activations": "aqsgd:bits=8"}),
    ({"wire.activations": "aqsgd"}, {"wire.activations": "aqsgd:cache=none"}),
    {"training.lr": 5e-4},
    {"training.lr_schedule": "cosine"},
    ({"training.lr_schedule": "cosine"}, {"training.steps": 90}),
    ({"training.lr_schedule": "linear"}, {"training.min_lr": 1e-5}),
    ({"training.lr_schedule": "wsd"}, {"training.decay_steps": 3}),
    {"training.warmup_steps": 5},
    {"training.betas": (0.8, 0.9)},
    {"training.epsilon": 1e-6},
    ({"training.optimizer": "fp8_adamw"}, {"training.betas": (0.8, 0.9), "training.epsilon": 1e-6}),
    ({"training.optimizer": "galore"}, {"training.betas": (0.8, 0.9)}),
    ({"training.optimizer": "qgalore"}, {"training.qgalore": {"gap": 7}}),
    ({"training.optimizer": "qgalore"}, {"training.qgalore": {"svd": "exact"}}),
    ({"training.optimizer": "adamw8bit"}, {"training.betas": (0.8, 0.9)}),
    {"training.weight_decay": 0.0},
    ({"training.optimizer": "ema_sgd"}, {"training.momentum": 0.5}),
    {"training.clip_norm": None},
    {"training.micro_batch": 8},
    {"training.precision": "bf16"},
    ({"training.precision": "fp8"}, {"training.fp8": {"backward": "e5m2"}}),
    {"data.seq_len": 64},
    ({"model.max_seq_len": 512}, {"data.seq_len": 256}),
    ({"model": {"path": "/model"}}, {"data.seq_len": 4096}),
    {"run.threads": 2},
    {"run.device": "cuda"},
    {"hosts": [{"address": f"10.0.0.{stage}"} for stage in range(4)]},
]
REFUSED = [
    ({"training.optimizer": "adamw_bf16"}, {"training.adamw_bf16": {"weights": "bf16"}}),
    {"run.seed": 4},
    {"model.num_layers": 9},
    {"model.dropout": 0.1},
    {"model.tie": "sync"},
    {"model.overrides": {"n_inner": 7}},
    {"data.text": ["/elsewhere"]},
    {"data.tokenizer": "/elsewhere"},
    {"data.shuffle": False},
    {"data.validation": 0.1},
    {"data.seq_len": 256},
    ({"model.max_seq_len": 256}, {"model.max_seq_len": 128}),
    {"training.global_batch": 64},
    {"training.optimizer": "sgd"},
    ({"training.optimizer": "fp8_adamw"}, {"training.fp8_adamw": {"expand_second": False}}),
    ({"training.optimizer": "fp8_adamw"}, {"training.fp8_adamw": {"first": "e5m2"}}),
    ({"training.optimizer": "qgalore"}, {"training.qgalore": {"rank": 7}}),
    ({"training.optimizer": "galore"}, {"training.qgalore": {"states": "int8"}}),
    ({"training.optimizer": "qgalore"}, {"training.qgalore": {"ends": "int8"}}),
    ({"training.optimizer": "adamw8bit"}, {"training.adamw8bit": {"block": 128}}),
    ({"training.optimizer": "qgalore"}, {"training.adamw8bit": {"block": 128}}),
    (
        {"training.optimizer": "galore", "training.qgalore": {"states": "int8"}},
        {"training.adamw8bit": {"min_elements": 0}},
    ),
]
CASES = [(case, verdict) for verdict, cases in zip(Verdict, (EXACT, INEXACT, REFUSED), strict=True) for case in cases]


@pytest.mark.parametrize(("case", "verdict"), CASES, ids=str)
def test_change_is_exact_inexact_or_refused(case, verdict):
    common, change = case if isinstance(case, tuple) else ({}, case)
    report = compare(common, common | change)
    assert report.changes
    assert report.exact is (verdict is Verdict.EXACT)
    if verdict is Verdict.REFUSED:
        with pytest.raises(SnapshotError, match=report.refused[0].key):
            report.check()
    else:
        report.check()
        assert report.lines()[-1] == f"the continuation is {'exact' if report.exact else 'no longer exact, to the bit'}"


def test_refusal_lists_every_key_with_both_values_on_one_line():
    with pytest.raises(SnapshotError) as caught:
        compare({}, {"run.seed": 4, "training.global_batch": 64, "training.lr": 1.0}).check()
    message = str(caught.value)
    assert "run.seed was 3, is 4" in message
    assert "training.global_batch was 32, is 64" in message
    assert "training.lr" not in message
    assert "Set them back, or start a new run" in message
    assert "\n" not in message


def test_lines_say_what_changed_and_why():
    assert compare({"wire.gradients": "tah"}, {"wire.gradients": "raw", "training.steps": 70}).lines() == [
        "training.steps: 60 -> 70 (exact: the rate is constant)",
        "wire.gradients: 'tah' -> 'raw' (no longer exact: tensors at cuts are rounded differently)",
        "the continuation is no longer exact, to the bit",
    ]


def test_a_run_whose_codecs_follow_its_links_does_not_promise_the_same_bits():
    follow = {"wire": {"activations": "wf", "gradients": "eden", "follow": {"raise_after": 5}, "replay": None}}
    report = compare_configs(config() | follow, config() | follow)
    assert not report.exact
    assert report.lines() == [
        "resuming with the configuration of the checkpoint: codecs keep following the links, so it is exact only if "
        "they are chosen alike"
    ]
    replayed = {"wire": {**follow["wire"], "replay": "metrics.jsonl"}}
    assert compare_configs(config() | replayed, config() | replayed).exact
    assert [str(change) for change in compare_configs(config() | follow, config() | replayed).changes] == [
        "wire.replay: None -> 'metrics.jsonl' (no longer exact: codecs change at other steps)"
    ]


def test_model_keeps_its_length_when_sequences_get_shorter():
    old, new = config(), config(**{"data.seq_len": 64})
    kept = keep_model_sizes(old, new)
    assert kept["model"]["max_seq_len"] == 128
    assert kept["data"]["seq_len"] == 64
    # and the next resume, from what was kept, may go back up
    report = compare_configs(kept, keep_model_sizes(kept, config()))
    assert [change.key for change in report.changes] == ["data.seq_len"]
    assert not report.refused


def test_moving_a_host_is_exact_where_it_still_computes():
    hosts = [{"address": f"10.0.0.{stage}", "bind": "0.0.0.0:7000", "ssh": "me@host"} for stage in range(4)]
    moved = [host | {"bind": "0.0.0.0:8000", "workdir": "/data"} for host in hosts]
    assert compare({"hosts": hosts}, {"hosts": moved}).exact


AQSGD = {"wire.activations": "aqsgd", "pipeline.layers": [2, 2, 2, 2]}


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        (AQSGD, AQSGD | {"wire.activations": "aqsgd:bits=6,cache=file"}, None),
        (AQSGD, AQSGD | {"pipeline.stages": 2, "pipeline.layers": [4, 4]}, None),  # that cut was there before
        (AQSGD, AQSGD | {"pipeline.stages": 2, "pipeline.layers": [3, 5]}, "the cuts before block 3 "),
        (AQSGD, AQSGD | {"pipeline.layers": [1, 2, 3, 2]}, "the cuts before block 1, 3 "),
        (AQSGD, AQSGD | {"data.seq_len": 64}, "empty at every cut"),
        ({"wire.activations": "tah"}, AQSGD, "empty at every cut"),
        (AQSGD, {"wire.activations": "tah"}, "are dropped"),
        (AQSGD, {"wire.activations": "aqsgd:cache=none"}, "are dropped"),
    ],
)
def test_samples_that_aqsgd_forgets_are_reported(old, new, note):
    lines = "\n".join(compare(old, new).lines())
    assert "AQ-SGD" in lines if note else "AQ-SGD" not in lines
    assert note is None or note in lines


def test_every_key_of_the_configuration_has_a_rule():
    for key in _flatten(config()):
        assert "no rule" not in _rule(key).reason, key


def test_every_rule_belongs_to_a_key():
    keys = set(_flatten({**config(), "adapter": AdapterConfig().model_dump()}))
    for prefix in RULES:
        assert any(key == prefix or key.startswith(f"{prefix}.") for key in keys), prefix


def test_unknown_key_is_refused():
    report = compare_configs(config(), {**config(), "surprise": 1})
    assert [change.key for change in report.refused] == ["surprise"]


def test_recompute_has_its_old_name_in_earlier_checkpoints():
    old = config()
    old["training"]["activation_checkpointing"] = old["memory"].pop("recompute")
    assert compare_configs(old, config()).changes == ()
    (change,) = compare_configs(old, config(**{"memory.recompute": "att"})).changes
    assert (change.key, change.verdict) == ("memory.recompute", Verdict.EXACT)
    assert ClusterConfig.model_validate(old) == ClusterConfig.model_validate(config())


def test_records_of_earlier_checkpoints_were_padded_and_had_their_end_cut():
    def earlier(**changes):
        old = config(**changes)
        old["data"] = {key: value for key, value in old["data"].items() if key not in ("packing", "truncation")}
        return old

    assert compare_configs(earlier(), config()).exact
    pairs = {"data.text": None, "data.records": "pairs.jsonl"}
    before = earlier(**pairs)
    before["data"]["jsonl"] = before["data"].pop("records")
    (refused,) = compare_configs(before, config(**pairs)).refused
    assert (refused.key, refused.new) == ("data.packing", "auto")
    assert compare_configs(before, config(**pairs, **{"data.packing": False})).exact


def test_checkpoint_keys_have_their_old_names_in_earlier_checkpoints():
    old = config(**{"run.checkpoint_every": 50})
    for name in ("every", "buffers"):
        old["run"][f"snapshot_{name}"] = old["run"].pop(f"checkpoint_{name}")
    old["run"]["keep_snapshots"] = old["run"].pop("keep_checkpoints")
    assert compare_configs(old, config(**{"run.checkpoint_every": 50})).changes == ()
    (change,) = compare_configs(old, config()).changes
    assert str(change) == "run.checkpoint_every: 50 -> '600s' (exact: it does not affect the arithmetic)"
    assert ClusterConfig.model_validate(old).run.checkpoint_every == 50
