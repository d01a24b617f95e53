"""What is chosen before the first step: what is open, from figures that were measured, within every host's memory."""

import os
import re
import time
from dataclasses import replace
from itertools import permutations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tahq.config.cluster import ClusterConfig
from tahq.config.file import dump_yaml, load_config
from tahq.config.stage_estimate import stage_estimate
from tahq.coordinator.observer import StageRecord, StageSplit, StepRecord
from tahq.errors import UserError
from tahq.memory import estimate
from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, LayerTimes, PathNumbers, host_labels
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.first_numbers import cache_path, open_micro_batches
from tahq_launch.plan.first_plan import first_plan
from tahq_launch.plan.measure import write_numbers
from tahq_launch.start.prepared_run import StartRequest, continued_config
from tahq_launch.start.resolution import resolve_for_run

pytestmark = pytest.mark.ci

OPEN = {
    "run": {"name": "tiny"},
    "model": {"family": "gpt2", "num_layers": 8, "hidden_size": 64, "num_heads": 2, "vocab_size": 300},
    "data": {"text": "stdlib", "seq_len": 32},
}
FOUR_HOSTS = {"hosts": [{"address": f"192.0.2.{n}", "ssh": f"host{n}"} for n in range(1, 5)]}


def load_config_of(values):
    return ClusterConfig.model_validate(values)


def planner_in(folder, monkeypatch):
    """planned(config, speeds, memory): the first plan with measurements of so many seconds per block and sample."""
    monkeypatch.setenv("TAHQ_CACHE", str(folder))

    def find(values, speeds=(0.01,) * 4, memory=None, rates=None, **host):
        path = folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(values))
        read = load_config(path)
        config, sizes = resolve_for_run(read), open_micro_batches(read)
        names = host_labels(config.hosts, config.pipeline.stages)
        hosts = [
            HostNumbers(
                name=name,
                memory=memory,
                **host,
                compute=[LayerTimes(micro_batch=n, block_forward=n * s, block_backward=2 * n * s) for n in sizes],
            )
            for name, s in zip(names, speeds, strict=False)
        ]
        paths = [PathNumbers(source=a, target=b, rate=rate) for (a, b), rate in (rates or {}).items()]
        target = cache_path(config, sizes, has_paths=isinstance(config.hosts, list))
        target.parent.mkdir(exist_ok=True)
        write_numbers(ClusterNumbers(hosts=hosts, paths=paths), target, is_complete=True)
        return first_plan(read, StartRequest(path), measures=False)

    return find


@pytest.fixture
def planned(tmp_path, monkeypatch):
    return planner_in(tmp_path, monkeypatch)


def test_nothing_is_measured_where_nothing_is_open(tmp_path, monkeypatch):
    monkeypatch.setenv("TAHQ_CACHE", str(tmp_path))
    for pipeline in ({"balance": "counted"}, {"layers": [2, 2, 2, 2]}):
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(OPEN | {"pipeline": pipeline}))
        assert first_plan(load_config(path), StartRequest(path)) is None


def test_model_and_data_are_enough(planned):
    found = planned(OPEN)
    config = found.config
    assert (config.training.epochs, config.pipeline.stages, sum(config.pipeline.layers)) == (1.0, 4, 8)
    assert config.pipeline.first is not None
    assert config.pipeline.schedule == "auto"
    assert {"raw:dtype=bf16"} == set(config.wire.specs().values())  # nothing is slow between workers of one machine
    assert [line.split()[0] for line in found.lines] == [
        "planned",
        "layers",
        f"{32 // config.training.micro_batch}",
        "schedule",
        "codecs",
    ]


def test_choices_are_keys_and_read_back_equal(planned, tmp_path):
    config = planned(OPEN | FOUR_HOSTS, speeds=(0.01, 0.02, 0.04, 0.02)).config
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    again = load_config(path)
    assert again == config
    assert first_plan(again, StartRequest(path)) is None


