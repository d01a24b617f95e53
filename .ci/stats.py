"""Print how large the tree is, and fail if a measure has risen above its limit.

    python .ci/stats.py

A limit is lowered when a change makes the tree smaller, and raised only with a reason in the closing note of the issue.
"""

import ast
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"tahq": ROOT, "tahq_launch": ROOT / "launch", "tahq_netem": ROOT / "netem"}

LIMITS = {
    "lines of tahq, launch and netem": 74_570,
    "modules there": 395,
    "lines of benchmarks": 10_995,
    "lines of tests": 54_050,
    "modules with one importer, in the same folder": 29,
    "modules in the largest folder": 15,
    "files that one activation crosses, without the codec's kernels": 15,
}


def lines(*folders: str) -> int:
    """Lines of all Python files below the folders."""
    return sum(len(file.read_text().splitlines()) for folder in folders for file in (ROOT / folder).rglob("*.py"))


def modules() -> dict[str, Path]:
    """The modules of the packages by dotted name, packages themselves included."""
    return {
        ".".join(file.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): file
        for package, base in PACKAGES.items()
        for file in (base / package).rglob("*.py")
    }


def importers(by_name: dict[str, Path]) -> dict[str, set[str]]:
    """For each module, the modules that import it or a name of it."""
    found = defaultdict(set)
    for name, file in by_name.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
            else:
                continue
            for target in imported:
                found[target].add(name)
    return {name: found[name] - {name} for name in by_name}


def files_of_an_activation() -> int:
    """As the last line of activation_path.py counts them."""
    command = [sys.executable, str(ROOT / ".ci/activation_path.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return int(printed.splitlines()[-1].split()[0])


def measures() -> dict[str, int]:
    """The figures of today, by the names of `LIMITS`."""
    by_name = modules()
    folders = defaultdict(int)
    for file in by_name.values():
        folders[file.parent] += file.name != "__init__.py"
    with_one_importer = [
        name
        for name, used_by in importers(by_name).items()
        if len(used_by) == 1 and by_name[name].parent == by_name[min(used_by)].parent
    ]
    return {
        "lines of tahq, launch and netem": lines("tahq", "launch", "netem"),
        "modules there": len(list(by_name)) + len(list((ROOT / "netem/vm").glob("*.py"))),
        "lines of benchmarks": lines("benchmarks"),
        "lines of tests": lines("tests"),
        "modules with one importer, in the same folder": len(with_one_importer),
        "modules in the largest folder": max(folders.values()),
        "files that one activation crosses, without the codec's kernels": files_of_an_activation(),
    }


def main() -> int:
    """Print the table; 1 if a measure is above its limit."""
    today = measures()
    width = max(map(len, LIMITS))
    for name, limit in LIMITS.items():
        print(f"{name:{width}}  {today[name]:>7,}  at most {limit:,}{'  TOO MANY' if today[name] > limit else ''}")
    return int(any(today[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
