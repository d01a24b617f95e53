"""`tahq plan`: the report, the file it writes, and one line for each mistake."""

import json
from itertools import pairwise

import pytest
import yaml
from support.cluster_files import EXAMPLES
from support.runs import tiny, write_config

from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config
from tahq.units import WRITTEN_BY_HAND

from .conftest import assert_one_line

NUMBERS = """\
source: invented
round_trip: 20ms
hosts:
  - name: host0
    up: 10mbit
    down: 50mbit
    memory: 4GB
    compute: [{micro_batch: 2, block_forward: 0.04, block_backward: 0.08}]
  - name: host1
    compute: [{micro_batch: 2, block_forward: 0.01, block_backward: 0.02}]
  - name: host2
    compute: [{micro_batch: 2, block_forward: 0.02, block_backward: 0.04}]
paths:
  - {source: host1, target: host2, rate: 5mbit, round_trip: 80ms}
"""

SLEEPING = tiny(
    model={"num_layers": 6},
    emulate={"sleep": {"forward": ["30ms", "10ms", "20ms"], "backward": ["60ms", "20ms", "40ms"]}},
    pipeline={"stages": 3, "layers": [2, 2, 2]},
)
NETWORK = {
    **SLEEPING,
    "hosts": "namespaces",
    "emulate": {
        **SLEEPING["emulate"],
        "rate": "20mbit",
        "delay": "5ms",
        "hosts": {"host0": {"up": "1mbit"}, "host2": {"site": "far"}},
        "pairs": [{"between": ["host0", "host1"], "delay": "90ms"}, {"between": ["host1", "far"], "rate": "8mbit"}],
    },
}


@pytest.fixture
def plan(tahq, tmp_path):
    """plan(config, "--grid", ...) runs `tahq plan cluster.yaml` inside this process: (status, stdout, stderr).

    `numbers` is the content of numbers.yaml, which is then used.
    """

    def run(config, *arguments: str, numbers: str | None = None) -> tuple[int, str, str]:
        write_config(tmp_path, config)
        (tmp_path / "numbers.yaml").write_text(numbers or "")
        use = ["--numbers", "numbers.yaml"] if numbers is not None else []
        return tahq("tahq", "plan", "cluster.yaml", *use, *arguments)

    return run


@pytest.fixture
def planned(plan, tmp_path):
    """planned(config, ...) also writes the plan: (stdout, figures as JSON, the written configuration)."""

    def run(config, *arguments: str, numbers: str | None = None) -> tuple[str, dict, ClusterConfig]:
        status, out, err = plan(config, *arguments, "--write", "planned.yaml", numbers=numbers)
        assert (status, err) == (0, "")
        status, figures, err = plan(config, *arguments, "--json", numbers=numbers)
        assert (status, err) == (0, "")
        return out, json.loads(figures), load_config(tmp_path / "planned.yaml")

    return run


def listed(num_hosts: int, **changes) -> dict:
    hosts = [{"address": f"host{index}", **changes} for index in range(num_hosts)]
    return tiny(pipeline={"stages": num_hosts}) | {"hosts": hosts, "run": {"name": "x", "bind": "0.0.0.0:7700"}}


def test_json_has_the_figures_of_the_report(planned):
    out, figures, _ = planned(SLEEPING, "--stages", "2", "--grid", numbers=NUMBERS)
    assert out.startswith(f"Predicted: {figures['tokens_per_s']:,.0f} tokens/s")
    assert "all numbers: numbers.yaml (invented)" in out
    assert "stage 0  0F0" in out
    best, given = figures["plan"], figures["given"]
    assert len(best["hosts"]) == len(best["layers"]) == len(best["in_flight"]) == 2
    assert sum(best["layers"]) == 6
    assert figures["tokens_per_s"] == pytest.approx(8 * 32 / figures["step_s"])
    assert figures["second_best"]["tokens_per_s"] <= figures["tokens_per_s"] * 1.001
    assert 0 < figures["bottleneck"]["share"] <= 1.001
    assert (given["hosts"], given["layers"]) == (["host0", "host1", "host2"], [2, 2, 2])
    assert given["tokens_per_s"] < figures["tokens_per_s"]


