"""Each family in four stages, from a folder, beside a plain loop over transformers' own model."""

import math

import pytest
import torch
from support.runs import finish, tiny, train
from support.small_slices import EXPERTS
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from tahq.config.cluster import ClusterConfig
from tahq.data.batches import BatchSource
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.models.config import ModelConfig
from tahq.models.families import FAMILIES
from tahq.models.model_spec import load_spec

STEPS, LENGTH = 10, 32
TWO_KINDS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
LLAMA_31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
KEYS = {
    "llama": {"rope_parameters": LLAMA_31 | {"rope_theta": 5e5, "original_max_position_embeddings": 16}},
    "qwen2": {"use_sliding_window": True, **TWO_KINDS},
    "mistral": {"sliding_window": 9},
    "smollm3": {"no_rope_layer_interval": 2},
    "phi3": {"sliding_window": 9, "pad_token_id": 0},
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, **TWO_KINDS},
    "gemma3_text": {"query_pre_attn_scalar": 8, **TWO_KINDS},
    **{family: keys | BALANCED for family, keys in EXPERTS.items()},
    "qwen3_moe": EXPERTS["qwen3_moe"] | BALANCED | {"mlp_only_layers": [2]},
}
SMOKE = {("gemma2", True), ("qwen3_moe", False)}
"""Those with most parts of their own."""


def saved_model(family: str, folder, *, tied: bool, seed: int = 3) -> PreTrainedModel:
    sizes = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "vocab_size": 256}
    grouped = {} if family == "gpt2" else {"num_kv_heads": 2}
    overrides = KEYS.get(family, {}) | {"tie_word_embeddings": tied}
    config = ModelConfig(family=family, max_seq_len=64, overrides=overrides, **sizes, **grouped)
    spec = load_spec(config, vocab_size=256, seq_len=LENGTH)
    torch.manual_seed(seed)
    spec.hf_config._attn_implementation = "eager"
    model = getattr(spec.layout.modeling(), spec.layout.causal_lm)(spec.hf_config)
    model.save_pretrained(folder)
    return model


def train_in_one_loop(model: PreTrainedModel, config: ClusterConfig) -> tuple[list[float], list[float]]:
    """The losses of AdamW on the batches of the run, which the model's own `forward` computes; and those of routers.

    Micro-batches are those of the run, since transformers balances the experts of each `forward`.
    """
    training, losses, router_losses = config.training, [], []
    batches = BatchSource(
        load_dataset(config.data, load_tokenizer(config.data)),
        seed=config.run.seed,
        global_batch=training.global_batch,
        micro_batch=training.micro_batch,
    )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]]
    decays = zip(groups, (training.weight_decay, 0.0), strict=True)
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in decays],
        *(training.lr, training.betas, training.epsilon),
    )
    for step in range(STEPS):
        batch = batches.train(step)
        loss = router_loss = 0.0
        for number in range(training.num_micro_batches):
            tokens, labels = batch.micro_batch(number)
            result = model(tokens, use_cache=False)
            logits = result.logits
            part = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / batch.num_tokens
            loss += float(part.detach())
            if getattr(result, "aux_loss", None) is not None:
                of_routers = model.config.router_aux_loss_coef * result.aux_loss / training.num_micro_batches
                part = part + of_routers
                router_loss += float(of_routers.detach())
            part.backward()
        torch.nn.utils.clip_grad_norm_(parameters, training.clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        router_losses.append(router_loss)
    return losses, router_losses


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(family, tied, marks=pytest.mark.ci if (family, tied) in SMOKE else pytest.mark.acceptance)
        for family in FAMILIES
        for tied in ((False, True) if family.startswith(("gemma", "gpt2")) else (False,))
    ],
)
def test_family_trains_as_transformers_does_and_is_exported(tmp_path, family, tied):
    model = saved_model(family, tmp_path / "hf", tied=tied)
    config = tiny(
        model={"path": "hf", "tie": "sync" if tied else "untied"},
        data={"tokenizer": "bytes"},
        training={"steps": STEPS},
        run={"name": "family"},
    )
    del config["model"]["family"], config["model"]["num_layers"], config["model"]["hidden_size"]
    del config["model"]["num_heads"]
    run = train(tmp_path, config)
    expected, of_routers = train_in_one_loop(model, ClusterConfig.model_validate(config))
    assert run.losses == pytest.approx(expected, abs=1e-5)
    assert [row.get("router_loss", 0.0) for row in run.metrics] == pytest.approx(of_routers, abs=1e-5)
    assert (of_routers[0] > 0.1) == (family in EXPERTS)
    assert expected[-1] < expected[0] - 0.1

    assert finish(tmp_path, "tahq", "export", str(run.folder), "out").returncode == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % 256
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens).logits, model(tokens).logits, atol=2e-4, rtol=1e-3)
