"""Damage to streams, many at a time and the same for a seed: bytes, bits, numbers, sections, lengths."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

Rng = np.random.Generator
Section = tuple[int, int]
"""Start and stop."""

BATCH = 64
"""Copies that are damaged in the same way, in other places or with other values."""

_HALVES = np.array([0x0000, 0x8000, 0x0001, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0xFFFF], dtype="<u2")
"""fp16: zeros, the least, the largest, infinities, NaNs."""


def mutated(streams: np.ndarray, sections: Sequence[Section], rng: Rng) -> Iterator[np.ndarray]:
    """Damaged copies without end, uint8 [BATCH, nbytes] at a time.

    Args:
        streams: uint8 [K, nbytes], valid ones of one shape and spec.
        sections: of these streams, those that are not empty, the header included.
        rng: drawn from; the same one gives the same copies.
    """
    while True:
        copies = streams[rng.integers(len(streams), size=BATCH)]
        mutate = _MUTATIONS[rng.integers(len(_MUTATIONS))]
        yield mutate(copies, sections[rng.integers(len(sections))], rng)


def _bytes(copies: np.ndarray, section: Section, rng: Rng) -> np.ndarray:
    """A few bytes anywhere become others."""
    places = rng.integers(copies.shape[1], size=(BATCH, rng.integers(1, 9)))
    np.put_along_axis(copies, places, rng.integers(256, size=places.shape, dtype=np.uint8), axis=1)
    return copies


def _header(copies: np.ndarray, section: Section, rng: Rng) -> np.ndarray:
    """One of the first 16 bytes becomes another."""
    places = rng.integers(min(16, copies.shape[1]), size=BATCH)
    copies[np.arange(BATCH), places] = rng.integers(256, size=BATCH, dtype=np.uint8)
    return copies


def _bits(copies: np.ndarray, section: Section, rng: Rng) -> np.ndarray:
    """One bit of the section flips."""
    places = rng.integers(*section, size=BATCH)
    copies[np.arange(BATCH), places] ^= np.left_shift(1, rng.integers(8, size=BATCH)).astype(np.uint8)
    return copies


def _halves(copies: np.ndarray, section: Section, rng: Rng) -> np.ndarray:
    """Two bytes of the section become a special number."""
    start, stop = section
    places = start + 2 * rng.integers(max(1, (stop - start) // 2), size=BATCH)
    halves = _HALVES[rng.integers(len(_HALVES), size=BATCH)]
    copies[np.arange(BATCH), places] = halves & 0xFF
    copies[np.arange(BATCH), np.minimum(places + 1, stop - 1)] = halves >> 8
    return copies


def _filled(copies: np.ndarray, section: Section, rng: Rng) -> np.ndarray:
    """The section becomes one byte, repeated."""
    values = np.array([0, 0xFF, 0x7F, 0x80, rng.integers(256)], dtype=np.uint8)
    copies[:, slice(*section)] = values[rng.integers(len(values), size=(BATCH, 1))]
    return copies


def _noise(copies: np.ndarray, section: Section, rng: Rng) -> np.ndarray:
    """The section becomes noise."""
    copies[:, slice(*section)] = rng.integers(256, size=(BATCH, section[1] - section[0]), dtype=np.uint8)
    return copies


def _swapped(copies: np.ndarray, section: Section, rng: Rng) -> np.ndarray:
    """The section is another stream's."""
    copies[:, slice(*section)] = rng.permutation(copies[:, slice(*section)])
    return copies


def _length(copies: np.ndarray, section: Section, rng: Rng) -> np.ndarray:
    """Cut short anywhere, or up to 32 zeros behind."""
    return np.pad(copies, ((0, 0), (0, 32)))[:, : rng.integers(copies.shape[1] + 33)]


_MUTATIONS: tuple[Callable[[np.ndarray, Section, Rng], np.ndarray], ...] = (
    _bytes,
    _header,
    _bits,
    _halves,
    _filled,
    _noise,
    _swapped,
    _length,
)