SMALL_BATCH = ("--set", "training.global_batch=3", "--set", "training.micro_batch=1")
OTHER_CODEC = ("--codecs", "wf:bits=3", "--stages", "2")
CODEC_TIMES = "codecs: {wf:bits=4: {encode_per_element: 1.0e-8, decode_per_element: 1.0e-8}}\n    compute"
# four micro-batches of two samples in flight on the first stage
FULL = {**SLEEPING, "pipeline": {"stages": 3, "schedule": "gpipe"}}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("config", "arguments", "numbers", "notes"),
    [
        (
            tiny(emulate={"rate": "100mbit"}, pipeline={"stages": 2}),
            *((), None, ["compute: multiply-adds counted, ASSUMED", "memory: unknown"]),
        ),
        (SLEEPING, (), None, ["compute: cluster.yaml's emulate.sleep"]),
        (SLEEPING, SMALL_BATCH, NUMBERS, ["is interpolated from those of 2"]),
        (
            *(SLEEPING, OTHER_CODEC, NUMBERS.replace("compute", CODEC_TIMES)),
            ["wf:bits=3,group=128,center=on was not measured on every host: there it is assumed to be as slow as wf"],
        ),
        (FULL, (), NUMBERS.replace("4GB", "5MB"), ["cluster.yaml unchanged, if it fitted: host0 needs "]),
    ],
    ids=["counted", "emulate.sleep", "interpolated", "another codec's", "memory too small"],
)
def test_origin_of_numbers_and_lack_of_memory_are_named(plan, config, arguments, numbers, notes):
    status, out, _ = plan(config, *arguments, numbers=numbers)
    assert status == 0
    assert [note for note in notes if note not in out] == []


def test_every_replica_is_shown(plan, tmp_path):
    one = "  - {name: NAME, up: 1gbit, compute: [{micro_batch: 2, block_forward: 0.4, block_backward: 0.8}]}\n"
    four = "hosts:\n" + "".join(one.replace("NAME", name) for name in "abcd")
    arguments = ("--stages", "2", "--max-replicas", "2")
    status, out, err = plan(SLEEPING, *arguments, numbers=four)
    assert (status, err) == (0, "")
    status, figures, err = plan(SLEEPING, *arguments, "--json", "--output", "planned.yaml", numbers=four)
    assert (status, err) == (0, "\nwritten to planned.yaml\n")
    replicas = json.loads(figures)["replicas"]
    assert [each["hosts"] for each in replicas["plans"]] == replicas["hosts"]
    assert [sum(each["layers"]) for each in replicas["plans"]] == [6, 6]
    pipeline = yaml.safe_load((tmp_path / "planned.yaml").read_text())["pipeline"]
    assert (pipeline["replicas"], pipeline["stages"], pipeline["layers"]) == (2, 2, replicas["plans"][0]["layers"])
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("0  ", "1  ")) and "+" in line]
    assert [row[3] for row in rows[-2:]] == ["+".join(map(str, each["layers"])) for each in replicas["plans"]]


@pytest.mark.ci
def test_example_of_the_docs_is_the_printed_report(tahq, monkeypatch):
    root = EXAMPLES.parents[1]
    monkeypatch.chdir(root)
    shown = (root / "docs/dev/planner.md").read_text().partition("$ tahq plan ")[2].partition("```")[0]
    command, _, expected = shown.partition("\n")
    status, out, _ = tahq("tahq", "plan", *command.split())
    assert status == 0
    assert [line.rstrip() for line in out.splitlines()] == expected.splitlines()


def test_written_file_has_the_plan_in_it(planned):
    out, figures, config = planned(NETWORK)
    best, pipeline = figures["plan"], config.pipeline
    assert "written to planned.yaml" in out
    assert pipeline.stages == len(best["hosts"])
    assert (pipeline.layers, pipeline.schedule) == (best["layers"], best["schedule"])
    assert config.training.micro_batch == best["micro_batch"]
    actions = pipeline.actions(config.training.num_micro_batches)
    assert [actions.max_in_flight(stage) for stage in range(pipeline.stages)] == best["in_flight"]
    # 15, 5 and 10 ms per layer for micro-batches of two samples
    each = {"host0": 0.015, "host1": 0.005, "host2": 0.01}
    scale = best["micro_batch"] / 2
    expected = [each[name] * layers * scale for name, layers in zip(best["hosts"], best["layers"], strict=True)]
    assert config.emulate.sleep.forward == pytest.approx(expected)
    assert config.emulate.sleep.backward == pytest.approx([2 * seconds for seconds in expected])


@pytest.mark.ci
def test_hosts_of_namespaces_keep_their_network_so_that_planning_again_predicts_the_same(planned, tahq, tmp_path):
    # three stages, so that all hosts are in it; host0, whose uplink is slow, sends least as the last stage
    _, figures, config = planned(NETWORK, "--stages", "3")
    place = {name: f"host{stage}" for stage, name in enumerate(figures["plan"]["hosts"])}
    links = config.emulate.model_dump(mode="json", context=WRITTEN_BY_HAND)
    assert links["hosts"][place["host0"]]["up"] == "1mbit"
    assert links["hosts"][place["host2"]]["site"] == "far"
    between = {frozenset(pair["between"]) for pair in links["pairs"]}
    assert between == {frozenset((place["host0"], place["host1"])), frozenset((place["host1"], "far"))}
    status, out, _ = tahq("tahq", "plan", "planned.yaml", "--stages", "3", "--json")
    assert status == 0
    assert json.loads(out)["tokens_per_s"] == pytest.approx(figures["tokens_per_s"], rel=0.01)


