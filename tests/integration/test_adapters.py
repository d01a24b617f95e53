"""Adapters in real stages: beside peft's plain loop, under other cuts, with a lost stage, and exported."""

import json
import math
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from support.runs import Run, assert_same_run, finish, launch, overrides, start, tiny, train, write_config
from support.small_slices import EXPERTS
from torch.nn import functional
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tahq import fault_points
from tahq.config.cluster import ClusterConfig
from tahq.data.batches import BatchSource
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.memory.small_floats.nf4 import Nf4Weight
from tahq.memory.stored_slice import is_in_4_bits
from tahq.models.adapters.lora import initial_values
from tahq.models.config import ModelConfig
from tahq.models.model_spec import load_spec

STEPS = 10
_GROUPED = {"num_kv_heads": 2, "intermediate_size": 96}
FAMILIES = {"gpt2": {}, "llama": _GROUPED, "qwen3_moe": _GROUPED | {"overrides": EXPERTS["qwen3_moe"]}}
KINDS = {"lora": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "qlora": {"kind": "qlora"}}
EVERY = [*product(("gpt2", "llama"), KINDS), ("qwen3_moe", "lora"), ("qwen3_moe", "qlora")]
SMOKE = (("llama", "dora"), ("llama", "qlora"))


def save_base(folder, family: str = "gpt2", **changes):
    """A model of four blocks in a folder."""
    sizes = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 256, "max_seq_len": 64}
    spec = load_spec(ModelConfig(family=family, **sizes | FAMILIES[family] | changes), vocab_size=256, seq_len=32)
    torch.manual_seed(3)
    getattr(spec.layout.modeling(), spec.layout.causal_lm)(spec.hf_config).save_pretrained(folder)
    return folder


def config_of(**sections) -> dict:
    config = tiny(
        data={"tokenizer": "bytes"},
        adapter={"rank": 4, "alpha": 16, **sections.pop("adapter", {})},
        training={"steps": STEPS, "lr": 5e-3} | sections.pop("training", {}),
        run={"name": "adapters"} | sections.pop("run", {}),
        **sections,
    )
    return config | {"model": {"path": "hf"}}


