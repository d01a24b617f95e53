"""Every mistake in cluster.yaml is one line that names its place, the key, the value, and what was expected."""

import re
from typing import get_args

import pytest
from support.cluster_files import LEAST, ClusterFile, changed

from tahq.config.cluster import OTHER_NAMES, ClusterConfig


@pytest.fixture
def file(tmp_path, monkeypatch) -> ClusterFile:
    return ClusterFile(tmp_path, monkeypatch)


# -- places ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("micro_batch", "micro_bach", 12, "training.micro_bach is not a key of training; did you mean micro_batch?"),
        ("training:", "trainig:", 9, "trainig is not a section of a configuration; did you mean training?"),
        ("steps: 10", "steps: ten", 10, "training.steps: expected a whole number; got 'ten'"),
        ("hosts: local", "hosts:\n- address: a\n- adress: b", 17, "hosts.1.adress is not a key of hosts.1; did you"),
        ("hosts: local", "hosts:\n- address: a:5", 16, "hosts.0.address: expected a host name or an IP address"),
        ("hosts: local", "hosts: [{address: a}]\npipeline: {stages: 4}", 15, "hosts lists 1 machines, pipeline.st"),
        ("hosts: local", "wire:\n  backend: gpu", 16, "wire.backend: expected auto, reference, cpu or triton; got"),
        ("global_batch: 8", "global_batch: 9", 9, "training: global_batch 9 is not divisible by micro_batch 2"),
        ("{name: test}", "{name: test, snapshot_every: no}", 1, "run.checkpoint_every: expected a duration such as"),
        (
            "emulate:\n  rate: 100mbit",
            "links: {cap_up: 60%}",
            13,
            "links.cap_up: 60% is a share of a rate, and with hosts: local no rate",
        ),
        ("text: stdlib", "seq_len: 5", 7, "data: needs exactly one of text, tokens, records; got none"),
        ("hosts: local", "pipeline:\n  stages: 5", 16, "pipeline.stages 5 is above model.num_layers 4"),
        (
            "100mbit",
            "100kbit",
            13,
            "emulate: a peer would look lost: a round trip takes 0 s and a piece of 262 kB takes",
        ),
    ],
)
def test_mistake_in_the_file_names_its_line(file, old, new, line, message):
    assert file.refusal(changed(old, new)).startswith(f"cluster.yaml:{line}: {message}")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps: 10", "max_steps: 10", "training.max_steps is not a key of training; use training.steps"),
        ("steps: 10", "learning_rate: 1e-4", "training.learning_rate is not a key of training; use training.lr"),
        ("hosts: local", "bf16: true", "bf16 is not a section of a configuration; use training.precision"),
        (
            "steps: 10",
            "save_steps: 10",
            "training.save_steps is not a key of training; use run.checkpoint_every, in st",
        ),
        (
            "text: stdlib",
            "messages: chat.jsonl",
            "data.messages is not a key of data; use data.records, which may be chats",
        ),
        (
            "text: stdlib",
            "group_by_length: true",
            "data.group_by_length is not a key of data; use data.packing; rows ha",
        ),
        ("steps: 10", "save_total_limit: 3", "training.save_total_limit is not a key of training; use run.keep_check"),
        ("hosts: local", "lora_r: 8", "lora_r is not a section of a configuration; use adapter.rank"),
        ("hosts: local", "adapter: {r: 8}", "adapter.r is not a key of adapter; use adapter.rank"),
        ("hosts: local", "load_in_4bit: true", "use adapter: qlora, which has weights in 4 bits (8 are not"),
    ],
)
def test_names_that_other_programs_have_get_the_key_to_use(file, old, new, message):
    assert message in file.refusal(changed(old, new))


