"""Reading cluster.yaml: files, YAML's traps, and `--set`."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cluster_files import EXAMPLES, LEAST, ClusterFile, changed

from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config
from tahq.errors import ConfigError


@pytest.fixture
def file(tmp_path, monkeypatch) -> ClusterFile:
    return ClusterFile(tmp_path, monkeypatch)


def test_open_ports_of_listed_hosts_follow_the_base_port():
    hosts = [{"address": "lab"}, {"address": "127.0.0.1"}, {"address": "lab"}, {"address": "lab", "bind": "[::]:9000"}]
    config = ClusterConfig.model_validate(
        {
            "model": {"family": "llama", "num_layers": 4, "hidden_size": 32, "num_heads": 2},
            "data": {"text": "stdlib"},
            "hosts": hosts,
        }
    )
    assert [config.worker_bind(stage) for stage in range(4)] == [
        "0.0.0.0:7701",
        "0.0.0.0:0",
        "0.0.0.0:7702",
        "[::]:9000",
    ]
    free = config.model_copy(update={"run": config.run.model_copy(update={"base_port": 0})})
    assert free.worker_bind(0) == "0.0.0.0:0"


def test_minimal_configuration_has_defaults_and_is_frozen(file):
    config = file.load(LEAST)
    assert (config.wire.activations, config.emulate.rate, config.hosts) == ("wf:bits=6", 1e8, "local")
    assert config.training.num_micro_batches == 4
    with pytest.raises(ValueError, match="frozen"):
        config.training.steps = 5
    assert file.load(changed("  rate: 100mbit\n", "  # rate: 100mbit\n")).emulate.rate is None


# -- files ---------------------------------------------------------------------------------------


def test_missing_file_folder_binary_or_unreadable_file_is_one_line(tmp_path, monkeypatch):
    def refusal(name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name)
        return str(caught.value)

    (tmp_path / "binary.yaml").write_bytes(b"a: 1\nb: \xff\xfe")
    assert "none.yaml does not exist; write one, or copy one of launch/examples" in refusal("none.yaml")
    assert "is a folder" in refusal(".")
    assert "binary.yaml:2: not UTF-8 text" in refusal("binary.yaml")
    # Tests may run as root, who may read every file.
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert "x.yaml cannot be read: Permission denied" in refusal("x.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", "cluster.yaml is empty; the least it needs are"),
        ("\n- a\n- b\n", "cluster.yaml:2: expected sections such as `model:`, got ['a', 'b']"),
        ("a: 1\nb: [1, 2\n", "cluster.yaml:3: not valid YAML"),
        (changed("  steps: 10", "\tsteps: 10"), "cluster.yaml:10: not valid YAML: a tab"),
        (changed("steps: 10", "steps: 10\n  steps: 11"), "cluster.yaml:11: steps is given twice; the first is in line"),
    ],
)
def test_text_that_is_not_a_configuration_names_the_line(file, text, message):
    assert file.refusal(text).startswith(message)


def test_yaml_1_1_traps_are_read_as_people_mean_them(file):
    text = changed("steps: 10", "steps: 010\n  lr: 1e-3").replace("{name: test}", "{name: no}")
    config = file.load(text, "pipeline.schedule=1f1b", "data.shuffle=off")
    assert (config.training.steps, config.training.lr, config.run.name) == (10, 1e-3, "no")
    assert (config.pipeline.schedule, config.data.shuffle) == ("1f1b", False)
    assert file.load(text, "run.name=300").run.name == "300"


@given(st.lists(st.sampled_from("abdeglmnrst:-[]{},&*!|>'\"%@` \n\t0.#~"), max_size=40).map("".join))
def test_any_file_is_refused_by_name(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"fuzz\.yaml"):
        load_config(path)


@pytest.mark.parametrize(
    ("value", "read"),
    [("50", 50), ("10min", 600.0), ("1.5h", 5400.0), ("600s", 600.0), ("never", "never"), ("null", "never")],
)
def test_checkpoints_follow_steps_or_the_clock(file, value, read):
    every = file.load(LEAST, f"run.checkpoint_every={value}").run.checkpoint_every
    assert (every, type(every)) == (read, type(read))
    assert file.load(LEAST).run.checkpoint_every == 600.0


def test_keys_by_their_old_names_are_read_and_the_later_of_both_names_wins(file):
    old = changed("{name: test}", "{name: test, snapshot_every: 7, keep_snapshots: 3, snapshot_buffers: 1}")
    run = file.load(old).run
    assert (run.checkpoint_every, run.keep_checkpoints, run.checkpoint_buffers) == (7, 3, 1)
    assert file.load(old, "run.checkpoint_every=1h").run.checkpoint_every == 3600.0
    present = changed("{name: test}", "{name: test, checkpoint_every: 7}")
    assert file.load(present, "run.snapshot_every=null").run.checkpoint_every == "never"
    assert file.load(present, "run={snapshot_every: 9}").run.checkpoint_every == 9
    recompute = file.load(LEAST, "training.activation_checkpointing=block", "training.steps=3").memory.recompute
    assert recompute == "block"


# -- --set ---------------------------------------------------------------------------------------

FOUR_HOSTS = changed("hosts: local", "hosts: [{address: a}, {address: b}, {address: c}, {address: d}]")


def test_overrides_are_yaml_and_later_ones_win(file):
    config = file.load(
        *(LEAST, "training.steps=20", "training.steps=30", "training.betas=[0.8, 0.9]", "training.clip_norm=null"),
        *("emulate={delay: 5ms}", "wire.gradients=aqsgd:bits=8,cache=none", "wire.activations=aqsgd:cache=file"),
        *("model.overrides.a.b=5", "data.text=null", "data.tokens=[a.bin]"),
    )
    assert config.training.steps == 30
    assert config.training.betas == (0.8, 0.9)
    assert config.training.clip_norm is None
    assert (config.emulate.rate, config.emulate.delay) == (None, 0.005)
    assert (config.wire.activations, config.wire.gradients) == ("aqsgd:cache=file", "aqsgd:bits=8,cache=none")
    assert config.model.overrides == {"a": {"b": 5}}
    assert config.data.tokens == ["a.bin"]


def test_the_word_paper_stands_for_the_papers_pair(file):
    pair = {"activations": "tah", "gradients": "fixed:bits=8"}
    expected = {**pair, "backend": "auto", "threads": 1, "all_reduce": "fp8"}
    config = file.load(changed("hosts: local", "wire: paper"))
    assert config.wire.model_dump(exclude_none=True) == expected
    assert file.load(LEAST, "wire=paper") == config
    more_threads = file.load(LEAST, "wire=paper", "wire.threads=2").wire
    assert more_threads.model_dump(exclude_none=True) == expected | {"threads": 2}
    raw_first = changed("hosts: local", "wire: {activations: raw, gradients: raw}")
    assert file.load(raw_first, "wire=paper") == config


@pytest.mark.parametrize(
    ("inside", "emulate", "hosts", "expected"),
    [
        ("gloo", "", "local", ["gloo", "gloo", "gloo"]),
        ("zmq", "rate: 1mbit", "local", ["zmq", "zmq", "zmq"]),
        ("nccl", "", "[{address: a, site: x}, {address: b, site: x}, {address: c}, {address: d}]", ["nccl"]),
        ("gloo", "hosts: {host0: {site: x}, host2: {site: y}, host3: {site: y}}", "namespaces", ["zmq", "zmq", "gloo"]),
    ],
)
def test_links_between_hosts_of_one_site_have_the_sites_transport(file, inside, emulate, hosts, expected):
    keys = f"emulate: {{{emulate}}}\nlinks: {{inside: {inside}}}\nhosts: {hosts}"
    config = file.load(changed("emulate:\n  rate: 100mbit\nhosts: local", keys))
    transports = [config.transport_between(stage, stage + 1) for stage in range(3)]
    assert transports == [*expected, *["zmq"] * (3 - len(expected))]


def test_override_names_list_entries_by_index(file):
    assert file.load(FOUR_HOSTS, "hosts.1.device=cpu").hosts[1].device == "cpu"
    with_list = ("hosts=[{address: a}, {address: b}]", "pipeline.stages=2", "hosts.0.address=c")
    assert [host.address for host in file.load(LEAST, *with_list).hosts] == ["c", "b"]


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        (FOUR_HOSTS, "hosts.4.device=cpu", "hosts has the entries 0 to 3; got 4"),
        (FOUR_HOSTS, "hosts.-1.device=cpu", "hosts has the entries 0 to 3; got -1"),
        (LEAST, "training.steps.x=1", "training.steps is 10, which has no keys"),
        (LEAST, "training.steps=", "no value after =; write null for none, or '\"\"' for an empty text"),
        (LEAST, "training.steps", "expected section.key=value, such as training.steps=100"),
        (LEAST, "=5", "expected section.key=value"),
        (LEAST, "training.lr=[1", "not valid YAML: expected"),
        (LEAST, "training.lr={a: 1, a: 2}", "a is given twice; the first is in line 1 (in the value)"),
        (LEAST, "training=null", "training: expected keys and values; got nothing (null)"),
    ],
)
def test_wrong_override_is_named(file, text, override, message):
    assert file.refusal(text, override).startswith(f"--set {override}: {message}")


@pytest.mark.parametrize(
    ("override", "place", "message"),
    [
        ("training.global_batch=9", "cluster.yaml:9", "training: global_batch 9 is not divisible by micro_batch 2"),
        (
            *("data.tokens=a.bin", "cluster.yaml:7"),
            "data: needs exactly one of text, tokens, records; got text and tokens; null takes one away",
        ),
    ],
)
def test_override_that_contradicts_the_file_is_named_beside_the_line(file, override, place, message):
    assert file.refusal(LEAST, override) == f"{place} (changed by --set {override}): {message}"


@settings(max_examples=15)
@given(st.text(max_size=30))
def test_any_override_is_taken_or_refused_by_name(override):
    try:
        result = load_config(EXAMPLES / "minimal.yaml", [override])
    except ConfigError as error:
        result = str(error)
    assert isinstance(result, ClusterConfig) or " ".join(override.splitlines()) in result


# -- run.trace_steps -----------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "traced"), [("[2, 4]", [2, 3, 4]), ("3", [3]), ("null", [])])
def test_traced_steps_are_the_first_to_the_last_from_one(file, text, traced):
    run = file.load(LEAST, f"run.trace_steps={text}").run
    assert [step + 1 for step in range(6) if run.is_traced(step)] == traced


@pytest.mark.parametrize("text", ["[4, 2]", "0", "[3]", "[true, 2]", "[1, 2, 3]", "2.5", "ten", "true"])
def test_malformed_trace_steps_are_refused(file, text):
    takes = r"run\.trace_steps: expected a step, such as 10, or the first and the last, such as \[10, 12\]; got "
    with pytest.raises(ConfigError, match=takes):
        file.load(LEAST, f"run.trace_steps={text}")
