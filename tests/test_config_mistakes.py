"""Every mistake in cluster.yaml is one line that names file, line, key, what was got and what was expected."""

import pytest
from support.cluster_files import LEAST, ClusterFile, changed

from tahq.config.file import load_config
from tahq.errors import UserError, message_of
from tahq_launch.start.resolution import resolve_for_run


@pytest.fixture
def file(tmp_path, monkeypatch) -> ClusterFile:
    return ClusterFile(tmp_path, monkeypatch)


def _inside(key: str, new: str) -> tuple[str, str]:
    """A line after `key: …`, one section deep."""
    line = next(line for line in LEAST.splitlines() if line.strip().startswith(f"{key}:"))
    return line, f"{line}\n  {new}"


UNKNOWN = [
    ("micro_batch", "micro_bach", 12, "training.micro_bach is not a key of training; did you mean micro_batch?"),
    ("training:", "trainig:", 9, "trainig is not a section of a configuration; did you mean training?"),
    (*_inside("text", "lr: 1"), 9, "data.lr is not a key of data; did you mean training.lr?"),
    (*_inside("text", "zzz: 1"), 9, "data.zzz is not a key of data; known are text, tokens, tokens_dtype, jsonl"),
    (
        *("hosts: local", "hosts:\n- address: a\n- adress: b"),
        *(17, "hosts.1.adress is not a key of hosts.1; did you mean address?"),
    ),
]

MISTYPED = [
    ("steps: 10", "steps: ten", 10, "training.steps: expected a whole number; got 'ten'"),
    ("steps: 10", "steps: 10.5", 10, "training.steps: expected a whole number; got 10.5"),
    ("steps: 10", "steps: [10]", 10, "training.steps: expected a whole number; got a list of 1"),
    ("steps: 10", "steps: {a: 1}", 10, "training.steps: expected a whole number; got keys and values (a)"),
    ("steps: 10", "steps: true", 10, "training.steps: expected a number; got true"),
    (
        *_inside("steps", "activation_checkpointing: true"),
        *(11, "training.activation_checkpointing: expected none or block; got true"),
    ),
    ("stdlib", "true", 8, "data.text: expected text (put it in quotes) or a list; got true"),
    (*_inside("rate", "delay: true"), 15, "links.delay: expected a number; got true"),
    (*_inside("steps", "lr: .nan"), 11, "training.lr: expected a finite number; got nan"),
    (*_inside("steps", "betas: [0.9]"), 11, "training.betas: expected 2 or more entries; got fewer"),
    (*_inside("steps", "betas: [0, 0, 0]"), 11, "training.betas: expected at most 2 entries; got a list of 3"),
    ("stdlib", "5", 8, "data.text: expected text (put it in quotes) or a list; got 5"),
    ("stdlib", "[a, 5]", 8, "data.text.1: expected text (put it in quotes); got 5"),
    (*_inside("text", "shuffle: maybe"), 9, "data.shuffle: expected true or false; got 'maybe'"),
    ("{name: test}", "{name: 5}", 1, "run.name: expected text (put it in quotes); got 5"),
    ("{name: test}", "[name]", 1, "run: expected keys and values; got a list of 1"),
    ("hosts: local", "hosts: lokal", 15, "hosts: expected local or namespaces; got 'lokal'"),
    ("100mbit", "100", 14, "links.rate: a rate needs a unit, such as 100mbit; got 100"),
    ("100mbit", "1.5", 14, "links.rate: a quantity needs a unit, such as 100mbit or 20ms; got 1.5"),
    ("100mbit", "100mb", 14, "links.rate: a rate must be like 100mbit (units: bit, kbit, mbit, gbit); got '100mb'"),
]