def with_peft(base, adapter: dict, seed: int):
    """peft's model, in which A begins as in tahq; and the names that tahq has for its parameters."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    targets = adapter.get("targets", "all-linear")
    keys = {"r": adapter["rank"], "lora_alpha": adapter["alpha"], "target_modules": targets}
    switches = {f"use_{name}": adapter.get(name, False) for name in ("rslora", "dora")}
    model = peft.get_peft_model(base, peft.LoraConfig(**keys, **switches, task_type="CAUSAL_LM"))
    named = {name.removeprefix("base_model.model.").replace(".default", ""): p for name, p in model.named_parameters()}
    named = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in named.items():
            if "lora_A" in name:
                parameter.copy_(initial_values(name, parameter.shape, seed))
    return model, named


def in_4_bits(model, config: ClusterConfig):
    """A model with the weights that those of `kind: qlora` stand for."""
    sizes = {"vocab_size": 256, "seq_len": 32}
    spec = load_spec(ModelConfig(path=model.name_or_path), **sizes, adapter=config.adapter)
    for path, layer in model.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if is_in_4_bits(spec, f"{path}.{name}", parameter.shape):
                is_transposed = type(layer).__name__ == "Conv1D"
                weight = Nf4Weight(parameter.shape, torch.device("cpu"), is_transposed=is_transposed)
                weight.copy_(parameter.data)
                assert not torch.equal(parameter.data, weight.decoded(torch.float32))
                parameter.data = weight.decoded(torch.float32).contiguous()
    return model


def train_in_one_loop(model, parameters, config: ClusterConfig) -> list[float]:
    """The losses of AdamW on the batches of the run."""
    training, losses = config.training, []
    dataset = load_dataset(config.data, load_tokenizer(config.data))
    sizes = {"global_batch": training.global_batch, "micro_batch": training.micro_batch}
    batches = BatchSource(dataset, seed=config.run.seed, **sizes)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, training.lr, training.betas, training.epsilon)
    model.train()
    for step in range(STEPS):
        batch, sums = batches.train(step), []
        for number in range(training.num_micro_batches):
            tokens, labels = batch.micro_batch(number)
            logits = model(tokens, use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / batch.num_tokens).backward()
            sums.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(parameters, training.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(math.fsum(sums) / batch.num_tokens)
    return losses


@pytest.mark.parametrize(
    ("family", "kind", "stages"),
    [
        pytest.param(*each, stages, marks=pytest.mark.ci if each in SMOKE else pytest.mark.acceptance)
        for each, stages in zip(EVERY, (2, 4, 2, 4, 2, 4, 2, 4, 2, 4), strict=True)
    ],
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning", "ignore:fan_in_fan_out:UserWarning")
def test_adapters_train_as_pefts_do_and_are_exported(tmp_path, family, kind, stages):
    targets = {"targets": ["q_proj", "v_proj"]} if family in EXPERTS else {}  # peft's all-linear has experts, too
    config = config_of(adapter=KINDS[kind] | targets, pipeline={"stages": stages})
    save_base(tmp_path / "hf", family)
    run = train(tmp_path, config)
    resolved = ClusterConfig.model_validate(config)
    base = in_4_bits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), resolved)
    model, named = with_peft(base, config["adapter"], config["run"]["seed"])
    expected = train_in_one_loop(model, list(named.values()), resolved)
    assert run.losses == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.05
    assert run.weights.keys() == named.keys()

    export(tmp_path, run, "lora", "--adapter")
    export(tmp_path, run, "merged")
    own = load_file(tmp_path / "hf" / "model.safetensors")
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == own.keys()
    tokens = torch.arange(64).view(2, 32) * 5 % 256
    import peft

    plain, coded = (AutoModelForCausalLM.from_pretrained(tmp_path / "hf") for _ in range(2))
    loaded = peft.PeftModel.from_pretrained(in_4_bits(coded, resolved), tmp_path / "lora").eval()
    beside_whole = peft.PeftModel.from_pretrained(plain, tmp_path / "lora").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(run.weights[name])
        logits = model.eval()(tokens).logits
        assert torch.equal(loaded(tokens).logits, logits)
        torch.testing.assert_close(merged(tokens).logits, beside_whole(tokens).logits, atol=2e-5, rtol=1e-4)
    settings = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "hf"


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_beside_4_bits_train_as_pefts_do_over_bitsandbytes(tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    config = config_of(adapter={"kind": "qlora"}, pipeline={"stages": 2})
    save_base(tmp_path / "hf", "llama", intermediate_size=128)  # theirs decodes rows of 96 wrongly with AVX-512
    run = train(tmp_path, config)
    names = ("load_in_4bit", "bnb_4bit_use_double_quant")
    coded = BitsAndBytesConfig(**dict.fromkeys(names, True), bnb_4bit_quant_type="nf4")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", quantization_config=coded, device_map="cpu")
    model, named = with_peft(base, config["adapter"], config["run"]["seed"])
    assert type(model.get_submodule("base_model.model.model.layers.1.mlp.up_proj.base_layer")).__name__ == "Linear4bit"
    expected = train_in_one_loop(model, list(named.values()), ClusterConfig.model_validate(config))
    assert run.losses == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0] - 0.05


def export(folder, run: Run, out: str, *options: str) -> str:
    done = finish(folder, "tahq", "export", str(run.folder), out, *options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


# -- under other cuts --------------------------------------------------------------------------------

DROPPED = {"dropout": 0.1, "dora": True}
RECOMPUTED = {
    "pipeline": {"stages": 4, "schedule": "zero-bubble"},
    "memory": {"recompute": ["none", "norm", "att", "block"]},
}


@pytest.fixture(scope="module")
def calm_of(tmp_path_factory) -> Callable[[str], Run]:
    """A run of one stage, by its kind of adapter."""

    @cache
    def calm(kind: str) -> Run:
        folder = tmp_path_factory.mktemp("calm")
        return train(folder, here(folder, kind, pipeline={"stages": 1}))

    return calm


@pytest.fixture
def calm(calm_of) -> Run:
    return calm_of("lora")


def here(tmp_path, kind: str = "lora", **sections) -> dict:
    save_base(tmp_path / "hf", "llama")
    return config_of(adapter={"kind": kind, **DROPPED}, training={"steps": 4}, **sections)


EVERY_KIND = pytest.mark.parametrize("kind", ["lora", pytest.param("qlora", marks=pytest.mark.ci)])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "sections"),
    [
        ("qlora", RECOMPUTED),
        *(
            pytest.param(kind, sections, marks=pytest.mark.acceptance)
            for kind, sections in (
                ("lora", RECOMPUTED),
                ("lora", {"pipeline": {"stages": 2}, "memory": {"offload": ["weights", "m", "gradients", "residual"]}}),
                ("qlora", {"pipeline": {"stages": 2}, "memory": {"offload": ["m", "gradients", "residual"]}}),
                ("lora", {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2}}),
            )
        ),
    ],
    ids=["qlora-zero-bubble", "zero-bubble", "offload", "qlora-offload", "interleaved"],
)
def test_adapters_have_the_same_bits_under_every_cut(tmp_path, calm_of, kind, sections):
    assert_same_run(train(tmp_path, here(tmp_path, kind, **sections)), calm_of(kind))


@pytest.mark.ci
@EVERY_KIND
def test_lost_stage_returns_with_the_same_bits(tmp_path, calm_of, kind):
    faults = {
        fault_points.FAULTS: "kill@backward:stage=1:step=2",
        fault_points.FOLDER: str(tmp_path / "faults"),
    }
    (tmp_path / "faults").mkdir()
    run = {"checkpoint_every": 1, "peer_timeout": "10s"}
    write_config(tmp_path, here(tmp_path, kind, pipeline={"stages": 2}, run=run))
    launcher = start(tmp_path, "tahq-launch", "cluster.yaml", extra=faults)
    stdout, stderr = launcher.communicate(timeout=120)
    assert list((tmp_path / "faults").iterdir())
    assert launcher.returncode == 0, stdout + stderr
    assert_same_run(Run(tmp_path / "runs" / "adapters", 0, stdout, stderr), calm_of(kind))


@EVERY_KIND
def test_checkpoints_hold_adapters_only_and_other_base_weights_or_adapters_are_refused(tmp_path, calm_of, kind):
    config = here(tmp_path, kind, pipeline={"stages": 2})
    run = train(tmp_path, {**config, "training": {**config["training"], "steps": 2}})
    state = run.snapshot()
    kept = [name for name, tensor in state.items() if tensor.numel() > 1]
    assert all("lora_" in name for name in kept)
    assert sum(tensor.nbytes for tensor in state.values()) < 3.1 * sum(each.nbytes for each in run.weights.values())

    for change in ("rank=8", "kind=lora" if kind == "qlora" else "kind=qlora"):
        refused = launch(tmp_path, config, "--resume", *overrides(f"adapter.{change}"))
        assert refused.returncode == 2
        assert f"cannot resume with another adapter.{change.partition('=')[0]}" in refused.stderr
        assert refused.stderr.count("\n") == 1
    resumed = launch(tmp_path, config, "--resume")
    assert "no longer exact" not in resumed.stdout
    assert_same_run(resumed, calm_of(kind))

    file = tmp_path / "hf" / "model.safetensors"
    assert "model.layers.1.mlp.up_proj.weight" in load_file(file)
    content = bytearray(file.read_bytes())
    content[-4] ^= 1  # a last bit, which no code in 4 bits has
    file.write_bytes(content)
    other = launch(tmp_path, config, "--resume", *overrides("training.steps=6"))
    assert other.returncode != 0
    assert "differs from" in other.stdout + other.stderr


@pytest.mark.ci
def test_only_some_blocks_have_adapters_and_replicas_sum_their_gradients(tmp_path, calm):
    partly = here(tmp_path, pipeline={"stages": 2})
    partly["adapter"] |= {"layers": "1-2", "targets": ["q_proj", "mlp.down_proj"]}
    run = train(tmp_path, partly)
    layers = {name.split(".lora_")[0] for name in run.weights}
    assert layers == {f"model.layers.{n}.{part}" for n in (1, 2) for part in ("self_attn.q_proj", "mlp.down_proj")}
    export(tmp_path, run, "lora", "--adapter")
    settings = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert settings["layers_to_transform"] == [1, 2]

    replicas = here(tmp_path, pipeline={"stages": 2, "replicas": 2}, wire={"all_reduce": "raw:dtype=fp32"})
    replicas["run"]["name"] = "replicas"
    replicas["memory"] = {"shard": ["optimizer"]}
    assert train(tmp_path, replicas).losses == pytest.approx(calm.losses, abs=1e-2)