def test_every_key_to_use_instead_of_another_name_exists():
    for instead in set(OTHER_NAMES.values()):
        for section, key in re.findall(r"\b([a-z]+)\.([a-z_]+)", instead.replace("metrics.jsonl", "")):
            annotation = ClusterConfig.model_fields[section].annotation
            (model,) = {part for part in (annotation, *get_args(annotation)) if hasattr(part, "model_fields")}
            assert key in model.model_fields


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            "adapter: qlora\nmemory: {offload: [m, weights]}",
            "memory.offload: weights stay on the device where",
        ),
        ("adapter: {kind: dora}", "adapter.kind: dora is a switch: use kind: lora with dora: true"),
        ("adapter: {layers: 5-3}", "adapter.layers: "),
        ("adapter: lora\nmemory: {offload: [master]}", "memory.offload: master is the fp32 copy of weights that are"),
        ("adapter: lora\nmemory: {shard: [optimizer, gradients]}", "memory.shard: gradients and weights of adapters"),
    ],
)
def test_what_adapters_do_not_combine_with_is_refused(file, new, message):
    assert message in file.refusal(changed("hosts: local", new))


PAIRS = LEAST.replace("text: stdlib", "records: pairs.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["adapter=null"], "training.dpo needs adapter: lora: its reference is the model with the adapters switched"),
        (["data.records=null", "data.text=stdlib"], "training.dpo learns from pairs: name files with prompt, chosen"),
        (["data.packing=true"], "data.packing: true puts several answers into a row, and training.dpo compares rows"),
        (["model.dropout=0.1"], "model.dropout would drop other inputs of the model than of its reference"),
        (["adapter.dropout=0.1"], "adapter.dropout would drop other inputs of the model than of its reference"),
        (["training.z_loss=1e-4"], "training.z_loss is for the loss of tokens, and training.dpo compares answers"),
        (["wire.activations=aqsgd:bits=4"], "wire.activations: aqsgd remembers one activation per sample, and with"),
        (["training.dpo.loss_type=ipo"], "training.dpo.loss_type is not a key of training.dpo; use training.dpo, with"),
        (["training.dpo.beta=0"], "training.dpo.beta: expected more than 0.0; got 0"),
        (["training.dpo.label_smoothing=0.5"], "training.dpo.label_smoothing: expected less than 0.5; got 0.5"),
    ],
)
def test_what_dpo_does_not_combine_with_is_refused(file, changes, message):
    given = ["adapter={}", "training.dpo={}"]
    assert (file.load(PAIRS, *given).training.lr, file.load(PAIRS, *given).data.packing) == (5e-6, False)
    assert message in file.refusal(PAIRS, *given, *changes)


def test_tokenizer_and_rate_suit_a_model_in_a_folder_unless_set(file):
    text = "model: {path: models/x}\ndata: {text: stdlib}\n"
    config = file.load(text)
    assert (config.data.tokenizer, config.training.lr) == ("models/x", 2e-5)
    config = file.load(text, "data.tokenizer=bytes", "training.lr=1e-4")
    assert (config.data.tokenizer, config.training.lr) == ("bytes", 1e-4)


def test_unknown_key_is_reported_before_the_section_that_it_leaves_missing(file):
    assert file.refusal(changed("data:", "dat:")).endswith("did you mean data? (and 1 more: data)")
    missing = file.refusal("model: {path: x}\ntraining: {steps: 1}")
    assert missing.startswith("cluster.yaml: data is missing; a run needs this section")


def test_several_mistakes_are_one_line_with_the_first_in_full(file):
    text = changed("steps: 10", "steps: ten").replace("num_heads: 2", "num_heads: 0").replace("stdlib", "5")
    assert file.refusal(text) == (
        "cluster.yaml:6: model.num_heads: expected 1 or more; got 0 "
        "(and 2 more: data.text in line 8, training.steps in line 10)"
    )
    many = file.refusal(LEAST + "".join(f"k{i}: 1\n" for i in range(7)))
    assert many.startswith("cluster.yaml:16: k0 is not a section")
    assert many.endswith("(and 6 more: k1 in line 17, k2 in line 18, k3 in line 19, k4 in line 20, …)")


