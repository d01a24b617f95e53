"""Write the reference pages that follow from the code: configuration.md from the models, commands.md from typer.

    python .ci/reference.py

What is above `MARK` in a page is written by hand. A test fails if a page is not what this would write.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from prose import ROOT
from pydantic import BaseModel

from tahq.config.cluster import ClusterConfig
from tahq.units import WRITTEN_BY_HAND
from tahq_launch.cli import tahq_app

CONFIGURATION = ROOT / "docs" / "reference" / "configuration.md"
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
OF_MANY = ("help", "version", "debug", "overrides")
"""Options that the head of commands.md describes once."""
MARK = "<!-- From here on written by .ci/reference.py -->\n"


def sections(model: type[BaseModel] = ClusterConfig, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section of cluster.yaml by its dotted name, each before those inside it."""
    for key, field in model.model_fields.items():
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield prefix + key, part
                yield from sections(part, f"{prefix}{key}.")


def _parts(annotation: Any) -> Iterator[Any]:
    """The types, and values of literals, that an annotation is made of."""
    yield annotation
    for argument in get_args(annotation):
        yield from _parts(argument)


def configuration() -> str:
    """A table for each section."""
    return "\n".join(_section(name, model) for name, model in sections())


def _section(name: str, model: type[BaseModel]) -> str:
    intro, _, example = (model.__doc__ or "").partition("Example: ")
    lines = [f"## {name}", "", *(line.strip() for line in intro.strip().splitlines()), ""]
    if example:
        lines += [f"Example: {' '.join(example.split())}", ""]
    lines += ["| key | default | meaning |", "|---|---|---|"]
    optional = {key for key, field in model.model_fields.items() if not field.is_required()}
    defaults = model.model_construct().model_dump(mode="json", context=WRITTEN_BY_HAND, include=optional)
    lines += [f"| `{key}` | {_default(name, key, defaults)} | {_meaning(model, key)} |" for key in model.model_fields]
    return "\n".join(lines) + "\n"


def _default(name: str, key: str, defaults: dict[str, Any]) -> str:
    if key not in defaults:
        return "required"
    value = defaults[key]
    if isinstance(value, dict) and value:
        return f"[below](#{(name + key).replace('.', '')})"
    return "" if value is None else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def _meaning(model: type[BaseModel], key: str) -> str:
    """The description, with the values of a literal that it does not name."""
    field = model.model_fields[key]
    text = " ".join((field.description or "").split())
    literals = [part for part in _parts(field.annotation) if get_origin(part) is Literal]
    values = list(dict.fromkeys(str(value) for literal in literals for value in get_args(literal)))
    if any(f"`{value}`" not in text for value in values):
        text += f" Values: {', '.join(f'`{value}`' for value in values)}."
    return text.replace("|", "\\|")


def commands() -> str:
    """Usage, help and options of every command of the program `tahq`."""
    group = typer.main.get_command(tahq_app())
    return "\n".join(_command(name, command) for name, command in _visible("tahq", group))


def _visible(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", {})
    if not below:
        yield path, command
    for name, each in below.items():
        if not each.hidden:
            yield from _visible(f"{path} {name}", each)


def _command(path: str, command: Any) -> str:
    lines = [f"## {path}", "", *_paragraphs(command.help or "")]
    rows = [row for each in command.params if (row := _row(each))]
    return "\n".join(lines + ["| option | default | meaning |", "|---|---|---|", *rows, ""] * bool(rows))


def _paragraphs(text: str) -> Iterator[str]:
    """The help's text; an example becomes code, and exit statuses are left to the page that lists them."""
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split())
        if line.startswith("Example: "):
            yield from ("```sh", line.removeprefix("Example: "), "```", "")
        elif not line.startswith("Exit status"):
            yield from (line, "")


def _row(parameter: Any) -> str:
    """A row of the table; empty for hidden options and those of many commands."""
    help_text = getattr(parameter, "help", None) or ""
    if getattr(parameter, "hidden", False) or parameter.name in OF_MANY or not help_text:
        return ""
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{getattr(parameter, 'metavar', None) or str(parameter.name).upper()}`"
    text, _, default = help_text.partition(" Default: ")
    if not default and parameter.default is not None and not getattr(parameter, "is_flag", False):
        default = f"`{parameter.default}`"
    return f"| {names} | {default.rstrip('.')} | {text} |".replace("|none", "\\|none")


def page(path: Path, generated: str) -> str:
    """The page with its part below `MARK` renewed."""
    return path.read_text(encoding="utf-8").partition(MARK)[0] + MARK + "\n" + generated


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    return {CONFIGURATION: page(CONFIGURATION, configuration()), COMMANDS: page(COMMANDS, commands())}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
