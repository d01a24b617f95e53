"""How this package starts its own programs on a host: the same Python, with the same modules."""

import os
import sys
from pathlib import Path


def module_argv(module: str, *arguments: str) -> list[str]:
    """The command line of a module of this package."""
    return [sys.executable, "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Where this process found its modules, the program finds them, too, whichever folder it runs in."""
    folders = [str(Path(__file__).parents[1]), *sys.path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in folders)}