@pytest.mark.parametrize(
    "keys",
    [
        {"training": {"micro_batch": 2}, "pipeline": {"schedule": "1f1b", "in_flight": 3}},
        pytest.param(
            {"wire": {"activations": "tah", "gradients": "fixed:bits=8"}, "links": {"first": "gradients"}},
            marks=pytest.mark.acceptance,
        ),
        {"pipeline": {"stages": 4, "in_flight": [5, 4, 3, 2]}},
    ],
    ids=str,
)
def test_key_that_is_set_is_never_overridden(planned, keys):
    config = planned(OPEN | FOUR_HOSTS | keys, speeds=(0.01, 0.02, 0.04, 0.02)).config
    for section, values in keys.items():
        found = getattr(resolve_for_run(config), section).model_dump(mode="json")
        for key, value in values.items():
            shown = found[key].partition(":")[0] if section == "wire" else found[key]
            assert shown == (value.partition(":")[0] if section == "wire" else value)


@pytest.mark.parametrize(
    ("training", "size", "known"),
    [({"global_batch": 6}, 3, False), ({"micro_batch": 2}, 2, False), ({"global_batch": 8}, 4, True)],
    ids=str,
)
def test_sizes_that_a_given_file_lacks_are_interpolated_and_said_to_be(training, size, known, tmp_path):
    hosts = [
        HostNumbers(name=host["address"], compute=[LayerTimes(micro_batch=4, block_forward=0.1, block_backward=0.2)])
        for host in FOUR_HOSTS["hosts"]
    ]
    numbers = write_numbers(ClusterNumbers(hosts=hosts), tmp_path / "numbers.yaml", is_complete=True)
    values = OPEN | FOUR_HOSTS | {"training": training, "links": {"measured": str(numbers)}}
    found = first_plan(load_config_of(values), StartRequest(tmp_path / "cluster.yaml"), measures=False)
    assert found.config.training.micro_batch == size
    assert any("interpolated" in line for line in found.lines) != known


@pytest.mark.parametrize("stages", [{}, pytest.param({"stages": 4}, marks=pytest.mark.acceptance)], ids=str)
def test_resumed_run_in_namespaces_keeps_the_hosts_that_the_plan_has_renamed(stages, planned):
    sleep = {"forward": ["60ms", "30ms", "900ms", "30ms"], "backward": ["120ms", "60ms", "1800ms", "60ms"]}
    network = {"hosts": {"host1": {"up": "5mbit"}, "host3": {"up": "20mbit"}}, "delay": "10ms", "rate": "100mbit"}
    network["pairs"] = [{"between": ["host0", "host3"], "delay": "40ms"}]
    values = OPEN | {
        "emulate": {"sleep": sleep} | network,
        "pipeline": stages,
        "hosts": "namespaces",
    }
    config = planned(values, speeds=(0.06, 0.03, 0.9, 0.03)).config
    assert config.pipeline.stages == (4 if stages else 3)
    assert config.emulate.hosts != load_config_of(values).emulate.hosts
    old = config.model_dump(mode="json")
    continued = continued_config(old, load_config_of(values | {"training": {"steps": 9}}))
    for section in ("hosts", "pipeline", "links", "wire"):
        assert getattr(continued, section) == getattr(config, section)
    assert continued.emulate.sleep == config.emulate.sleep
    changed = continued_config(
        old, load_config_of(values | {"emulate": values["emulate"] | {"hosts": {"host1": {"up": "7mbit"}}}})
    )
    assert changed.emulate.hosts["host1"].up == 7e6


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "schedule S at first, in flight N N (pipeline.schedule, pipeline.in_flight)"),
        ({"in_flight": 2}, "schedule S at first (pipeline.schedule)"),
        ({"schedule": "1f1b"}, "in flight N N (pipeline.in_flight)"),
        ({"schedule": "1f1b", "in_flight": 2}, ""),
    ],
    ids=str,
)
def test_only_what_is_chosen_of_the_schedule_is_said(keys, line, planned):
    lines = [each.strip() for each in planned(OPEN | {"pipeline": {"stages": 2, **keys}}).lines]
    found = [re.sub(r"[\d]+", "N", re.sub("schedule [^ ]+", "schedule S", each)) for each in lines]
    assert [each for each in found if "schedule" in each or "in flight" in each] == ([line] if line else [])


def test_single_stage_has_neither_layers_nor_a_schedule_to_choose(planned):
    lines = planned(OPEN | {"pipeline": {"stages": 1}}).lines
    assert [line.split()[-1] for line in lines[1:]] == ["(training.micro_batch)"]


