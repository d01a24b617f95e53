"""Offloading: bits, and what is left on the device."""

import gc
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import combinations
from typing import get_args

import pytest
import torch
from support.samples import normal
from support.small_slices import MICRO_BATCH, SEQ_LEN, make_spec

from tahq.memory.adam.adamw import BlockwiseAdamW
from tahq.memory.agoq import stored_gradients
from tahq.memory.config import Offload, Recompute
from tahq.memory.estimate import StepNumbers, stage_memory
from tahq.memory.offload.blocks import offload_blocks, place_on_host
from tahq.memory.offload.host_memory import HostBuffer, HostMemory
from tahq.memory.recompute import recompute
from tahq.memory.saved_tensors import MicroBatchShape
from tahq.memory.stored_slice import build_slice
from tahq.models.deferred_gradients import DeferredGradients
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec
from tahq.models.partition import BlockRange
from tahq.models.slice import sharing_copies_of
from tahq.pipeline import update
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import optimizer_nbytes
from tahq.pipeline.update import StageUpdate

OPTIONS = get_args(Offload)
EACH = [*((each,) for each in OPTIONS), OPTIONS]
EACH_AND_PAIRS = [*EACH, *combinations(OPTIONS, 2)]
STEPS, IN_FLIGHT = 3, 3
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class LateMemory(HostMemory):
    """Copies at the last moment that is allowed on CUDA: when something waits for it, or another copy is behind it.

    So a value that is read before its copy is waited for, or overwritten before it is copied, is wrong.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._late: dict[int, Callable[[], None]] = {}

    def begin_copy(self, buffer: HostBuffer, on_device: torch.Tensor, *, to_host: bool) -> None:
        self.finish(buffer)
        if not to_host:
            on_device.fill_(0xFF)  # NaN
        self._late[id(buffer)] = partial(super().begin_copy, buffer, on_device, to_host=to_host)

    def wait_for(self, buffer: HostBuffer) -> None:
        self.finish(buffer)

    def finish(self, buffer: HostBuffer) -> None:
        self._late.pop(id(buffer), lambda: None)()


class Trained:
    """Some steps of a stage in the middle of a model, several micro-batches in flight."""

    def __init__(
        self,
        spec: ModelSpec,
        which: Iterable[Offload],
        *,
        level: Recompute = "none",
        bf16: bool = False,
        is_split: bool = False,
        optimizer: str = "adamw",
        fp8_gradients: bool = False,
        device: str = "cpu",
        steps: int = STEPS,
        num_blocks: int = 4,
        memory: type[HostMemory] = HostMemory,
    ) -> None:
        self.device, self.bf16, self.is_split = torch.device(device), bf16, is_split
        which, self.memory = frozenset(which), memory(self.device)
        blocks, keys = (
            BlockRange(0, num_blocks, num_blocks + 2),
            {"seed": 0, "device": self.device, "random": RandomContext(0)},
        )
        if which:
            self.module = build_slice(
                *(spec, blocks),
                **keys,
                weights=True,
                filled=lambda numel: None,
                placed=lambda block: place_on_host(block, which, self.memory, copies=torch.bfloat16 if bf16 else None),
            )
        else:
            self.module = build_slice(spec, blocks, **keys)
        recompute(self.module.train(), level)
        if which:
            offload_blocks(self.module, which, self.memory)
        self.config = config = TrainingConfig.model_validate({"optimizer": optimizer, "lr": 1e-2})
        self.update = StageUpdate(
            *(config, self.module.canonical_parameters(), self.module.is_decayed, STEPS),
            gradients="fp8" if fp8_gradients else "fp32",
        )
        self.outputs: list[torch.Tensor] = []
        self.norms: list[float] = []
        for step in range(steps):
            self.step(step)

    def step(self, step: int) -> None:
        self.update.begin(step)
        with sharing_copies_of([self.module]):
            flights = [self.forward(step * IN_FLIGHT + number) for number in range(IN_FLIGHT)]
            for y, _ in flights:
                y.backward(normal(y.shape, seed=1).to(self.device))
            for _, deferred in flights if self.is_split else ():
                deferred.run()
        self.norms += self.update.squared_norms()
        if step == 1:  # as after NaN or infinity
            self.update.discard()
        else:
            self.update.apply(step, 0.37)
        self.module.eval()
        with torch.no_grad():
            self.outputs.append(self.forward(0)[0])
        self.module.train()

    def forward(self, seed: int) -> tuple[torch.Tensor, DeferredGradients | None]:
        tokens = torch.randint(100, (MICRO_BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(seed))
        self.module.deferred = deferred = DeferredGradients() if self.is_split and self.module.training else None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            y = self.module(tokens.to(self.device)).float()
        if torch.is_grad_enabled():
            self.outputs.append(y.detach())
        return y, deferred

    def found(self) -> dict[str, torch.Tensor]:
        outputs = {f"output/{number}": y for number, y in enumerate(self.outputs)}
        return outputs | {"norms": torch.tensor(self.norms)} | self.update.tensors()


@cache
def plain(family: str, dropout: float, **keys) -> dict[str, torch.Tensor]:
    """What a stage computes that offloads nothing."""
    return Trained(make_spec(family, num_layers=6, dropout=dropout), (), **keys).found()


def check_bits(
    family: str, which: Iterable[Offload], *, dropout: float = 0.0, memory: type[HostMemory] = HostMemory, **keys
) -> None:
    expected = plain(family, dropout, **keys)
    got = Trained(make_spec(family, num_layers=6, dropout=dropout), which, memory=memory, **keys).found()
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name].cpu(), got[name].cpu())] == []


@pytest.mark.parametrize("which", EACH_AND_PAIRS, ids="+".join)
@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.acceptance), True], ids=["fp32", "bf16"])
def test_training_has_the_same_bits_with_each_option_and_each_pair(which, bf16):
    if bf16 or "master" not in which:
        check_bits("llama", which, bf16=bf16)


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(level, marks=pytest.mark.ci if level in ("swiglu", "qkv", "block") else pytest.mark.acceptance)
        for level in get_args(Recompute)
    ],
)
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.acceptance) for family in ("gpt2", "qwen3"))]
)
@pytest.mark.parametrize("is_split", [pytest.param(False, marks=pytest.mark.acceptance), True], ids=["whole", "split"])
def test_every_level_of_recomputation_has_the_same_bits(family, level, is_split):
    keys = {"level": level, "is_split": is_split, "dropout": 0.1 if family == "gpt2" else 0.0}
    check_bits(family, OPTIONS, bf16=True, steps=2, **keys)
    check_bits(family, ["residual", "weights"], steps=1, **keys)


@pytest.mark.parametrize(
    ("optimizer", "device"),
    [
        *((each, "cpu") for each in ("sgd", "ema_sgd", "fp8_adamw", "adamw8bit", "adamw_bf16")),
        *(pytest.param(each, "cuda", marks=pytest.mark.gpu) for each in ("fp8_adamw", "adamw8bit", "adamw_bf16")),
    ],
)
def test_every_optimizer_gets_its_states_from_the_host(optimizer, device):
    check_bits("llama", OPTIONS, optimizer=optimizer, bf16=True, device=device)


@pytest.mark.parametrize("which", EACH_AND_PAIRS, ids="+".join)
@pytest.mark.parametrize("is_split", [pytest.param(False, marks=pytest.mark.acceptance), True], ids=["whole", "split"])
def test_nothing_is_read_or_overwritten_before_its_copy_is_waited_for(which, is_split):
    check_bits("llama", which, bf16=True, is_split=is_split, steps=2, memory=LateMemory)


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(level, marks=pytest.mark.ci if level in ("qkv", "block") else pytest.mark.acceptance)
        for level in get_args(Recompute)
    ],
)
def test_late_copies_give_the_same_bits_at_every_level(level, monkeypatch):
    monkeypatch.setattr(stored_gradients, "DECODED_AT_A_TIME", 5000)
    check_bits("gpt2", OPTIONS, level=level, bf16=True, memory=LateMemory)


@every_device
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "adamw_bf16"])
def test_states_that_are_read_in_place_have_the_same_bits(optimizer, device, monkeypatch):
    """As on CUDA, where that is faster."""
    monkeypatch.setattr(update, "zero_copy_is_faster", lambda build, device: True)
    made = BlockwiseAdamW.__init__

    def make(optimizer: BlockwiseAdamW, *args, **keys) -> None:
        made(optimizer, *args, **keys)
        optimizer.reads_host_memory = True

    monkeypatch.setattr(BlockwiseAdamW, "__init__", make)
    check_bits("llama", OPTIONS, optimizer=optimizer, bf16=True, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_both_kinds_of_access_are_measured(optimizer, caplog):
    caplog.set_level("INFO")
    Trained(make_spec("llama", num_layers=6), ["m", "v"], optimizer=optimizer, device="cuda", steps=1)
    assert "moments in host memory" in caplog.text


def test_gradients_in_8_bits_combine_with_states_on_the_host():
    check_bits("llama", ["m", "v", "weights"], fp8_gradients=True)


def test_parts_of_an_update_have_the_same_bits(monkeypatch):
    monkeypatch.setattr(stored_gradients, "DECODED_AT_A_TIME", 5000)
    check_bits("llama", OPTIONS, bf16=True)


def test_a_checkpoint_is_loaded_with_and_without_offload():
    spec = make_spec("llama", num_layers=6)
    whole = Trained(spec, (), bf16=True).found()
    for before, after in ((OPTIONS, ()), ((), OPTIONS), (OPTIONS, OPTIONS)):
        saved = {
            name: tensor.clone() for name, tensor in Trained(spec, before, bf16=True, steps=2).update.tensors().items()
        }
        resumed = Trained(spec, after, bf16=True, steps=1)
        resumed.update.load(saved.__getitem__, set(saved))
        resumed.step(2)
        found = resumed.update.tensors()
        assert [name for name in found if not torch.equal(found[name], whole[name])] == []


def test_the_digest_is_that_of_weights_on_the_device():
    spec = make_spec("llama", num_layers=6)
    plain, offloaded = (Trained(spec, which, bf16=True).update.weights_digest() for which in ((), OPTIONS))
    assert plain == offloaded


def device_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


def test_only_the_last_block_that_computed_is_on_the_device():
    trained = Trained(make_spec("llama", num_layers=6), OPTIONS, bf16=True)
    matrices = [[each for each in block.parameters() if each.ndim > 1] for block in trained.module.blocks()]
    every = [each for block in matrices for each in block]
    states = (state for each in every for name, state in trained.update.optimizer.state[each].items() if name != "step")
    assert device_nbytes(every) == device_nbytes(states) == 0
    assert all(each.grad is None for each in every)
    assert [device_nbytes(each.product_copy for each in block) > 0 for block in matrices] == [False] * 3 + [True]


@pytest.mark.parametrize(("level", "num_kept"), [("none", 2), ("ffn", 2), ("att", 2), ("block", 1)])
def test_the_residual_stream_is_away_between_forward_and_backward(level, num_kept):
    spec, kept = make_spec("llama", num_layers=6), []
    for which in ((), ("residual",)):
        trained, saved = Trained(spec, which, level=level, steps=0), []
        with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):  # noqa: B023
            trained.forward(0)
        kept.append(device_nbytes(saved))
    tensor = 4 * MICRO_BATCH * SEQ_LEN * spec.hidden_size
    assert kept[0] - kept[1] == 3 * num_kept * tensor  # the last block's is on its way


@pytest.mark.parametrize("which", EACH, ids="+".join)
def test_memory_does_not_grow_after_the_first_step(which):
    trained = Trained(make_spec("llama", num_layers=6), which, bf16=True, steps=1)
    nbytes = trained.memory.nbytes
    trained.step(1)
    trained.step(2)
    assert trained.memory.nbytes == nbytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("which", EACH_AND_PAIRS, ids="+".join)
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_bits_are_equal_on_cuda(which, is_split):
    check_bits("llama", which, bf16=True, is_split=is_split, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("level", get_args(Recompute))
def test_bits_are_equal_on_cuda_at_every_level(level):
    check_bits("llama", OPTIONS, level=level, bf16=True, device="cuda")
    check_bits("gpt2", ["residual", "weights", "m"], level=level, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("which", "bytes_per_weight"),
    [(("m", "v"), 8), (("gradients",), 4), (("master",), 4), (("master", "weights"), 6), (OPTIONS, 18)],
    ids=str,
)
def test_memory_of_a_gpu_falls_and_does_not_grow(which, bytes_per_weight, monkeypatch):
    monkeypatch.setattr(stored_gradients, "DECODED_AT_A_TIME", 1 << 19)
    spec, peaks = make_spec("llama", num_layers=14, hidden_size=256), []
    for each in ((), which):
        gc.collect()
        torch.cuda.empty_cache()
        trained = Trained(spec, each, bf16=True, device="cuda", num_blocks=12)
        by_step = []
        for step in (STEPS, STEPS + 1):
            trained.outputs.clear()
            torch.cuda.reset_peak_memory_stats()
            trained.step(step)
            by_step.append(torch.cuda.max_memory_allocated())
        assert by_step[0] == by_step[1]
        peaks.append(by_step[1])
        weights = sum(p.numel() for block in trained.module.blocks() for p in block.parameters() if p.ndim > 1)
        del trained
    # two blocks' worth, and a part of the update, may be on the device
    assert peaks[0] - peaks[1] > 0.6 * bytes_per_weight * weights


@pytest.mark.parametrize("which", EACH, ids="+".join)
@pytest.mark.parametrize(("bf16", "level"), [(True, "none"), (True, "block"), (False, "att")])
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adamw8bit", marks=pytest.mark.acceptance)])
def test_host_memory_is_what_is_estimated(which, bf16, level, optimizer):
    if not bf16 and "master" in which:
        return
    spec = make_spec("llama", num_layers=6)
    trained = Trained(spec, which, bf16=bf16, level=level, optimizer=optimizer, steps=1)
    blocks, estimates = BlockRange(0, 4, 6), []
    for each in ((), which):
        numbers = StepNumbers(
            shape=MicroBatchShape(MICRO_BATCH, SEQ_LEN, bf16, recompute=level),
            in_flight=IN_FLIGHT,
            optimizer_nbytes=partial(optimizer_nbytes, trained.config),
            frame_nbytes=0,
            offload=each,
            moments_nbytes=partial(optimizer_nbytes, trained.config, moments=each),
        )
        estimates.append(stage_memory(spec, blocks, numbers))
    plain, offloaded = estimates
    assert trained.memory.nbytes == offloaded.host_total
    assert plain.snapshot == offloaded.snapshot
    moved = {name: nbytes - offloaded.kinds()[name] for name, nbytes in plain.kinds().items()}
    assert moved["optimizer"] == offloaded.host_optimizer
    assert moved["activations"] == offloaded.host_activations
    assert moved["gradients"] == offloaded.host_gradients
    # at the level `block` the copies of one block are counted otherwise
    assert level == "block" or moved["weights"] == offloaded.host_weights
