"""`tahq measure`'s part of a worker on a CUDA device."""

import pytest
import torch
from support.runs import tiny

from tahq.config.cluster import ClusterConfig
from tahq.memory.free_memory import free_bytes
from tahq.quant.config import WireConfig
from tahq.worker.measuring import ComputeMeasurement, seconds_per_element

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")


def test_parts_are_timed_under_autocast():
    config = ClusterConfig.model_validate(tiny(model={"vocab_size": 256}))
    times = ComputeMeasurement(config, 0, CUDA, lambda activity: None).layer_times(4)
    assert 0 < times.block_input_gradient <= times.block_backward < 1
    assert times.block_forward > 0
    assert times.last_backward > 0


@pytest.mark.parametrize("spec", ["raw:dtype=bf16", "fixed:bits=4"])
def test_codecs_take_time_both_ways(spec):
    encode_s, decode_s = seconds_per_element(spec, WireConfig(), (2, 128, 256), CUDA)
    assert 0 < encode_s < 1e-3
    assert 0 < decode_s < 1e-3


def test_free_memory_is_the_drivers():
    free, whole = torch.cuda.mem_get_info(CUDA)
    assert 0 < free_bytes(CUDA) <= whole
    assert free_bytes(CUDA) == pytest.approx(free, rel=0.1)