@pytest.mark.parametrize(
    ("age_s", "text"),
    [
        pytest.param(59, "less than a minute ago", marks=pytest.mark.acceptance),
        pytest.param(60, "1 minute ago", marks=pytest.mark.acceptance),
        (7200, "2 hours ago"),
        pytest.param(200_000, "2 days ago", marks=pytest.mark.acceptance),
    ],
)
def test_age_of_measurements_is_said(age_s, text, planned, tmp_path):
    planned(OPEN)
    (path,) = (tmp_path / "measured").iterdir()
    os.utime(path, (time.time() - age_s,) * 2)
    read = load_config(tmp_path / "cluster.yaml")
    found = first_plan(read, StartRequest(tmp_path / "cluster.yaml"), measures=False)
    assert f"speeds measured {text} (" in found.lines[0]


def test_few_layers_make_fewer_stages_and_hosts_make_as_many_as_there_are():
    model = OPEN["model"] | {"num_layers": 2}
    assert load_config_of(OPEN | {"model": model}).pipeline.stages == 2
    assert load_config_of(OPEN | {"model": model, "hosts": "namespaces"}).pipeline.stages == 2
    with pytest.raises(ValueError, match=r"pipeline.stages 4 is above"):
        load_config_of(OPEN | {"model": model} | FOUR_HOSTS)


def test_slow_host_is_left_out_unless_stages_say_otherwise(planned):
    speeds = (0.01, 1.0, 0.01, 0.01)
    addresses = [host.address for host in planned(OPEN | FOUR_HOSTS, speeds).config.hosts]
    assert "192.0.2.2" not in addresses
    kept = planned(OPEN | FOUR_HOSTS | {"pipeline": {"stages": 4}}, speeds).config
    assert len(kept.hosts) == 4
    assert kept.pipeline.layers[[host.address for host in kept.hosts].index("192.0.2.2")] == 1


def test_neighbours_have_fast_paths_between_them(planned):
    names = [host["address"] for host in FOUR_HOSTS["hosts"]]
    fast = [(names[0], names[2]), (names[2], names[1]), (names[1], names[3])]
    rates = {(a, b): 1e9 if (a, b) in fast or (b, a) in fast else 1e6 for a in names for b in names if a != b}
    config = planned(OPEN | FOUR_HOSTS | {"pipeline": {"stages": 4}}, speeds=(0.001,) * 4, rates=rates).config
    order = [host.address for host in config.hosts]
    assert order in ([names[0], names[2], names[1], names[3]], [names[3], names[1], names[2], names[0]])


def test_slow_paths_get_the_fewest_bits_that_quality_allows(planned):
    names = [host["address"] for host in FOUR_HOSTS["hosts"]]
    rates = {(a, b): 1e6 for a in names for b in names if a != b}
    wire = planned(OPEN | FOUR_HOSTS | {"pipeline": {"stages": 4}}, speeds=(0.001,) * 4, rates=rates).config.wire
    default = resolve_for_run(load_config_of(OPEN)).wire
    assert wire.activations == default.activations
    assert wire.gradients in (default.gradients, "eden:bits=2,group=256")  # the other direction is the slower one


ADAPTERS = OPEN | FOUR_HOSTS | {"adapter": {"rank": 1, "targets": ["c_attn"]}}
SLOW_PATHS = {(a["address"], b["address"]): 1e5 for a, b in permutations(FOUR_HOSTS["hosts"], 2)}


@pytest.mark.acceptance
def test_adapters_of_hosts_apart_get_replicas_which_a_resumed_run_keeps(planned):
    found = planned(ADAPTERS, speeds=(0.003,) * 4, rates=SLOW_PATHS)
    pipeline = found.config.pipeline
    assert (pipeline.stages, pipeline.replicas, len(found.config.hosts)) == (1, 4, 4)
    (line,) = [each for each in found.lines if "(pipeline.replicas)" in each]
    assert re.match(r"  4 replicas, which sum gradients for .* s per step; as one pipeline [\d,]+ tokens/s", line)
    old = found.config.model_dump(mode="json")
    assert continued_config(old, load_config_of(ADAPTERS)).pipeline.replicas == 4
    one = ADAPTERS | {"pipeline": {"replicas": 1}}
    assert planned(one, speeds=(0.003,) * 4, rates=SLOW_PATHS).config.pipeline.replicas == 1
    assert continued_config(old, load_config_of(one)).pipeline.replicas == 1
    full = {key: each for key, each in ADAPTERS.items() if key != "adapter"}
    assert planned(full, speeds=(0.003,) * 4, rates=SLOW_PATHS).config.pipeline.replicas == 1


