"""Make small models with a tokenizer, pairs, chats and preferences, on which every recipe runs without a download.

    python launch/examples/recipes/small.py [FOLDER]

FOLDER, by default `small`, gets `dense` and `experts`, folders as of the Hugging Face Hub with random weights of four
layers, `pairs.jsonl`, `chats.jsonl` and `preferences.jsonl`. Then, for example:

    tahq-launch launch/examples/recipes/lora.yaml --set model=small/dense --set data.records=small/pairs.jsonl \\
        --set data.seq_len=64 --set training.steps=5
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    made = PreTrainedTokenizerFast(tokenizer_object=own, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    made.chat_template = CHATML
    return made


def spelled(number: int) -> str:
    """17 as `one seven`."""
    return " ".join(DIGITS[int(digit)] for digit in str(number))


def main(folder: Path) -> None:
    """Write everything into `folder`."""
    for name, config in {"dense": Qwen3Config(**SIZES), "experts": Qwen3MoeConfig(**SIZES, **EXPERTS)}.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    pairs = [{"prompt": f"# {number} = ", "response": spelled(number)} for number in range(400)]
    chats = [
        {"messages": [{"role": "user", "content": f"Spell {n}."}, {"role": "assistant", "content": spelled(n)}]}
        for n in range(400)
    ]
    preferences = [
        {"prompt": f"# {number} = ", "chosen": spelled(number), "rejected": str(number)} for number in range(400)
    ]
    for name, records in {"pairs": pairs, "chats": chats, "preferences": preferences}.items():
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{folder}: dense, experts, pairs.jsonl, chats.jsonl, preferences.jsonl")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "small"))
