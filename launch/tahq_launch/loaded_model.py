"""A trained model in memory, from a run, exported on the way, or a folder that transformers loads; text it writes."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils.logging import disable_progress_bar

from tahq.errors import UserError
from tahq.models.model_spec import CONFIG_FILE
from tahq_launch.export import export_run
from tahq_launch.runs.pull import Which

_SHARD_NBYTES = 4 * 10**9


def is_run(source: Path) -> bool:
    """Whether this is to be read as a run's folder, rather than as a Hugging Face folder."""
    return not (source / CONFIG_FILE).is_file()


@contextmanager
def model_folder(source: Path, step: Which = None) -> Iterator[Path]:
    """A Hugging Face folder with a run's model at a checkpoint, or `source` if it is one.

    Raises:
        UserError: there is no such model.
    """
    if not is_run(source):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="tahq-model-") as name:
        folder = Path(name) / "model"
        for line in export_run(source, folder, step=step, max_shard_nbytes=_SHARD_NBYTES):
            print(line, file=sys.stderr)
        yield folder


def default_device() -> str:
    """cuda if there is one, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(folder: Path, device: str) -> tuple[Any, Any]:
    """The model of a Hugging Face folder, whole on one device, and its tokenizer."""
    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    return model.eval(), tokenizer


def generate_text(
    source: Path, prompt: str, *, num_tokens: int, temperature: float, seed: int, device: str, step: Which = None
) -> None:
    """Print the prompt's continuation word by word, on one device that holds the whole model.

    Args:
        source: a run's folder, or one with config.json, safetensors and a tokenizer.
        prompt: text that is continued as it stands.
        num_tokens: at most so many new tokens; fewer if the model ends the text.
        temperature: of the sampling; 0: always the likeliest token.
        seed: of the sampling.
        device: cpu, cuda or cuda:N.
        step: of a run's checkpoint.

    Raises:
        UserError: there is no such model, or the prompt is empty.
    """
    with model_folder(source, step) as folder:
        model, tokenizer = load_model(folder, device)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
        if inputs["input_ids"].numel() == 0:
            raise UserError("the prompt is empty; give at least one word")
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        model.generate(**inputs, max_new_tokens=num_tokens, streamer=TextStreamer(tokenizer), **sampling)
