"""Sums of gradients over replicas: equal bits everywhere, whatever the sizes, buckets and codecs."""

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from tahq.comm.link.frame import CPU
from tahq.memory.agoq.stored_gradients import drop_gradient, gradient_of, store_gradient
from tahq.memory.shares import Share
from tahq.memory.small_floats.block_codes import dequantize_blocks, quantize_blocks
from tahq.pipeline import gradient_sum
from tahq.pipeline.boundary import Boundary, CutIdentity
from tahq.pipeline.gradient_sum import GradientSum, SumCodecs, sum_codec
from tahq.pipeline.spans import Stopwatch
from tahq.quant.config import WireConfig

FP8, FP32, BF16 = "fp8", "raw:dtype=fp32", "raw:dtype=bf16"


class Wire:
    """One end of a link between two threads."""

    payload_device, link = CPU, 0

    def __init__(self, sent, received):
        self._sent, self._received, self._expected = sent, received, {}

    def expect(self, id, max_nbytes):
        self._expected[id] = max_nbytes

    def send(self, frame):
        self._sent.put(frame)

    def recv(self, timeout_s=None):
        frame = self._received.get(timeout=20)
        assert frame.payload.nbytes <= self._expected.pop(frame.id)
        return frame


def all_reduce(gradients, spec_of, of_sums, *, stored=False, computing=None, gives_up=(), shares=None, earlier=None):
    """Every replica's gradients after the sum; `gradients` by replica, `spec_of` the codec of shards of a pair.

    Only those `computing` have gradients; where one `gives_up`, None. With `shares`, by parameter, every replica's
    weights after their owners have added the sums of two equal steps to them. `earlier`: by replica, gradients of
    earlier micro-batches.
    """
    count, wire = len(gradients), WireConfig()
    queues = {(a, b): queue.Queue() for a in range(count) for b in range(count)}
    parameters = [[Parameter(torch.zeros_like(each)) for each in of_replica] for of_replica in gradients]

    def run(rank):
        boundaries = {
            other: Boundary(
                *(Wire(queues[rank, other], queues[other, rank]), CutIdentity(1, 7, 0, rank)),
                SumCodecs(sum_codec(spec_of(rank, other), wire), sum_codec(of_sums, wire)),
                *(CPU, Stopwatch()),
            )
            for other in range(count)
            if other != rank
        }
        computes = computing is None or rank in computing
        for parameter in parameters[rank]:
            if stored:
                store_gradient(parameter)
        half = len(parameters[rank]) // 2
        halves = {0: slice(half), 1: slice(half, None)}
        chunks = {chunk: parameters[rank][each] for chunk, each in halves.items()}
        divided = {chunk: shares[each] for chunk, each in halves.items()} if shares else None
        sums = GradientSum(chunks, rank, boundaries, 1, 3, divided)
        if computing is not None:
            sums.use(computing)
        micro_batches = [*(earlier[rank] if earlier else ()), gradients[rank]] if computes else []
        for step in (5, 6) if shares else (5,):
            sums.post(step, len(micro_batches))
            for number, of_micro_batch in enumerate(micro_batches, start=1):
                for chunk in (1, 0):
                    sums.open(step, chunk, send, is_last=number == len(micro_batches))
                    for parameter, gradient in zip(chunks[chunk], of_micro_batch[halves[chunk]], strict=True):
                        (parameter * gradient).sum().backward()
                    sums.close(is_void=rank in gives_up)
                for parameter, share in zip(parameters[rank], shares or (), strict=shares is not None):
                    assert share.owner == rank or not share.sums_alone or gradient_of(parameter) is None
            is_done = sums.finish(step, is_void=rank in gives_up)
            for parameter, share in zip(parameters[rank], shares or (), strict=shares is not None):
                gradient = gradient_of(parameter)
                assert (gradient is None) == (share.owner != rank)
                parameter.data.add_(gradient if share.owner == rank else torch.nan)
                drop_gradient(parameter)
            sums.gather_weights(step)
        assert all(not boundary.transport._expected and not boundary._posted for boundary in boundaries.values())
        if shares:
            return [parameter.detach() for parameter in parameters[rank]]
        return [gradient_of(parameter) for parameter in parameters[rank]] if is_done else None

    def send(boundary, name, shard, _):
        if shard is None:
            boundary.send_void(name)
        else:
            boundary.send(name, shard)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(run, range(count)))


