"""Frames to send, and endpoints that are always closed."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint

RUN = 77


def _make_id(micro_batch: int = 0, direction: Direction = Direction.FORWARD, step: int = 0) -> LogicalId:
    return LogicalId(RUN, 0, step, Purpose.TRAIN, micro_batch, 1, direction)


def _make_frame(
    nbytes: int = 1000, micro_batch: int = 0, direction: Direction = Direction.FORWARD, step: int = 0
) -> Frame:
    content = random.Random(f"{nbytes} {micro_batch} {direction} {step}").randbytes(nbytes)
    payload = torch.frombuffer(bytearray(content or b"0"), dtype=torch.uint8)[:nbytes]
    return Frame(_make_id(micro_batch, direction, step), 3, torch.bfloat16, (2, nbytes), payload)


@pytest.fixture
def make_id() -> Callable[..., LogicalId]:
    """make_id(micro_batch, direction, step) of run 77."""
    return _make_id


@pytest.fixture
def make_frame() -> Callable[..., Frame]:
    """make_frame(nbytes, micro_batch, direction, step): the payload is a function of these."""
    return _make_frame


@pytest.fixture
def make_endpoint() -> Iterator[Callable[..., ZmqEndpoint]]:
    """make_endpoint(stage, **what differs): an endpoint of run 77 on loopback, closed at the end."""
    endpoints = []

    def make(
        stage: int, *, epoch: int = 1, config_hash: str = "c0ffee", run_id: int = RUN, **changes: Any
    ) -> ZmqEndpoint:
        settings = EndpointSettings(**{"bind": "127.0.0.1:0", "peer_timeout_s": 5.0, "heartbeat_s": 0.5} | changes)
        endpoints.append(ZmqEndpoint(PeerIdentity(run_id, epoch, stage, config_hash), settings))
        return endpoints[-1]

    yield make
    for endpoint in endpoints:
        endpoint.close(linger_s=0.1)
