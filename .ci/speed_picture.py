"""Draw docs/images/speed.svg, tokens per second by bandwidth, from the table of a committed result.

python .ci/speed_picture.py
"""

import re

import matplotlib.pyplot as plt
from prose import ROOT

RESULT = ROOT / "benchmarks" / "results" / "gpt2_xl_h200_202611.md"
PICTURE = ROOT / "docs" / "images" / "speed.svg"
LABELS = {
    "tahq 1f1b `wf:bits=4 / eden:bits=3`": "tahq, 4-bit activations, 3-bit gradients (wf, eden)",
    "tahq 1f1b `tah / fixed:bits=6`": "tahq, TAH-Quant's pair (tah, 6-bit fixed)",
    "tahq 1f1b `raw:dtype=bf16`": "tahq, bf16",
    "torch gpipe `raw:dtype=bf16`": "torch, GPipe, bf16",
}


def lines() -> dict[str, dict[int, int]]:
    """Tokens per second by Mbit/s, by the column's title."""
    table = RESULT.read_text(encoding="utf-8").partition("## Tokens a second")[2].strip().partition("\n\n")[0]
    header, _, *rows = ([cell.strip() for cell in row.strip("| ").split(" | ")] for row in table.splitlines())
    return {
        title: {int(row[0]): int(row[column].replace(",", "")) for row in rows if re.match(r"\d", row[column])}
        for column, title in enumerate(header)
        if column
    }


def main() -> None:
    """Draw the lines of `LABELS`."""
    plt.rcParams["svg.hashsalt"] = "tahq"  # the same file from the same figures
    plt.rcParams["svg.fonttype"] = "none"
    figure, axes = plt.subplots(figsize=(7, 4))
    points = lines()
    for title, label in LABELS.items():
        axes.plot(list(points[title]), list(points[title].values()), marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s of each host, up and down", ylabel="tokens/s")
    axes.set_xticks(rates := [50, 100, 300, 500, 1000], [str(rate) for rate in rates])
    axes.set_yticks(speeds := [1000, 2000, 5000, 10000, 20000], [f"{speed:,}" for speed in speeds])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title("GPT2-XL, four stages, one H200 each", fontsize=10)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
