"""Tied embeddings kept in step: both copies end with the sum of both gradients."""

import threading
from contextlib import closing

import torch
from support.cuts import codec_table
from torch.nn import Parameter

from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint
from tahq.pipeline.boundary import Boundary, CutIdentity
from tahq.pipeline.gradients import TiedEmbedding
from tahq.pipeline.spans import Stopwatch


def copy_with(gradient: torch.Tensor | None) -> Parameter:
    parameter = Parameter(torch.zeros(5, 4))
    parameter.grad = gradient
    return parameter


def test_one_stage_that_owns_both_copies_sums_their_gradients():
    first, second = torch.rand(5, 4), torch.rand(5, 4)
    embedding, head = copy_with(first), copy_with(second)
    tied = TiedEmbedding(embedding, head, None)
    tied.exchange(0)
    assert torch.equal(embedding.grad, first + second)
    assert torch.equal(head.grad, first + second)
    assert embedding.grad is not head.grad
    assert tied.uncounted is head


def test_a_stage_in_the_middle_does_nothing():
    tied = TiedEmbedding(None, None, None)
    tied.exchange(0)
    assert tied.uncounted is None


def open_endpoint(stage: int) -> ZmqEndpoint:
    return ZmqEndpoint(
        PeerIdentity(77, 1, stage, "tie"),
        EndpointSettings(
            bind="127.0.0.1:0",
            peer_timeout_s=10.0,
            heartbeat_s=1.0,
        ),
    )


def test_first_and_last_stage_exchange_over_their_link():
    with closing(open_endpoint(0)) as first, closing(open_endpoint(2)) as last:
        exchange(first, last)


def exchange(first: ZmqEndpoint, last: ZmqEndpoint) -> None:
    ends = [first.open_link(2, 2, "last", ""), last.open_link(2, 0, "first", first.address)]
    for endpoint in (first, last):
        endpoint.wait_connected(10.0)
    table = codec_table("tah", "fixed:bits=8")
    cuts = [Boundary(end, CutIdentity(77, 0, 2), table, torch.device("cpu"), Stopwatch()) for end in ends]
    gradients = [torch.randn(5, 4), torch.randn(5, 4)]
    embedding, head = copy_with(gradients[0].clone()), copy_with(gradients[1].clone())
    sides = [TiedEmbedding(embedding, None, cuts[0]), TiedEmbedding(None, head, cuts[1])]
    threads = [threading.Thread(target=side.exchange, args=(3,)) for side in sides]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert torch.equal(embedding.grad, gradients[0] + gradients[1])
    assert torch.equal(head.grad, embedding.grad)


def test_a_copy_without_a_gradient_counts_as_zero():
    embedding, head = copy_with(None), copy_with(torch.ones(5, 4))
    TiedEmbedding(embedding, head, None).exchange(0)
    assert torch.equal(embedding.grad, torch.ones(5, 4))
