"""CUDA graphs of a slice's blocks: the bits of a pass that launches kernel by kernel, and when they are used."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import get_args

import pytest
import torch
from support.samples import normal
from support.small_slices import make_slice, make_spec

from tahq.memory import block_graphs
from tahq.memory.block_graphs import BlockGraphs
from tahq.memory.config import Recompute
from tahq.memory.recompute import recompute
from tahq.memory.stored_slice import build_slice
from tahq.models.adapters.config import AdapterConfig
from tahq.models.deferred_gradients import DeferredGradients, after_gradient, sharing_weight_copies
from tahq.models.keyed_dropout import RandomContext
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice

pytestmark = pytest.mark.gpu
FIRST_TWO, LAST_TWO = BlockRange(0, 2, 3), BlockRange(1, 3, 3)
SHAPE = 2, 48, 320
WHOLE = "F0 F1 F2 B0 F3 B1 B2 B3"
SPLIT = "F0 F1 F2 B0 F3 B1 W0 W1 B2 B3 W2 W3"
MANY = " ".join(f"{kind}{number}" for kind in "FB" for number in range(40))
"""More than torch has streams."""
STEPS = 4


@pytest.fixture
def replays(monkeypatch):
    """Grows with each graph that is replayed, and keeps none alive."""
    found, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (found.append(id(graph)), replay(graph))[1])
    return found


def make(family: str, level: Recompute = "none", blocks: BlockRange = FIRST_TWO, **keys) -> ModelSlice:
    return make_slice(make_spec(family, hidden_size=320, **keys), level, blocks=blocks, device="cuda")


def make_adapted(
    family: str, level: Recompute = "none", blocks: BlockRange = FIRST_TWO, *, kind: str, dtype: torch.dtype, **keys
) -> ModelSlice:
    """A frozen base in that type, or 4 bits, with adapters that change its outputs."""
    spec = replace(make_spec(family, hidden_size=320), adapter=AdapterConfig(kind=kind, rank=8, **keys))
    random = RandomContext(0)
    module = build_slice(spec, blocks, seed=0, device=torch.device("cuda"), random=random, matrices=dtype).train()
    for number, parameter in enumerate(each for each in module.parameters() if each.requires_grad):
        parameter.data += 0.1 * normal(parameter.shape, seed=number).cuda()
    recompute(module, level)
    return module


def compute(module: ModelSlice, order: str, *, bf16: bool, step: int, is_packed: bool = False) -> list[torch.Tensor]:
    """A step in this order of forwards, backwards and gradients of weights; outputs and all gradients.

    `is_packed`: rows of every other micro-batch have two records, of other lengths in each.
    """
    if module.graphs is not None:
        module.graphs.begin()
    passes, deferrals, found, is_split = {}, {}, [], "W" in order
    with sharing_weight_copies():
        for kind, number in ((each[0], each[1:]) for each in order.split()):
            seed = 10 * step + int(number)
            if kind == "F":
                tokens = torch.arange(96).view(2, 48).add(seed) % 100
                x = tokens.cuda() if module.parts.embedding else normal(SHAPE, seed=seed).cuda().requires_grad_()
                module.deferred = deferrals[number] = DeferredGradients() if is_split else None
                first = 10 + step + int(number) % 30
                positions = torch.cat([torch.arange(first), torch.arange(48 - first)]).expand(2, -1).cuda()
                with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                    passes[number] = x, module(x, positions if is_packed and int(number) % 2 else None)
                found.append(passes[number][1].detach().clone())
            elif kind == "B":
                x, y = passes.pop(number)
                y.backward(normal(y.shape, seed=1000 + seed).cuda().to(y.dtype))
                found += [] if x.grad is None else [x.grad]
            else:
                deferrals.pop(number).run()
    return found + [parameter.grad.clone() for parameter in module.parameters() if parameter.requires_grad]


def train(module: ModelSlice, order: str, *, bf16: bool, is_packed: bool = False) -> list[torch.Tensor]:
    """All outputs and gradients of a few steps, after each of which the weights change."""
    found = []
    for step in range(STEPS):
        found += compute(module, order, bf16=bf16, step=step, is_packed=is_packed)
        with torch.no_grad():
            for parameter in (each for each in module.parameters() if each.requires_grad):
                parameter -= 0.001 * parameter.grad.sign()
                parameter.grad = None
            x = torch.zeros(2, 48, dtype=torch.int64, device="cuda")
            module.eval()
            found.append(module(x if module.parts.embedding else normal(SHAPE).cuda()))
            module.train()
    return found


def check(family: str, order: str, *, bf16: bool = True, is_packed: bool = False, **keys) -> None:
    plain, recorded = ((make_adapted if "kind" in keys else make)(family, **keys) for _ in range(2))
    recorded.graphs = BlockGraphs(recorded)
    expected = train(plain, order, bf16=bf16, is_packed=is_packed)
    assert all(each.isfinite().all() for each in expected)
    pairs = zip(expected, train(recorded, order, bf16=bf16, is_packed=is_packed), strict=True)
    assert [index for index, (left, right) in enumerate(pairs) if not torch.equal(left, right)] == []


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("order", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_bits_are_those_of_single_kernels(family, order, bf16, replays):
    check(family, order, bf16=bf16)
    assert len(replays) == (STEPS - 1) * len(order.split())


@pytest.mark.parametrize("level", [level for level in get_args(Recompute) if level not in ("none", "block")])
@pytest.mark.parametrize("order", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bits_are_those_of_single_kernels_where_parts_are_recomputed(family, order, level, replays):
    check(family, order, level=level)
    assert len(replays) == (STEPS - 1) * len(order.split())


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_bits_are_those_of_single_kernels_where_rows_have_several_records(family, replays):
    check(family, SPLIT, is_packed=True)
    assert len(replays) == (STEPS - 1) * len(SPLIT.split())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("order", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(("kind", "dtype"), [("lora", "float32"), ("lora", "bfloat16"), ("qlora", "bfloat16")])
@pytest.mark.parametrize("blocks", [FIRST_TWO, LAST_TWO], ids=["first", "last"])
def test_bits_of_adapters_are_those_of_single_kernels(family, order, kind, dtype, blocks, replays):
    check(family, order, kind=kind, dtype=getattr(torch, dtype), blocks=blocks)
    assert len(replays) == (STEPS - 1) * len(order.split())


@pytest.mark.parametrize("order", [WHOLE, SPLIT], ids=["whole", "split"])
def test_blocks_below_the_first_adapter_are_replayed_without_a_backward(order, replays):
    check("llama", order, kind="lora", dtype=torch.bfloat16, layers=[1])
    assert len(replays) == (STEPS - 1) * len(order.split())


def test_last_slice(replays):
    check("gpt2", SPLIT, blocks=LAST_TWO)
    assert replays


def test_micro_batches_that_find_no_slot_are_computed_by_single_kernels(monkeypatch, replays):
    rooms = iter([True, True])
    monkeypatch.setattr(block_graphs, "free_bytes", lambda device: 1 << 60 if next(rooms, False) else 0)
    check("gpt2", SPLIT)
    assert 0 < len(replays) < (STEPS - 1) * len(SPLIT.split())


def test_nothing_is_recorded_beside_a_micro_batch_without_a_slot(monkeypatch, replays):
    rooms = iter([True, False] + [True] * 100)
    monkeypatch.setattr(block_graphs, "free_bytes", lambda device: 1 << 60 if next(rooms) else 0)
    check("gpt2", WHOLE)
    assert 0 < len(replays) < (STEPS - 1) * len(WHOLE.split())


def test_slots_of_an_earlier_schedule_make_room(monkeypatch, replays):
    plain, recorded = make("gpt2"), make("gpt2")
    recorded.graphs = BlockGraphs(recorded)
    found, reserved = [], []

    def room(device: torch.device) -> int:
        """Bytes for slots: none at the first question, then enough."""
        reserved.append(torch.cuda.memory_reserved())
        return 0 if len(reserved) == 1 else 1 << 60

    for module in (plain, recorded):
        found.append([each for step in range(3) for each in compute(module, SPLIT, bf16=True, step=step)])
        with monkeypatch.context() as patch:
            patch.setattr(block_graphs, "free_bytes", room)
            found[-1] += compute(module, WHOLE, bf16=True, step=3)
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))
    assert len(replays) == 2 * len(SPLIT.split()) + len(WHOLE.split())
    assert reserved[1] < reserved[0]


def test_kernels_of_other_threads_are_not_recorded(replays):
    stream, counter, is_done = torch.cuda.Stream(), torch.zeros(1, device="cuda"), Event()

    def work() -> int:
        count = 0
        with torch.cuda.stream(stream):
            while not is_done.is_set():
                counter.add_(1)
                stream.synchronize()
                count += 1
        return count

    with ThreadPoolExecutor(1) as thread:
        count = thread.submit(work)
        try:
            check("gpt2", MANY)
        finally:
            is_done.set()
        assert counter.item() == count.result() > 0
    assert len(replays) == (STEPS - 1) * len(MANY.split())


def test_no_garbage_is_collected_in_a_recording(replays):
    module, collects = make("gpt2"), []
    module.graphs, through_blocks = BlockGraphs(module), module.through_blocks

    def observed(*args):
        if torch.cuda.is_current_stream_capturing():
            collects.append(gc.isenabled())
        return through_blocks(*args)

    module.through_blocks = observed
    train(module, WHOLE, bf16=True)
    assert replays
    assert collects == [False] * 3
    assert gc.isenabled()


def test_slots_of_an_abandoned_step_are_free_again(replays):
    plain, recorded = (make("gpt2") for _ in range(2))
    recorded.graphs = BlockGraphs(recorded)
    train(recorded, SPLIT, bf16=True)
    compute(recorded, "F0 F1 F2 B0", bf16=True, step=0)
    num_before = len(replays)
    recorded.load_state_dict(plain.state_dict())
    recorded.zero_grad()
    pairs = zip(train(plain, SPLIT, bf16=True), train(recorded, SPLIT, bf16=True), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert len(replays) == num_before + STEPS * len(SPLIT.split())


@pytest.mark.parametrize("reason", ["dropout", "hook", "block"])
def test_passes_that_differ_are_not_recorded(reason, replays):
    module = make("gpt2", "block" if reason == "block" else "none", dropout=0.1 if reason == "dropout" else 0.0)
    if reason == "hook":
        after_gradient(next(module.blocks()).ln_1.weight, lambda parameter: None)
    module.graphs = BlockGraphs(module)
    train(module, WHOLE, bf16=True)
    assert not replays