OUT_OF_RANGE = [
    ("steps: 10", "steps: 0", 10, "training.steps: expected 1 or more; got 0"),
    (*_inside("steps", "lr: -1"), 11, "training.lr: expected more than 0.0; got -1"),
    (*_inside("steps", "betas: [0.9, 1]"), 11, "training.betas.1: expected less than 1.0; got 1"),
    (*_inside("steps", "optimizer: adam"), 11, "training.optimizer: expected adamw, sgd, ema_sgd, "),
    ("stdlib", "[]", 8, "data.text: expected a path or a list of paths and globs; got []"),
    ("stdlib", "''", 8, "data.text: expected a path or a list of paths and globs; got ''"),
    (*_inside("text", "tokenizer: ''"), 9, "data.tokenizer: expected text that is not empty; got ''"),
    (*_inside("rate", "piece: 1KiB"), 15, "links.piece: expected 4KiB or more; got '1KiB'"),
    (*_inside("rate", "delay: 5min"), 15, "links.delay: expected at most 60s; got '5min'"),
    ("{name: test}", "{name: ../x}", 1, "run.name: expected at most 100 letters, digits, dots, dashes, underscores"),
    ("{name: test}", "{seed: -1}", 1, "run.seed: expected 0 or more; got -1"),
    ("{name: test}", "{copies: 2}", 1, "run.copies: expected at most 1; got 2"),
    ("{name: test}", "{copy_rate: 5kbit}", 1, "run.copy_rate: expected 10kbit or more; got '5kbit'"),
    ("{name: test}", "{peer_timeout: 0}", 1, "run.peer_timeout: expected 0.1s or more; got 0"),
    ("{name: test}", "{join_timeout: 0s}", 1, "run.join_timeout: expected more than 0s; got '0s'"),
    (
        *_inside("num_heads", "sleep: {forward: [], backward: 1ms}"),
        *(7, "model.sleep.forward: expected 1 or more entries; got a list of 0"),
    ),
    (*_inside("rate", "piece: 2MiB"), 15, "links.piece: expected at most 1MiB; got '2MiB'"),
    ("{name: test}", "{device: gpu}", 1, "run.device: expected auto, cpu, cuda or cuda:N; got 'gpu'"),
    ("{name: test}", "{bind: localhost}", 1, "run.bind: expected host:port, such as 0.0.0.0:7000 or [::1]:7000"),
    ("{name: test}", "{bind: 'a:70000'}", 1, "run.bind: expected host:port"),
    ("{name: test}", "{advertise: 'a:0'}", 1, "run.advertise: peers dial this address, so it needs the real port"),
    ("hosts: local", "hosts: []", 15, "hosts: expected 1 or more entries; got a list of 0"),
    (*_inside("rate", "up: 5kbit"), 15, "links.up: expected 10kbit or more; got '5kbit'"),
    (*_inside("rate", "loss: 2"), 15, "links.loss: expected at most 1.0; got 2"),
    (*_inside("rate", "backend: magic"), 15, "links.backend: expected auto, kernel or tun; got 'magic'"),
    (*_inside("rate", "backend: relay"), 15, "links.backend: the backend relay was removed; run as root with auto"),
    (*_inside("rate", "hosts: {host1: {delay: 5min}}"), 15, "links.hosts.host1.delay: expected at most 60s"),
    (*_inside("rate", "hosts: {host1: {upp: 1mbit}}"), 15, "links.hosts.host1.upp is not a key of links.hosts.host1"),
    (*_inside("rate", "pairs: [{between: [a]}]"), 15, "links.pairs.0.between: expected 2 or more entries; got fewer"),
    (*_inside("rate", "pairs: [{between: [a b, c]}]"), 15, "links.pairs.0.between.0: expected at most 32 letters"),
    ("hosts: local", "hosts:\n- address: a:5", 16, "hosts.0.address: expected a host name or an IP address"),
    ("hosts: local", "hosts:\n- {address: a, ssh: -oX}", 16, "hosts.0.ssh: expected [user@]host for ssh; got '-oX'"),
    (
        "hosts: local",
        "hosts:\n- {address: a, ssh: b, env: {A=B: c}}",
        16,
        "hosts.0.env.A=B: expected the name of an env",
    ),
    ("hosts: local", "hosts:\n- {address: a, advertise: b}", 16, "hosts.0.advertise: expected host:port"),
    ("hosts: local", "wire: papers", 15, "wire: expected keys and values, or the word paper; got 'papers'"),
    ("hosts: local", "wire: [paper]", 15, "wire: expected keys and values; got a list of 1"),
    ("hosts: local", "wire:\n  backend: gpu", 16, "wire.backend: expected auto, reference, cpu or triton; got 'gpu'"),
    ("hosts: local", "wire:\n  threads: 0", 16, "wire.threads: expected 1 or more; got 0"),
    (
        "hosts: local",
        "wire:\n  gradients: tah:alloc=64",
        16,
        "wire.gradients does not fit model.hidden_size 32: tah:group=64,int4=0.8,tau=2,low=3,high=4,alloc=64: "
        "alloc=64 does not fit 32 channels",
    ),
    ("hosts: local", "wire: {gradients: fixd}", 15, "wire.gradients: codec spec 'fixd': no codec 'fixd'"),
    ("gpt2", "gpt3", 3, "model.family: expected gpt2, llama, qwen2, qwen3 or mistral; got 'gpt3'"),
    (*_inside("family", "overrides: {a: [1, .nan]}"), 4, "model.overrides: numbers must be finite; got nan"),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), [*UNKNOWN, *MISTYPED, *OUT_OF_RANGE])
