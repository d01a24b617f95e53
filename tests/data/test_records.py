"""Records of other shapes than prompt and response: chats by templates, Alpaca's, plain text."""

import importlib
import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset, shown_samples
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import DataError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' "
    "+ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
QWEN_3 = (  # writes thoughts of the last turn only
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CALLING = (  # as those of Qwen 3, which write thoughts of the last turn only
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] }}{% for call in m['tool_calls'] %}"
    "{{ '<tool_call>' + call['function']['name'] + (call['function']['arguments'] | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<bos>"]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 3 times 3?"},
    {"role": "assistant", "content": "9"},
    {"role": "user", "content": "And 4?"},
    {"role": "assistant", "content": "16"},
]


@pytest.fixture
def tokenizer_with(bpe_folder, tmp_path):
    """tokenizer_with(template): a folder with a tokenizer that has it, and all special tokens."""

    def make(template: str):
        tokenizer = AutoTokenizer.from_pretrained(bpe_folder)
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[:-1], "bos_token": "<bos>"})
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        return tmp_path / "tokenizer"

    return make


@pytest.mark.parametrize("name", ["records.json", "records.parquet", "stream.arrow", "file.arrow"])
def test_records_of_other_files_are_those_of_the_same_lines(tmp_path, tokenizer_with, name):
    pyarrow = pytest.importorskip("pyarrow")
    folder, call = tokenizer_with(CALLING), {"function": {"name": "f", "arguments": '{"a": 1}'}}
    talk = [{"role": "user", "content": "f"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    records = [{"messages": talk}, {"messages": TALK[1:3]}, {"prompt": "2 + 2 = ", "response": "4"}, {"text": "four"}]
    config = config_of(tmp_path, folder, *records)
    expected = load_dataset(config, load_tokenizer(config))
    columns = {key: [record.get(key) for record in records] for key in ("messages", "prompt", "response", "text")}
    path, table = tmp_path / "tables" / name, pyarrow.table(columns)
    path.parent.mkdir()
    (path.parent / "state.json").write_text("{}")  # as of `save_to_disk`
    if name.endswith(".json"):
        path.write_text(json.dumps(records, indent=1))
    elif name.endswith(".parquet"):
        importlib.import_module("pyarrow.parquet").write_table(table, path)
    else:
        ipc = importlib.import_module("pyarrow.ipc")
        with (ipc.new_stream if name == "stream.arrow" else ipc.new_file)(path, table.schema) as writer:
            writer.write_table(table)
    config = DataConfig(records=str(path.parent), tokenizer=str(folder), seq_len=200, validation=0.0)
    assert load_dataset(config, load_tokenizer(config)).fingerprint == expected.fingerprint
    path.write_bytes(b"[{")
    with pytest.raises(DataError, match=rf"{name}: not (JSON|Parquet|Arrow): "):
        load_dataset(config, load_tokenizer(config))


def config_of(tmp_path, tokenizer, *records, seq_len: int = 200) -> DataConfig:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(records=str(path), tokenizer=str(tokenizer), seq_len=seq_len, validation=0.0)


@pytest.mark.parametrize(
    ("template", "scored"),
    [
        (CHATML, ["9<|im_end|>", "16<|im_end|>"]),
        (LLAMA_3, ["9<|eot_id|>", "16<|eot_id|>"]),
        (QWEN_3, ["9<|im_end|>", "<think>\n\n</think>\n\n16<|im_end|>"]),
    ],
    ids=["ChatML", "Llama 3", "Qwen 3"],
)
@pytest.mark.parametrize("is_sharegpt", [False, True], ids=["messages", "conversations"])
def test_chat_is_the_templates_text_with_loss_on_the_assistants_turns(
    tmp_path, tokenizer_with, template, scored, is_sharegpt
):
    folder = tokenizer_with(template)
    roles = {"user": "human", "assistant": "gpt"}
    shared = [{"from": roles.get(m["role"], m["role"]), "value": m["content"]} for m in TALK]
    config = config_of(tmp_path, folder, {"conversations": shared} if is_sharegpt else {"messages": TALK})
    tokenizer = load_tokenizer(config)
    tokens, labels = (rows[0] for rows in load_dataset(config, tokenizer).gather(np.array([0])))
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(tokens).startswith(text)
    turns = np.split(labels, np.flatnonzero(np.diff(labels != -100)) + 1)
    assert [tokenizer.decode(turn) for turn in turns if turn[0] != -100] == scored


def test_samples_are_shown_with_what_has_no_loss_in_brackets(tmp_path, tokenizer_with):
    config = config_of(
        tmp_path,
        tokenizer_with(CHATML),
        {"messages": TALK[1:3]},
        {"instruction": "Square it.", "input": "4", "output": "16"},
        {"text": "4 times 4"},
        {"prompt": "never", "response": "shown"},
    )
    tokenizer = load_tokenizer(config)
    chat, alpaca, text = shown_samples(load_dataset(config, tokenizer), tokenizer)
    assert chat == "⟦<|im_start|>user\nWhat is 3 times 3?<|im_end|>\n<|im_start|>assistant\n⟧9<|im_end|>"
    assert alpaca.startswith("⟦Below is an instruction that describes a task, paired with an input")
    assert alpaca.endswith("### Instruction:\nSquare it.\n\n### Input:\n4\n\n### Response:\n⟧16<eot>")
    assert text == "⟦<eot>⟧4 times 4<eot>"


RIGHT, WRONG = ([{"role": "assistant", "content": text}] for text in ("16", "15"))
PREFERENCES = {
    "messages behind a prompt of messages": {"prompt": TALK[:4], "chosen": RIGHT, "rejected": WRONG},
    "an answer behind messages": {"messages": TALK[:4], "chosen": RIGHT[0], "rejected": WRONG[0]},
    "whole chats": {"chosen": TALK, "rejected": [*TALK[:4], *WRONG]},
    "whole chats beside other keys": {"prompt": "And 4?", "chosen": TALK, "rejected": [*TALK[:4], *WRONG]},
}


@pytest.mark.parametrize("template", [CHATML, LLAMA_3, QWEN_3], ids=["ChatML", "Llama 3", "Qwen 3"])
@pytest.mark.parametrize("form", PREFERENCES)
def test_preferences_that_are_chats_have_a_loss_on_their_last_answer_only(tmp_path, tokenizer_with, form, template):
    config = config_of(tmp_path, tokenizer_with(template), {"messages": TALK, "score": 3} | PREFERENCES[form])
    tokenizer = load_tokenizer(config)
    dataset = load_dataset(config, tokenizer, are_preferences=True)
    chosen, rejected = shown_samples(dataset, tokenizer)
    prompt, answer = chosen.removeprefix("⟦").split("⟧")
    assert "9" in prompt
    assert prompt.rstrip().endswith(("assistant", "assistant<|end_header_id|>"))
    assert answer.replace("16", "15") == rejected.split("⟧")[1]
    assert rejected.startswith(f"⟦{prompt}⟧")


def test_preferences_with_the_same_chat_twice_are_kept(tmp_path, tokenizer_with):
    config = config_of(tmp_path, tokenizer_with(CHATML), {"chosen": TALK, "rejected": TALK})
    tokenizer = load_tokenizer(config)
    chosen, rejected = shown_samples(load_dataset(config, tokenizer, are_preferences=True), tokenizer)
    assert chosen == rejected
    assert chosen.endswith("assistant\n⟧16<|im_end|>")


@pytest.mark.parametrize("content", ["", None, "I multiply."])
@pytest.mark.parametrize("arguments", [{"a": 3}, '{"a": 3}'], ids=["object", "JSON"])
def test_turns_with_tool_calls_have_a_loss_on_the_calls(tmp_path, tokenizer_with, content, arguments):
    calls = [{"function": {"name": "square", "arguments": arguments}}] * 2
    talk = [*TALK[1:2], {"role": "assistant", "content": content, "tool_calls": calls}]
    talk += [{"role": "tool", "content": "9"}, {"role": "assistant", "content": "It is 9."}]
    config = config_of(tmp_path, tokenizer_with(CALLING), {"messages": talk, "tools": "[]"})
    tokenizer = load_tokenizer(config)
    (shown,) = shown_samples(load_dataset(config, tokenizer), tokenizer)
    call = '<tool_call>square{"a": 3}</tool_call>'
    assert f"assistant\n⟧{content or ''}{call}{call}<|im_end|>⟦\n<|im_start|>tool\n9<|im_end|>" in shown
    assert shown.endswith("assistant\n⟧<think>\n\n</think>\n\nIt is 9.<|im_end|>")


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"messages": [*TALK[:2], {"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "write the tool calls of m"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "message 0: tool_calls must be a list of objects"),
        ({"messages": []}, "expected a list of messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 0 needs a role and a content, both strings"),
        ({"messages": TALK[:2]}, "no message has the role assistant, so there is nothing to learn"),
        ({"messages": [{"role": "assistant", "content": "\0"}]}, "message 0 holds a NUL character"),
        ({"messages": [*TALK[:2], {"role": "assistant", "content": ""}]}, "does not write the content of message 2"),
    ],
)
def test_chat_that_cannot_be_learned_from_is_refused_with_its_line(tmp_path, tokenizer_with, record, problem):
    config = config_of(tmp_path, tokenizer_with(CHATML), {"messages": TALK}, record)
    with pytest.raises(DataError, match=rf"records\.jsonl:2: .*{problem}"):
        load_dataset(config, load_tokenizer(config))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('no system role') }}", "the chat template refuses it: no system role"),
        ("{{ messages | length }}" + CHATML, "writes what precedes message 2 in another way before a later message"),
    ],
)
def test_template_that_does_not_fit_is_refused(tmp_path, tokenizer_with, template, problem):
    config = config_of(tmp_path, tokenizer_with(template), {"messages": TALK})
    with pytest.raises(DataError, match=problem):
        load_dataset(config, load_tokenizer(config))
