"""`tahq codec …`: which codecs there are, what a stream holds, what each codec would do to a tensor.

Only words are here, as in `cli`: what a command does is imported when it is run.
"""

from pathlib import Path
from typing import Annotated

import typer

from tahq.errors import UserError, brief

Shape = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="N,…",
        show_default=False,
        help="Shape of the encoded tensor, e.g. 2,1024,1600. Default: none.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line. Default: a table.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks. Default: one line an error.")]


def list_codecs(
    shape: Annotated[
        str, typer.Option("--shape", metavar="N,…", help="Shape for which bits an element are counted.")
    ] = "2,1024,1600",
    json_lines: Json = False,
    debug: Debug = False,
) -> int:
    """List the codecs: parameters with their defaults, bits an element.

    Example: tahq codec list --shape 4,512,768
    """
    from tahq_launch.analysis.codec_inspection import print_codecs

    print_codecs(_shape(shape), json_lines=json_lines)
    return 0


def inspect(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, help="A stream as codec.encode returns it, e.g. x.tah."),
    ],
    spec: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC", show_default=False, help="Codec that wrote it, e.g. tah:group=32. Default: a guess."
        ),
    ] = None,
    shape: Shape = None,
    hex_nbytes: Annotated[
        int, typer.Option("--hex", min=0, metavar="N", help="Also print the first N bytes, annotated.")
    ] = 0,
    key: Annotated[int, typer.Option(min=0, metavar="K", help="Key it was encoded with; eden's values need it.")] = 0,
    debug: Debug = False,
) -> int:
    """Show what a stream holds, and decode it to be sure that it is valid.

    Header, sections and statistics. A stream does not carry its codec and shape: without --spec and --shape
    only what the header alone says is shown.

    Example: tahq codec inspect boundary.tah --spec tah --shape 2,1024,1600 --hex 64
    """
    from tahq_launch.analysis.codec_inspection import StreamRequest, print_stream

    print_stream(StreamRequest(file, spec, None if shape is None else _shape(shape), hex_nbytes, key))
    return 0


def compare(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", show_default=False, help="Tensors [..., C]: .safetensors or .npy."),
    ],
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor",
            metavar="NAME",
            show_default=False,
            help="Which tensor, may be repeated. Default: all that codecs take.",
        ),
    ] = None,
    specs: Annotated[
        list[str] | None,
        typer.Option(
            "--spec",
            metavar="SPEC",
            show_default=False,
            help="Which codec, e.g. fixed:bits=6; may be repeated. Default: the usual ones.",
        ),
    ] = None,
    draws: Annotated[int, typer.Option(min=2, metavar="N", help="Keys tried of a randomised codec.")] = 16,
    backend: Annotated[
        str, typer.Option(metavar="auto|reference|cpu|triton", help="Implementation to use, e.g. reference.")
    ] = "auto",
    device: Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Where to encode, e.g. cuda:1.")] = "cpu",
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.PNG",
            show_default=False,
            help="Also draw error against bits with the Gaussian bound (.png, .pdf, .svg). Default: no plot.",
        ),
    ] = None,
    json_lines: Json = False,
    debug: Debug = False,
) -> int:
    """Measure what each codec costs and loses on tensors of yours.

    Bytes, bits an element, relative error, the Gaussian bound on it, largest error, cosine, bias, the worst token's
    relative error, and millions of elements a second (one thread on the CPU).

    Example: tahq codec compare boundary.safetensors --spec tah --spec fixed:bits=6 --plot frontier.png
    """
    from tahq_launch.analysis.codec_comparison import ComparisonRequest, run_comparison

    request = ComparisonRequest(
        file, tuple(tensors or ()), tuple(specs or ()), draws, backend, device, plot, json_lines
    )
    run_comparison(request)
    return 0


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise UserError(
            f"--shape must be whole numbers with commas between them, as in 2,1024,1600; got {brief(repr(text))}"
        ) from None


def codec_app() -> typer.Typer:
    """The group `tahq codec`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(_group)
    app.command("list")(list_codecs)
    app.command("inspect")(inspect)
    app.command("compare")(compare)
    return app


def _group(context: typer.Context) -> None:
    """List codecs, look into their streams, compare them on tensors."""
    if context.invoked_subcommand is None:
        print(context.get_help())