def test_mistake_names_line_key_and_what_was_expected(file, old, new, line, message):
    assert file.refusal(changed(old, new)).startswith(f"cluster.yaml:{line}: {message}")


CONTRADICTIONS = [
    (
        *("rate: 100mbit", "cap_up: 60%"),
        *(
            14,
            "links.cap_up: 60% is a share of a rate, and with hosts: local no rate is known; set links.rate, or give",
        ),
    ),
    ("global_batch: 8", "global_batch: 9", 9, "training: global_batch 9 is not divisible by micro_batch 2"),
    (*_inside("steps", "epochs: 1"), 9, "training: needs exactly one of steps and epochs"),
    (*_inside("steps", "min_lr: 1"), 9, "training: min_lr 1.0 is above lr 0.001"),
    (*_inside("steps", "warmup_steps: 11"), 9, "training: warmup_steps 11 do not fit into steps 10"),
    (
        *_inside("steps", "lr_schedule: wsd\n  warmup_steps: 5\n  decay_steps: 6"),
        *(9, "training: warmup_steps 5 and decay_steps 6 do not fit into steps 10"),
    ),
    (*_inside("text", "jsonl: b"), 7, "data: needs exactly one of text, tokens, jsonl; got text and jsonl; null takes"),
    ("text: stdlib", "seq_len: 5", 7, "data: needs exactly one of text, tokens, jsonl; got none"),
    ("family: gpt2", "path: folder", 2, "model: with a path the folder's config.json gives num_layers, hidden_size"),
    ("family: gpt2", "dropout: 0", 2, "model: needs family, or a path to a folder with config.json and safetensors"),
    (*_inside("num_heads", "max_seq_len: 99"), 8, "data.seq_len 256 is longer than model.max_seq_len 99"),
    (*_inside("num_heads", "vocab_size: 100"), 7, "model.vocab_size 100 is below the 256 tokens of data.tokenizer"),
    (
        *("hosts: local", "pipeline:\n  layers: [1, 1, 1, 2]"),
        *(16, "pipeline.layers [1, 1, 1, 2] adds up to 5 layers, model.num_layers is 4"),
    ),
    ("hosts: local", "pipeline:\n  stages: 5", 16, "pipeline.stages 5 is above model.num_layers 4"),
    ("hosts: local", "pipeline:\n  layers: [1, 3]", 15, "pipeline: layers lists 2 stages, stages is 4"),
    ("hosts: local", "hosts: [{address: a}]", 15, "hosts lists 1 machines, pipeline.stages is 4"),
    ("hosts: local", "hosts:\n- {address: a, env: {A: b}}", 16, "hosts.0: ssh_options, env and workdir are for hosts"),
    (
        "100mbit",
        "100kbit",
        13,
        "links: a peer would look lost: a round trip takes 0 s and a piece of 262 kB takes 21 s",
    ),
    (*_inside("rate", "delay: 5s"), 13, "links: a peer would look lost: a round trip takes 10 s"),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), CONTRADICTIONS)
