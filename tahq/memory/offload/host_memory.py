"""Tensors whose values are in host memory, and which are lent to their device.

The tensor itself stays where it is, with its shape, dtype and device; only its storage is emptied while it is away, and
filled again when it is lent. So parameters, optimizer states, and what autograd has saved can be offloaded without
anything that refers to them knowing it. Reading an empty one is an error of the caller and crashes.

On CUDA the copies run on two streams of their own, one for each direction, beside the computing:

- memory is allocated and freed on the caller's stream, so the allocator orders its uses;
- a copy begins when what the caller has queued so far is done, and the buffer's copy before it;
- the caller's stream waits for a copy in `wait`, before the values are read, and in `release`, before memory is freed;
- the host waits in `values` only;
- kernels may also read and write `values` where they are (zero-copy), with `changed` behind them.

The caller's stream must be the same in all calls. In a stage it is: the compute thread's, and in a backward pass
that of the forward pass. On a CPU copies are made at once, in ordinary memory.

Source: LLMQ §3.1, Offloading.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

_ALIGNMENT = 256
_SMALLEST, _LARGEST = 1 << 24, 1 << 30


@dataclass(slots=True)
class HostBuffer:
    """Bytes in host memory, and the last copy from or to them, or change of them."""

    data: torch.Tensor
    copied: torch.cuda.Event | None = None


class HostMemory:
    """Buffers in host memory for the tensors of one device: pinned if that is a GPU.

    Buffers that are given back are used again, so a step like the one before allocates nothing. torch makes every
    pinned allocation a power of two, so buffers are cut from large ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.nbytes = 0
        """Bytes allocated so far."""
        self._rooms: list[torch.Tensor] = []
        self._free: dict[int, list[HostBuffer]] = {}
        self._leaving: list[Offloaded] = []
        is_cuda = device.type == "cuda"
        self._streams = tuple(torch.cuda.Stream(device) for _ in range(2)) if is_cuda else None  # type: ignore[no-untyped-call]
        """To the host, and from it."""

    def place_for(self, tensor: torch.Tensor) -> "Offloaded":
        """A place for a tensor's values."""
        nbytes = tensor.untyped_storage().nbytes()
        free = self._free.get(nbytes)
        return Offloaded(tensor, self, free.pop() if free else HostBuffer(self._allocated(nbytes)))

    def give_back(self, buffer: HostBuffer) -> None:
        """Let a buffer be used again, behind its last copy."""
        self._free.setdefault(buffer.data.numel(), []).append(buffer)

    def begin_copy(self, buffer: HostBuffer, on_device: torch.Tensor, *, to_host: bool) -> None:
        """Begin to copy a buffer's bytes, behind what the caller has queued and behind the buffer's copy before."""
        target, source = (buffer.data, on_device) if to_host else (on_device, buffer.data)
        if self._streams is None:
            target.copy_(source)
            return
        stream = self._streams[0 if to_host else 1]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if buffer.copied is not None:
            stream.wait_event(buffer.copied)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            buffer.copied = stream.record_event()

    def changed(self, buffer: HostBuffer) -> None:
        """Let later copies of a buffer, and `finish`, wait for what the caller has queued, which changes it."""
        if self._streams is not None:
            buffer.copied = torch.cuda.current_stream(self.device).record_event()

    def wait_for(self, buffer: HostBuffer) -> None:
        """Let what the caller queues from now on run behind the buffer's last copy."""
        if buffer.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.copied)

    def finish(self, buffer: HostBuffer) -> None:
        """Return when the buffer's last copy is complete."""
        if buffer.copied is not None:
            buffer.copied.synchronize()

    def let_go(self, *items: "Offloaded") -> None:
        """Copy tensors to the host, and release them when the next ones are let go: what computes then need not wait
        for the copies."""
        for item in items:
            item.store()
        before, self._leaving = self._leaving, [*items]
        for item in before:
            item.release()

    def keep(self, item: "Offloaded") -> None:
        """Do not release a tensor that was let go."""
        if item in self._leaving:
            self._leaving.remove(item)

    def _allocated(self, nbytes: int) -> torch.Tensor:
        if self._streams is None:
            self.nbytes += nbytes
            return torch.empty(nbytes, dtype=torch.uint8)
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        number = next((number for number, room in enumerate(self._rooms) if room.numel() >= size), len(self._rooms))
        if number == len(self._rooms):
            least = max(size, _SMALLEST, min(self.nbytes, _LARGEST))
            self._rooms.append(torch.empty(1 << (least - 1).bit_length(), dtype=torch.uint8, pin_memory=True))
            self.nbytes += self._rooms[number].numel()
        room = self._rooms[number]
        self._rooms[number] = room[size:]
        return room[:nbytes]