@pytest.mark.parametrize("key", ["run.name", "run.bind", "emulate.rate", "wire.activations", "data.tokenizer", "x"])
def test_values_of_any_length_are_cut_in_messages(file, key):
    assert len(file.refusal(changed("steps: 10", f"steps: {'x' * 5000}"))) < 200
    text = "model: {family: gpt2}\ndata: {text: stdlib}\ntraining: {steps: 1, global_batch: 1}\n"
    assert len(file.refusal(text, f"{key}={'a ' * 100_000}")) < 5000


# -- values ----------------------------------------------------------------------------------------

VALUES = [
    ("training.steps=10.5", "expected a whole number; got 10.5"),
    ("training.steps={a: 1}", "expected a whole number; got keys and values (a)"),
    ("training.steps=true", "expected a number; got true"),
    ("training.steps=0", "expected 1 or more; got 0"),
    ("training.lr=.nan", "expected a finite number; got nan"),
    ("training.betas=[0.9]", "expected 2 or more entries; got fewer"),
    ("memory.recompute=true", "expected auto, none, swiglu, norm, ffn, qkv, att or block or a list; got true"),
    *(
        (f"training.optimizer={name}", f"{name} was removed, because its states cannot be checkpointed; use {other}")
        for name, other in (
            *(("bnb_adamw8bit", "adamw8bit"), ("torchao_adamw8bit", "adamw8bit"), ("torchao_adamw_fp8", "fp8_adamw")),
        )
    ),
    (
        "model.family=gpt3",
        "expected gpt2, llama, qwen2, qwen3, mistral, smollm3, olmo2, phi3, gemma, gemma2, gemma3_text, "
        "qwen2_moe, qwen3_moe or mixtral; got 'gpt3'",
    ),
    ("model.overrides={a: [1, .nan]}", "numbers must be finite; got nan"),
    ("data.text=[]", "expected a path or a list of paths and globs; got []"),
    ('data.tokenizer=""', "expected text that is not empty; got ''"),
    ("run.name=../x", "expected at most 100 letters, digits, dots, dashes, underscores"),
    *(
        (
            f"run.checkpoint_every={each}",
            f"expected a duration such as 10min, a number of steps such as 50, or never; got {got}",
        )
        for each, got in (("0", "0"), ("0s", "'0s'"), ("1.5", "1.5"), ("10 parsecs", "'10 parsecs'"), ("[5]", "[5]"))
    ),
    ("run.checkpoint_every=true", "expected a number; got true"),
    ("run.copy_rate=5kbit", "expected 10kbit or more; got '5kbit'"),
    ("run.bind=localhost", "expected host:port, such as 0.0.0.0:7000 or [::1]:7000"),
    ("run.advertise=a:0", "peers dial this address, so it needs the real port"),
    ("run.device=gpu", "expected auto, cpu, cuda or cuda:N; got 'gpu'"),
    ("emulate.rate=100", "a rate needs a unit, such as 100mbit; got 100"),
    ("emulate.delay=5min", "expected at most 60s; got '5min'"),
    ("emulate.backend=relay", "the backend relay was removed; run as root with auto"),
    ("links.piece=1KiB", "expected 4KiB or more; got '1KiB'"),
    ("wire=papers", "expected keys and values, or one of the words paper, auto; got 'papers'"),
    ("wire.gradients=fixd", "codec spec 'fixd': no codec 'fixd'"),
    ("wire.activations=aqsgd:bits=9", "codec aqsgd: bits must be a whole number from 2 to 8; got 9"),
    ("wire.activations=aqsgd:cache=disk", "codec aqsgd: cache must be memory, file or none; got disk"),
    ("wire.gradients=aqsgd", "AQ-SGD remembers activations, not gr"),
]
KEYS = [
    ("data.lr=1", "data.lr is not a key of data; did you mean training.lr?"),
    ("data.zzz=1", "data.zzz is not a key of data; known are text, tokens, tokens_dtype, records"),
    ("emulate.hosts={host1: {upp: 1mbit}}", "emulate.hosts.host1.upp is not a key of emulate.hosts.host1"),
    ("emulate.pairs=[{between: [a b, c]}]", "emulate.pairs.0.between.0: expected at most 32 letters"),
    ("hosts=[{address: a, ssh: -oX}]", "hosts.0.ssh: expected [user@]host for ssh; got '-oX'"),
    ("hosts=[{address: a, ssh: b, env: {A=B: c}}]", "hosts.0.env.A=B: expected the name of an env"),
    ("hosts=[{address: a, env: {A: b}}]", "hosts.0: ssh_options, env and workdir are for hosts that are started by"),
]


