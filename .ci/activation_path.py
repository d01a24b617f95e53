"""Print the files of tahq that one activation crosses, from one stage's forward to the next stage's forward.

    PYTHONPATH=benchmarks python .ci/activation_path.py

Two stages run one step of one micro-batch in this process, over ZMQ on loopback with the default codecs. Every function
that is given the tensor, its bytes or a frame of them in any thread between the two forwards is recorded, in order of
first entry: what only times, acknowledges or watches is left out, because it sees no more than a kilobyte.
"""

import dataclasses
import os
import sys
import threading
from pathlib import Path

import numpy as np
import torch
import zmq
from bench_runtime import Multiplication

from tahq.comm.link.spec import PeerIdentity
from tahq.comm.zmq.endpoint import EndpointSettings, ZmqEndpoint
from tahq.models.keyed_dropout import RandomContext
from tahq.pipeline.boundary import Boundary, CodecTable, CutIdentity
from tahq.pipeline.codec_lanes import ThreadedLanes
from tahq.pipeline.engine import Chunk, StageEngine, StepShape
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.spans import Stopwatch
from tahq.quant.config import WireConfig

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ("tahq/quant/cpu/", "tahq/quant/gaussian/")
"""What a codec computes on this device: the path through these differs from codec to codec."""
LARGE_NBYTES = 4096
"""The activation has 64 KiB, its encoding about 8; an acknowledgement at most one."""
SHAPE = StepShape(1, micro_batch=1, seq_len=64, hidden_size=256)
entered: dict[str, list[str]] = {}
"""Functions by file, in the order in which they first saw the tensor while recording."""
recording = threading.Event()


class Batch:
    """Tokens for the first stage, labels for the last."""

    digest = ""
    num_tokens = SHAPE.seq_len

    def micro_batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(SHAPE.boundary), torch.zeros(SHAPE.boundary[:2], dtype=torch.int64)

    def micro_batch_positions(self, index: int) -> None:
        return None


class Batches:
    """The same batch at every step."""

    def train(self, step: int) -> Batch:
        return Batch()


class Watched(Multiplication):
    """Starts recording after stage 0's forward in the second step, and stops before stage 1's."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage, self.calls = stage, 0

    def forward(self, x: torch.Tensor, positions: None = None) -> torch.Tensor:
        self.calls += 1
        if self.stage == 1:
            recording.clear()
        y = super().forward(x)
        if self.stage == 0 and self.calls == 2:
            recording.set()
        return y


def carries(value: object, depth: int = 2) -> bool:
    """Whether this is a large buffer, or a container or dataclass with one in it."""
    if isinstance(value, (bytes, bytearray)):
        return len(value) >= LARGE_NBYTES
    if isinstance(value, (torch.Tensor, np.ndarray, memoryview)):
        return value.nbytes >= LARGE_NBYTES
    if depth == 0 or isinstance(value, type):
        return False
    if isinstance(value, zmq.Frame):
        return len(value.bytes) >= LARGE_NBYTES
    if isinstance(value, (tuple, list)):
        return any(carries(part, depth - 1) for part in value)
    if dataclasses.is_dataclass(value):
        return any(carries(getattr(value, field.name, None), depth - 1) for field in dataclasses.fields(value))
    return False


def record(frame, event: str, returned: object) -> None:
    """A profiler: note the function that is given the tensor, or returns it."""
    if event not in ("call", "return") or not recording.is_set():
        return
    file = frame.f_code.co_filename
    if file.startswith(str(ROOT / "tahq")):
        seen = [returned] if event == "return" else [value for name, value in frame.f_locals.items() if name != "self"]
        if any(map(carries, seen)):
            functions = entered.setdefault(str(Path(file).relative_to(ROOT)), [])
            if frame.f_code.co_name not in functions:
                functions.append(frame.f_code.co_name)


def give_up(error: threading.ExceptHookArgs) -> None:
    """End the program at an error in a thread, for which the other would wait."""
    threading.__excepthook__(error)
    os._exit(1)


def run_stage(stage: int, endpoint: ZmqEndpoint, dial: str) -> None:
    """Two steps; the second is recorded."""
    transport = endpoint.open_link(0, 1 - stage, "neighbour", dial)
    endpoint.wait_connected(20.0)
    stopwatch, device = Stopwatch(), torch.device("cpu")
    codecs = CodecTable(WireConfig(activations="wf", gradients="eden"))
    cut = Boundary(transport, CutIdentity(1, 0, 0), codecs, device, stopwatch)
    cut_before, cut_behind = (cut, None) if stage else (None, cut)
    engine = StageEngine(
        chunks={stage: Chunk(Watched(stage), cut_before, cut_behind)},
        actions=generate("1f1b", 2, 1).actions[stage],
        shape=SHAPE,
        batches=Batches(),
        random=RandomContext(0),
        device=device,
        stopwatch=stopwatch,
        on_action=lambda step, action: None,
        lanes=ThreadedLanes(device, stopwatch),
    )
    for step in range(2):
        engine.run_step(step)


def main() -> None:
    """Run the two stages and print the files."""
    torch.set_num_threads(1)
    threading.excepthook = give_up
    threading.setprofile(record)
    sys.setprofile(record)
    endpoints = [
        ZmqEndpoint(
            PeerIdentity(1, 1, stage, "path"),
            EndpointSettings(bind="127.0.0.1:0", peer_timeout_s=20.0, heartbeat_s=19.0),
        )
        for stage in (0, 1)
    ]
    addresses = ["", endpoints[0].address]
    threads = [threading.Thread(target=run_stage, args=(stage, endpoints[stage], addresses[stage])) for stage in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for endpoint in endpoints:
        endpoint.close()
    sys.setprofile(None)
    threading.setprofile(None)
    for number, (file, functions) in enumerate(entered.items(), 1):
        print(f"{number:3}  {file:45}  {', '.join(functions)}")
    kernels = [file for file in entered if file.startswith(KERNELS)]
    print(f"{len(entered) - len(kernels)} files, and {len(kernels)} of the codec's kernels")


if __name__ == "__main__":
    main()