def test_contradiction_names_the_line_to_look_at(file, old, new, line, message):
    text = changed(old, new)
    if "max_seq_len" in new:
        text = text.replace("text: stdlib", "seq_len: 256\n  text: stdlib")
        line += 1
    assert file.refusal(text).startswith(f"cluster.yaml:{line}: {message}")


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ("hosts: {host4: {}}", "links.hosts: unknown host host4; expected host0, host1, host2, host3"),
        (
            "hosts: {host1: {site: a}}, pairs: [{between: [a, b]}]",
            "links.pairs: unknown host or site 'b'; expected host0",
        ),
        ("pairs: [{between: [host1, host1]}]", "links.pairs: expected two different hosts; got host1 twice"),
        ("profile: cable, delay: 5ms", "links: profile cable also sets the network's delay; remove one of them"),
        ("hosts: {host1: {delay: 6s}}", "links: a peer would look lost: a round trip takes 12 s"),
        (
            "hosts: {host1: {up: 100kbit}}",
            "links: a peer would look lost: a round trip takes 0 s and a piece of 262 kB takes",
        ),
    ],
)
def test_network_that_contradicts_itself_is_refused(file, links, message):
    text = LEAST.replace("links:\n  rate: 100mbit\nhosts: local", f"links: {{{links}}}\nhosts: namespaces")
    assert file.refusal(text).startswith(f"cluster.yaml:13: {message}")


def test_key_of_namespaces_is_refused_where_nothing_could_enforce_it(file):
    for hosts, what in (("local", "local"), ("[{address: a}, {address: b}, {address: c}, {address: d}]", "a list")):
        text = changed("hosts: local", f"  loss: 0.01\nhosts: {hosts}")
        message = file.refusal(text)
        assert message.startswith("cluster.yaml:15: links.loss is for hosts: namespaces")
        assert f"with hosts: {what} only rate, delay and piece can be enforced" in message


FOUR_AT_HOME = "hosts: [{address: a, site: x}, {address: b, site: x}, {address: c}, {address: d}]"


@pytest.mark.parametrize(
    ("links", "hosts", "message"),
    [
        ("rate: 100mbit", "hosts: local", "links.rate and links.delay are enforced on ZMQ links only"),
        ("delay: 5ms", FOUR_AT_HOME, "links.rate and links.delay are enforced on ZMQ links only"),
        (
            "cap_up: 1mbit",
            "hosts: local",
            "links.cap_up is enforced on ZMQ links only, and stage 0 has a link inside its site",
        ),
        (
            "cap_down: 50%",
            FOUR_AT_HOME.replace("a, site: x", "a").replace("{address: c}", "{address: c, site: x}"),
            "links.cap_down is enforced on ZMQ links only, and stage 1 has a link inside its site",
        ),
        (
            "delay: 0",
            FOUR_AT_HOME.replace("b, site: x", "b, site: x, cap_up: 1mbit"),
            "hosts.1.cap_up is enforced on ZMQ links only, and stage 1 has a link inside its site",
        ),
        (
            "hosts: {host0: {site: x}, host1: {site: x}}, cap_up: 1mbit",
            "hosts: namespaces",
            "links.cap_up is enforced on ZMQ links only, and stage 0 has a link inside its site",
        ),
        ("rate: 1gbit", "hosts: namespaces", "no two neighbours are of one site (set site under links.hosts)"),
        (
            "delay: 0",
            FOUR_AT_HOME.replace("b, site: x", "b"),
            "no two neighbours are of one site (set site under hosts)",
        ),
    ],
)
def test_group_inside_a_site_that_cannot_be_is_refused(file, links, hosts, message):
    text = LEAST.replace("links:\n  rate: 100mbit\nhosts: local", f"links: {{inside: gloo, {links}}}\n{hosts}")
    assert f"links.inside: gloo: {message}; use links.inside: zmq" in file.refusal(text)