@pytest.mark.parametrize(
    ("override", "message"), [*((each, f"{each.partition('=')[0]}: {message}") for each, message in VALUES), *KEYS]
)
def test_mistake_in_an_override_names_key_value_and_expectation(file, override, message):
    assert file.refusal(LEAST, override).startswith(f"--set {override}: {message}")


# -- contradictions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.epochs=1"], "training: has both steps and epochs; remove one"),
        (["training.warmup_steps=11"], "training: warmup_steps 11 do not fit into steps 10"),
        (["training.min_lr=1"], "training: min_lr 1.0 is above lr 0.001"),
        (
            ["training.lr_schedule=wsd", "training.warmup_steps=5", "training.decay_steps=6"],
            "training: warmup_steps 5 and decay_steps 6 do not fit into steps 10",
        ),
        (["training.eval_every=5", "data.validation=0"], "training.eval_every needs validation samples, but data.v"),
        (["training.early_stopping={patience: 3}"], "training: early_stopping needs validation losses; set eval_every"),
        (
            ["training.eval_every=5", "data.validation={a: 0.1}", "training.best_set=b"],
            "training.best_set: data.validation has no set b; it has a",
        ),
        (["data.validation={a: 0.1, b: 0.2}"], "data: validation: a and b are shares of the data; give files to all"),
        (
            ["memory.attention_chunks=2", "model.dropout=0.1"],
            "memory.attention_chunks divides the work of a fused kernel, but with model.dropout attention is written",
        ),
        (
            ["training.seq_len_schedule=[[64, 2], [32, 4]]"],
            "training: seq_len_schedule: [32, 4] follows [64, 2]; both numbers must rise",
        ),
        (
            ["training.seq_len_schedule=[[64, 11]]"],
            "training: seq_len_schedule ends with step 11, which does not fit into steps 10",
        ),
        (
            ["training.seq_len_schedule=[[96, 2]]"],
            "training.seq_len_schedule: [96, 2] cuts samples of data.seq_len 256 tokens into pieces of 96; give a",
        ),
        (
            ["training.seq_len_schedule=[[64, 2]]", "data.text=null", "data.jsonl=b"],
            "training.seq_len_schedule cuts samples, but those of data.records are a prompt and its response",
        ),
        (["data.jsonl=b"], "data: needs exactly one of text, tokens, records; got text and records; null takes"),
        (["model.path=folder"], "model: with a path the folder's config.json gives family, num_layers, hidden_size"),
        (["model.family=null"], "model: needs family, or a path to a folder with config.json and safetensors"),
        (["model.max_seq_len=99", "data.seq_len=256"], "data.seq_len 256 is longer than model.max_seq_len 99"),
        (["model.vocab_size=100"], "model.vocab_size 100 is below the 256 tokens of data.tokenizer"),
        (["pipeline.layers=[1, 1, 1, 2]"], "pipeline.layers [1, 1, 1, 2] adds up to 5 layers, model.num_layers is 4"),
        (["pipeline.stages=4", "pipeline.layers=[1, 3]"], "pipeline: layers lists 2 stages, stages is 4"),
        (["emulate.delay=5s"], "emulate: a peer would look lost: a round trip takes 10 s"),
        (["run.give_up=1s"], "run.give_up is 1s and run.peer_timeout 10s: a silent peer would be given up before"),
        (["wire.gradients=tah:alloc=64"], "wire.gradients does not fit model.hidden_size 32: tah:group=64,int4"),
        (
            ["memory.activations=coat", "model.family=llama", "training.optimizer=galore"],
            "memory.activations: coat needs whole weights to code in FP8, but training.optimizer galore stores those",
        ),
        (
            ["training.precision=fp8", "training.optimizer=qgalore"],
            "training.precision: fp8 needs whole weights to code in FP8, but training.optimizer qgalore stores those",
        ),
        (
            ["training.precision=fp8", "memory.activations=coat", "model.family=llama"],
            "training.precision: fp8 is not for memory.activations: coat, which has FP8 products of its own",
        ),
        (["training.precision=fp16", "training.optimizer=galore"], "training.precision: fp16 is not for training.opt"),
        (["training.precision=fp16", "memory.residual=bf16"], "training.precision: fp16 is not for memory.residual:"),
        (
            ["training.compile=true", "pipeline.schedule=zero-bubble"],
            "training.compile does not combine with pipeline.schedule: zero-bubble, whose backwards are in two parts",
        ),
        (["training.compile=true", "memory.recompute=att"], "training.compile does not combine with memory.recompute"),
        (["training.compile=true", "adapter=lora"], "training.compile does not combine with adapter, which adds"),
        (["training.compile=true", "model.dropout=0.1"], "training.compile does not combine with model.dropout, whose"),
        (["training.compile=true", "memory.offload=[weights]"], "training.compile does not combine with memory.off"),
        (
            ["training.loss_scale.initial=60000"],
            "training.loss_scale.initial: 60000 is no power of two, so it would round",
        ),
        (
            ["memory.shard=[gradients, weights]"],
            "memory: shard gradients and weights needs optimizer, since only the replica that keeps a parameter's sum",
        ),
        (
            ["memory.shard=[optimizer, weights]", "memory.activations=coat", "model.family=llama"],
            "memory: shard weights does not combine with activations coat, which keeps FP8 codes of all weights",
        ),
        (
            ["memory.shard=[optimizer, weights]", "training.precision=fp8", "pipeline.replicas=2"],
            "training.precision: fp8 keeps codes of all weights during a step, so that memory.shard: weights would",
        ),
        (
            ["memory.shard=[optimizer]", "memory.offload=[m]", "pipeline.replicas=2"],
            "memory.shard: replicas send each other weights that they keep on the device; memory.offload lists m",
        ),
        (
            ["memory.gradients=bf16", "training.optimizer=qgalore"],
            "memory.gradients: bf16 is for the optimizers adamw, adamw8bit, adamw_bf16; training.optimizer qgalore",
        ),
        (
            ["memory.residual=bf16", "training.precision=fp32"],
            "memory.residual: bf16 needs products in bf16, training.precision is fp32; use precision bf16, or residual",
        ),
        (["memory.agoq.bits=[4, 5, 8]"], "memory.agoq.bits lists 3 stages, pipeline.stages is 4; give one value for"),
        (["memory.recompute=[none, att]"], "memory.recompute lists 2 stages, pipeline.stages is 4; give one value for"),
        (["memory.offload=[[m], [v]]"], "memory.offload lists 2 stages, pipeline.stages is 4; give one value for"),
        (
            ["memory.offload=[weights, m]", "training.optimizer=qgalore"],
            "memory.offload: training.optimizer qgalore keeps weights and gradients of attention and MLP in a form",
        ),
        (
            ["memory.offload=[gradients]", "pipeline.replicas=2"],
            "memory.offload: gradients are on the host, but replicas",
        ),
        (["memory.offload=[master]", "training.precision=fp32"], "master keeps fp32 weights on the host beside bf16"),
        (["memory.offload=[gradients]", "memory.gradients=fp8"], "offload gradients keeps gradients in fp32 on the"),
        (
            ["memory.offload=[residual]", "memory.activations=agoq"],
            "offload residual does not combine with activations",
        ),
        (
            ["memory.offload=[weights]", "memory.activations=coat", "model.family=llama"],
            "offload master and weights do not combine with activations coat",
        ),
        (["memory.activations=agoq", "memory.recompute=qkv"], "recompute qkv does not combine with activations agoq"),
        (["memory.activations={kind: agog}"], "memory: activations with options needs kind: coat or kind: agoq"),
        (
            ["memory.activations={kind: agoq, bits: 7}"],
            "memory: activations.bits: Input should be 'auto', 4, 5, 6 or 8",
        ),
        (
            ["memory.activations={kind: agoq, bit: 5}"],
            "memory: activations.bit: Extra inputs are not permitted; got 5; kn",
        ),
        (
            ["emulate.loss=0.01"],
            "emulate.loss is for hosts: namespaces, where the network is made on this machine; with",
        ),
    ],
)
def test_contradiction_names_both_keys(file, overrides, message):
    assert f": {message}" in file.refusal(LEAST, *overrides)


