"""Lines of JSON Lines files as records: texts in order, each with loss or without.

    {"prompt": …, "response": …}                     loss on the response
    {"instruction": …, "input": …, "output": …}      the same, with Alpaca's prompt
    {"messages": [{"role": …, "content": …}, …]}     loss on the assistant's turns, written by the chat template
    {"conversations": [{"from": …, "value": …}, …]}  the same, as ShareGPT names them
    {"text": …}                                      loss on everything

Other keys are ignored. An assistant's turn is what the template writes behind its generation prompt, up to the special
token that ends it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tahq.data.sources import FoundFile, read_bytes
from tahq.errors import DataError, brief

_KINDS = "prompt and response, instruction and output, messages, conversations, or text"
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
    """A line; `ends`: whether the end-of-document token follows, with loss. `place`: ``file:line``, for messages."""

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

    def parts(self, messages: list[dict[str, Any]], tools: Any, place: str) -> tuple[Part, ...]:
        """The conversation in parts; DataError if the template refuses it, or the assistant's turns cannot be found."""
        whole, parts, written = self._rendered(messages, tools, place), list[Part](), 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._rendered(messages[:number], tools, place, add_generation_prompt=True)
            if not whole.startswith(before):
                raise DataError(
                    f"{place}: the chat template writes what precedes message {number} in another way before a later "
                    "message, so that the loss on the assistant's turns cannot be placed"
                )
            content = str(message.get("content") or "").strip()
            found = whole.find(content, len(before)) if content else -1
            if found < 0:
                raise DataError(f"{place}: the chat template does not write the content of message {number}")
            end = self._end.match(whole, found + len(content))
            stop = end.end() if end else found + len(content)
            parts += [Part(whole[written : len(before)], False), Part(whole[len(before) : stop], True)]
            written = stop
        parts.append(Part(whole[written:], False))
        return tuple(part for part in parts if part.text)

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


def read_records(files: Sequence[FoundFile], template: ChatTemplate | None, most: int | None = None) -> list[Record]:
    """The records of JSON Lines files, in order; blank lines are skipped. `most`: only so many; None: all.

    `template`: of chats; None: the tokenizer has none. DataError: a line is malformed, or all are empty.
    """
    records: list[Record] = []
    for file in files:
        for number, line in enumerate(read_bytes(file.path).split(b"\n"), start=1):
            if line.strip():
                records.append(_parsed(line, f"{file.path}:{number}", template))
            if len(records) == most:
                return records
    if not records:
        raise DataError(f"data.jsonl: all lines of {len(files)} files are empty, first {files[0].path}")
    return records


def _parsed(line: bytes, place: str, template: ChatTemplate | None) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected an object with {_KINDS}; got {type(record).__name__}")
    if "messages" in record or "conversations" in record:
        return Record(_chat(record, place, template), False, place)
    if "instruction" in record:
        given = _text_of(record, "input", place) if record.get("input") else ""
        prompt = _ALPACA.format(
            pairing=_ALPACA_PAIRING if given else "",
            instruction=_text_of(record, "instruction", place),
            given=f"### Input:\n{given}\n\n" if given else "",
        )
        return Record((Part(prompt, False), Part(_text_of(record, "output", place), True)), True, place)
    if "text" in record and "prompt" not in record:
        return Record((Part("", False), Part(_text_of(record, "text", place), True)), True, place)
    prompt, response = (_text_of(record, key, place) for key in ("prompt", "response"))
    return Record((Part(prompt, False), Part(response, True)), True, place)


def _chat(record: dict[str, Any], place: str, template: ChatTemplate | None) -> tuple[Part, ...]:
    if template is None:
        raise DataError(
            f"{place}: a chat needs a tokenizer with a chat template (chat_template.jinja or tokenizer_config.json); "
            "that of data.tokenizer has none"
        )
    listed = record.get("messages", record.get("conversations"))
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise DataError(f"{place}: expected a list of messages, each an object with role and content")
    messages = []
    for number, message in enumerate(listed):
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str | None):
            raise DataError(f"{place}: message {number} needs a role and a content, both strings")
        _check_text(content or "", f"{place}: message {number}")
        messages.append({**message, "role": _SHAREGPT_ROLES.get(role, role), "content": content or ""})
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{place}: no message has the role assistant, so there is nothing to learn")
    return template.parts(messages, record.get("tools"), place)


def _text_of(record: dict[str, object], key: str, place: str) -> str:
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise DataError(f"{place}: no key {key!r}, only {keys}; a line needs {_KINDS}")
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
