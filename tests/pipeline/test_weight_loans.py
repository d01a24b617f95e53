"""Replicas that lend each other matrices of blocks: the bits of one that has all, and one block's at a time."""

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pipeline.test_gradient_sum import FP32, Wire
from support.runs import tiny

from tahq.comm.link.frame import CPU, Purpose
from tahq.config.cluster import ClusterConfig
from tahq.memory.offload.host_part import device_nbytes, is_here
from tahq.models.keyed_dropout import RandomContext
from tahq.pipeline.boundary import Boundary, CutIdentity
from tahq.pipeline.gradient_sum import SumCodecs, sum_codec
from tahq.pipeline.spans import Stopwatch
from tahq.pipeline.weight_loans import WeightLoans
from tahq.quant.config import WireConfig
from tahq.worker.assembly import chunk_module, resolved_spec


def module_of(replicas, replica, **memory):
    sections = {"pipeline": {"stages": 1, "replicas": replicas}, "training": {"global_batch": 2 * replicas}}
    config = ClusterConfig.model_validate(tiny(**sections, model={"vocab_size": 256}, memory=memory))
    random = RandomContext(config.run.seed)
    module = chunk_module(config, resolved_spec(config, None), 0, device=CPU, random=random, replica=replica)
    random.at(0, 0, 0, 0)
    return module


def result(module):
    """Logits of two passes, and the gradients of the second."""
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        first = module(tokens)
    second = module(tokens)
    second.logsumexp(-1).sum().backward()
    return first, second.detach(), *(parameter.grad for parameter in module.parameters())


@pytest.mark.parametrize("replicas", [2, 3, 6])
def test_passes_have_the_bits_of_whole_weights_with_one_block_lent_at_a_time(replicas):
    """With six, some have nothing of a block, which has four matrices. The next block's are frames meanwhile."""
    expected, wire = result(module_of(replicas, 0)), WireConfig()
    queues = {(a, b): queue.Queue() for a in range(replicas) for b in range(replicas)}

    def run(rank):
        module = module_of(replicas, rank, shard=["optimizer", "weights"])
        boundaries = {
            other: Boundary(
                *(Wire(queues[rank, other], queues[other, rank]), CutIdentity(1, 7, 0, rank)),
                *(SumCodecs(*[sum_codec(FP32, wire)] * 3), CPU, Stopwatch()),
            )
            for other in range(replicas)
            if other != rank
        }

        def send(boundary, name, tensor, _):
            boundary.send(name, tensor)

        blocks = list(module.blocks())
        loans = WeightLoans([block.shared for block in blocks], rank, boundaries, 1, 3, send)
        others = [[p for p in block.parameters() if not is_here(p)] for block in blocks]
        lent = []

        def note(*_):
            lent.append([sum(map(device_nbytes, of_block)) > 0 for of_block in others if of_block].count(True))

        for block in blocks:
            block.register_forward_pre_hook(note)
            block.register_full_backward_hook(note)
        note()
        loans.begin(5, Purpose.WEIGHTS)
        found = result(module)
        loans.begin(5, Purpose.EVAL)
        note()
        assert lent[0] == lent[-1] == 0
        assert max(lent) == 1
        assert all(not boundary.transport._expected and not boundary._posted for boundary in boundaries.values())
        return found

    with ThreadPoolExecutor(replicas) as threads:
        for found in threads.map(run, range(replicas)):
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
