"""The fixture that codecs are measured on: what crosses three cuts of a GPT-2 small in training.

`gpt2small_boundary.safetensors` has the activation and the gradient behind blocks 2, 5 and 8, [2, 512, 768] in bf16.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

BLOCKS = (2, 5, 8)
FILE_NAME = "gpt2small_boundary.safetensors"
DIRECTIONS = ("activations", "gradients")


@dataclass(frozen=True, slots=True)
class Cut:
    """What crosses one cut in one micro-batch: activation X and gradient G, both [B, S, C]."""

    block: int
    activation: torch.Tensor
    gradient: torch.Tensor

    def of(self, direction: str) -> torch.Tensor:
        """The tensor of one of `DIRECTIONS`."""
        return self.activation if direction == "activations" else self.gradient


def add_data_option(parser: argparse.ArgumentParser) -> None:
    """`--data PATH`: the file, or the folder that has it."""
    default = os.environ.get("TAHQ_SHARED_DATA", Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--data", type=Path, default=Path(default), help=f"{FILE_NAME}, or its folder")


def load_cuts(data: Path) -> list[Cut]:
    """The three cuts; ends the program where there is no such file."""
    path = data / FILE_NAME if data.is_dir() else data
    if not path.is_file():
        sys.exit(f"no {FILE_NAME} at {path}: give its place with --data, or set TAHQ_SHARED_DATA to its folder")
    tensors: Mapping[str, torch.Tensor] = load_file(path)
    return [Cut(block, tensors[f"act_after_block_{block}"], tensors[f"grad_after_block_{block}"]) for block in BLOCKS]
