"""A program that decodes mutated streams beside forbidden pages, for `tests/quant/test_mutated_streams.py`.

    python -m support.mutated_decoding COUNT SEED PART PARTS

It prints a JSON line for every case, `{"case": …, "backends": …, "decoded": …, "share_refused": …}`, and before each
the same without figures, so that the caller knows where it died. A decoder that raises anything but CodecError,
gives a tensor of another shape, an infinity, or not what the reference gives, ends it with a traceback; one that reads
outside its buffer, with a signal.
"""

import faulthandler
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from support.codec_backends import backends_of
from support.guarded_memory import GuardedMemory
from support.stream_mutations import mutated
from tahq.errors import CodecError
from tahq.quant import Codec, get_codec
from tahq.quant.inspection import section_table

Case = tuple[str, tuple[int, ...]]

CASES: tuple[Case, ...] = (
    ("raw:dtype=fp16", (3, 17)),
    ("fixed", (2, 2, 64)),
    ("fixed:bits=3,group=8", (3, 20)),  # padded to 24
    ("fixed:bits=13,group=32", (1, 3, 32)),
    ("tah", (1, 3, 100)),  # padded to 128
    ("tah:group=8,int4=0.5", (2, 2, 16)),
    ("tah:group=16,low=2,high=8,tau=0", (2, 3, 32)),
    ("tah:group=256,tau=0", (1, 2, 256)),
    ("tah:group=8,alloc=token,low=3,high=5", (2, 3, 24)),
    ("aqsgd", (2, 2, 12)),
    ("aqsgd:cache=none", (2, 2, 12)),
    ("eden:bits=3,group=16", (2, 3, 32)),
    ("eden:bits=3/2,group=64", (2, 100)),  # padded to 128
    ("wf:bits=7/2,group=8", (2, 3, 20)),  # padded to 24
    ("wf:bits=5,group=32,center=off", (2, 3, 32)),
)
NUM_STREAMS = 8
SLOW_SHARE = 0.001
"""Of all decodes, how many a case gets whose decoder is plain torch, and takes hundreds of microseconds."""


@dataclass(frozen=True, slots=True)
class Job:
    """One case: `count` buffers for its first backend, the first `num_compared` of them also for the others."""

    spec: str
    shape: tuple[int, ...]
    backends: tuple[str, ...]
    count: int
    num_compared: int

    @property
    def case(self) -> str:
        return f"{self.spec} {list(self.shape)}"

    @property
    def num_decodes(self) -> int:
        return self.count + self.num_compared * (len(self.backends) - 1)


def main(count: int, seed: int, part: int, parts: int) -> None:
    """Do one of `parts` equal parts of the cases; together they decode `count` buffers, or a few more."""
    faulthandler.enable()
    torch.set_num_threads(1)
    memory = GuardedMemory(1 << 16)
    for number, job in list(enumerate(jobs(count)))[part::parts]:
        print(json.dumps({"case": job.case, "backends": job.backends}), flush=True)
        refused = run(job, memory, np.random.default_rng((seed, number)))
        said = {
            "case": job.case,
            "backends": job.backends,
            "decoded": job.num_decodes,
            "share_refused": refused / job.count,
        }
        print(json.dumps(said), flush=True)


def jobs(count: int) -> list[Job]:
    """Every case on every backend of the CPU; fast decoders share what the slow ones, in plain torch, leave."""
    fast = [spec.startswith("raw") or "cpu" in backends_of(spec) for spec, _ in CASES]
    each, num_slow = -(-count // sum(fast)), int(count * SLOW_SHARE)
    planned = []
    for (spec, shape), is_fast in zip(CASES, fast, strict=True):
        backends = tuple(name for name in ("cpu", "reference") if name in backends_of(spec))
        planned.append(Job(spec, shape, backends, each if is_fast else num_slow, num_slow))
    return planned


def run(job: Job, memory: GuardedMemory, rng: np.random.Generator) -> int:
    """Decode a job's buffers; how many were refused."""
    first, *others = (get_codec(job.spec, backend=backend) for backend in job.backends)
    places = itertools.cycle((memory.at_end, memory.at_start))
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float16))
    refused = 0
    for number, data in enumerate(itertools.islice(_buffers(job, rng), job.count)):
        dtype = next(dtypes)
        values = decode(first, next(places)(data), job.shape, dtype)
        refused += values is None
        _check(values, job, data, dtype)
        for other in others if number < job.num_compared else ():
            _compare(values, decode(other, next(places)(data), job.shape, dtype), job, data)
    return refused


def _buffers(job: Job, rng: np.random.Generator) -> Iterator[np.ndarray]:
    codec = get_codec(job.spec, backend="reference")
    tensors = [_tensor(job.shape, number) for number in range(NUM_STREAMS)]
    streams = [codec.encode(x) for x in tensors]
    table = section_table(codec.spec, job.shape, streams[0])
    sections = [(row.offset, row.offset + row.nbytes) for row in table if row.nbytes]
    batches = mutated(np.stack([buf.numpy() for buf in streams]), sections, rng)
    return itertools.chain.from_iterable(batches)


def _tensor(shape: Sequence[int], number: int) -> torch.Tensor:
    """Values of another magnitude for each number, with outliers; in some a NaN, in one nothing but zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 10.0 ** (3 * number - 9)
    x.view(-1)[number::13] *= 30
    if number in (2, 5):
        x.view(-1)[number] = torch.nan
    return torch.zeros(shape) if number == 7 else x


def decode(codec: Codec, buf: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """What a buffer decodes to; None if it is refused."""
    try:
        return codec.decode(buf, shape, dtype)
    except CodecError:
        return None


def _check(values: torch.Tensor | None, job: Job, data: np.ndarray, dtype: torch.dtype) -> None:
    """Right shape and type, and no infinity; raw has no patterns that are none of its values."""
    if values is None:
        return
    is_right = values.shape == job.shape and values.dtype == dtype
    if not is_right or (values.isinf().any() and not job.spec.startswith("raw")):
        raise AssertionError(f"{job.case}: {values} from {data.tobytes().hex()}")


def _compare(values: torch.Tensor | None, others: torch.Tensor | None, job: Job, data: np.ndarray) -> None:
    """Backends refuse the same buffers, and read the same values from the rest."""
    if values is None or others is None:
        agree = values is others
    else:
        agree = torch.equal(values.nan_to_num(1.0), others.nan_to_num(1.0)) and torch.equal(
            values.isnan(), others.isnan()
        )
    if not agree:
        raise AssertionError(f"{job.case}: {job.backends} give {values} and {others} from {data.tobytes().hex()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