UNLIKE = {
    "hosts": "namespaces",
    "emulate": {
        "sleep": {"forward": ["80ms", "40ms", "20ms", "40ms"], "backward": "80ms"},
        "hosts": {f"host{n}": {"up": rate} for n, rate in enumerate(("50mbit", "100mbit", "300mbit", "1gbit"))},
    },
}


@pytest.mark.parametrize("sections", [{}, FOUR_HOSTS, UNLIKE], ids=["local", "listed", "namespaces"])
def test_resumed_run_keeps_what_was_planned(planned, sections):
    values = OPEN | sections
    config = planned(values, speeds=(0.01, 1.0, 0.02, 0.04)).config
    continued = continued_config(config.model_dump(mode="json"), load_config_of(values))
    sizes = {"model": continued.model.model_copy(update={"max_seq_len": None})}
    assert resolve_for_run(continued.model_copy(update=sizes)) == resolve_for_run(config)
    other = continued_config(config.model_dump(mode="json"), load_config_of(values | {"training": {"micro_batch": 1}}))
    assert other.training.micro_batch == 1


MODELS = st.tuples(
    st.integers(4, 12),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([4, 6, 8, 16]),
    st.integers(2, 4),
    st.floats(1.0, 4.0),
    st.sampled_from([0, 50, 150]),
    st.sampled_from(["none", "block", "auto"]),
    st.sampled_from(["none", "agoq"]),
)
"""Layers, width, batch, stages, share of memory, delay, checkpointing, activations."""


@settings(max_examples=4)
@given(MODELS)
def test_plan_fits_memory_wherever_one_micro_batch_in_flight_does(tmp_path_factory, model):
    check_that_plan_fits(tmp_path_factory, *model)


@pytest.mark.acceptance
@pytest.mark.timeout(900)
@settings(max_examples=60)
@given(MODELS)
def test_plans_of_many_models_fit_memory(tmp_path_factory, model):
    check_that_plan_fits(tmp_path_factory, *model)


def check_that_plan_fits(tmp_path_factory, layers, width, batch, stages, share, delay, recompute, activations):
    """Each host has `share` times the memory that the fullest stage needs with one sample in flight."""
    values = {
        **OPEN,
        "model": {**OPEN["model"], "num_layers": layers, "hidden_size": width},
        "training": {"steps": 1, "global_batch": batch},
        "memory": {"activations": activations, "recompute": recompute},
        "pipeline": {"stages": stages},
        "emulate": {"rate": "100mbit", "delay": f"{delay}ms"},
    }
    least = load_config_of(values | {"pipeline": {"stages": stages, "in_flight": 1, "balance": "counted"}})
    least = resolve_for_run(least.model_copy(update={"training": least.training.model_copy(update={"micro_batch": 1})}))
    limit = share * max(needs(least, stage) for stage in range(stages))
    with pytest.MonkeyPatch.context() as patch:
        found = planner_in(tmp_path_factory.mktemp("plan"), patch)(values, memory=int(limit / 0.9) + 1)
    assert max(needs(found.config, stage) for stage in range(stages)) <= limit * 1.001


@pytest.mark.parametrize(
    ("share", "chosen"),
    [(3.0, "none"), (0.9, ["none", "none", "none", "norm"]), (0.6, ["norm", "norm", "norm", "ffn"])],
)
def test_each_stage_recomputes_as_much_as_it_must_to_fit(planned, share, chosen):
    """With one micro-batch in flight; `share` is of what the largest stage, the last, keeps of it without."""
    values = OPEN | {
        "training": {"steps": 1, "global_batch": 8, "micro_batch": 8},
        "data": {**OPEN["data"], "seq_len": 256},
        "memory": {"gradients": "fp32"},
    }
    least = resolve_for_run(load_config_of(values | {"pipeline": {"in_flight": 1, "balance": "counted"}}))
    spec = resolved_spec(least, None)
    stages = [stage_estimate(least, spec, stage, device="cpu") for stage in range(4)]
    limit = max(each.total - (1 - share) * each.activations for each in stages)
    found = planned(values, memory=int(limit / 0.9))
    assert found.config.memory.recompute == chosen
    named = "; ".join(chosen)
    assert any(f"recompute {named}, by stage, since memory" in line for line in found.lines) == (chosen != "none")


