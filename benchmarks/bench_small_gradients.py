"""What fp16 makes of a GPT-2 small's gradients at its cuts, with the scale of `loss.gradient_scale` and without.

The gradient is that of the mean over a step of 32 × 1,024 tokens. One sample is computed in each step of training, with
the weight that it has in such a mean.

Run:  python benchmarks/bench_small_gradients.py [--text FILES] [--tokenizer GPT2-FOLDER] [--output FILE]
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from machine import describe
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.pipeline.loss import gradient_scale, summed_cross_entropy

SEQ_LEN = 1024
STEP_TOKENS = 32 * SEQ_LEN
CUTS = (3, 6, 9)
"""After so many blocks: four stages."""


def lines(options: argparse.Namespace) -> Iterator[str]:
    """A row of the table for each cut, in some of the steps."""
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    config = DataConfig(text=options.text, tokenizer=options.tokenizer, seq_len=SEQ_LEN, validation=0.0)
    tokenizer = load_tokenizer(config)
    samples = load_dataset(config, tokenizer)
    sizes = GPT2Config(vocab_size=tokenizer.vocab_size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    for step in range(options.steps):
        tokens, labels = (torch.from_numpy(ids) for ids in samples.gather(np.array([step])))
        hidden = model.transformer(tokens, output_hidden_states=True).hidden_states
        for cut in CUTS:
            hidden[cut].retain_grad()
        loss = summed_cross_entropy(model.lm_head(hidden[-1]), labels)
        (loss / SEQ_LEN).backward()
        if step in options.shown:
            for cut in CUTS:
                yield row(step, loss.item() / SEQ_LEN, cut, hidden[cut].grad * (SEQ_LEN / STEP_TOKENS))
        optimizer.step()
        optimizer.zero_grad()


def row(step: int, loss: float, cut: int, gradient: torch.Tensor) -> str:
    """Magnitude, and what is lost in fp16."""
    scale = gradient_scale(STEP_TOKENS)
    plain, scaled = gradient.half().float(), (gradient * scale).half().float() / scale
    zeros = float(((plain == 0) & (gradient != 0)).float().mean())
    rms = float(gradient.square().mean().sqrt())
    errors = [float((kept - gradient).norm() / gradient.norm()) for kept in (plain, scaled)]
    cosine = float(functional.cosine_similarity(plain.flatten(), gradient.flatten(), dim=0))
    return (
        f"| {step} | {loss:.2f} | {cut} | {rms:.1e} | {errors[0]:.2%} | {zeros:.1%} | {cosine:.4f} | {errors[1]:.2%} |"
    )


def report(rows: Sequence[str]) -> str:
    return "\n".join(
        [
            "# Gradients of a mean over 32,768 tokens, in fp16\n",
            f"{describe()}\n",
            "GPT-2 small (12 blocks, random weights), AdamW 6e-4 on one sample of 1,024 tokens a step.",
            "Cuts after 3, 6 and 9 blocks. Lost: ‖fp16(g) − g‖ / ‖g‖.",
            f"Scaled: times {gradient_scale(STEP_TOKENS):,.0f} before, and divided by it after.\n",
            "| step | loss | cut | g, rms | lost | zeros | cosine | lost when scaled |\n" + "|---" * 8 + "|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--text", nargs="+", default="stdlib", help="text files; default: the standard library's sources"
    )
    parser.add_argument("--tokenizer", default="bytes", help="folder of a Hugging Face tokenizer")
    parser.add_argument("--steps", type=int, default=31)
    parser.add_argument("--shown", type=int, nargs="+", default=[0, 3, 7, 30])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = report(list(lines(options)))
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
