"""The cluster of unlike hosts: plans over it, what stages sleep, and what is said of the results."""

import json

import pytest
from bench_heterogeneous import figures, predict, report, times_naive, verdict, with_layers
from heterogeneous_cluster import (
    CLUSTER,
    NUM_LAYERS,
    ChosenPlan,
    cluster_numbers,
    load_plan,
    naive_plan,
    network_config,
)

from tahq.errors import ConfigError
from tahq_netem.measure.machine import BusyCores
from tahq_netem.network.description import plan_network
from tahq_netem.runtimes.session import StepRecord
from tahq_netem.sweep.measurement import Measurement
from tahq_netem.sweep.prediction import CodecSeconds
from tahq_netem.sweep.workload import session_config

PLAN = """\
hosts: [desk, laptop, tower, server]
layers: [1, 3, 7, 1]
explanation: the slow link goes to the end
"""
SETTINGS = {"num_steps": 5, "settle": 2, "backend": "auto", "max_busy_cores": None}


@pytest.fixture
def write(tmp_path):
    def plan_file(text):
        (tmp_path / "plan.yaml").write_text(text)
        return tmp_path / "plan.yaml"

    return plan_file


def test_hosts_differ_in_speed_and_in_both_directions_of_their_links():
    assert {machine.speed for machine in CLUSTER} == {1, 2, 4}
    rates = [rate for machine in CLUSTER for rate in (machine.up_bits_per_s, machine.down_bits_per_s)]
    assert (min(rates), max(rates)) == (50e6, 1000e6)
    assert any(machine.up_bits_per_s != machine.down_bits_per_s for machine in CLUSTER)
    shapes = plan_network(network_config()).host_shapes
    assert (shapes["desk"].up_bits_per_s, shapes["desk"].down_bits_per_s) == (50e6, 200e6)


def test_stages_sleep_as_long_as_their_layers_take_their_host(write):
    plan = load_plan(write(PLAN))
    # 1 layer on a host of speed 1, 3 on 2, 7 on 4, 1 on 1; 30 and 60 ms a layer
    assert plan.times().forward_s == pytest.approx([0.030, 0.045, 0.0525, 0.030])
    assert plan.times().backward_s == pytest.approx([0.060, 0.090, 0.105, 0.060])
    small = load_plan(write(PLAN + "micro_batch: 2\n"))
    assert small.times().forward_s[0] == pytest.approx(0.015)
    assert small.num_micro_batches == 2 * plan.num_micro_batches


PLANNED = {
    "plan": {
        "hosts": ["tower", "desk", "server", "laptop"],
        "layers": [7, 1, 1, 3],
        "micro_batch": 2,
        "schedule": "1f1b",
        "in_flight": [18, 13, 7, 1],
        "activations": ["tah", "tah", "tah"],
        "gradients": ["fixed:bits=6"] * 3,
        "tokens_per_s": 6501.6,
    },
    "bottleneck": {"resource": "compute", "index": 0, "share": 1.0},
}
"""Of what `tahq plan --json` writes, what is read."""


def test_plan_is_read_as_tahq_plan_writes_it(write):
    plan = load_plan(write(json.dumps(PLANNED)))
    assert (plan.hosts[0], plan.layers, plan.depths) == ("tower", [7, 1, 1, 3], [18, 13, 7, 1])
    assert (plan.activations, plan.gradients) == ("tah", "fixed:bits=6")
    assert "predicts 6,502 tokens/s; bottleneck: compute of stage 0" in plan.explanation


def test_plan_with_codecs_that_differ_by_link_is_refused(write):
    mixed = {**PLANNED, "plan": {**PLANNED["plan"], "gradients": ["fixed:bits=6", "fixed:bits=8", "fixed:bits=6"]}}
    with pytest.raises(ConfigError, match="codecs differ by link"):
        load_plan(write(json.dumps(mixed)))


def test_naive_pipeline_is_the_list_split_evenly():
    plan = naive_plan()
    assert plan.hosts == [machine.name for machine in CLUSTER]
    assert plan.layers == [3, 3, 3, 3]
    assert sum(plan.layers) == NUM_LAYERS


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tower", "tow", ("hosts are some of desk",)),
        ("tower", "desk", ("each once",)),
        ("7", "6", ("share 12 layers",)),
        ("layers:", "layer:", ("plan.yaml:2", "did you mean layers?")),
        ("explanation: the slow link goes to the end", "micro_batch: 3", ("micro_batch divides 64",)),
        ("explanation: the slow link goes to the end", "depths: [4]", ("depths are one for each of 4 hosts",)),
        (PLAN, "[1, 2]", ("expected keys",)),
        (PLAN, "hosts: [", ("plan.yaml:",)),
    ],
)
def test_plan_that_does_not_fit_is_refused_in_one_line(write, old, new, said):
    with pytest.raises(ConfigError) as caught:
        load_plan(write(PLAN.replace(old, new)))
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in said)


def test_plan_reaches_the_workers_configuration(write, tmp_path):
    plan = load_plan(write(PLAN))
    config = session_config(plan.sweep(**SETTINGS), plan.key(), tmp_path, plan.times())
    assert with_layers(config, plan.layers).pipeline.layers == [1, 3, 7, 1]
    assert config.model.sleep.of(2) == pytest.approx((0.0525, 0.105))
    assert config.training.num_micro_batches == 16


def test_order_and_split_matter_to_the_simulator(write):
    naive, planned = naive_plan(), load_plan(write(PLAN))
    slow, fast = (predict(plan, plan.sweep(**SETTINGS), CodecSeconds()) for plan in (naive, planned))
    # 16 micro-batches of 3 layers on a host of speed 1 are 4.3 s alone
    assert slow > 16 * 3 * 0.09 > fast


def test_row_and_verdict_say_what_the_steps_were(write):
    plan = load_plan(write(PLAN))

    def row(of, seconds):
        steps = tuple(StepRecord(1, seconds * factor, None, (), ()) for factor in (0.9, 1.0, 1.3))
        return figures(of, of.sweep(**SETTINGS), Measurement(steps, BusyCores(0.1, 0.2), None, None, 1))

    rows = {"naive": row(naive_plan(), 5.0), "planned": row(plan, 3.2)}
    assert rows["naive"]["step_s"] == 5.0
    assert times_naive(rows) == pytest.approx(5.0 / 3.2)
    assert verdict(rows).endswith("1.56 ×, met")
    assert verdict({**rows, "planned": row(plan, 4.0)}).endswith("1.25 ×, MISSED")
    assert verdict({"naive": rows["naive"]}).endswith("not measured")
    text = report(rows, "a machine")
    assert "| planned | desk, laptop, tower, server | 1, 3, 7, 1 |" in text
    assert "planned: the slow link goes to the end" in text


def test_planner_is_told_what_tcp_has_of_each_link():
    numbers = json.loads(json.dumps(cluster_numbers()))
    desk = numbers["hosts"][0]
    assert (desk["name"], desk["up"]) == ("desk", "47820343bit")  # 1448 of 1514 bytes of 50 Mbit/s
    tower = numbers["hosts"][1]
    assert tower["compute"][1] == {"micro_batch": 4, "block_forward": 0.0075, "block_backward": 0.015}
    assert ChosenPlan.model_fields.keys() >= {"hosts", "layers", "micro_batch", "schedule", "depths"}
