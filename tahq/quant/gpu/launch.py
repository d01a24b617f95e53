"""Launching Triton kernels: options, block sizes, grids, and the plan of launches that encodes or decodes.

Block sizes are fixed numbers by G, so that nothing is tuned, and nothing compiled twice, in a training step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from tahq.kernel_launch import launcher, on_device_of
from tahq.quant.gpu.tiles import DAMAGED, FLAGGED, MARKED, MAX_MEASURED
from tahq.quant.stochastic_rounding import key_halves
from tahq.quant.stream import ALIGNMENT, Layout

EXACT: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": False, "num_stages": 1})
"""Options of kernels that must give the reference's bits: a fused multiply-add rounds once, not twice."""
MEASURED_ELEMENTS = 8192
MEASURING_WARPS = 8
ELEMENTS_PER_WARP = 512
MAX_PROGRAMS = 4224
"""One-warp programs that a large device (2024) holds at a time: 132 multiprocessors with 32 each."""
MAX_CODING_PROGRAMS = 4 * MAX_PROGRAMS
"""The most programs of kernels that code: more than a device holds at a time, as blocks differ in their time."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with everything that a shape decides: grid, the numbers after its tensors, constants and options.

    Triton inspects every argument of every launch to decide what to compile, which takes longer than small kernels
    run. Here only devices and dtypes can change, as all tensors are aligned, so the compiled kernel is kept.
    """

    kernel: Any
    grid: tuple[int, int, int]
    numbers: tuple[int | float, ...]
    constants: Mapping[str, Any]
    _compiled: dict[tuple[object, ...], Callable[..., None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, *tensors: torch.Tensor, last: tuple[float, ...] = ()) -> None:
        """Launch it on these tensors, with `last` behind the numbers, on the caller's stream."""
        of = (tensors[0].get_device(), tensors[0].dtype, tensors[-1].dtype)
        known = self._compiled.get(of)
        if known is not None:
            known(*(tensor.data_ptr() for tensor in tensors), *self.numbers, *last)
            return
        arguments = (*tensors, *self.numbers, *last)
        compiled = self.kernel[self.grid](*arguments, **self.constants)
        if compiled is not None:  # the interpreter returns None
            names = self.kernel.arg_names[len(arguments) :]
            self._compiled[of] = launcher(compiled, self.grid, of[0], tuple(self.constants[name] for name in names))


class BoundLaunches:
    """Launches on tensors whose addresses are read once, except that of number `moving`.

    Otherwise a dozen tensors cost the host more time than millions of their elements cost the device. The tensors must
    be aligned, and are kept as long as this is; each call passes the moving one, always of one device and type.
    """

    __slots__ = ("_addresses", "_launches", "_moving", "_of", "_tensors")

    def __init__(self, launches: Sequence[Launch], tensors: Sequence[torch.Tensor], moving: int) -> None:
        self._launches, self._moving = launches, moving
        self._tensors = [*tensors]
        self._of = (tensors[0].get_device(), tensors[0].dtype, tensors[-1].dtype)
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._tensors[moving] = tensors[moving].new_empty(0)

    def __call__(self, moved: torch.Tensor, last: tuple[float, ...]) -> None:
        """Launch them, with `last` behind the numbers, on the caller's stream."""
        addresses = self._addresses
        addresses[self._moving] = moved.data_ptr()
        with on_device_of(moved):
            for launch in self._launches:
                known = launch._compiled.get(self._of)
                if known is not None:
                    known(*addresses, *launch.numbers, *last)
                else:
                    tensors = [*self._tensors]
                    tensors[self._moving] = moved
                    launch(*tensors, last=last)


Steps = tuple[tuple[str, Launch], ...]
"""Launches, each with the names of its tensors (x, work, table, buf); a final `key` passes the halves of the key."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The launches for one spec and shape, and the 32-bit words of work buffer that they need."""

    encode_words: int
    encode: Steps
    decode_words: int
    decode: Steps
    is_zeroed: bool = False


def backend(
    plan_of: Callable[[Any], LaunchPlan], table_on: Callable[[torch.device], torch.Tensor | None] = lambda device: None
) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor | None]]:
    """`encode` and `decode` of a backend (see `backends.Kernels`) for tensors on CUDA that are not empty.

    Args:
        plan_of: the launches for a layout; cached.
        table_on: makes the tensor that launches call `table`, on a device.
    """

    def encode(layout: Layout, x: torch.Tensor, *, key: int = 0, threads: int = 1) -> torch.Tensor:
        plan, x = plan_of(layout), aligned(x)
        work = torch.empty(plan.encode_words, dtype=torch.int32, device=x.device)
        buf = torch.empty(layout.sections.nbytes, dtype=torch.uint8, device=x.device)
        _run(plan.encode, {"x": x, "work": work, "table": table_on(x.device), "buf": buf}, key)
        return buf

    def decode(
        layout: Layout, buf: torch.Tensor, dtype: torch.dtype, *, key: int = 0, threads: int = 1
    ) -> torch.Tensor | None:
        plan = plan_of(layout)
        make = torch.zeros if plan.is_zeroed else torch.empty
        work = make(plan.decode_words, dtype=torch.int32, device=buf.device)
        x = torch.empty(layout.tiling.shape, dtype=dtype, device=buf.device)
        _run(plan.decode, {"x": x, "work": work, "table": table_on(buf.device), "buf": buf}, key)
        verdict = int(work[0])
        is_refused = bool(verdict & DAMAGED) or bool(verdict & FLAGGED) != bool(verdict & MARKED)
        return None if is_refused else x

    return encode, decode


def _run(steps: Steps, tensors: Mapping[str, Any], key: int) -> None:
    with on_device_of(tensors["x"]):
        for names, launch in steps:
            needed = names.split()
            last = key_halves(key) if needed[-1] == "key" else ()
            launch(*(tensors[name] for name in needed if name != "key"), last=last)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous and at a multiple of 16 bytes, as kernels assume. Copied only if necessary."""
    contiguous = x.detach().contiguous()
    return contiguous.clone() if contiguous.data_ptr() % ALIGNMENT else contiguous


def slots(count: int) -> int:
    """`count`, rounded up so that what follows in a work buffer is aligned."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def measuring_tiles(group: int) -> int:
    """Tiles of a block of an encoder's first kernel."""
    return MEASURED_ELEMENTS // group


def measuring_programs(num_tiles: int, group: int) -> int:
    """Programs of an encoder's first kernel."""
    return min(-(-num_tiles // measuring_tiles(group)), MAX_MEASURED)


def tiles_per_block(group: int, elements_per_warp: int) -> int:
    """Tiles of a block of the kernels that code: a multiple of 8, so that no two blocks share a byte."""
    return max(8, elements_per_warp // group)


def warps_per_block(group: int, elements_per_warp: int) -> int:
    """Warps that work on a block: one, but for the largest groups."""
    return max(1, tiles_per_block(group, elements_per_warp) * group // elements_per_warp)


def programs(num_tiles: int, group: int) -> int:
    """Programs of the kernels that code."""
    return min(-(-num_tiles // tiles_per_block(group, ELEMENTS_PER_WARP)), MAX_PROGRAMS)