class Offloaded:
    """The values of one tensor in host memory, which are lent to it; made by `HostMemory.place_for`.

    At first they are on the device only. Once this object is dropped, the buffer is given back; the tensor keeps what
    it has.
    """

    def __init__(self, tensor: torch.Tensor, memory: HostMemory, buffer: HostBuffer) -> None:
        self.shape = tensor.shape
        self._memory, self._storage = memory, tensor.untyped_storage()  # not the tensor, which may refer to this object
        self._nbytes, self._is_lent = self._storage.nbytes(), True
        self._buffer = buffer
        host = buffer.data.view(tensor.dtype)
        offset = host.storage_offset() + tensor.storage_offset()
        self._values = host.as_strided(tensor.shape, tensor.stride(), offset)

    def __del__(self) -> None:
        self._memory.give_back(self._buffer)

    def numel(self) -> int:
        """Elements of the tensor."""
        return self.shape.numel()

    @property
    def values(self) -> torch.Tensor:
        """The tensor on the host, after the last copy; without what has changed on the device since then."""
        self._memory.finish(self._buffer)
        return self._values

    def changed(self) -> None:
        """Called behind what changes `values` from the device."""
        self._memory.changed(self._buffer)

    def copy_(self, values: torch.Tensor) -> None:
        """Replace the values on the host; what is on the device is dropped."""
        self.release()
        self.values.copy_(values)

    def allocate(self) -> None:
        """Give the tensor memory on its device, with any content; nothing happens if it has some."""
        self._memory.keep(self)
        if not self._is_lent and self._storage.nbytes() == 0:
            self._storage.resize_(self._nbytes)
        self._is_lent = True

    def fetch(self) -> None:
        """Begin to copy the values to the device; nothing happens if the tensor has memory there."""
        was_lent = self._is_lent
        self.allocate()
        if not was_lent:
            self._copy(to_host=False)

    def wait(self) -> None:
        """Let what the caller queues from now on run behind the copies begun so far."""
        self._memory.wait_for(self._buffer)

    def store(self) -> None:
        """Begin to copy the values to the host; they must not change before `wait` or `release`."""
        self._copy(to_host=True)

    def release(self) -> None:
        """Free the tensor's memory on the device, behind the copies begun so far; nothing happens if it has none."""
        self._memory.keep(self)
        if self._is_lent:
            self.wait()
            if self._storage.resizable():  # not where numpy has seen a tensor of the CPU
                self._storage.resize_(0)
        self._is_lent = False

    def _copy(self, *, to_host: bool) -> None:
        on_device = torch.empty(0, dtype=torch.uint8, device=self._memory.device).set_(self._storage)
        self._memory.begin_copy(self._buffer, on_device, to_host=to_host)


class Loan(NamedTuple):
    """A tensor that is lent for one piece of work, which reads it, writes it, or both."""

    item: Offloaded
    reads: bool = True
    writes: bool = True


def lent(groups: Iterable[Sequence[Loan]]) -> Iterator[None]:
    """Lend groups of tensors one after the other: the next group arrives, and the last one leaves, beside the work.

    At most two groups are on the device at a time.
    """
    waiting = iter(groups)
    before: Sequence[Loan] = ()
    now = next(waiting, None)
    _begin(now or ())
    while now is not None:
        for loan in before:
            loan.item.release()
        ahead = next(waiting, None)
        _begin(ahead or ())
        for loan in now:
            loan.item.wait()
        yield
        for loan in now:
            if loan.writes:
                loan.item.store()
        before, now = now, ahead
    for loan in before:
        loan.item.release()


def _begin(group: Sequence[Loan]) -> None:
    for item, reads, _ in group:
        item.fetch() if reads else item.allocate()
