"""A sleeping slice takes the configured time, has the model's shapes, and lets gradients through."""

import time

import pytest
import torch
from support.cluster_files import LEAST, ClusterFile

from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.models.sleeping_slice import SleepingSlice

B, S, C = 2, 8, 16


def sleeping(block, num_layers=3, vocab_size=20, forward_s=0.0, backward_s=0.0):
    config = ModelConfig(family="gpt2", num_layers=num_layers, hidden_size=C, num_heads=2, vocab_size=vocab_size)
    spec = load_spec(config, vocab_size=vocab_size, seq_len=S)
    blocks = BlockRange(block, block + 1, num_layers)
    return SleepingSlice(spec, blocks, forward_s, backward_s, device="cpu", random=RandomContext(5))


def test_forward_and_backward_take_the_configured_time_and_little_cpu():
    module = sleeping(1, forward_s=0.08, backward_s=0.12)
    x = torch.randn(B, S, C, requires_grad=True)
    begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
    y = module(x)
    middle_s = time.perf_counter()
    y.sum().backward()
    end_s = time.perf_counter()
    assert middle_s - begin_s >= 0.08
    assert end_s - middle_s >= 0.12
    assert time.thread_time() - begin_cpu_s < 0.1


@pytest.mark.parametrize("vocab_size", [5, 16, 20, 37])
def test_chain_has_the_models_shapes_and_every_channel_a_gradient(vocab_size):
    first, middle, last = (sleeping(block, vocab_size=vocab_size) for block in range(3))
    hidden = first(torch.randint(0, vocab_size, (B, S)))
    assert hidden.shape == (B, S, C)
    assert hidden.std() > 0.5
    received = hidden.detach().requires_grad_()
    logits = last(middle(received))
    assert logits.shape == (B, S, vocab_size)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(B * S, dtype=torch.int64)).backward()
    assert (received.grad != 0).all()


def test_names_differ_by_stage_and_data_depend_on_the_seed_alone():
    names = [name for block in range(3) for name in sleeping(block).canonical_parameters()]
    assert len(set(names)) == 3
    assert not any(sleeping(0).is_decayed(name, p) for name, p in sleeping(0).canonical_parameters().items())
    tokens = torch.arange(S)[None]
    assert torch.equal(sleeping(0)(tokens), sleeping(0)(tokens))


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    return ClusterFile(tmp_path, monkeypatch)


def test_durations_are_one_for_all_stages_or_one_per_stage(cluster):
    sleep = cluster.load(LEAST, "emulate.sleep={forward: 73ms, backward: [0.1s, 0.2s, 0.3s, 0.4s]}").emulate.sleep
    assert sleep.of(0) == (0.073, 0.1)
    assert sleep.of(3) == (0.073, 0.4)


@pytest.mark.parametrize(
    ("sleep", "tie", "message"),
    [
        (
            "{forward: [1ms, 2ms], backward: 1ms}",
            "untied",
            "emulate.sleep.forward lists 2 durations, pipeline.stages is 4",
        ),
        ("{forward: 73, backward: 1ms}", "untied", "needs a unit"),
        ("{forward: 73ms}", "untied", "emulate.sleep.backward is missing"),
        ("{forward: 73ms, backward: 1ms}", "sync", "tie: sync"),
    ],
)
def test_sleep_that_does_not_fit_the_model_is_refused(sleep, tie, message, cluster):
    assert message in cluster.refusal(LEAST, f"emulate.sleep={sleep}", f"model.tie={tie}")
