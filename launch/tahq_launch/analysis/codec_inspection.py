"""`tahq codec list` and `tahq codec inspect`.

A damaged stream is shown as far as possible: header, sections and bytes first, then the decoder's verdict.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tahq.errors import CodecError, UserError
from tahq.quant import CodecSpec, get_codec
from tahq.quant.inspection import (
    HeaderField,
    SectionRow,
    codec_summaries,
    header_fields,
    header_guesses,
    hex_rows,
    section_table,
    statistics,
)
from tahq_launch.command_line import print_table


def print_codecs(shape: Sequence[int], *, json_lines: bool) -> None:
    """Every codec with its default parameters, and its bits per element for a tensor of this shape."""
    with codec_errors("--shape"):
        rows = [_codec_row(name, summary, shape) for name, summary in codec_summaries().items()]
    if json_lines:
        print(*map(json.dumps, rows), sep="\n")
        return
    cells = [[row["codec"], f"{row['bits_per_element']:.3f}", row["parameters"], row["summary"]] for row in rows]
    print(f"Codecs with their defaults, and bits per element of a tensor {list(shape)}")
    print_table(["codec", "bits", "parameters", "summary"], cells, left=(0, 2, 3))


def _codec_row(name: str, summary: str, shape: Sequence[int]) -> dict[str, Any]:
    codec = get_codec(name)
    nbytes, num_elements = codec.encoded_nbytes(shape), math.prod(shape)
    if not num_elements:
        raise CodecError(f"a tensor {list(shape)} has no elements to count bits for")
    return {
        "codec": name,
        "summary": summary,
        "parameters": ",".join(f"{key}={value}" for key, value in codec.spec.parameters().items()),
        "bits_per_element": 8 * nbytes / num_elements,
        "randomised": codec.is_keyed,
        "stateful": codec.is_stateful,
    }


def print_stream(file: Path, spec: str | None, shape: tuple[int, ...] | None, hex_nbytes: int, key: int) -> None:
    """Describe the stream in a file; UserError if the codec refuses it."""
    try:
        data = bytearray(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; inspect takes a file with one stream") from error
    buf = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    if spec is not None:
        known = CodecSpec.parse(spec)
        print(f"{file}: {buf.numel()} bytes, {known}")
        with codec_errors(file):
            _print_known(buf, known, shape, hex_nbytes, key)
        return
    if shape is not None:
        raise UserError("--shape needs --codec: name the codec too, e.g. --codec tah")
    guesses = header_guesses(buf)
    print(f"{file}: {buf.numel()} bytes")
    if not guesses:
        print("No codec with a header begins a stream like this; any bytes may be values of raw.")
    for name, header in guesses.items():
        _print_header(header, f"\nHeader, if {name} wrote it")
    _print_hex(buf, hex_nbytes)
    print(
        "\nA stream does not record its codec, nor the shape of the tensor: for sections, statistics and validity give"
        "\nboth, e.g. --codec tah --shape 2,1024,1600."
    )


def _print_known(buf: torch.Tensor, spec: CodecSpec, shape: tuple[int, ...] | None, hex_nbytes: int, key: int) -> None:
    if header := header_fields(spec, buf):
        _print_header(header, "\nHeader")
    if shape is None:
        _print_hex(buf, hex_nbytes)
        print("\nSections, statistics and validity need the shape too, e.g. --shape 2,1024,1600.")
        return
    rows = section_table(spec, shape, buf)
    print(f"\nSections of a tensor {list(shape)}")
    cells = [[row.name, str(row.offset), str(row.nbytes), str(row.filling), row.holds] for row in rows]
    print_table(["section", "offset", "bytes", "padding", "content"], cells, left=(0, 4))
    _print_hex(buf, hex_nbytes, rows)
    figures = statistics(spec, shape, buf, key=key)
    print("\nStatistics")
    print_table(["statistic", "value"], [[name, f"{value:.6g}"] for name, value in figures.items()], left=(0,))
    if get_codec(spec).is_stateful:
        print("\nThe stream itself is valid; decoding it needs the caches at the ends of its cut.")
    else:
        print("\nThe stream is valid: it was decoded in full.")


def _print_header(header: Sequence[HeaderField], title: str) -> None:
    print(title)
    cells = [[str(field.place), field.name, str(field.value), field.meaning] for field in header]
    print_table(["byte", "field", "value", "meaning"], cells, left=(1, 3))


def _print_hex(buf: torch.Tensor, hex_nbytes: int, rows: Sequence[SectionRow] = ()) -> None:
    if lines := list(hex_rows(buf, rows, hex_nbytes)):
        print("\nBytes\n  " + "\n  ".join(lines))


@contextmanager
def codec_errors(source: object) -> Iterator[None]:
    """Turn a CodecError inside into a UserError that names the source of the tensor or stream."""
    try:
        yield
    except CodecError as error:
        raise UserError(f"{source}: {error}") from error
