"""A program for the hosts of a network under test: what a link of tahq carries over several connections.

``python link_transfer.py receive BIND NUMBERS`` and ``send ADDRESS NUMBERS``: a frame over a link for each number of
connections, one after another; the sender prints its goodputs in bits a second as JSON.
"""

import json
import sys
import time

import torch

from tahq.comm.link.frame import Direction, Frame, LogicalId, Purpose
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint

NBYTES = 600_000
SOON_S = 30.0


def open_endpoint(stage: int, bind: str, connections: int) -> ZmqEndpoint:
    return ZmqEndpoint(
        PeerIdentity(1, connections, stage, "test"),
        EndpointSettings(
            bind=bind,
            shaping=Shaping(piece_nbytes=16 * 1024),
            peer_timeout_s=20.0,
            heartbeat_s=2.0,
            connections=connections,
        ),
    )


ID = LogicalId(1, 0, 0, Purpose.TRAIN, 0, 0, Direction.FORWARD)


def receive(bind: str, connections: int) -> None:
    endpoint = open_endpoint(1, bind, connections)
    link = endpoint.open_link(0, 0, "sender", "")
    link.expect(ID, NBYTES)
    link.recv(SOON_S)
    endpoint.close()


def send(address: str, connections: int) -> float:
    endpoint = open_endpoint(0, "", connections)
    link = endpoint.open_link(0, 1, "receiver", address)
    endpoint.wait_connected(SOON_S)
    link.send(Frame(ID, 0, torch.uint8, (NBYTES,), torch.zeros(NBYTES, dtype=torch.uint8)))
    started_s = time.monotonic()
    endpoint.close(SOON_S)  # returns when all is acknowledged
    return 8 * NBYTES / (time.monotonic() - started_s)


def main(what: str, address: str, *numbers: str) -> None:
    run = {"receive": receive, "send": send}[what]
    results = {number: run(address, int(number)) for number in numbers}
    if what == "send":
        print(json.dumps(results))


main(*sys.argv[1:])
