"""DPO in real stages: beside peft's plain loop, under other cuts, with a lost stage, and the bytes on the wire."""

import json
import math
import random

import pytest
import torch
from support.runs import Run, assert_same_run, launch, overrides, start, tiny, train, write_config
from torch.nn.functional import log_softmax, logsigmoid
from transformers import AutoModelForCausalLM

from tahq import fault_points
from tahq.config.cluster import ClusterConfig
from tahq.data.batches import BatchSource
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.models.adapters.lora import initial_values
from tahq.models.config import ModelConfig
from tahq.models.model_spec import load_spec
from tahq.worker.assembly import resolved_spec
from tahq_launch.plan.step_traffic import step_flows

STEPS, BETA, SMOOTHING = 10, 0.3, 0.1


def here(folder, family: str = "llama", **sections) -> dict:
    """A configuration, with its model of four blocks and its data: sums, with the right answer and a wrong one."""
    folder.mkdir(exist_ok=True)
    sizes = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 256, "max_seq_len": 64}
    spec = load_spec(ModelConfig(family=family, **sizes), vocab_size=256, seq_len=24)
    torch.manual_seed(3)
    getattr(spec.layout.modeling(), spec.layout.causal_lm)(spec.hf_config).save_pretrained(folder / "hf")
    draw = random.Random(5)
    records = [
        {"prompt": f"{a} + {b} = ", "chosen": f"{a + b}", "rejected": f"{a + b + draw.randint(1, 9)}, perhaps"}
        for a, b in ((draw.randint(0, 99), draw.randint(0, 99)) for _ in range(60))
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    config = tiny(
        adapter={"rank": 4, "alpha": 16} | sections.pop("adapter", {}),
        training={"steps": STEPS, "lr": 5e-3, "dpo": {"beta": BETA, "label_smoothing": SMOOTHING}}
        | sections.pop("training", {}),
        run={"name": "dpo"} | sections.pop("run", {}),
        **sections,
    )
    return config | {"model": {"path": "hf"}, "data": {"records": "pairs.jsonl", "tokenizer": "bytes", "seq_len": 24}}


def train_in_one_loop(config: dict) -> list[dict]:
    """DPO by hand, with peft's model, in this folder: loss, rewards and accuracy of each step."""
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    settings, adapter = ClusterConfig.model_validate(config), config["adapter"]
    keys = {"r": adapter["rank"], "lora_alpha": adapter["alpha"], "target_modules": "all-linear"}
    base = AutoModelForCausalLM.from_pretrained("hf")
    model = peft.get_peft_model(base, peft.LoraConfig(**keys, task_type="CAUSAL_LM"))
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for name, parameter in named.items():
            own = name.removeprefix("base_model.model.").replace(".default", "")
            parameter.copy_(initial_values(own, parameter.shape, settings.run.seed))
    training = settings.training
    dataset = load_dataset(settings.data, load_tokenizer(settings.data), are_preferences=True)
    sizes = {"global_batch": training.global_batch, "micro_batch": training.micro_batch}
    batches = BatchSource(dataset, seed=settings.run.seed, **sizes)
    decay = training.weight_decay
    optimizer = torch.optim.AdamW(named.values(), training.lr, training.betas, training.epsilon, weight_decay=decay)

    def log_probs(tokens, labels):
        each = log_softmax(model(tokens, use_cache=False).logits, -1)
        return each.gather(-1, labels.clamp(min=0)[..., None])[..., 0].where(labels >= 0, 0.0).sum(1)

    rows = []
    for step in range(STEPS):
        batch, sums = batches.train(step), torch.zeros(4)
        for number in range(training.num_micro_batches):
            tokens, labels = batch.micro_batch(number)
            with torch.no_grad(), model.disable_adapter():
                reference = log_probs(tokens, labels)
            rewards = BETA * (log_probs(tokens, labels) - reference)
            margin = rewards[0::2] - rewards[1::2]
            loss = -((1 - SMOOTHING) * logsigmoid(margin) + SMOOTHING * logsigmoid(-margin)).sum()
            (loss / training.global_batch).backward()
            sums += torch.stack([loss, rewards[0::2].sum(), rewards[1::2].sum(), (margin > 0).sum()]).detach()
        torch.nn.utils.clip_grad_norm_(named.values(), training.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        loss, chosen, rejected, right = (sums / training.global_batch).tolist()
        rewards = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "accuracy": right}
        rows.append({"loss": loss, "rewards": rewards})
    return rows


@pytest.mark.parametrize(
    ("family", "stages"), [pytest.param("llama", 2), pytest.param("gpt2", 4, marks=pytest.mark.ci)]
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning", "ignore:fan_in_fan_out:UserWarning")
def test_dpo_is_that_of_a_plain_loop_with_peft(tmp_path, monkeypatch, family, stages):
    monkeypatch.chdir(tmp_path)
    config = here(tmp_path, family, pipeline={"stages": stages})
    run, expected = train(tmp_path, config), train_in_one_loop(config)
    assert run.losses == pytest.approx([row["loss"] for row in expected], abs=1e-5)
    for row, plain in zip(run.metrics, expected, strict=True):
        assert row["rewards"] == pytest.approx(plain["rewards"], abs=1e-5)
    assert run.losses[0] == pytest.approx(math.log(2))
    assert run.losses[-1] < 0.6
    assert run.metrics[-1]["rewards"]["accuracy"] == 1
    assert "100 % right, margin" in run.stdout
    assert "nats per pair" in run.stdout


@pytest.mark.ci
def test_bytes_on_the_wire_are_those_that_a_dry_run_counts(tmp_path, monkeypatch):
    """Two blocks that are not trained: their activations are the reference's, too, and cross their cut once."""
    monkeypatch.chdir(tmp_path)
    wire = {"activations": "wf:bits=4", "gradients": "eden:bits=3"}
    config = here(tmp_path, adapter={"layers": "2-3"}, training={"steps": 2, "eval_every": 2}, wire=wire)
    run = train(tmp_path, config)
    settings = ClusterConfig.model_validate(config)
    flows = {
        (flow.source, flow.target): flow.num_frames * flow.payload_nbytes
        for flow in step_flows(settings, resolved_spec(settings, None))
        if flow.num_frames
    }
    assert {(link["from"], link["to"]): link["payload_bytes"] for link in run.metrics[1]["links"]} == flows
    assert flows.keys() == {(0, 1), (1, 2), (2, 3), (3, 2)}
    assert 1.9 * flows[0, 1] < flows[2, 3] <= 2 * flows[0, 1] == 2 * flows[1, 2]
    validation = run.metrics[1]["validation"]
    assert validation.keys() == {"pairs", "loss", "loss_raw", "accuracy"}
    assert validation["pairs"] == 3
    assert 3 * validation["accuracy"] in (0, 1, 2, 3)
    assert 0 < validation["loss_raw"] < math.log(2)


# -- under other cuts --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Run:
    """A run of one stage."""
    folder = tmp_path_factory.mktemp("calm")
    return train(folder, here(folder, pipeline={"stages": 1}, training={"steps": 4}))


@pytest.mark.acceptance
@pytest.mark.parametrize(
    "sections",
    [
        {
            "pipeline": {"stages": 4, "schedule": "zero-bubble"},
            "memory": {"recompute": ["none", "norm", "att", "block"]},
        },
        {"pipeline": {"stages": 2}, "memory": {"offload": ["weights", "m", "gradients", "residual"]}},
        {"pipeline": {"stages": 2, "schedule": "interleaved", "chunks": 2}},
    ],
    ids=["zero-bubble", "offload", "interleaved"],
)
def test_dpo_has_the_same_bits_under_every_cut(tmp_path, calm, sections):
    assert_same_run(train(tmp_path, here(tmp_path, training={"steps": 4}, **sections)), calm)


LOSSY = {"activations": "wf:bits=4", "gradients": "eden:bits=3"}


@pytest.mark.acceptance
@pytest.mark.parametrize("fault", ["kill@backward:stage=1:step=2", "kill@forward:stage=0:step=2"])
def test_lost_stage_returns_with_the_same_bits_lossy_codecs_included(tmp_path, fault):
    sections = {"pipeline": {"stages": 2}, "training": {"steps": 4, "eval_every": 3}, "wire": LOSSY}
    undisturbed = train(tmp_path / "undisturbed", here(tmp_path / "undisturbed", **sections))
    faults = {fault_points.FAULTS: fault, fault_points.FOLDER: str(tmp_path / "faults")}
    (tmp_path / "faults").mkdir()
    config = here(tmp_path, run={"checkpoint_every": 1, "peer_timeout": "10s"}, **sections)
    write_config(tmp_path, config)
    launcher = start(tmp_path, "tahq-launch", "cluster.yaml", extra=faults)
    stdout, stderr = launcher.communicate(timeout=120)
    assert list((tmp_path / "faults").iterdir())
    assert launcher.returncode == 0, stdout + stderr
    run = Run(tmp_path / "runs" / "dpo", 0, stdout, stderr)
    assert_same_run(run, undisturbed)
    for key in ("rewards", "validation"):
        assert [row.get(key) for row in run.metrics] == [row.get(key) for row in undisturbed.metrics]


@pytest.mark.acceptance
def test_replicas_share_the_pairs_and_chunks_of_the_loss_change_its_last_bits_only(tmp_path, calm):
    config = here(
        tmp_path,
        pipeline={"stages": 2, "replicas": 2},
        training={"steps": 4},
        memory={"loss_chunks": 3},
        wire={"all_reduce": "raw:dtype=fp32"},
    )
    run = train(tmp_path, config)
    assert run.losses == pytest.approx(calm.losses, abs=1e-5)
    for row, plain in zip(run.metrics, calm.metrics, strict=True):
        assert row["rewards"] == pytest.approx(plain["rewards"], abs=1e-4)


@pytest.mark.ci
def test_pairs_without_a_rejected_answer_are_refused_in_one_line(tmp_path):
    config = here(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1 + 1 = ", "chosen": "2"}\n')
    refused = launch(tmp_path, config)
    assert refused.returncode == 2
    assert "pairs.jsonl:1: no key 'rejected', only 'prompt', 'chosen'; a record needs prompt, chosen" in refused.stderr
    assert refused.stderr.count("\n") == 1
    shown = launch(tmp_path, config, "--dry-run")
    assert "no key 'rejected'" in shown.stdout
    resumed = launch(tmp_path, config, "--resume", *overrides("training.dpo=null"))
    assert resumed.returncode == 2