@pytest.mark.parametrize(
    ("emulate", "message"),
    [
        ("hosts: {host4: {}}", "emulate.hosts: unknown host host4; expected host0, host1, host2, host3"),
        (
            "hosts: {host1: {site: a}}, pairs: [{between: [a, b]}]",
            "emulate.pairs: unknown host or site 'b'; expected h",
        ),
        ("pairs: [{between: [host1, host1]}]", "emulate.pairs: expected two different hosts; got host1 twice"),
        ("profile: cable, delay: 5ms", "emulate: profile cable also sets the network's delay; remove one of them"),
        ("hosts: {host1: {delay: 6s}}", "emulate: a peer would look lost: a round trip takes 12 s"),
        ("hosts: {host1: {up: 100kbit}}", "emulate: a peer would look lost: a round trip takes 0 s and a piece of"),
    ],
)
def test_network_that_contradicts_itself_is_refused(file, emulate, message):
    text = LEAST.replace("emulate:\n  rate: 100mbit\nhosts: local", f"emulate: {{{emulate}}}\nhosts: namespaces")
    assert file.refusal(text).startswith(f"cluster.yaml:13: {message}")


AT_HOME = "[{address: a, site: x}, {address: b, site: x}, {address: c}, {address: d}]"
B_ALONE = AT_HOME.replace("b, site: x", "b")
B_CAPPED = AT_HOME.replace("b, site: x", "b, site: x, cap_up: 1mbit")
B_AND_C = AT_HOME.replace("a, site: x", "a").replace("{address: c}", "{address: c, site: x}")
SITES = "hosts: {host0: {site: x}, host1: {site: x}}"


