"""Where frames that come in are put."""

import torch

from tahq.comm.link.frame import FrameHeader, FrameKind
from tahq.comm.link.inbound import Inbound, memory_for, pageable
from tahq.comm.link.spec import SessionLimits


def test_frames_for_a_cpu_come_into_memory_as_any():
    assert memory_for(torch.device("cpu")) is pageable
    assert pageable(7).shape == (7,)
    assert pageable(7).dtype == torch.uint8


def test_a_frame_is_received_in_the_memory_that_was_allocated_for_it(make_id):
    given = []

    def allocate(nbytes):
        given.append(torch.empty(nbytes, dtype=torch.uint8))
        return given[-1]

    inbound = Inbound(SessionLimits(), "peer", allocate)
    header = FrameHeader(FrameKind.DATA, 1, 0, 1, make_id(), payload_nbytes=5, total_nbytes=5)
    inbound.expect(header.id, 5)
    frame = inbound.accept(header, b"hello")
    assert frame is not None
    assert frame.payload is given[0]
    assert bytes(frame.payload.numpy()) == b"hello"
    assert inbound.accept(header, b"hello") is None  # delivered before: nothing is allocated for it
    assert len(given) == 1
