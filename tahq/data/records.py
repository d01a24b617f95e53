"""Records of files, here or on the Hub, as texts in order, each with loss or without.

    {"prompt": …, "response": …}                     loss on the response
    {"instruction": …, "input": …, "output": …}      the same, with Alpaca's prompt
    {"messages": [{"role": …, "content": …}, …]}     loss on the assistant's turns, written by the chat template
    {"conversations": [{"from": …, "value": …}, …]}  the same, as ShareGPT names them
    {"text": …}                                      loss on everything

Of preferences (`training.dpo`), each of which makes two records:

    {"prompt": …, "chosen": …, "rejected": …}        loss on the answers; or all three are lists of messages
    {"chosen": [{"role": …}, …], "rejected": […]}    loss on the assistant's turns behind the messages they share
    {"messages": […], "chosen": {"role": …}, "rejected": {…}}    loss on the answers

Files are JSON Lines, a JSON array, Parquet or Arrow. Other keys are ignored. An assistant's turn is what the template
writes behind its generation prompt, up to the special token that ends it.
"""

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tahq.data.config import DataConfig
from tahq.data.sources import FoundFile, as_patterns, find_files, read_bytes
from tahq.errors import DataError, brief
from tahq.hub import DATA_FILES, dataset_files, is_hub_name

_KINDS = "prompt and response, instruction and output, messages, conversations, or text"
_OF_PREFERENCES = "prompt, chosen and rejected (training.dpo)"
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""What `datasets` writes beside records."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_ALPACA = (
    "Below is an instruction that describes a task{pairing}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{given}### Response:\n"
)
_ALPACA_PAIRING = ", paired with an input that provides further context"


class Part(NamedTuple):
    """A text, and whether its tokens are labels with loss."""

    text: str
    is_scored: bool


class Record(NamedTuple):
    """Its parts; `ends`: whether the end-of-document token follows, with loss. `place`: ``file:line``, for messages."""

    parts: tuple[Part, ...]
    ends: bool
    place: str


