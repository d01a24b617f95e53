"""Updates a stage's weights as the coordinator commits; weights change nowhere else.

PREPARE reports `squared_norms`; COMMIT answers with (apply or skip, clip factor); only then does `StageUpdate.apply`
change anything. Learning rates are a pure function of the step, so they are not sent. With `training.qgalore.fused` the
backward itself applies the step, and nothing is left to do at COMMIT.
"""

import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial
from hashlib import blake2b

import torch
from torch.nn import Parameter

from tahq.errors import SnapshotError
from tahq.memory.adam.loop import AdamwLoop
from tahq.memory.agoq.stored_gradients import (
    HoldsGradient,
    drop_gradient,
    scale_gradients,
    store_gradient,
    with_gradients,
)
from tahq.memory.config import Gradients
from tahq.memory.galore.low_rank_weight import LowRankWeight
from tahq.memory.offload.host_part import (
    copy_for_products,
    filled_weight,
    host_gradient,
    host_part,
    is_here,
    kept_values,
    sum_as_filled,
)
from tahq.memory.offload.zero_copy import zero_copy_is_faster
from tahq.models.deferred_gradients import set_gradient_dtype
from tahq.models.slice import HEAD_WEIGHT
from tahq.models.weights import sum_of_bits
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.gradients import TiedEmbedding, squared_norm, squared_norms
from tahq.pipeline.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors

WSD_DECAY_SHARE = 10
"""Without `decay_steps`, the decay of `wsd` takes one in this many steps."""