def random_gradients(count, sizes, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [[torch.randn(size, generator=draw) for size in sizes] for _ in range(count)]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 4),
    st.lists(st.integers(1, 700), min_size=1, max_size=6),
    st.sampled_from([64, 300, 1 << 20]),
    st.sampled_from([FP32, BF16, FP8, "eden:bits=3", "fixed:bits=8,round=stochastic"]),
)
def test_every_replica_has_the_same_sums_of_any_sizes(count, sizes, bucket, spec):
    gradients = random_gradients(count, sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_sum, "BUCKET", bucket)
        found = all_reduce(gradients, lambda a, b: spec, spec)
    for index in range(len(sizes)):
        assert all(torch.equal(each[index], found[0][index]) for each in found)
        total = torch.stack([of_replica[index] for of_replica in gradients]).sum(0)
        if spec == FP32:
            torch.testing.assert_close(found[0][index], total)
        elif sizes[index] > 300:
            tolerance = {BF16: 0.01, FP8: 0.06}.get(spec, 1.0)
            assert (found[0][index] - total).norm() < tolerance * total.norm()


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(2, 4), st.lists(st.integers(1, 700), min_size=1, max_size=6), st.booleans())
def test_owners_alone_have_the_sums_and_give_the_others_their_weights(data, count, sizes, stored):
    gradients, shares = random_gradients(count, sizes), [Share(data.draw(st.integers(0, count - 1))) for _ in sizes]
    whole = all_reduce(gradients, lambda a, b: FP32, FP32, stored=stored)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_sum, "BUCKET", data.draw(st.sampled_from([64, 300, 1 << 20])))
        patch.setattr(gradient_sum, "_AHEAD", data.draw(st.integers(0, 900)))
        found = all_reduce(gradients, lambda a, b: FP32, FP32, stored=stored, shares=shares)
    for replica in found:
        assert all(torch.equal(weights, total + total) for weights, total in zip(replica, whole, strict=True))


@settings(max_examples=30, deadline=None)
@given(
    st.data(),
    st.integers(2, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, 700), min_size=1, max_size=6),
    st.sampled_from([FP32, BF16]),
    st.booleans(),
)
def test_gradients_go_to_owners_that_sum_alone_once_per_micro_batch(data, count, num, sizes, spec, stored):
    """The order is the documented one; others keep no sum in between (`all_reduce` asserts it)."""
    shares = [Share(data.draw(st.integers(0, count - 1)), data.draw(st.booleans())) for _ in sizes]
    micro_batches = [random_gradients(count, sizes, seed) for seed in range(num)]
    earlier = [[each[replica] for each in micro_batches[:-1]] for replica in range(count)]
    codec = sum_codec(spec, WireConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_sum, "BUCKET", data.draw(st.sampled_from([64, 300, 1 << 20])))
        found = all_reduce(micro_batches[-1], lambda a, b: spec, FP32, stored=stored, shares=shares, earlier=earlier)
    assert all(torch.equal(one, other) for replica in found for one, other in zip(replica, found[0], strict=True))
    for index, (share, size) in enumerate(zip(shares, sizes, strict=True)):
        if not share.sums_alone:
            continue
        total = Parameter(torch.zeros(size))
        if stored:
            store_gradient(total)
        for of_replicas in micro_batches:
            for replica in sorted(range(count), key=lambda replica: replica != share.owner):
                gradient = of_replicas[replica][index]
                if replica != share.owner:
                    gradient = gradient if not stored else rounded(gradient)
                    gradient = codec.decode(codec.encode(gradient), gradient.shape)
                (total * gradient).sum().backward()
        summed = gradient_of(total)
        assert torch.equal(found[0][index], summed + summed)