@pytest.mark.parametrize(
    ("emulate", "caps", "hosts", "message"),
    [
        ("rate: 100mbit", "", "local", "emulate.rate and emulate.delay are enforced on ZMQ links only"),
        ("delay: 5ms", "", AT_HOME, "emulate.rate and emulate.delay are enforced on ZMQ links only"),
        (
            "",
            "cap_down: 50%",
            B_AND_C,
            "links.cap_down is enforced on ZMQ links only, and stage 1 has a link inside its",
        ),
        ("", "", B_CAPPED, "hosts.1.cap_up is enforced on ZMQ links only, and stage 1 has a link inside its site"),
        (SITES, "cap_up: 1mbit", "namespaces", "links.cap_up is enforced on ZMQ links only, and stage 0 has a"),
        ("", "", B_ALONE, "no two neighbouring stages are in one site (set site under hosts)"),
    ],
)
def test_impossible_group_inside_a_site_is_refused(file, emulate, caps, hosts, message):
    keys = f"emulate: {{{emulate}}}\nlinks: {{inside: gloo, {caps}}}\nhosts: {hosts}"
    text = changed("emulate:\n  rate: 100mbit\nhosts: local", keys)
    refusal = file.refusal(text)
    assert f"links.inside: gloo: {message}" in refusal
    assert refusal.endswith("; use links.inside: zmq")


def test_capped_host_may_stand_beside_groups_of_other_hosts(file):
    hosts = AT_HOME.replace("{address: d}", "{address: d, cap_up: 1mbit}")
    text = LEAST.replace("emulate:\n  rate: 100mbit\nhosts: local", f"links: {{inside: gloo}}\nhosts: {hosts}")
    assert [file.load(text).has_group(stage) for stage in range(4)] == [True, True, False, False]
