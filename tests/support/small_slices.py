"""Blocks of small models, their gradients, and what autograd saves of them."""

import gc
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.samples import normal
from tahq.memory.agoq.stored_inputs import store_inputs
from tahq.memory.coat.fp8_flow import use_fp8_flow
from tahq.memory.config import AgoqConfig, CoatConfig, Fp8Config, Recompute
from tahq.memory.fp8_products import use_fp8_products
from tahq.memory.recompute import recompute
from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice

MICRO_BATCH, SEQ_LEN, VOCAB = 2, 48, 100
EXPERTS = {
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Keys of `model.overrides` that make mixtures of experts small."""
MIDDLE = BlockRange(1, 2, 3)


def make_spec(family: str, **keys) -> ModelSpec:
    """Three blocks; keywords are `model:` keys."""
    grouped = {} if family == "gpt2" else {"num_kv_heads": 2}
    sizes = {"num_layers": 3, "hidden_size": 64, "num_heads": 4, **grouped, **keys}
    sizes["overrides"] = EXPERTS.get(family, {}) | sizes.get("overrides", {})
    return load_spec(ModelConfig(family=family, **sizes), vocab_size=VOCAB, seq_len=SEQ_LEN)


def make_slice(
    spec: ModelSpec,
    memory: CoatConfig | AgoqConfig | Recompute | None = None,
    *,
    blocks: BlockRange = MIDDLE,
    device: torch.device | str = "cpu",
    fp8: Fp8Config | None = None,
) -> ModelSlice:
    """A slice as transformers computes it, or with COAT's FP8 flow, AGoQ's stored activations, or recomputation.

    `fp8`: with products in FP8.
    """
    module = build_slice(spec, blocks, seed=0, device=device, random=RandomContext(0)).train()
    if isinstance(memory, CoatConfig):
        use_fp8_flow(module, memory)
    elif isinstance(memory, str):
        recompute(module, memory)
    elif memory is not None:
        store_inputs(module, memory, memory.bits_of(0))
    if fp8 is not None:
        use_fp8_products(module, fp8)
    return module


class Watch(TorchDispatchMode):
    """Storages that are allocated while it is entered, and the most bytes of them that were alive at once."""

    peak_nbytes = 0

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {each.untyped_storage()._cdata for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            is_tensor = isinstance(each, torch.Tensor) and each.device.type != "meta"
            if is_tensor and each.untyped_storage()._cdata not in given:
                reference = StorageWeakRef(each.untyped_storage())
                self._seen[reference.cdata] = reference, each.untyped_storage().nbytes()
        self.peak_nbytes = max(self.peak_nbytes, self._alive_nbytes())
        return result

    def alive_nbytes(self) -> int:
        """Those of now."""
        gc.collect()
        return self._alive_nbytes()

    def _alive_nbytes(self) -> int:
        return sum(nbytes for reference, nbytes in self._seen.values() if not reference.expired())


def saved_storages(forward: Callable[[], object]) -> dict[int, torch.Tensor]:
    """Tensors that a forward pass saves, by address of their storage; kept alive, so that no address comes twice."""
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return saved


def gradients(
    module: ModelSlice, *, bf16: bool = False, deferred: DeferredGradients | None = None, seq_len: int = SEQ_LEN
) -> dict[str, torch.Tensor]:
    """Of a forward and a backward, on the CPU: the layers' own share of the output, and all gradients."""
    device = next(module.parameters()).device
    x = normal((MICRO_BATCH, seq_len, module.spec.hidden_size)).to(device).requires_grad_()
    module.deferred = deferred
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        y = module(x)
    y.float().backward(normal(y.shape, seed=1).to(device))
    if deferred is not None:
        assert all(parameter.grad is None for parameter in module.parameters() if parameter.ndim > 1)
        deferred.run()
    found = {"y": (y - x).detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}
    return {name: tensor.cpu() for name, tensor in found.items()}


def different(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors are not equal to the bit."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def relative_distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).norm() / right.norm())
