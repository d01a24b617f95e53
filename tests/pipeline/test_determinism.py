"""A training step has the same bits each time, and uses no operator of torch that cannot promise that."""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, get_args

import pytest
import torch
from support.runs import tiny
from support.small_slices import EXPERTS

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import autocast_dtype
from tahq.data.batches import BatchSource
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.memory.config import Recompute
from tahq.models.keyed_dropout import RandomContext
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.stage import Stage, StagePlan
from tahq.worker.assembly import chunk_module, resolved_spec

FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")
OPTIMIZERS = get_args(TrainingConfig.model_fields["optimizer"].annotation)
WINDOW = {"overrides": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}}
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{family}, {level}": {"model": {"family": family}, "memory": {"recompute": level}}
        for family, level in itertools.product(FAMILIES, get_args(Recompute))
    },
    **{f"{family}, dropout": {"model": {"family": family, "dropout": 0.1}} for family in ("gpt2", "llama")},
    **{f"{family}, agoq": {"model": {"family": family}, "memory": {"activations": "agoq"}} for family in FAMILIES},
    **{
        f"{family}, coat": {"model": {"family": family}, "memory": {"activations": "coat"}}
        for family in ("llama", "qwen2")
    },
    **{f"llama, {name}": {"model": {"family": "llama"}, "training": {"optimizer": name}} for name in OPTIMIZERS},
    "qwen2, window": {"model": {"family": "qwen2", **WINDOW}},
    "llama, attention in chunks": {"model": {"family": "llama"}, "memory": {"attention_chunks": 3}},
    **{
        f"mixtral, {level}": {
            "model": {"family": "mixtral", "overrides": EXPERTS["mixtral"]},
            "training": {"router_aux_loss": "pooled"},
            "memory": {"recompute": level},
        }
        for level in ("none", "block")
    },
    "gpt2, zero-bubble": {"pipeline": {"schedule": "zero-bubble"}},
    "llama, loss in chunks, fp8 gradients": {
        "model": {"family": "llama"},
        "memory": {"loss_chunks": 3, "gradients": "fp8"},
    },
}
pytestmark = pytest.mark.usefixtures("repeatable_kernels")
every_case = pytest.mark.parametrize("sections", CASES.values(), ids=CASES.keys())


@cache
def batch_source(seq_len: int) -> BatchSource:
    config = configured({}, seq_len=seq_len)
    dataset = load_dataset(config.data, load_tokenizer(config.data))
    return BatchSource(dataset, seed=7, global_batch=8, micro_batch=4)


def configured(sections: dict[str, Any], *, seq_len: int, **model: Any) -> ClusterConfig:
    family = sections.get("model", {}).get("family", "gpt2")
    grouped = {} if family == "gpt2" else {"num_kv_heads": 1}
    merged = {
        **sections,
        "model": {"num_layers": 2, "vocab_size": 256, **grouped, **model, **sections.get("model", {})},
        "data": {"seq_len": seq_len},
        "training": {"micro_batch": 4, **sections.get("training", {})},
        "pipeline": {"stages": 1, **sections.get("pipeline", {})},
    }
    return ClusterConfig.model_validate(tiny(**merged))


def one_step(config: ClusterConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Loss, squared norms of gradients, and weights and states after the step of a new stage."""
    module = chunk_module(config, resolved_spec(config, None), 0, device=device, random=RandomContext(config.run.seed))
    plan = StagePlan(
        stage=0,
        run=1,
        seed=config.run.seed,
        seq_len=config.data.seq_len,
        total_steps=4,
        training=config.training,
        pipeline=config.pipeline,
        wire=config.wire,
        tie=False,
        gradients=config.memory.gradients,
    )
    autocast = autocast_dtype(config, device)
    stage = Stage(plan, {0: module}, batch_source(config.data.seq_len), {}, device=device, autocast=autocast)
    found = {"loss": torch.tensor(stage.engine.run_step(0).loss_sum)}
    found["norms"] = torch.tensor(stage.update.squared_norms())
    stage.update.apply(0, 0.5)
    return found | {name: tensor.cpu().clone() for name, tensor in stage.tensors().items()}


def check(config: ClusterConfig, device: torch.device, beside: AbstractContextManager[None]) -> None:
    first = one_step(config, device)
    with beside:
        second = one_step(config, device)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert bool(first["loss"] > 0)


@every_case
def test_a_step_is_repeated_to_the_bit(sections):
    check(configured(sections, seq_len=16, num_heads=2), torch.device("cpu"), nullcontext())


def test_an_operator_without_a_repeatable_form_raises():
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


# -- CUDA ----------------------------------------------------------------------------------------


@contextmanager
def busy_device() -> Iterator[None]:
    """Products on another stream, so that blocks of the kernels beside them finish in another order."""
    x, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(200):
            x = (x @ x).tanh()
    yield
    torch.cuda.synchronize()


@pytest.mark.gpu
@every_case
def test_a_step_is_repeated_to_the_bit_on_cuda(sections):
    """4096 tokens in a micro-batch: enough for the embedding's second kernel, and many blocks of attention."""
    config = configured(sections, seq_len=1024, hidden_size=256, num_heads=4)
    check(config, torch.device("cuda"), busy_device())
