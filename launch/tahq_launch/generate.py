"""`tahq generate`: what a trained model says, from a run's newest checkpoint or a Hugging Face folder."""

from pathlib import Path

import torch
from transformers import TextStreamer

from tahq.errors import UserError
from tahq_launch.loaded_model import load_model, model_folder


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
    with model_folder(source) as folder:
        model, tokenizer = load_model(folder, device)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
        if inputs["input_ids"].numel() == 0:
            raise UserError("the prompt is empty; give at least one word")
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        model.generate(**inputs, max_new_tokens=num_tokens, streamer=TextStreamer(tokenizer), **sampling)
