"""docs/dev/wire-format.md is right: the codecs write its examples, and its hex decodes to the values below it."""

import re
from pathlib import Path

import pytest
import torch

from tahq.quant import get_codec

DOC = Path(__file__).parents[2] / "docs" / "dev" / "wire-format.md"

EXAMPLES = {
    "tah": (
        "tah:group=8,int4=0.5",
        torch.tensor([[[0, 0, 12, 0, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8.5]]]),
        ["header", "bit map", "scale", "zero-point", "pivot", "low planes", "high planes"],
    ),
    "fixed": (
        "fixed:bits=10,group=8",
        torch.tensor([[0, 1, 2, 3, -4, -5, -6, 7.001]]) * 1e-4,
        ["header", "scale", "bytes", "planes"],
    ),
    "raw": ("raw:dtype=fp16", torch.tensor([1.0, -2.0, 0.5]), ["values"]),
    "aqsgd": (
        "aqsgd",
        torch.tensor([[[1.25, 2, 3, 4.5], [4.5, 6.5, 7, 7.5]], [[0, -1, 0.1, 1e6], [1, 2, 3, 4]]]),
        ["header", "record of sample 7", "record of sample 9", "marks", "scale", "values", "planes"],
    ),
    "eden": (
        "eden:bits=2.5,group=8",
        torch.tensor([[[0, 0, 12, 0, 0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8.5]]]),
        ["header", "scale", "width", "codes"],
    ),
    "wf": (
        "wf:bits=3.5,group=8",
        torch.tensor([[[1, 2, 3, 4, 5, 6, 7, 8], [0, 3, 1, 4, 1, 5, 9, 2.0]]]),
        ["header", "scale", "width", "mean", "codes"],
    ),
}
KEYS = {"eden": 1}
"""Keys of the randomised codecs."""
SAMPLES = {"aqsgd": [7, 9]}
"""Sample ids, for a codec that remembers samples."""
BEFORE = {"aqsgd": ([7], torch.tensor([[[1.0, 2, 3, 4], [5, 6, 7, 8]]]))}
"""The ids and tensor that such a codec has sent before."""


def made(name, spec):
    """The codec of an example before the stream, and the arguments of its calls."""
    codec = get_codec(spec)
    if name not in SAMPLES:
        return codec, {"key": KEYS.get(name, 0)}
    ids, x = BEFORE[name]
    codec.decode(codec.encode(x, sample_ids=ids), x.shape, sample_ids=ids)
    return codec, {"sample_ids": SAMPLES[name]}


def dump(name):
    """The example's stream, a row for every 16 bytes, and the values that it decodes to."""
    spec, x, names = EXAMPLES[name]
    codec, told = made(name, spec)
    stream = codec.encode(x, **told)
    rows = [stream[i : i + 16].tolist() for i in range(0, stream.numel(), 16)]
    assert len(rows) == len(names), "each section of an example fits one row"
    lines = [
        f"{16 * i:02x}  {bytes(row).hex(' '):47}  {title}"
        for i, (row, title) in enumerate(zip(rows, names, strict=True))
    ]
    back = codec.decode(stream, x.shape, **told).flatten().tolist()
    decoded = ["decoded: " + " ".join(f"{value:.7g}" for value in back[i : i + 8]) for i in range(0, len(back), 8)]
    return "\n".join([f"{codec.spec} of shape {list(x.shape)}, {stream.numel()} bytes", *lines, *decoded, ""])


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_in_the_doc_is_what_the_codec_writes(name, golden):
    golden(f"wire_format_{name}.txt", dump(name))
    assert f"```text\n{dump(name)}```\n" in DOC.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_hex_in_the_doc_decodes_to_the_values_below_it(name):
    block = next(b for b in re.findall(r"```text\n(.*?)```", DOC.read_text(), re.S) if b.startswith(f"{name}:"))
    spec, shape = re.match(r"(\S+) of shape \[([\d, ]+)\]", block).groups()
    data = bytes.fromhex("".join(re.findall(r"^[0-9a-f]{2}  ((?:[0-9a-f]{2} ?)+)", block, re.M)))
    listed = [float(value) for line in re.findall(r"decoded: (.*)", block) for value in line.split()]
    buf = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    codec, told = made(name, spec)
    back = codec.decode(buf, [int(size) for size in shape.split(",")], **told)
    assert back.flatten().tolist() == pytest.approx(listed, rel=1e-6)
