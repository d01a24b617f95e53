"""Training as a textbook has it: one process, one loop, torch's own optimizer, no pipeline code.

What real workers compute is compared with this to the bit. The model and the batches are tahq's (their own
tests compare them with transformers and with the text); forward, backward, accumulation, clipping and
the optimizer's step are written out here. With `wire`, the codec is inserted where the model would be cut.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch.nn import functional

from tahq.comm.link.frame import Direction, LogicalId, Purpose
from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import block_ranges
from tahq.data.batches import BatchSource
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.memory.agoq.stored_inputs import store_inputs
from tahq.memory.coat.fp8_flow import use_fp8_flow
from tahq.memory.fp8_products import use_fp8_products
from tahq.memory.shares import Share, shares_of
from tahq.memory.small_floats.block_codes import dequantize_blocks, quantize_blocks
from tahq.memory.stored_slice import build_slice
from tahq.models.experts.load_balance import Balance, router_loss_of
from tahq.models.keyed_dropout import RandomContext
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice
from tahq.pipeline.boundary import codec_key
from tahq.pipeline.update import learning_rate
from tahq.quant import get_codec
from tahq.quant.codec import Codec
from tahq.worker.assembly import resolved_spec


@dataclass
class PlainRun:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


class Cut(torch.autograd.Function):
    """What a cut does to a tensor: codec and back, forward to the activation, backward to its gradient."""

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, codecs: tuple[Codec, Codec], keys: tuple[int, int], sample_ids: Sequence[int]
    ) -> torch.Tensor:
        ctx.codec, ctx.key = codecs[1], keys[1]
        told = {"key": keys[0]} | ({"sample_ids": sample_ids} if codecs[0].is_stateful else {})
        return codecs[0].decode(codecs[0].encode(x, **told), x.shape, x.dtype, **told)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        packed = ctx.codec.encode(gradient, key=ctx.key)
        return ctx.codec.decode(packed, gradient.shape, gradient.dtype, key=ctx.key), None, None, None


class PlainModel:
    """The whole model in one process: one slice, or (with `cut`) one per stage with the codec in between."""

    def __init__(self, config: ClusterConfig, *, cut: bool) -> None:
        self.config = config
        self.random = RandomContext(config.run.seed)
        spec = resolved_spec(config, None)
        ranges = block_ranges(config, spec) if cut else (BlockRange(0, spec.num_layers, spec.num_layers),)
        self.slices: list[ModelSlice] = [
            build_slice(spec, blocks, seed=config.run.seed, device="cpu", random=self.random) for blocks in ranges
        ]
        if config.memory.activations == "coat":
            for part in self.slices:
                use_fp8_flow(part, config.memory.coat)
        if config.memory.activations == "agoq":
            for part in self.slices:
                store_inputs(part, config.memory.agoq, config.memory.agoq.bits_of(0))
        if config.training.precision == "fp8":
            for part in self.slices:
                use_fp8_products(part, config.training.fp8)
        wire = config.wire
        self.cuts = [(get_codec(wire.activations), get_codec(wire.gradients)) for _ in self.slices[1:]]

    def begin_balance(self, num_tokens: int) -> Balance | None:
        """What the routers of the next micro-batch add their choices to."""
        loss = router_loss_of(self.config.training.router_aux_loss, self.slices[0].spec)
        share = 1 / self.config.training.num_micro_batches
        balance = None if loss is None else loss.begin(num_tokens, share, torch.device("cpu"))
        for part in self.slices:
            part.balance = balance
        return balance

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those that are trained."""
        return {name: p for part in self.slices for name, p in _trained(part).items()}

    def forward(
        self, tokens: torch.Tensor, step: int, micro_batch: int, sample_ids: Sequence[int] = (), replica: int = 0
    ) -> torch.Tensor:
        self.random.at(step, replica, micro_batch, int(Purpose.TRAIN))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.config.training.precision in ("bf16", "fp8")):
            return self._output(tokens, step, micro_batch, sample_ids, replica).float()

    def _output(
        self, tokens: torch.Tensor, step: int, micro_batch: int, sample_ids: Sequence[int], replica: int
    ) -> torch.Tensor:
        lengths = [size for size, last in self.config.training.seq_len_schedule if step < last]
        size = min(lengths, default=tokens.shape[1])
        x = self.slices[0](torch.stack([piece for sample in tokens for piece in sample.split(size)]))
        for cut, (part, codecs) in enumerate(zip(self.slices[1:], self.cuts, strict=True)):
            ids = [LogicalId(0, replica, step, Purpose.TRAIN, micro_batch, cut, direction) for direction in Direction]
            keys = tuple(codec_key(id, self.config.run.seed) for id in ids)
            crossed = Cut.apply(x.view(*tokens.shape, -1), codecs, keys, sample_ids)
            x = part(crossed.view(x.shape))
        return x


def _trained(part: ModelSlice) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in part.canonical_parameters().items() if p.requires_grad}


def train_plainly(config: ClusterConfig, *, cut: bool = False) -> PlainRun:
    """The losses (nats a token), gradient norms and final weights of `config.training.steps` steps."""
    torch.set_num_threads(1)
    model, training = PlainModel(config, cut=cut), config.training
    parameters = model.parameters()
    batches = BatchSource(
        load_dataset(config.data, load_tokenizer(config.data)),
        seed=config.run.seed,
        global_batch=training.global_batch,
        micro_batch=training.micro_batch,
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": training.weight_decay},
            {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=training.betas,
        eps=training.epsilon,
        foreach=False,
    )
    run = PlainRun([], [], {})
    for step in range(training.steps):
        loss = _accumulate(model, batches.train(step), step)
        norm = math.sqrt(
            math.fsum(float(p.grad.double().flatten().dot(p.grad.double().flatten())) for p in parameters.values())
        )
        clip = 1.0 if training.clip_norm is None else min(1.0, training.clip_norm / norm)
        for parameter in parameters.values():
            if clip != 1.0:
                parameter.grad.mul_(clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step, training.steps)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss)
        run.norms.append(norm)
    run.weights = {name: p.detach().clone() for name, p in parameters.items()}
    return run