def test_cap_of_a_host_without_a_group_goes_with_groups_elsewhere(file):
    hosts = FOUR_AT_HOME.replace("{address: d}", "{address: d, cap_up: 1mbit}")
    text = LEAST.replace("links:\n  rate: 100mbit\nhosts: local", f"links: {{inside: gloo}}\n{hosts}")
    config = file.load(text)
    assert [config.has_group(stage) for stage in range(4)] == [True, True, False, False]


def test_evaluation_without_validation_samples_is_refused(file):
    text = changed("stdlib", "stdlib\n  validation: 0").replace("steps: 10", "steps: 10\n  eval_every: 5")
    assert file.refusal(text) == (
        "cluster.yaml:12: training.eval_every needs validation samples, but data.validation is 0"
    )


@pytest.mark.parametrize(
    ("removed", "replacement"),
    [("bnb_adamw8bit", "adamw8bit"), ("torchao_adamw8bit", "adamw8bit"), ("torchao_adamw_fp8", "fp8_adamw")],
)
def test_removed_optimizer_is_refused_with_its_replacement(file, removed, replacement):
    assert file.refusal(changed("steps: 10", f"steps: 10\n  optimizer: {removed}")) == (
        f"cluster.yaml:11: training.optimizer: {removed} was removed, because its states cannot be checkpointed; "
        f"use {replacement}"
    )


@pytest.mark.parametrize("optimizer", ["qgalore", "galore"])
def test_fp8_flow_over_low_rank_weights_is_refused(file, optimizer):
    text = changed("hosts: local", "memory: {activations: coat}")
    text = text.replace("family: gpt2", "family: llama").replace("steps: 10", f"steps: 10\n  optimizer: {optimizer}")
    refusal = file.refusal(text)
    assert "memory.activations: coat needs whole weights to code in FP8" in refusal
    assert f"training.optimizer {optimizer} stores those of attention and MLP in another form" in refusal


def test_contradiction_with_a_default_names_the_file(file):
    assert file.refusal(changed("num_layers: 4", "num_layers: 3")).startswith(
        "cluster.yaml: pipeline.stages 4 is above model.num_layers 3"
    )


def test_section_that_is_missing_is_named(file):
    text = "model: {path: x}\ntraining: {steps: 1}"
    assert file.refusal(text) == "cluster.yaml: data is missing; a run needs this section"


def test_key_that_is_missing_is_named(file):
    assert (
        file.refusal(changed("hosts: local", "hosts: [{device: cpu}]")) == "cluster.yaml:15: hosts.0.address is missing"
    )


def test_misspelt_key_comes_before_what_it_leaves_missing(file):
    assert file.refusal(changed("training:", "trainig:")).endswith("did you mean training? (and 1 more: training)")


def test_several_mistakes_are_one_line_with_the_first_in_full(file):
    text = changed("steps: 10", "steps: ten").replace("num_heads: 2", "num_heads: 0").replace("stdlib", "5")
    assert file.refusal(text) == (
        "cluster.yaml:6: model.num_heads: expected 1 or more; got 0 "
        "(and 2 more: data.text in line 8, training.steps in line 10)"
    )


def test_many_mistakes_are_counted(file):
    message = file.refusal(LEAST + "".join(f"k{i}: 1\n" for i in range(7)))
    assert message.startswith("cluster.yaml:16: k0 is not a section")
    assert message.endswith("(and 6 more: k1 in line 17, k2 in line 18, k3 in line 19, k4 in line 20, …)")


def test_long_value_is_shortened(file):
    assert len(file.refusal(changed("steps: 10", f"steps: {'x' * 5000}"))) < 200


@pytest.mark.parametrize("key", ["run.name", "run.bind", "links.rate", "wire.activations", "data.tokenizer", "x"])
def test_values_of_any_length_are_cut_in_messages(tmp_path, key):
    value = "a " * 100_000
    path = tmp_path / "cluster.yaml"
    path.write_text("model: {family: gpt2}\ndata: {text: stdlib}\ntraining: {steps: 1, global_batch: 1}\n")
    with pytest.raises(UserError) as refused:
        resolve_for_run(load_config(path, [f"{key}={value}"]))
    assert len(message_of(refused.value)) < 5000
