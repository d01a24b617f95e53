"""What `bench_frontier` measures, behind one face: our codecs by their spec, and the peers that are installed.

Peers are counted by the bytes that they would send: codes and the scales or codebook without which no one can decode.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from stream_codes import Codes, codes_of

from tahq.quant import get_codec

EDEN_BITS = ("1", "1.5", "2", "2.5", "3", "4", "6")
WF_BITS = ("2", "2.5", "3", "3.5", "4", "5")
SPECS = (
    *(f"fixed:bits={bits}" for bits in range(3, 11)),
    *(f"fixed:bits={bits},group={group}" for bits in (3, 4) for group in (16, 256)),
    *(f"fixed:bits={bits},round=stochastic" for bits in (3, 4, 6)),
    "tah:low=2,high=2",
    "tah:low=2,high=3,int4=0.2",
    "tah:low=2,high=3",
    "tah:low=3,high=3",
    "tah",
    "tah:low=4,high=4",
    "tah:low=5,high=6",
    "tah:group=32",
    "tah:group=128",
    "tah:tau=0",
    "tah:low=2,high=3,tau=0",
    "tah:select=low",
    "aqsgd:bits=4",
    "aqsgd:bits=4,cache=none",
    "aqsgd:bits=8,cache=none",
    *(f"eden:bits={bits}" for bits in EDEN_BITS),
    "eden:bits=2,group=64",
    *(f"wf:bits={bits}" for bits in WF_BITS),
    "wf:bits=3.5,center=off",
)
NUM_DOUBLE_QUANT_CONSTANTS = 1
"""fp32 numbers that a doubly quantised bitsandbytes tensor has beside its two levels of scales: their mean."""


def no_codes() -> None:
    """What there is to say of a stream that is not ours."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What one encoding comes to.

    Attributes:
        nbytes: of what would be sent.
        values: what the other end gets, fp32.
        read_codes: finds the codes in the stream; None of codecs that are not ours, and of raw values.
    """

    nbytes: int
    values: torch.Tensor
    read_codes: Callable[[], Codes | None] = no_codes


@dataclass(frozen=True, slots=True)
class Candidate:
    """One codec at one setting.

    Attributes:
        family: what a curve joins, such as `wf`.
        label: what a row says.
        is_keyed: whether a draw depends on the key.
        send: (x, key) to what is sent of it.
    """

    family: str
    label: str
    is_keyed: bool
    send: Callable[[torch.Tensor, int], Sent]


def our_candidates(specs: Sequence[str], backend: str) -> list[Candidate]:
    """Codecs of tahq; `aqsgd` with a cache sees every tensor for the first time, and without ids never remembers."""
    return [_ours(spec, backend) for spec in specs]


def _ours(text: str, backend: str) -> Candidate:
    codec = get_codec(text, backend=backend)

    def send(x: torch.Tensor, key: int) -> Sent:
        buf = codec.encode(x, key=key)
        return Sent(buf.numel(), codec.decode(buf, x.shape, key=key), lambda: codes_of(codec.spec, buf, x.shape))

    return Candidate(_family(text), text, codec.is_keyed, send)


def _family(text: str) -> str:
    name = text.partition(":")[0]
    return f"{name}, stochastic" if "round=stochastic" in text else name


def peer_candidates() -> tuple[list[Candidate], list[str]]:
    """The peers that can be imported, and for each package a line: its version, or why it is missing."""
    found, said = [], []
    for package, make in (("bitsandbytes", _bitsandbytes), ("hivemind", _hivemind)):
        try:
            candidates = make()
            said.append(f"{package} {version(package)}")
            found += candidates
        except (ImportError, PackageNotFoundError) as error:
            said.append(f"{package} not measured: {error}")
    return found, said


def _bitsandbytes() -> list[Candidate]:
    """4-bit blocks of 64 with an fp32 absmax each, and with absmax that is quantised once more."""
    functional = importlib.import_module("bitsandbytes.functional")

    def candidate(kind: str, double: bool) -> Candidate:
        def send(x: torch.Tensor, key: int) -> Sent:
            codes, state = functional.quantize_4bit(
                x.float().contiguous(), blocksize=64, quant_type=kind, compress_statistics=double
            )
            scales = [state.absmax, state.state2.absmax] if double else [state.absmax]
            nbytes = sum(part.numel() * part.element_size() for part in (codes, *scales))
            nbytes += 4 * NUM_DOUBLE_QUANT_CONSTANTS if double else 0
            return Sent(nbytes, functional.dequantize_4bit(codes, state).view(x.shape))

        return Candidate("bitsandbytes", f"bitsandbytes {kind}{', double' if double else ''}", False, send)

    return [candidate("nf4", False), candidate("nf4", True), candidate("fp4", False)]


def _hivemind() -> list[Candidate]:
    """8-bit codes with a codebook of 256 fp32 for the whole tensor.

    The values are looked up here: hivemind 1.1.12's own `extract` does so too, but calls numpy in a way that numpy no
    longer allows (an array of one element as an int).
    """
    compression = importlib.import_module("hivemind.compression")

    def candidate(name: str) -> Candidate:
        quantizer: Any = getattr(compression, name)()

        def send(x: torch.Tensor, key: int) -> Sent:
            values = x.float()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                message = quantizer.compress(values, compression.CompressionInfo.from_tensor(values))
                indices, codebook = quantizer.quantize(values)
            decoded = torch.from_numpy(codebook)[torch.from_numpy(indices).long()]
            return Sent(message.ByteSize(), decoded.view(x.shape))

        return Candidate("hivemind", f"hivemind {name.removesuffix('Quantization')}", False, send)

    return [candidate("Uniform8BitQuantization"), candidate("Quantile8BitQuantization")]