def test_chunks_and_codecs_are_chosen_from_those_that_are_allowed(planned):
    out, figures, config = planned(NETWORK, "--schedules", "interleaved", "--stages", "2", "--codecs", "ladder")
    best, pipeline = figures["plan"], config.pipeline
    assert (pipeline.schedule, pipeline.chunks, len(pipeline.layers), sum(pipeline.layers)) == ("interleaved", 2, 4, 6)
    assert all(codec.startswith(("raw", "fixed", "wf", "tah")) for codec in best["activations"])
    assert all(codec.startswith(("raw", "fixed", "eden")) for codec in best["gradients"])
    assert config.wire.activations in best["activations"]
    assert ("note: wire.activations" in out) == (len(set(best["activations"])) > 1)


def test_listed_hosts_are_written_in_the_plans_order_with_the_connections_that_it_assumes(planned):
    several = NUMBERS.replace("rate: 5mbit,", "rate: 5mbit, connections: 4,")
    _, figures, config = planned(listed(3, device="cpu"), numbers=several)
    hosts = figures["plan"]["hosts"]
    assert [host.address for host in config.hosts] == hosts
    are_neighbours = {"host1", "host2"} in map(set, pairwise(hosts))
    assert config.links.connections == (4 if are_neighbours else 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--numbers", "nowhere.yaml"), "nowhere.yaml does not exist; `tahq measure` writes such files"),
        (("--numbers", "bad.yaml"), "bad.yaml:3: hosts.0.compute.0.micro_bach is not a key of"),
        (("--numbers", "small.yaml"), "no host has the memory"),
        (("--schedules", "2f2b"), "unknown schedule '2f2b'; known: gpipe, 1f1b"),
        (("--codecs", "zip"), "--codec: "),
        (("--stages", "4"), "4 stages need 4 hosts, the numbers have 3"),
    ],
)
def test_mistake_is_one_line(plan, tmp_path, arguments, message):
    (tmp_path / "bad.yaml").write_text("hosts:\n  - name: a\n    compute: [{micro_bach: 2}]\n")
    (tmp_path / "small.yaml").write_text(NUMBERS.replace("4GB", "1kB").split("  - name: host1")[0])
    assert_one_line(plan(SLEEPING, *arguments), 2, message)


@pytest.mark.parametrize(
    ("num_hosts", "message"),
    [(2, "no host host2 in cluster.yaml, which lists host0, host1"), (4, "numbers.yaml has no numbers for host host3")],
)
def test_host_that_only_one_file_knows_is_named(plan, num_hosts, message):
    assert_one_line(plan(listed(num_hosts), numbers=NUMBERS), 2, message)


OWN = """\
# my run
model: {family: gpt2, num_layers: 6, hidden_size: 64, num_heads: 2}   # small
data:
  text: stdlib
  seq_len: 32  # tokens

training:
  steps: 4
  # of all replicas
  global_batch: 8

# at home
emulate: {rate: 100mbit}
wire: paper
"""


@pytest.mark.parametrize("is_planned_twice", [False, True])
def test_written_file_is_the_users_with_the_plan_in_it(tahq, tmp_path, is_planned_twice):
    (tmp_path / "cluster.yaml").write_text(OWN)
    arguments = ("--set", "training.lr=0.002", "--set", "data.seq_len=64")
    assert tahq("tahq", "plan", "cluster.yaml", *arguments, "--write", "planned.yaml")[0] == 0
    if is_planned_twice:
        assert tahq("tahq", "plan", "planned.yaml", "--write", "planned.yaml")[0] == 0
    head, *lines = (tmp_path / "planned.yaml").read_text().splitlines()
    assert head.startswith("# Planned by tahq plan: ")
    kept = [line for line in OWN.splitlines() if "seq_len" not in line and "wire" not in line]
    assert [line for line in lines if line in kept] == kept
    assert "  seq_len: 64  # tokens" in lines
    assert lines[lines.index("  global_batch: 8") + 1].startswith("  micro_batch: ")
    assert len(lines) <= len(OWN.splitlines()) + 5
    config = load_config(tmp_path / "planned.yaml")
    assert (config.training.lr, config.emulate.rate) == (0.002, 1e8)
    assert config.pipeline.layers is not None
