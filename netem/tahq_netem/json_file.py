"""Reports as JSON files, where a person has asked for one."""

import json
from pathlib import Path

from tahq.errors import UserError


def write_json(path: Path, values: object) -> None:
    """Write a report.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