def _accumulate(model: PlainModel, batch, step: int) -> float:
    replicas, sums, of_replicas = model.config.pipeline.replicas, [], []
    parameters = list(model.parameters().values())
    of_micro_batches: list[list[dict]] = [[] for _ in range(replicas)]
    for replica in range(replicas):
        count = model.config.training.num_micro_batches // replicas
        for index in range(count):
            sums.append(_micro_batch(model, batch, step, replica, index, replica * count + index))
            if "gradients" in model.config.shards:
                of_micro_batches[replica].append({p: p.grad for p in parameters})
                for parameter in parameters:
                    parameter.grad = None
        last = {p: p.grad for p in parameters}
        of_replicas.append(_added(of_micro_batches[replica]) if of_micro_batches[replica] else last)
        for parameter in parameters if replica < replicas - 1 else ():
            parameter.grad = None
    if replicas > 1:
        for part in model.slices:
            _all_reduce(model.config, part, of_replicas, of_micro_batches)
    return math.fsum(sums) / batch.num_tokens


def _added(gradients: list[dict]) -> dict:
    """Sums, the first two terms first."""
    return {p: reduce(torch.add, [each[p] for each in gradients]) for p in gradients[0]}


def _micro_batch(model: PlainModel, batch, step: int, replica: int, index: int, number: int) -> float:
    """The loss of a micro-batch, whose gradients are added."""
    tokens, labels = batch.micro_batch(number)
    balance = model.begin_balance(tokens.numel())
    sample_ids = batch.sample_ids.view(-1, batch.micro_batch_size)[number].tolist()
    logits = model.forward(tokens, step, index, sample_ids, replica)
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    differentiated = total
    if factor := model.config.training.z_loss:
        log_sums = logits.logsumexp(-1).where(labels != -100, 0.0)
        differentiated = total + factor * log_sums.square().sum()
    before = {p: p.grad for p in model.parameters().values()}
    for parameter in before:
        parameter.grad = None if model.config.memory.gradients == "fp8" else parameter.grad
    if balance is not None:
        balance.totals = balance.sums[0]
    (differentiated / batch.num_tokens).backward()
    if model.config.memory.gradients == "fp8":
        for parameter, past in before.items():
            parameter.grad = _in_fp8(parameter.grad if past is None else parameter.grad + past)
    return float(total.detach())


def _in_fp8(x: torch.Tensor) -> torch.Tensor:
    return dequantize_blocks(quantize_blocks(x, 8, torch.float32), x.shape)


def _all_reduce(
    config: ClusterConfig, part: ModelSlice, of_replicas: list[dict], of_micro_batches: list[list[dict]]
) -> None:
    """The sums of a stage's gradients, as AGoQ §5 has it: shards in 8 bits, sums in fp32, their results in 8 bits."""
    parameters = list(_trained(part).values())
    # workers of one machine are one site
    spec = config.wire.all_reduce_inside or config.wire.all_reduce
    coded = _in_fp8 if spec == "fp8" else lambda x: x
    if config.shards:
        shapes = {name: p.shape for name, p in part.canonical_parameters().items()}
        every = shares_of(part.spec, shapes, config.pipeline.replicas, config.shards)
        shares = [every[name] for name in _trained(part)]
        for share in set(shares):
            owned = [p for p, its_share in zip(parameters, shares, strict=True) if its_share == share]
            _reduce_to_owner(
                owned, share, of_micro_batches if share.sums_alone else [[each] for each in of_replicas], coded
            )
        return
    flat = [torch.cat([grads[p].flatten() for p in parameters]) for grads in of_replicas]
    blocks = -(-flat[0].numel() // 128)
    size = 128 * -(-blocks // len(flat))
    shards = [x.split(size) for x in flat]
    sums = []
    for owner in range(len(shards[0])):
        parts = [each[owner] if replica == owner else coded(each[owner]) for replica, each in enumerate(shards)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        sums.append(coded(total))
    split = torch.cat(sums).split([p.numel() for p in parameters])
    for parameter, gradient in zip(parameters, split, strict=True):
        whole = gradient.view(parameter.shape).clone()
        parameter.grad = _in_fp8(whole) if config.memory.gradients == "fp8" else whole


def _reduce_to_owner(
    owned: list, share: Share, gradients: list[list[dict]], coded: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Of what one replica updates: sums are rounded no more. `gradients`: by replica, terms that it sends one by one.

    In the order of replicas; where the owner alone sums, its own comes first.
    """
    replicas, total = range(len(gradients)), None
    order = sorted(replicas, key=lambda replica: replica != share.owner) if share.sums_alone else replicas
    for number in range(len(gradients[0])):
        for replica in order:
            flat = torch.cat([gradients[replica][number][p].flatten() for p in owned])
            term = flat if replica == share.owner else coded(flat)
            total = term if total is None else total + term
    for parameter, gradient in zip(owned, total.split([p.numel() for p in owned]), strict=True):
        parameter.grad = gradient.view(parameter.shape).clone()
