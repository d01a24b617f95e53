"""Instructions a parameter of adamw8bit's CUDA kernel, compiled for sm_90 without such a device.

Counted are all instructions of the machine code; nothing here is a time. `fp8_adamw` is not counted: half of its
instructions belong to the exact way to codes, which few programs take. Needs Triton with its own ptxas and cuobjdump.

Run:  python benchmarks/count_instructions.py [--out FILE]
"""

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from machine import describe
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tahq.memory.adam import blockwise8
from tahq.memory.adam import kernels as adamw_kernels
from tahq.memory.adam import triton as adamw_triton

ARCHITECTURE = 90
THREADS_A_WARP = 32
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)")


def instructions(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], warps: int) -> list[str]:
    """Names of all instructions of a kernel; pointers and counts are multiples of 16, as launches have them."""
    aligned = [name for name, type in types.items() if type.startswith("*") or type == "i32"]
    source = ASTSource(
        kernel,
        {**types, **dict.fromkeys(constants, "constexpr")},
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", ARCHITECTURE, THREADS_A_WARP), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(TOOL), "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return INSTRUCTION.findall(text)


def adamw8bit() -> tuple[list[str], int]:
    """Its instructions, of a program that is filled, and parameters a thread."""
    kernel, block = adamw_kernels.adamw8bit_kernel, blockwise8.BLOCK
    warps = adamw_triton.ELEMENTS // adamw_triton.ELEMENTS_PER_WARP
    constants = {"R": adamw_triton.ELEMENTS // block, "B": block, "C": adamw_triton._ROW, "MASKED": False}
    pointers = {"m_codes": "*u8", "v_codes": "*u8", "first_program": "i32", "num_elements": "i32"}
    tensors = ("weights", "m_scales", "v_scales", "tables", "gradients")
    pointers |= dict.fromkeys(tensors, "*fp32")
    types = {name: pointers.get(name, "fp32") for name in kernel.arg_names if name not in constants}
    return instructions(kernel, types, constants, warps), adamw_triton.ELEMENTS // (warps * THREADS_A_WARP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = Path(__file__).parent / "results" / "optimizer_instructions_sm90_202611.md"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    lines = [
        "# Instructions of the optimizers' kernels",
        "",
        f"{describe()}; Triton {triton.__version__}, compiled for sm_{ARCHITECTURE}, not run. "
        "`python benchmarks/count_instructions.py`",
        "",
        "| kernel | instructions | parameters a thread | instructions a parameter | most frequent |",
        "|---|---:|---:|---:|---|",
    ]
    found, each = adamw8bit()
    common = Counter(instruction.partition(".")[0] for instruction in found).most_common(6)
    words = ", ".join(f"{what} {number}" for what, number in common)
    lines.append(f"| `adamw8bit` | {len(found)} | {each} | {len(found) / each:.0f} | {words} |")
    text = "\n".join(lines) + "\n"
    arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
