"""`tahq plan` as its user meets it: the report, the file it writes, and one line for each mistake."""

import json
import sys

import pytest
from support.cluster_files import EXAMPLES
from support.runs import tiny, write_config

from tahq.config.file import load_config
from tahq.units import WRITTEN_BY_HAND
from tahq_launch import cli

NUMBERS = """\
source: thought up
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
    model={"num_layers": 6, "sleep": {"forward": ["30ms", "10ms", "20ms"], "backward": ["60ms", "20ms", "40ms"]}},
    pipeline={"stages": 3, "layers": [2, 2, 2]},
)
NETWORK = {
    **SLEEPING,
    "hosts": "namespaces",
    "links": {
        "rate": "20mbit",
        "delay": "5ms",
        "hosts": {"host0": {"up": "1mbit"}, "host2": {"site": "far"}},
        "pairs": [{"between": ["host0", "host1"], "delay": "90ms"}, {"between": ["host1", "far"], "rate": "8mbit"}],
    },
}


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """plan(config, "--grid", ...) runs `tahq plan cluster.yaml` inside this process: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured.yaml").write_text(NUMBERS)

    def run(config, *arguments: str) -> tuple[int, str, str]:
        write_config(tmp_path, config)
        monkeypatch.setattr(sys, "argv", ["tahq", "plan", "cluster.yaml", *arguments])
        status = cli.main()
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_report_says_plan_bottleneck_and_what_else_would_give(plan):
    status, out, err = plan(SLEEPING, "--numbers", "measured.yaml", "--grid")
    assert (status, err) == (0, "")
    assert out.startswith("Predicted: ")
    assert "all numbers: measured.yaml (thought up)" in out
    for heading in ("Stages, and the share", "Links: activations", "Bottleneck: ", "Instead (", "stage 0  0F0"):
        assert heading in out
    for question in (
        "cluster.yaml as it is",
        "second best: ",
        "rates twice as high",
        "latency half as long",
        "hosts twice as fast",
    ):
        assert question in out
    assert max(map(len, out.splitlines())) <= 110


def test_json_has_the_figures_of_the_report(plan, tmp_path):
    status, out, _ = plan(SLEEPING, "--numbers", "measured.yaml", "--json", "plan.json", "--stages", "2")
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert status == 0
    assert f"{figures['tokens_per_s']:,.0f} tokens/s" in out
    best = figures["plan"]
    assert len(best["hosts"]) == len(best["layers"]) == len(best["in_flight"]) == 2
    assert sum(best["layers"]) == 6
    assert figures["tokens_per_s"] == pytest.approx(8 * 32 / figures["step_s"])
    assert figures["second_best"]["tokens_per_s"] <= figures["tokens_per_s"] * 1.001
    assert 0 < figures["bottleneck"]["share"] <= 1.001
    assert figures["given"]["hosts"] == ["host0", "host1", "host2"]
    assert figures["given"]["layers"] == [2, 2, 2]
    assert figures["given"]["tokens_per_s"] < figures["tokens_per_s"]


def test_written_file_has_the_plan_in_it(plan, tmp_path):
    status, out, err = plan(NETWORK, "--write", "planned.yaml", "--json", "plan.json")
    assert (status, err) == (0, "")
    assert "written to planned.yaml" in out
    best = json.loads((tmp_path / "plan.json").read_text())["plan"]
    planned = load_config(tmp_path / "planned.yaml")
    assert planned.pipeline.stages == len(best["hosts"])
    assert planned.pipeline.layers == best["layers"]
    assert planned.pipeline.schedule == best["schedule"]
    assert planned.training.micro_batch == best["micro_batch"]
    # what the file's own schedule holds at most is what the plan says
    actions = planned.pipeline.actions(planned.training.num_micro_batches)
    assert [actions.max_in_flight(stage) for stage in range(planned.pipeline.stages)] == best["in_flight"]
    # 15, 5 and 10 ms a layer for micro-batches of two samples
    each = {"host0": 0.015, "host1": 0.005, "host2": 0.01}
    scale = best["micro_batch"] / 2
    expected = [each[name] * layers * scale for name, layers in zip(best["hosts"], best["layers"], strict=True)]
    assert planned.model.sleep.forward == pytest.approx(expected)
    assert planned.model.sleep.backward == pytest.approx([2 * seconds for seconds in expected])