ON_GPUS = {
    **OPEN,
    "run": {**OPEN["run"], "device": "cuda"},
    "model": {**OPEN["model"], "hidden_size": 256},
    "training": {"steps": 1, "global_batch": 4, "micro_batch": 1},
}


@pytest.mark.parametrize(
    "has_link", [pytest.param(True, marks=pytest.mark.acceptance), False], ids=["measured", "not measured"]
)
def test_gpus_offload_what_they_have_no_room_for(planned, has_link, monkeypatch):
    monkeypatch.setattr(estimate, "DECODED_AT_A_TIME", 1)  # of a model with parts that are smaller than a stage
    config = resolve_for_run(load_config_of(ON_GPUS | {"pipeline": {"in_flight": 1, "balance": "counted"}}))
    least = config.model_copy(update={"memory": config.memory.model_copy(update={"recompute": "block"})})
    limit = 0.75 * max(
        stage_estimate(least, resolved_spec(least, None), stage, device="cuda").total for stage in range(4)
    )
    keys = {"memory": int(limit / 0.9), "host_memory": 10**10, "host_link": 1e11 if has_link else None}
    if not has_link:
        with pytest.raises(UserError, match="fits"):
            planned(ON_GPUS, **keys)
        return
    found = planned(ON_GPUS, **keys)
    offloads = [found.config.memory.offload_of(stage) for stage in range(4)]
    assert any({"m", "v"} <= each for each in offloads)
    assert any("in host memory: " in line for line in found.lines)
    spec = resolved_spec(found.config, None)
    for stage in range(4):
        memory = stage_estimate(found.config, spec, stage, device="cuda")
        assert memory.total <= 1.001 * limit
        assert (memory.host_total > 0) == bool(offloads[stage])


def test_model_that_fits_nowhere_is_refused_with_a_change_that_makes_it_fit(planned):
    values = ON_GPUS | {"run": OPEN["run"], "memory": {"recompute": "block"}}
    config = resolve_for_run(load_config_of(values | {"pipeline": {"in_flight": 1, "balance": "counted"}}))
    config = config.model_copy(update={"memory": config.memory.model_copy(update={"gradients": "fp8"})})
    most = max(needs(config, stage) for stage in range(4))
    with pytest.raises(
        UserError, match=r"has the memory.*with training\.optimizer: adamw_bf16, which change.* it fits"
    ):
        planned(values, memory=int(0.97 * most))
    with pytest.raises(UserError, match="use more hosts, or hosts with more memory"):
        planned(values, memory=int(0.1 * most))


def test_all_of_the_memory_is_used_where_nine_tenths_are_too_little(planned):
    values = ON_GPUS | {"run": OPEN["run"], "memory": {"recompute": "block", "gradients": "fp32"}}
    config = resolve_for_run(load_config_of(values | {"pipeline": {"in_flight": 1, "balance": "counted"}}))
    limit = 1.02 * max(needs(config, stage) for stage in range(4))
    found = planned(values, memory=int(limit))
    assert "warning: with 90% of the memory nothing fits" in found.lines[0]
    assert 0.9 * limit < max(needs(found.config, stage) for stage in range(4)) <= limit


def test_blocks_recompute_where_memory_would_keep_a_pipeline_on_long_links_shallow(planned):
    values = OPEN | {
        "training": {"steps": 1, "global_batch": 16, "micro_batch": 1},
        "data": {**OPEN["data"], "seq_len": 256},
        "emulate": {"rate": "100mbit", "delay": "150ms"},
    }
    shallow = resolve_for_run(load_config_of(values | {"pipeline": {"in_flight": 2, "balance": "counted"}}))
    limit = max(needs(shallow, stage) for stage in range(4))
    plans = [
        planned(values | {"memory": {"recompute": level}}, memory=int(limit / 0.9) + 1) for level in ("none", "auto")
    ]
    assert plans[1].config.memory.recompute != "none"
    assert sum(plans[1].config.pipeline.first_depths) > sum(plans[0].config.pipeline.first_depths)