def rounded(gradient):
    """To 8 bits in blocks, as gradients are stored."""
    return dequantize_blocks(quantize_blocks(gradient, 8, torch.float32), gradient.shape)


def test_near_replicas_send_shards_uncompressed_and_all_take_the_same_sums():
    """Replicas 0 and 1 are in one site, 2 in another: 0 and 1 lose nothing of each other's shards."""
    gradients = random_gradients(3, [900])

    def spec_of(a, b):
        return FP32 if 2 not in (a, b) else FP8

    found = all_reduce(gradients, spec_of, FP8)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][0], found[2][0])
    near, far = sum_codec(FP32, WireConfig()), sum_codec(FP8, WireConfig())
    shards = [of_replica[0].split(384) for of_replica in gradients]

    def coded(codec, x):
        return codec.decode(codec.encode(x), x.shape)

    first = shards[0][0] + coded(near, shards[1][0]) + coded(far, shards[2][0])
    assert torch.equal(found[0][0][:384], coded(far, first))
    last = coded(far, shards[0][2]) + coded(far, shards[1][2]) + shards[2][2]
    assert torch.equal(found[0][0][768:], coded(far, last))


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(2, 4), st.lists(st.integers(1, 700), min_size=1, max_size=4), st.sampled_from([64, 300]))
def test_replicas_that_do_not_compute_have_the_sums_of_the_others(data, count, sizes, bucket):
    computing = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    gradients, stored = random_gradients(count, sizes), data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_sum, "BUCKET", bucket)
        found = all_reduce(gradients, lambda a, b: FP32, FP32, computing=computing, stored=stored)
    for index in range(len(sizes)):
        assert all(torch.equal(each[index], found[0][index]) for each in found)
        total = sum(gradients[replica][index] for replica in computing)
        torch.testing.assert_close(found[0][index], total, rtol=0, atol=1.0 if stored else 1e-5)


@pytest.mark.parametrize("computing", [None, [0, 2]])
def test_step_that_one_replica_gives_up_is_given_up_by_all_and_leaves_no_frame(computing):
    gradients = random_gradients(3, [900, 40])
    assert all_reduce(gradients, lambda a, b: FP8, FP8, computing=computing, gives_up=[2]) == [None] * 3


def test_gradients_in_codes_are_summed_whole_and_coded_again():
    gradients = random_gradients(2, [500, 40], seed=3)
    found = all_reduce(gradients, lambda a, b: FP8, FP8, stored=True)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    total = gradients[0][0] + gradients[1][0]
    assert (found[0][0] - total).norm() < 0.1 * total.norm()


def test_nan_of_one_replica_is_nan_of_all():
    gradients = random_gradients(2, [300])
    gradients[1][0][299] = torch.nan
    for (gradient,) in all_reduce(gradients, lambda a, b: FP8, FP8):
        assert gradient.isnan().any()


def test_buckets_are_sent_within_the_backward_once_its_order_is_known(monkeypatch):
    monkeypatch.setattr(gradient_sum, "BUCKET", 300)
    boundary = Boundary(Wire(queue.Queue(), queue.Queue()), CutIdentity(1, 7, 0, 0), None, CPU, Stopwatch())
    first, last = (Parameter(torch.ones(300)) for _ in range(2))
    sums, sent = GradientSum({0: [first, last]}, 0, {1: boundary}, 1, 3), []

    def backward(step):
        sums.open(step, 0, lambda _, name, shard, __: sent.append((name.step, name.micro_batch)))
        before = len(sent)
        (last * 2).sum().backward()
        between = len(sent) - before
        (first * 2).sum().backward()
        sums.close()
        return between

    assert [backward(step) for step in (1, 2)] == [0, 1]
    assert sent == [(1, 0), (1, 1), (2, 1), (2, 0)]
    sums.open(3, 0, lambda *_: None)
    (last * 2).sum().backward()
    with pytest.raises(AssertionError, match="a gradient changed after it was sent"):
        (last * 2).sum().backward()