def test_hosts_of_namespaces_take_their_network_along(plan, tmp_path):
    # three stages, so that all hosts are in it; host0, whose uplink is slow, sends least as the last one
    status, _, _ = plan(NETWORK, "--stages", "3", "--write", "planned.yaml", "--json", "plan.json")
    assert status == 0
    hosts = json.loads((tmp_path / "plan.json").read_text())["plan"]["hosts"]
    place = {name: f"host{stage}" for stage, name in enumerate(hosts)}
    links = load_config(tmp_path / "planned.yaml").links.model_dump(mode="json", context=WRITTEN_BY_HAND)
    assert links["hosts"][place["host0"]]["up"] == "1mbit"
    assert links["hosts"][place["host2"]]["site"] == "far"
    assert {frozenset(pair["between"]) for pair in links["pairs"]} == {
        frozenset((place["host0"], place["host1"])),
        frozenset((place["host1"], "far")),
    }


def test_planning_a_planned_file_changes_nothing_that_matters(plan, tmp_path):
    plan(NETWORK, "--stages", "3", "--write", "planned.yaml", "--json", "first.json")
    first = json.loads((tmp_path / "first.json").read_text())
    config = (tmp_path / "planned.yaml").read_text()
    (tmp_path / "again").mkdir()
    (tmp_path / "again.yaml").write_text(config)
    sys.argv = ["tahq", "plan", "again.yaml", "--stages", "3", "--json", "second.json"]
    assert cli.main() == 0
    second = json.loads((tmp_path / "second.json").read_text())
    assert second["tokens_per_s"] == pytest.approx(first["tokens_per_s"], rel=0.01)


def test_numbers_are_estimated_where_none_are_given(plan):
    status, out, _ = plan(tiny(links={"rate": "100mbit"}, pipeline={"stages": 2}))
    assert status == 0
    assert "compute: multiply-adds counted, ASSUMED" in out
    assert "memory: not known" in out
    status, out, _ = plan(SLEEPING)
    assert "compute: cluster.yaml's model.sleep" in out
    assert status == 0


def test_codecs_may_be_chosen(plan, tmp_path):
    status, out, _ = plan(
        NETWORK, "--stages", "3", "--codecs", "ladder", "--json", "plan.json", "--write", "planned.yaml"
    )
    best = json.loads((tmp_path / "plan.json").read_text())["plan"]
    assert status == 0
    assert all(codec.startswith(("raw", "fixed", "wf", "tah")) for codec in best["activations"])
    assert all(codec.startswith(("raw", "fixed", "eden")) for codec in best["gradients"])
    written = load_config(tmp_path / "planned.yaml").wire
    assert written.activations in best["activations"]
    assert ("note: wire.activations" in out) == (len(set(best["activations"])) > 1)


def test_interleaved_plans_list_the_layers_of_chunks(plan, tmp_path):
    status, _, err = plan(NETWORK, "--schedules", "interleaved", "--stages", "2", "--write", "planned.yaml")
    assert (status, err) == (0, "")
    pipeline = load_config(tmp_path / "planned.yaml").pipeline
    assert (pipeline.schedule, pipeline.chunks, len(pipeline.layers), sum(pipeline.layers)) == ("interleaved", 2, 4, 6)


def test_micro_batches_that_were_not_measured_are_named(plan):
    _, out, _ = plan(
        SLEEPING, "--numbers", "measured.yaml", "--set", "training.global_batch=3", "--set", "training.micro_batch=1"
    )
    assert "is reckoned from those of 2" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--numbers", "nowhere.yaml"), "nowhere.yaml cannot be read"),
        (("--numbers", "bad.yaml"), "bad.yaml:3: hosts.0.compute.0.micro_bach is not a key of"),
        (("--schedules", "2f2b"), "unknown schedule '2f2b'; known: gpipe, 1f1b"),
        (("--codecs", "zip"), "--codecs: "),
        (("--stages", "4"), "4 stages need 4 hosts, the numbers have 3"),
        (("--json", "none/plan.json"), "none/plan.json cannot be written"),
        (("--max-replicas", "0"), "--max-replicas"),
    ],
)
def test_mistakes_are_one_line(plan, tmp_path, arguments, message):
    (tmp_path / "bad.yaml").write_text("hosts:\n  - name: a\n    compute: [{micro_bach: 2}]\n")
    status, _, err = plan(SLEEPING, *arguments)
    assert status == 2
    assert err.count("\n") == 1
    assert message in err


def test_hosts_that_only_one_file_knows(plan):
    hosts = [{"address": f"192.0.2.{index}"} for index in (1, 2)]
    listed = tiny(pipeline={"stages": 2}) | {"hosts": hosts, "run": {"name": "x", "bind": "0.0.0.0:7700"}}
    status, _, err = plan(listed, "--numbers", "measured.yaml")
    assert (status, "measured.yaml: no host host0 in cluster.yaml, which lists 192.0.2.1, 192.0.2.2" in err) == (
        2,
        True,
    )


