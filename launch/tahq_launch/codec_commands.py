"""The command lines of `tahq codec list`, `inspect` and `compare`.

Each function imports its implementation when it is called, so that `--help` needs no torch.
"""

from pathlib import Path
from typing import Annotated

import typer

from tahq.errors import UserError, brief
from tahq_launch.command_line import Debug

Shape = Annotated[
    str | None, typer.Option(metavar="N,…", help="Shape of the encoded tensor, e.g. 2,1024,1600. Default: none.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line. Default: a table.")]


def list_codecs(
    shape: Annotated[
        str, typer.Option(metavar="N,…", help="Tensor shape for which bits per element are computed.")
    ] = "2,1024,1600",
    json_lines: Json = False,
    debug: Debug = False,
) -> int:
    """List the codecs with their parameters, defaults and bits per element.

    Example: tahq codec list --shape 4,512,768
    """
    from tahq_launch.analysis.codec_inspection import print_codecs

    print_codecs(_shape(shape), json_lines=json_lines)
    return 0


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A stream as codec.encode returns it, e.g. x.tah.")],
    spec: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Codec that wrote it, e.g. tah:group=32. Default: guessed from the header."),
    ] = None,
    shape: Shape = None,
    hex_nbytes: Annotated[
        int, typer.Option("--hex", min=0, metavar="N", help="Also print the first N bytes, annotated.")
    ] = 0,
    key: Annotated[int, typer.Option(min=0, metavar="K", help="Key it was encoded with; needed to decode eden.")] = 0,
    debug: Debug = False,
) -> int:
    """Show the header, sections and statistics of an encoded stream, and decode it to check it.

    A stream does not record its codec and shape: without --spec and --shape only the header is shown.

    Example: tahq codec inspect boundary.tah --spec tah --shape 2,1024,1600 --hex 64
    """
    from tahq_launch.analysis.codec_inspection import StreamRequest, print_stream

    print_stream(StreamRequest(file, spec, None if shape is None else _shape(shape), hex_nbytes, key))
    return 0


def compare(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Tensors [..., C]: .safetensors or .npy.")],
    tensors: Annotated[
        list[str] | None,
        typer.Option("--tensor", metavar="NAME", help="Tensor to use; may be repeated. Default: all suitable tensors."),
    ] = None,
    specs: Annotated[
        list[str] | None,
        typer.Option(
            "--spec", metavar="SPEC", help="Codec to try, e.g. fixed:bits=6; may be repeated. Default: a selection."
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=2, metavar="N", help="Number of keys to try with a randomised codec.")] = 16,
    backend: Annotated[
        str, typer.Option(metavar="auto|reference|cpu|triton", help="Implementation, e.g. reference.")
    ] = "auto",
    device: Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Device to encode on, e.g. cuda:1.")] = "cpu",
    plot: Annotated[
        Path | None,
        typer.Option(metavar="OUT.PNG", help="Also plot error against bits (.png, .pdf, .svg). Default: none."),
    ] = None,
    json_lines: Json = False,
    debug: Debug = False,
) -> int:
    """Measure size, error and speed of codecs on your tensors.

    Bytes, bits per element, relative error and its Gaussian bound, largest error, cosine, bias, the worst token's
    relative error, and millions of elements per second (one thread on the CPU).

    Example: tahq codec compare boundary.safetensors --spec tah --spec fixed:bits=6 --plot frontier.png
    """
    from tahq_launch.analysis.codec_comparison import ComparisonRequest, run_comparison

    names = tuple(tensors or ())
    run_comparison(ComparisonRequest(file, names, tuple(specs or ()), draws, backend, device, plot, json_lines))
    return 0


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise UserError(
            f"--shape must be whole numbers with commas between them, as in 2,1024,1600; got {brief(repr(text))}"
        ) from None
