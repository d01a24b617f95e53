"""`emulate:`, and the places where its keys were before."""

import pytest
from support.cluster_files import LEAST, ClusterFile

from tahq.config.file import dump_yaml
from tahq.pipeline.checkpoint.resume import compare_configs

SLEEP = "{forward: 5ms, backward: 10ms}"
NEW = LEAST.replace("emulate:\n  rate: 100mbit\n", f"emulate: {{rate: 100mbit, delay: 5ms, sleep: {SLEEP}}}\n")
OLD = LEAST.replace("emulate:\n  rate: 100mbit\n", "links:\n  rate: 100mbit\n  delay: 5ms\n").replace(
    "data:\n", f"  sleep: {SLEEP}\ndata:\n"
)


@pytest.fixture
def file(tmp_path, monkeypatch):
    return ClusterFile(tmp_path, monkeypatch)


def test_former_places_mean_the_same(file):
    config = file.load(NEW)
    assert file.load(OLD) == config
    assert file.load(LEAST, "links.delay=5ms", f"model.sleep={SLEEP}") == config
    assert file.load(LEAST, "emulate.delay=5ms", "emulate.sleep.forward=5ms", "model.sleep.backward=10ms") == config
    assert "\nemulate:\n  rate: 100mbit\n  delay: 5ms\n" in dump_yaml(config)


def test_override_of_the_whole_former_section_replaces_the_network_as_before(file):
    config = file.load(NEW, "hosts=namespaces", "links={profile: cable, cap_up: 20mbit}")
    assert (config.emulate.profile, config.emulate.rate, config.links.cap_up) == ("cable", None, 2e7)
    assert config.emulate.sleep is not None
    assert file.load(NEW, "links={cap_up: 20mbit}").emulate.rate == 1e8
    assert file.load(LEAST, "links={rate: 1mbit}", "links.rate=2mbit").emulate.rate == 2e6
    training = "training={steps: 1, global_batch: 8, micro_batch: 2, report_to: tensorboard}"
    assert file.load(LEAST, "memory.recompute=block", training).memory.recompute == "block"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (LEAST, ("links=fast",), "--set links=fast: links: expected keys and values"),
        ("emulate: fast\n" + OLD, ("links={rate: 1mbit}",), "--set links={rate: 1mbit}: links.rate is not a key"),
        (OLD.replace("5ms\n", "5min\n"), (), "cluster.yaml:16: emulate.delay: expected at most 60s; got '5min'"),
        (LEAST, ("links={delay: 5}",), "--set links={delay: 5}: emulate.delay: a duration needs a unit"),
        (
            LEAST,
            ("links.hosts.host1.upp=1mbit",),
            "--set links.hosts.host1.upp=1mbit: emulate.hosts.host1.upp is not a",
        ),
    ],
)
def test_mistake_in_a_former_place_names_it_and_the_present_key(file, text, overrides, message):
    assert file.refusal(text, *overrides).startswith(message)


def test_checkpoint_of_a_former_version_continues_exactly_on_another_network(file):
    old = file.load(OLD).model_dump(mode="json")
    emulate = old.pop("emulate")
    old["model"]["sleep"] = emulate.pop("sleep")
    old["links"] |= emulate
    new = file.load(NEW, "emulate.rate=1mbit").model_dump(mode="json")
    report = compare_configs(old, new)
    assert [change.key for change in report.changes] == ["emulate.rate"]
    assert report.exact
    awake = compare_configs(old, file.load(NEW, "emulate.sleep=null").model_dump(mode="json"))
    assert [change.key for change in awake.refused] == ["emulate.sleep.backward", "emulate.sleep.forward"]