@pytest.mark.parametrize(("share", "chosen"), [(1.05, "fp32"), (0.9, "fp8")])
def test_gradients_are_kept_in_8_bits_only_where_fp32_fits_no_host(planned, share, chosen):
    values = OPEN | {"training": {"steps": 1, "global_batch": 4, "micro_batch": 1}, "pipeline": {"in_flight": 1}}
    values |= {"model": {**OPEN["model"], "hidden_size": 256}, "memory": {"recompute": "none"}}
    least = resolve_for_run(load_config_of(values | {"pipeline": {"in_flight": 1, "balance": "counted"}}))
    limit = share * max(needs(least, stage) for stage in range(4))
    found = planned(values, memory=int(limit / 0.9))
    assert found.config.memory.gradients == chosen
    assert any("gradients in 8 bits" in line for line in found.lines) == (chosen == "fp8")
    assert max(needs(found.config, stage) for stage in range(4)) <= limit * 1.001
    pinned = planned(values | {"memory": {"gradients": "fp8"}}, memory=None)
    assert pinned.config.memory.gradients == "fp8"


def test_bits_of_stored_activations_follow_the_planned_depths_and_are_kept(planned):
    values = OPEN | {"memory": {"activations": "agoq"}, "emulate": {"rate": "100mbit", "delay": "20ms"}}
    found = planned(values)
    bits = found.config.memory.agoq.bits
    assert bits[0] == 4 < bits[-1]
    assert f"  stored activations in {' '.join(map(str, bits))} bits, by stage (memory.agoq.bits)" in found.lines
    again = continued_config(found.config.model_dump(mode="json"), load_config_of(values))
    assert again.memory.agoq.bits == bits


def needs(config, stage):
    return stage_estimate(config, resolved_spec(config, None), stage, device="cpu").total


def test_figures_of_another_model_are_not_used(planned):
    config = resolve_for_run(load_config_of(OPEN))
    other = config.model_copy(update={"data": config.data.model_copy(update={"seq_len": 64})})
    assert cache_path(config, (1, 2)) != cache_path(other, (1, 2))
    assert cache_path(config, (1, 2)) != cache_path(config, (1, 2, 4))
    renamed = config.model_copy(update={"run": config.run.model_copy(update={"name": "other"})})
    assert cache_path(config, (1, 2)) == cache_path(renamed, (1, 2))
    listed, slower = (
        resolve_for_run(load_config_of(OPEN | FOUR_HOSTS | {"emulate": each})) for each in ({}, {"rate": 1e7})
    )
    assert cache_path(listed, (1, 2), has_paths=True) != cache_path(slower, (1, 2), has_paths=True)


@pytest.mark.parametrize(
    ("expected_s", "factor", "holds"),
    [
        *(((3.84, 3.84), factor, holds) for factor, holds in ((1.0, True), (1.4, True), (1.6, False), (0.6, False))),
        *(((8.0, 0.1), factor, holds) for factor, holds in ((4.0, True), (6.0, False))),  # a short stage hardly counts
    ],
)
def test_figures_that_the_run_contradicts_are_dropped(planned, expected_s, factor, holds):
    found = planned(OPEN | {"pipeline": {"stages": 2}})
    # 32 samples, 4 of 8 layers each, forward 0.01 s and backward 0.02 s per layer and sample
    assert found.compute_s == pytest.approx((32 * 4 * 0.03,) * 2)
    first_s, second_s = expected_s
    splits = StageSplit(forward_s=first_s), StageSplit(forward_s=factor * second_s)
    stages = tuple(StageRecord(stage, {}, 0, split) for stage, split in enumerate(splits))
    record = StepRecord(3, 1.0, 256, 4.0, 1.0, 1.0, False, False, stages, ())
    replace(found, compute_s=expected_s).watch([record])
    assert found.cached.exists() == holds


def test_steps_of_workers_that_share_cores_contradict_nothing(planned, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert planned(OPEN | {"pipeline": {"stages": 2}}).compute_s == ()