def test_hosts_without_numbers_are_named(plan, tmp_path):
    hosts = [{"address": f"host{index}"} for index in range(4)]
    listed = tiny() | {"hosts": hosts, "run": {"name": "x", "bind": "0.0.0.0:7700"}}
    status, _, err = plan(listed, "--numbers", "measured.yaml")
    assert (status, "measured.yaml has no numbers of host host3" in err) == (2, True)


def test_listed_hosts_are_written_in_the_plans_order(plan, tmp_path):
    hosts = [{"address": f"host{index}", "device": "cpu"} for index in range(3)]
    listed = tiny(pipeline={"stages": 3}) | {"hosts": hosts, "run": {"name": "x", "bind": "0.0.0.0:7700"}}
    status, _, err = plan(listed, "--numbers", "measured.yaml", "--write", "planned.yaml", "--json", "plan.json")
    assert (status, err) == (0, "")
    best = json.loads((tmp_path / "plan.json").read_text())["plan"]
    assert [host.address for host in load_config(tmp_path / "planned.yaml").hosts] == best["hosts"]


def test_links_are_written_with_as_many_connections_as_the_plan_reckons_with(plan, tmp_path):
    several = NUMBERS.replace("rate: 5mbit,", "rate: 5mbit, connections: 4,")
    (tmp_path / "several.yaml").write_text(several)
    arguments = ("--numbers", "several.yaml", "--write", "planned.yaml", "--json", "plan.json", "--stages", "3")
    status, _, err = plan(SLEEPING, *arguments)
    hosts = json.loads((tmp_path / "plan.json").read_text())["plan"]["hosts"]
    beside = abs(hosts.index("host1") - hosts.index("host2")) == 1
    assert (status, err) == (0, "")
    assert load_config(tmp_path / "planned.yaml").links.connections == (4 if beside else 1)


def test_codecs_that_take_their_times_from_others_are_named(plan, tmp_path):
    times = "codecs: {wf:bits=4: {encode_per_element: 1.0e-8, decode_per_element: 1.0e-8}}\n    compute"
    (tmp_path / "coded.yaml").write_text(NUMBERS.replace("compute", times))
    _, out, _ = plan(SLEEPING, "--numbers", "coded.yaml", "--codecs", "wf:bits=3", "--stages", "2")
    taken = "wf:bits=3,group=128,center=on was not measured on every host: there it is taken to be as slow as wf:bits=4"
    assert taken in out


def test_every_replica_is_told_whole(plan, tmp_path):
    one = "  - {name: NAME, up: 1gbit, compute: [{micro_batch: 2, block_forward: 0.4, block_backward: 0.8}]}\n"
    (tmp_path / "four.yaml").write_text("hosts:\n" + "".join(one.replace("NAME", name) for name in "abcd"))
    arguments = ("--numbers", "four.yaml", "--stages", "2", "--max-replicas", "2", "--json", "plan.json")
    status, out, err = plan(SLEEPING, *arguments)
    assert (status, err) == (0, "")
    replicas = json.loads((tmp_path / "plan.json").read_text())["replicas"]
    assert [each["hosts"] for each in replicas["plans"]] == replicas["hosts"]
    assert [sum(each["layers"]) for each in replicas["plans"]] == [6, 6]
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("0  ", "1  ")) and "+" in line]
    assert [row[3] for row in rows[-2:]] == ["+".join(map(str, each["layers"])) for each in replicas["plans"]]


def test_a_file_that_does_not_fit_is_compared_with_a_word(plan, tmp_path):
    # four micro-batches of two samples in flight on the first stage
    (tmp_path / "tight.yaml").write_text(NUMBERS.replace("4GB", "5MB"))
    status, out, _ = plan({**SLEEPING, "pipeline": {"stages": 3, "schedule": "gpipe"}}, "--numbers", "tight.yaml")
    assert status == 0
    assert "cluster.yaml as it is, did it fit: host0 needs " in out


def test_no_memory_for_anything(plan, tmp_path):
    (tmp_path / "small.yaml").write_text(
        NUMBERS.replace("up: 10mbit", "up: 10mbit").replace("4GB", "1kB").split("  - name: host1")[0]
    )
    status, _, err = plan(SLEEPING, "--numbers", "small.yaml")
    assert (status, "no host has the memory" in err) == (2, True)


def test_the_example_of_the_docs_is_what_is_printed(monkeypatch, capsys):
    root = EXAMPLES.parents[1]
    monkeypatch.chdir(root)
    shown = (root / "docs/planner.md").read_text().partition("$ tahq plan ")[2].partition("```")[0]
    command, _, expected = shown.partition("\n")
    monkeypatch.setattr(sys, "argv", ["tahq", "plan", *command.split()])
    assert cli.main() == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == expected.splitlines()