def learning_rate(config: TrainingConfig, step: int, total_steps: int) -> float:
    """The rate of a step, a pure function of the configuration.

    With s the step (from 0), T the number of steps, w that of warm-up steps, η the peak and μ the minimum:

        warm-up   s < w         η · (s + 1) / (w + 1)
        constant                η
        linear                  η + (μ − η) · p                     p = (s − w) / (T − w)
        cosine                  η + (μ − η) · (1 − cos πp) / 2      the same p
        wsd                     η until T − d, then linear with     p = (s − (T − d)) / d; or with √p (`decay_shape`)

    p is clamped to [0, 1]. The warm-up never starts at 0 and meets η at s = w; a decay reaches μ at s = T, the first
    step that is not taken, so no step is wasted on a rate of 0. `wsd` (warm-up, stable, decay) is the schedule of
    MiniCPM (Hu et al. 2024) with a linear decay, or with that by 1 − √p of LLMQ App. A.4 (Hägele et al. 2024).

    Returns:
        The rate, in (0, lr] during warm-up and in [min_lr, lr] after it; past `total_steps` it stays constant.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.lr_schedule == "constant":
        return config.lr
    if step >= total_steps:
        return config.min_lr
    start = config.warmup_steps
    if config.lr_schedule == "wsd":
        start = max(start, total_steps - (config.decay_steps or max(1, total_steps // WSD_DECAY_SHARE)))
    progress = max(0.0, (step - start) / (total_steps - start))
    if config.lr_schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    if config.lr_schedule == "wsd" and config.decay_shape == "sqrt":
        progress = math.sqrt(progress)
    # each operation is monotone in `progress` even after rounding, which a sum of two products is not
    rate = config.lr - (config.lr - config.min_lr) * progress
    return config.min_lr if progress >= 1 else max(config.min_lr, rate)


FROZEN = {torch.float32: "frozen/", torch.bfloat16: "frozen_bf16/", torch.float16: "frozen_fp16/"}
"""Prefixes, in a checkpoint, of sums over the bits of parameters that are not trained, by their type on their stage; it
does not have these parameters."""
FEW_SEARCHES = 8
"""Searches for subspaces that a step may have without reporting progress."""


class StageUpdate:
    """Updates the weights of one stage: optimizer, clipping and learning rate.

    With `training.qgalore.fused` each weight takes its step within the backward, as soon as it has its gradient, which
    is then freed. That is for one stage, one micro-batch and no clipping, because elsewhere a step is only decided once
    all gradients are there. No step can be skipped, so a non-finite one ends the run (`training.non_finite: halt`).
    Weights get the bits that COMMIT would have given them. Weight gradients of a split backward bypass autograd's
    hooks, so zero-bubble is refused (`ClusterConfig`). Source: Q-GaLore §3.5; Lv et al. 2023, Full Parameter
    Fine-tuning for LLMs with Limited Resources (LOMO), §3.1.

    Args:
        config: `training:`.
        parameters: by canonical name; those that do not require a gradient never change.
        decayed: which of them have weight decay.
        total_steps: of the run.
        tied: names the second copy of a tied weight, which is left out of the norm.
        low_rank: weights that are trained in a subspace, by canonical name.
        gradient_scale: the factor that gradients carry in the backward; None: never fuse.
        gradients: `memory.gradients`, unless the update is fused.
        seed: the run's.
        owned: the parameters that are updated here, with optimizer states (`memory.shard`); None: all.
    """

    def __init__(
        self,
        config: TrainingConfig,
        parameters: Mapping[str, Parameter],
        decayed: Callable[[str, Parameter], bool],
        total_steps: int,
        tied: TiedEmbedding | None = None,
        low_rank: Mapping[str, LowRankWeight] | None = None,
        gradient_scale: float | None = None,
        *,
        gradients: Gradients = "fp32",
        seed: int = 0,
        owned: Collection[str] | None = None,
    ) -> None:
        self._config = config
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        self._owned = {name: p for name, p in self._parameters.items() if owned is None or name in owned}
        self._low_rank = dict(low_rank or {})
        self._total_steps = total_steps
        self._uncounted = tied.uncounted if tied is not None else None
        self._gradient_scale = gradient_scale or 1.0
        self._is_fused = config.is_fused and gradient_scale is not None
        self._step = 0
        self._is_zero_copy: bool | None = None
        """Whether kernels read offloaded states in the host's memory; None: not measured yet."""
        self.on_search: Callable[[int, int], None] | None = None
        """Called with (subspaces searched, subspaces due) after each search of a step with more than a few.

        The backward searches, so the caller is autograd's thread on CUDA.
        """
        self._num_searched = self._num_due = 0
        self._squares: list[torch.Tensor] = []
        """‖g‖² of the weights that have taken their step within the backward."""
        if gradients == "bf16":
            set_gradient_dtype((p for p in self._parameters.values() if p.ndim >= 2), torch.bfloat16)
        # both copies of a tied matrix are rounded alike
        drawn_as = {name: HEAD_WEIGHT for name, p in self._parameters.items() if tied is not None and tied.holds(p)}
        self.optimizer = build_optimizer(config, self._owned, decayed, seed, drawn_as)
        for weight in self._low_rank.values():
            weight.on_search = self._count_search
        if self._is_fused:
            for parameter in self._parameters.values():
                parameter.register_post_accumulate_grad_hook(self._step_alone)  # type: ignore[no-untyped-call]
            for weight in self._low_rank.values():
                weight.on_gradient, weight.is_fused = self._step_alone, True
        else:
            holders: list[HoldsGradient] = [*self._parameters.values(), *self._low_rank.values()]
            for holder in holders:
                if gradients == "fp8" or host_gradient(holder) is not None:
                    store_gradient(holder)

    def begin(self, step: int) -> None:
        """Gradients from now on belong to this step."""
        self._step, self._squares, self._num_searched = step, [], 0
        self._num_due = sum(weight.begin(step) for weight in self._low_rank.values())

    def squared_norms(self, meanwhile: Callable[[], object] = lambda: None) -> list[float]:
        """‖g‖² in fp64 of each parameter that is updated here, for PREPARE; for low-rank weights, of the projection.

        `meanwhile` is called while a device computes them, unless the update is fused.
        """
        if not self._is_fused:
            return squared_norms((p for p in self._updated() if p is not self._uncounted), meanwhile)
        if any(parameter.grad is not None for parameter in self._parameters.values()):
            raise AssertionError("a gradient bypassed the hooks of the fused update")
        return [float(square) for square in torch.stack(self._squares).tolist()] if self._squares else []

    def weights_digest(self, apart_from: Collection[str] = ()) -> str:
        """A hash of the sums over the bits of each parameter, apart from these: equal where all weights are, and hardly
        elsewhere."""
        trained = (sum_of_bits(kept_values(p)) for name, p in self._parameters.items() if name not in apart_from)
        frozen = (each for name, each in self._frozen_sums.items() if name not in apart_from)
        sums = [int(each) for each in (*frozen, *trained)]
        return blake2b(repr(sums).encode(), digest_size=16).hexdigest()

    @cached_property
    def _frozen_sums(self) -> dict[str, torch.Tensor]:
        """Of parameters that are here and are not trained."""
        return {name: sum_as_filled(p) for name, p in self._frozen.items() if is_here(p)}

    def apply(self, step: int, clip_factor: float) -> None:
        """Clip by the global factor and take the optimizer's step."""
        scale_gradients(self._updated(), clip_factor)
        lr = self._set_rate(step)
        self._place_states()
        for part in with_gradients(self._owned.values()):
            self.optimizer.step()
            for parameter in part:
                if (host := host_part(parameter)) is not None:
                    host.updated(parameter, self.optimizer.state.get(parameter, {}))
        for weights in with_gradients(self._low_rank.values()):
            for weight in weights:
                weight.apply(step, lr, self._config.weight_decay)
        self.discard()

    def _place_states(self) -> None:
        """Make what will be offloaded of the states one parameter at a time: a first step would make all."""
        if not isinstance(self.optimizer, AdamwLoop):
            return
        hosts = {p: host for p in self._owned.values() if (host := host_part(p)) is not None}
        for parameter, host in hosts.items():
            host.take_states(self.optimizer.states_of(parameter))
        if not self.optimizer.reads_host_memory or not any(host.states for host in hosts.values()):
            return
        if self._is_zero_copy is None:
            build = partial(build_optimizer, self._config, decayed=lambda name, parameter: True)
            self._is_zero_copy = zero_copy_is_faster(build, next(iter(hosts)).device)
        for parameter, host in hosts.items() if self._is_zero_copy else ():
            host.use_in_place(self.optimizer.state[parameter])

    def discard(self) -> None:
        """Drop the gradients, after a step or instead of a skipped one."""
        for parameter in self._parameters.values():
            drop_gradient(parameter)
        for weight in self._low_rank.values():
            weight.discard()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights that are here, and states of those that are updated here, by their names in a checkpoint.

        Of weights that are not trained, only `sum_of_bits`.
        """
        weights = {f"model/{name}": kept_values(p) for name, p in self._parameters.items() if is_here(p)}
        states = optimizer_tensors(self.optimizer, self._owned)
        for name, parameter in self._owned.items():
            if (host := host_part(parameter)) is not None:
                states |= {f"{state}/{name}": item.values for state, item in host.states.items()}
        for weight in self._low_rank.values():
            weights |= weight.weight_tensors()
            states |= weight.states()
        weights |= {FROZEN[self._frozen[name].dtype] + name: each for name, each in self._frozen_sums.items()}
        return weights | {f"optimizer/{name}": tensor for name, tensor in states.items()}

    @torch.no_grad()
    def load(self, read: Callable[[str], torch.Tensor], names: set[str]) -> None:
        """Restore weights and optimizer states, bit for bit, from a checkpoint with these names.

        SnapshotError: it has none for this stage, or weights that are not trained are no longer those that it had.
        """
        for name, own in self._frozen_sums.items():
            check_frozen(name, own, self._frozen[name].dtype, read, names)
        for name, parameter in self._parameters.items():
            if is_here(parameter):
                filled_weight(parameter).copy_(read(f"model/{name}"))
        copy_for_products(self._parameters.values())
        for weight in self._low_rank.values():
            weight.load(read)
        states = {}
        for name in sorted(names):
            prefix, _, state = name.partition("/")
            if prefix == "optimizer" and state.partition("/")[2] in self._owned:
                states[state] = read(name)
        if not states and self._owned and any(name.startswith("optimizer/") for name in names):
            raise SnapshotError(
                "the checkpoint's optimizer states of this stage are in files of other replicas; copy them here"
            )
        if states:
            load_optimizer_tensors(self._config, self.optimizer, self._owned, states)

    def _updated(self) -> list[HoldsGradient]:
        return [*self._owned.values(), *self._low_rank.values()]

    def _count_search(self) -> None:
        self._num_searched += 1
        if self.on_search is not None and self._num_due > FEW_SEARCHES:
            self.on_search(self._num_searched, self._num_due)

    def _step_alone(self, holder: Parameter | LowRankWeight) -> None:
        """Within the backward: the step of one weight, a low-rank one or the only parameter that has a gradient."""
        scale_gradients([holder], 1 / self._gradient_scale)
        self._squares.append(squared_norm(holder))
        lr = self._set_rate(self._step)
        for _ in with_gradients([holder]):
            if isinstance(holder, LowRankWeight):
                holder.apply(self._step, lr, self._config.weight_decay)
                continue
            self.optimizer.step()
            if (host := host_part(holder)) is not None:
                host.updated(holder, self.optimizer.state[holder])

    def _set_rate(self, step: int) -> float:
        lr = learning_rate(self._config, step, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr


def frozen_dtype(name: str, names: Collection[str], usual: torch.dtype = torch.float32) -> torch.dtype:
    """The type that a parameter which is not trained had, by a checkpoint's names; `usual` if it says both or none."""
    types = [dtype for dtype, prefix in FROZEN.items() if prefix + name in names]
    return types[0] if len(types) == 1 else usual


def check_frozen(
    name: str, own: torch.Tensor, dtype: torch.dtype, read: Callable[[str], torch.Tensor], names: Collection[str]
) -> None:
    """Raise SnapshotError if a parameter that is not trained differs from what it was.

    `own`: its `sum_of_bits` in this type; `names`: the checkpoint's. What had another type cannot be compared.
    """
    if frozen_dtype(name, names, dtype) == dtype and int(read(FROZEN[dtype] + name)) != int(own):
        raise SnapshotError(
            f"{name} is not trained (model.frozen_layers, adapter) and so not in checkpoints, but it differs from what "
            "the run began with: put the model that model.path had then back into its place, or draw random weights "
            "with the same torch on the same kind of processor"
        )
