"""`tahq init`: a commented cluster.yaml for one of four uses, from flags or a few questions."""

import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from tahq.errors import UserError
from tahq_launch.command_line import Debug, announce, write_text

Answer = TypeVar("Answer", bound=str | int)


class Use(StrEnum):
    """What a new cluster.yaml is for."""

    TRY = "try"
    PRETRAIN = "pretrain"
    FINETUNE = "finetune"
    FRIENDS = "friends"


_QUESTION = """What is it for?
  try       two small stages on this machine, in a minute
  pretrain  a new model from your text
  finetune  a downloaded model, on pairs of prompt and response
  friends   a new model, with machines that others add by themselves
"""

_TRY = """\
# A small model learns the source text of Python's standard library, in two processes on this machine.
model: {family: llama, num_layers: 4, hidden_size: 128, num_heads: 4}  # random weights
data: {text: stdlib, seq_len: 128}  # or files of your own: {text: [notes/*.txt]}
training: {steps: 30, lr: 3.0e-3}
pipeline: {stages: 2}
"""

_PRETRAIN = """\
# A new model learns text from the beginning.
model: {{family: llama, num_layers: 12, hidden_size: 768, num_heads: 12}}  # about 85 million parameters
data:
  text: {data}  # files, folders and globs; on the machines of the first and the last stage
  tokenizer: bytes  # better: a local Hugging Face folder, or a tokenizer.json
  seq_len: 512
training:
  epochs: 1  # or steps
  global_batch: 32  # samples per step
  lr: 3.0e-4
  lr_schedule: cosine
  warmup_steps: 20
  eval_every: 100  # steps between validation losses
"""

_FINETUNE = """\
# A downloaded model learns to answer.
model: {{path: {model}}}  # config.json and *.safetensors
data:
  records: {data}  # one {{"prompt": "…", "response": "…"}} per line; the loss is on the response
  seq_len: 512
  validation: 0.02
training:
  epochs: 2
  global_batch: 32  # samples per step
  lr_schedule: linear
  warmup_steps: 20
  weight_decay: 0.0
  eval_every: 50  # steps between validation losses
"""

_TEXTS = {Use.TRY: _TRY, Use.PRETRAIN: _PRETRAIN, Use.FINETUNE: _FINETUNE, Use.FRIENDS: _PRETRAIN}
_DATA = {Use.PRETRAIN: "texts", Use.FINETUNE: "pairs/*.jsonl", Use.FRIENDS: "texts"}
_MORE = """\
# Everything else has a default, or is measured and chosen before the first step. Figures in other programs, too:
# run: {trackers: [tensorboard]}
"""


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("cluster.yaml"),
    use: Annotated[
        Use | None, typer.Option("--for", help="What the file is for. Default: asked on a terminal, else try.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Model to fine-tune, e.g. models/Qwen3-0.6B.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="Text, or pairs, to learn. May be repeated.")
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="USER@HOST", help="A machine for ssh, beside this one. May be repeated."),
    ] = None,
    invited: Annotated[int | None, typer.Option(min=1, metavar="N", help="Machines that friends add.")] = None,
    debug: Debug = False,
) -> int:
    """Write a commented cluster.yaml to begin with.

    Asks for what is not given, if it is started on a terminal.

    Example: tahq init --for finetune --model models/Qwen3-0.6B --data pairs.jsonl
    """
    if file.exists():
        raise UserError(f"{file} exists already; remove it, or give another name: tahq init other.yaml")
    asks = sys.stdin.isatty() and sys.stdout.isatty()
    if use is None:
        if asks:
            announce(_QUESTION)
        use = _asked("one of them", Use.TRY, asks)
    if use is Use.FINETUNE and model is None:
        model = _asked("the model's folder", "models/Qwen3-0.6B", asks)
    if use is not Use.TRY and not data:
        what = "files of pairs" if use is Use.FINETUNE else "files or folders of text"
        data = _asked(f"{what}, with spaces between", _DATA[use], asks).split()
    if use in (Use.PRETRAIN, Use.FINETUNE) and hosts is None:
        hosts = _asked("other machines, as user@host for ssh, with spaces between", "", asks).split()
    if use is Use.FRIENDS and invited is None:
        invited = _asked("how many machines will friends add", 2, asks)
    write_text(file, _text(use, model or "", data or (), hosts or (), invited))
    announce(f"{file} is written; look at what it does: tahq launch {file} --dry-run; start it: tahq launch {file}")
    return 0


def _asked(question: str, default: Answer, asks: bool) -> Answer:
    """The answer on the terminal, of the default's type; the default if none is given, or without a terminal."""
    answer: Answer = typer.prompt(question, default=default, show_default=bool(default)) if asks else default
    return answer


def _text(use: Use, model: str, data: Sequence[str], hosts: Sequence[str], invited: int | None) -> str:
    from tahq.config.file import yaml_flow  # imports torch

    paths = yaml_flow(data[0] if len(data) == 1 else list(data))
    text = _TRY if use is Use.TRY else _TEXTS[use].format(model=yaml_flow(model), data=paths)
    if invited is not None:
        text += f"hosts: {{invited: {invited}}}  # their owners join from their side\n"
    elif hosts:
        entries = [{"address": name.rpartition("@")[2], "ssh": name} for name in hosts]
        text += "host_defaults: {python: python3}  # the interpreter there that has tahq installed\nhosts:\n"
        text += "\n".join(f"  - {yaml_flow(entry)}" for entry in ({"local": True}, *entries)) + "\n"
    elif use is not Use.TRY:
        text += "pipeline: {stages: 2}  # processes on this machine; with `hosts` one per machine\n"
    return text + _MORE
