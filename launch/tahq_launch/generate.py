"""`tahq generate`: what a trained model says, from a run's newest checkpoint or a Hugging Face folder."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from tahq.errors import UserError
from tahq.models.model_spec import CONFIG_FILE
from tahq_launch.export import export_run

_SHARD_NBYTES = 4 * 10**9


def generate_text(source: Path, prompt: str, *, num_tokens: int, temperature: float, seed: int, device: str) -> None:
    """Print the prompt's continuation word by word, on one device that holds the whole model.

    Args:
        source: a run's folder, or one with config.json, safetensors and a tokenizer.
        prompt: text that is continued as it stands.
        num_tokens: at most so many new tokens; fewer if the model ends the text.
        temperature: of the sampling; 0: always the likeliest token.
        seed: of the sampling.
        device: cpu, cuda or cuda:N.

    Raises:
        UserError: there is no such model, or the prompt is empty.
    """
    with tempfile.TemporaryDirectory(prefix="tahq-generate-") as name:
        folder = source
        if not (source / CONFIG_FILE).is_file():
            folder = Path(name) / "model"
            for line in export_run(source, folder, max_shard_nbytes=_SHARD_NBYTES):
                print(line, file=sys.stderr)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
        if inputs["input_ids"].numel() == 0:
            raise UserError("the prompt is empty; give at least one word")
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        model.generate(**inputs, max_new_tokens=num_tokens, streamer=TextStreamer(tokenizer), **sampling)
