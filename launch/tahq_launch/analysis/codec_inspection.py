"""What `tahq codec list` and `tahq codec inspect` print.

A damaged stream is shown as far as it can be: header, sections and bytes first, then the decoder's verdict.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tahq.errors import CodecError, UserError
from tahq.quant import CodecSpec, get_codec
from tahq.quant.inspection import (
    HeaderField,
    codec_summaries,
    header_fields,
    header_guesses,
    hex_rows,
    section_table,
    statistics,
)
from tahq_launch.tables import print_table


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One codec at its defaults, as `tahq codec list` shows it."""

    codec: str
    summary: str
    parameters: str
    bits_per_element: float
    randomised: bool
    stateful: bool


def print_codecs(shape: Sequence[int], *, json_lines: bool) -> None:
    """Every codec with its parameters, and what it takes for a tensor of this shape.

    Raises:
        UserError: a shape that no codec takes.
    """
    with mistakes_of("--shape"):
        rows = [_codec_row(name, summary, shape) for name, summary in codec_summaries().items()]
    if json_lines:
        for row in rows:
            print(json.dumps(asdict(row)))
        return
    cells = [[row.codec, f"{row.bits_per_element:.3f}", row.parameters, row.summary] for row in rows]
    print(f"Codecs with their defaults, and bits per element of a tensor {list(shape)}")
    print_table(["codec", "bits", "parameters", "what it is"], cells, left=(0, 2, 3))


def _codec_row(name: str, summary: str, shape: Sequence[int]) -> CodecRow:
    codec = get_codec(name)
    nbytes, num_elements = codec.encoded_nbytes(shape), math.prod(shape)
    if not num_elements:
        raise CodecError(f"a tensor {list(shape)} has no elements to count bits for")
    parameters = ",".join(f"{key}={value}" for key, value in codec.spec.parameters().items())
    return CodecRow(name, summary, parameters, 8 * nbytes / num_elements, codec.is_keyed, codec.is_stateful)


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One command line of `tahq codec inspect`."""

    file: Path
    spec: str | None
    shape: tuple[int, ...] | None
    hex_nbytes: int
    key: int


def print_stream(request: StreamRequest) -> None:
    """Describe the stream in a file.

    Raises:
        UserError: a file that cannot be read, a shape without a spec, or a stream that the codec refuses.
    """
    buf = _read(request.file)
    if request.spec is None:
        if request.shape is not None:
            raise UserError("--shape is of no use without --spec: name the codec too, e.g. --spec tah")
        _print_guesses(request, buf)
        return
    spec = CodecSpec.parse(request.spec)
    with mistakes_of(request.file):
        _print_known(request, spec, buf)


def _print_guesses(request: StreamRequest, buf: torch.Tensor) -> None:
    guesses = header_guesses(buf)
    print(f"{request.file}: {buf.numel()} bytes")
    if not guesses:
        print("No codec with a header begins a stream like this; any bytes may be values of raw.")
    for name, header in guesses.items():
        print(f"\nHeader, if {name} wrote it")
        _print_header(header)
    _print_hex(hex_rows(buf, (), request.hex_nbytes))
    print(
        "\nA stream does not say which codec wrote it, nor the shape of the tensor: for sections, statistics and "
        "validity give\nboth, e.g. --spec tah --shape 2,1024,1600."
    )


def _print_known(request: StreamRequest, spec: CodecSpec, buf: torch.Tensor) -> None:
    print(f"{request.file}: {buf.numel()} bytes, {spec}")
    if header := header_fields(spec, buf):
        print("\nHeader")
        _print_header(header)
    if request.shape is None:
        _print_hex(hex_rows(buf, (), request.hex_nbytes))
        print("\nSections, statistics and validity need the shape too, e.g. --shape 2,1024,1600.")
        return
    rows = section_table(spec, request.shape, buf)
    print(f"\nSections of a tensor {list(request.shape)}")
    cells = [[row.name, str(row.offset), str(row.nbytes), str(row.filling), row.holds] for row in rows]
    print_table(["section", "offset", "bytes", "filling", "holds"], cells, left=(0, 4))
    _print_hex(hex_rows(buf, rows, request.hex_nbytes))
    figures = statistics(spec, request.shape, buf, key=request.key)
    print("\nStatistics")
    print_table(["statistic", "value"], [[name, f"{value:.6g}"] for name, value in figures.items()], left=(0,))
    print(f"\n{_verdict(spec)}")


def _verdict(spec: CodecSpec) -> str:
    if get_codec(spec).is_stateful:
        return "Nothing is wrong with the stream itself; decoding it takes what the ends of its cut remember."
    return "The stream is valid: it was decoded in full."


def _print_header(header: Sequence[HeaderField]) -> None:
    cells = [[str(field.place), field.name, str(field.value), field.meaning] for field in header]
    print_table(["byte", "field", "value", "meaning"], cells, left=(1, 3))


def _print_hex(rows: Iterator[str]) -> None:
    lines = list(rows)
    if lines:
        print("\nBytes\n  " + "\n  ".join(lines))


def _read(file: Path) -> torch.Tensor:
    try:
        data = bytearray(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; inspect takes a file with one stream") from error
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@contextmanager
def mistakes_of(source: object) -> Iterator[None]:
    """What a codec refuses here is the user's to mend: name where it came from.

    Raises:
        UserError: in place of a CodecError.
    """
    try:
        yield
    except CodecError as error:
        raise UserError(f"{source}: {error}") from error