class ChatTemplate:
    """A tokenizer's Jinja template, `settings` of its tokenizer_config.json, and the names of its special tokens."""

    def __init__(self, template: str, settings: Mapping[str, Any], special: Sequence[str]) -> None:
        self._template = template
        named = {key: settings.get(key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._tokens: dict[str, Any] = {
            key: token["content"] if isinstance(token, dict) else token for key, token in named.items()
        }
        names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._end = re.compile(rf"\s*(?:{names})" if names else "")

    def parts(self, messages: list[dict[str, Any]], tools: Any, place: str, first: int = 0) -> tuple[Part, ...]:
        """The conversation in parts, with loss from message `first` on.

        DataError if the template refuses it, or the assistant's turns cannot be found.
        """
        whole, parts, written = self._rendered(messages, tools, place), list[Part](), 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first:
                continue
            before = self._rendered(messages[:number], tools, place, add_generation_prompt=True)
            if not whole.startswith(before):
                raise DataError(
                    f"{place}: the chat template writes what precedes message {number} in another way before a later "
                    "message, so that the loss on the assistant's turns cannot be placed"
                )
            if message.get("tool_calls"):
                alone = self._rendered(messages[: number + 1], tools, place)
                stop = _end_of_calls(whole, before, alone, message["tool_calls"])
            else:
                stop = self._end_of_content(whole, before, message["content"].strip())
            if not stop:
                what = "tool calls" if message.get("tool_calls") else "content"
                raise DataError(f"{place}: the chat template does not write the {what} of message {number}")
            parts += [Part(whole[written : len(before)], False), Part(whole[len(before) : stop], True)]
            written = stop
        parts.append(Part(whole[written:], False))
        return tuple(part for part in parts if part.text)

    def _end_of_content(self, whole: str, before: str, content: str) -> int:
        """Where the turn behind `before` ends in the whole conversation; 0: its content is not there."""
        found = whole.find(content, len(before)) if content else -1
        end = self._end.match(whole, found + len(content))
        return 0 if found < 0 else end.end() if end else found + len(content)

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Any, place: str, *, add_generation_prompt: bool = False
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template  # imports much of transformers

        try:
            text: Any = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except Exception as error:  # Jinja's, and whatever a template raises
            raise DataError(f"{place}: the chat template refuses it: {brief(str(error))}") from error
        return str(text[0][0] if isinstance(text, tuple) else text[0])


def _end_of_calls(whole: str, before: str, alone: str, calls: list[Any]) -> int:
    """Where the turn behind `before` ends, which has tool calls; 0: they are not there.

    `alone`: the conversation up to this turn. A template may begin its last turn in another way, with thoughts, so that
    the turn in the whole may be the end of this one.
    """
    turn, head = alone.removeprefix(before).rstrip(), re.escape(whole[len(before) :][:8])
    ends = (turn[match.start() :] for match in re.finditer(head, turn))
    found = next((end for end in ends if whole.startswith(end, len(before))), "")
    return len(before) + len(found) if all(call["function"]["name"] in found for call in calls) else 0


def find_record_files(config: DataConfig, key: str = "data.records") -> list[FoundFile]:
    """The files of `data.records`, in messages `key`; those on the Hub are downloaded.

    DataError: a pattern matches nothing, or the Hub does not give a dataset or has no such part of it.
    """
    patterns = list[str]()
    for each in as_patterns(config.records or ()):
        is_there = is_hub_name(each)
        patterns += map(str, dataset_files(each, config.subset, config.split, key)) if is_there else [each]
    found = find_files(patterns, key=key, suffix=DATA_FILES)
    return [file for file in found if file.path.name not in _DESCRIPTIONS] or found


def read_records(
    files: Sequence[FoundFile], template: ChatTemplate | None, *, are_preferences: bool = False
) -> list[Record]:
    """The records of files, in order; of preferences the chosen one, then the rejected one.

    `template`: of chats; None: the tokenizer has none. DataError: a record is malformed, or there are none.
    """
    parse = _preference if are_preferences else _single
    records = [
        part
        for file in files
        for place, record in (_read_tables if file.path.suffix in _TABLES else _read_json)(file.path)
        for part in parse(_object(record, place), place, template)
    ]
    if not records:
        raise DataError(f"data.records: {len(files)} files have no record, first {files[0].path}")
    return records


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """An object per line, or one array of objects."""
    content = read_bytes(path)
    if content.lstrip()[:1] == b"[" and path.suffix == ".json":
        yield from ((f"{path}, record {n}", record) for n, record in enumerate(_json(content, str(path)), start=1))
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", _json(line, f"{path}:{number}")


def _json(content: bytes, place: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON: {error}") from error


def _read_tables(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a Parquet or Arrow file, without what is null in them."""
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
    except ModuleNotFoundError:
        raise DataError(f"data.records: {path} needs pyarrow; install it with: pip install 'tahq[data]'") from None
    number = 0
    try:
        for batch in _batches(path):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", _without_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not {path.suffix[1:].capitalize()}: {brief(str(error))}") from error


def _batches(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        yield from importlib.import_module("pyarrow.parquet").ParquetFile(path).iter_batches()
        return
    ipc = importlib.import_module("pyarrow.ipc")
    with path.open("rb") as file:
        is_stream = file.read(6) != b"ARROW1"
        file.seek(0)
        if is_stream:
            yield from ipc.open_stream(file)
        else:
            reader = ipc.open_file(file)
            yield from map(reader.get_batch, range(reader.num_record_batches))


def _without_nulls(value: Any) -> Any:
    """A column has a value, perhaps null, in every row, and so has a key of the objects in it."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


_TABLES = (".parquet", ".arrow")


def _object(record: Any, place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected an object with {_KINDS}; got {type(record).__name__}")
    return record


def _single(record: dict[str, Any], place: str, template: ChatTemplate | None) -> tuple[Record, ...]:
    if "messages" in record or "conversations" in record:
        listed = record.get("messages", record.get("conversations"))
        return (Record(_chat(listed, record.get("tools"), place, template), False, place),)
    if "instruction" in record:
        given = _text_of(record, "input", place) if record.get("input") else ""
        prompt = _ALPACA.format(
            pairing=_ALPACA_PAIRING if given else "",
            instruction=_text_of(record, "instruction", place),
            given=f"### Input:\n{given}\n\n" if given else "",
        )
        return (_answered(prompt, _text_of(record, "output", place), place),)
    if "text" in record and "prompt" not in record:
        return (_answered("", _text_of(record, "text", place), place),)
    prompt, response = (_text_of(record, key, place) for key in ("prompt", "response"))
    return (_answered(prompt, response, place),)


def _answered(prompt: str, answer: str, place: str) -> Record:
    return Record((Part(prompt, False), Part(answer, True)), True, place)


def _preference(record: dict[str, Any], place: str, template: ChatTemplate | None) -> tuple[Record, ...]:
    """The chosen and the rejected answer; lists of messages have a prompt that is text in them."""
    answers: list[Any] = [record.get("chosen"), record.get("rejected")]
    prompt: Any = record.get("prompt")
    if all(isinstance(answer, dict) for answer in answers):
        prompt, answers = record.get("messages", record.get("conversations")), [[answer] for answer in answers]
    if not all(isinstance(answer, list) for answer in answers):
        before, *texts = (_text_of(record, key, place, _OF_PREFERENCES) for key in ("prompt", "chosen", "rejected"))
        return tuple(_answered(before, text, place) for text in texts)
    chats = [[*(prompt if isinstance(prompt, list) else ()), *answer] for answer in answers]
    shared = next((n for n, (one, other) in enumerate(zip(*chats, strict=False)) if one != other), None)
    first = min(map(len, chats)) - 1 if shared is None else shared
    tools = record.get("tools")
    return tuple(Record(_chat(chat, tools, place, template, max(first, 0)), False, place) for chat in chats)


def _chat(listed: Any, tools: Any, place: str, template: ChatTemplate | None, first: int = 0) -> tuple[Part, ...]:
    if template is None:
        raise DataError(
            f"{place}: a chat needs a tokenizer with a chat template (chat_template.jinja or tokenizer_config.json); "
            "that of data.tokenizer has none"
        )
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise DataError(f"{place}: expected a list of messages, each an object with role and content")
    messages = []
    for number, message in enumerate(listed):
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str | None):
            raise DataError(f"{place}: message {number} needs a role and a content, both strings")
        _check_text(content or "", f"{place}: message {number}")
        given = {**message, "role": _SHAREGPT_ROLES.get(role, role), "content": content or ""}
        messages.append(given | _tool_calls(message, f"{place}: message {number}"))
    if not any(message["role"] == "assistant" for message in messages[first:]):
        raise DataError(f"{place}: no message has the role assistant, so there is nothing to learn")
    tools = _json(tools.encode(), f"{place}: tools") if isinstance(tools, str) else tools
    return template.parts(messages, tools, place, first)


def _tool_calls(message: dict[str, Any], what: str) -> dict[str, Any]:
    """The calls of a message in the form that templates expect, whose arguments are an object, not its JSON."""
    calls = message.get("tool_calls")
    if not calls:
        return {}
    listed = calls if isinstance(calls, list) else [calls]
    functions: list[Any] = [call.get("function", call) if isinstance(call, dict) else None for call in listed]
    if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions):
        raise DataError(f"{what}: tool_calls must be a list of objects, each with a function that has a name")
    parsed = []
    for call, function in zip(listed, functions, strict=True):
        arguments = function.get("arguments", {})
        arguments = _json(arguments.encode(), f"{what}: arguments") if isinstance(arguments, str) else arguments
        parsed.append({"type": "function", **call, "function": {**function, "arguments": arguments}})
    return {"tool_calls": parsed}


def _text_of(record: dict[str, object], key: str, place: str, needed: str = _KINDS) -> str:
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        more = "; training.dpo learns from chosen and rejected" if needed is _KINDS and "chosen" in record else ""
        raise DataError(f"{place}: no key {key!r}, only {keys}; a record needs {needed}{more}")
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key} must be a string, got {type(value).__name__}")
    _check_text(value, f"{place}: {key}")
    return value


def _check_text(text: str, what: str) -> None:
    if "\0" in text:
        raise DataError(f"{what} holds a NUL character; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what} holds half a surrogate pair at character {error.start}") from error
