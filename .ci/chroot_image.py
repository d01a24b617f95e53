"""Build a Dockerfile's image without Docker: its steps in chroots, as root on Debian with debootstrap.

    python .ci/chroot_image.py docker/Dockerfile FOLDER --volume HERE:/home/tahq/work --run "launch work/cluster.yaml"

The image is left in FOLDER/image, which must not exist. A Debian image is a system from debootstrap. Each `--run` then
starts the entrypoint with these arguments, as the image's user. Layers, limits and networks of containers are not
shown. pip in the steps has this machine's settings.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parent.parent
HOST = "/run/host"
"""Where the steps find this machine's files."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENTER = f"""
user=$1 root=$2 here=$3 there=$4; shift 4
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs tmpfs "$root/run"
mkdir "$root{HOST}"
mount --bind -o ro / "$root{HOST}"
if [ -n "$here" ]; then mkdir -p "$root$there"; mount --bind "$here" "$root$there"; fi
exec chroot --userspec="$user" "$root" "$@"
"""


@dataclass
class Stage:
    """A FROM, and what the steps after it have set."""

    base: str
    name: str = ""
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    folder: str = "/"
    ports: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    steps: list[tuple[str, list[str], dict[str, str]]] = field(default_factory=list)
    """RUN and COPY, as root in /, with their words and variables; the words of RUN are one, for the shell."""


def read_dockerfile(path: Path, build_args: dict[str, str]) -> list[Stage]:
    """The stages of a Dockerfile; ValueError for an instruction that is not known here."""
    text = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#"))
    stages = list[Stage]()
    for line in filter(None, re.sub(r"\\\n\s*", "", text).splitlines()):
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            base, *name = rest.split(" AS ")
            stages.append(Stage(base, *name))
        else:
            _read(stages[-1], keyword, rest, build_args)
    return stages


def _read(stage: Stage, keyword: str, rest: str, build_args: dict[str, str]) -> None:
    words = [rest] if keyword == "RUN" else json.loads(rest) if keyword == "ENTRYPOINT" else shlex.split(rest)
    match keyword, words:
        case "ARG", [word]:
            name, _, default = word.partition("=")
            stage.arguments[name] = build_args.get(name, default)
        case "ENV", _:
            pairs = (word.split("=", 1) for word in words)
            stage.environment |= {name: Template(value).substitute(stage.environment) for name, value in pairs}
        case "USER", [user]:
            stage.user = user
        case "WORKDIR", [folder]:
            stage.folder = folder
        case "EXPOSE", ports:
            stage.ports += ports
        case "ENTRYPOINT", command:
            stage.entrypoint = command
        case ("RUN", _) | ("COPY", [_, *_, _]) if stage.user == "root" and stage.folder == "/":
            stage.steps.append((keyword, words, {**stage.arguments, **stage.environment}))
        case _:
            raise ValueError(f"cannot do this step here: {keyword} {rest}")


def copied(words: list[str], built: dict[str, Path]) -> tuple[Path, str]:
    """Source and target of a COPY; ValueError for a file that .dockerignore does not let through."""
    *options, source, target = words
    if options:
        return built[options[0].removeprefix("--from=")] / source.lstrip("/"), target
    if f"!{source}" not in (ROOT / ".dockerignore").read_text().splitlines():
        raise ValueError(f".dockerignore does not let {source} through")
    return ROOT / source, target


def pip_settings() -> dict[str, str]:
    """This machine's settings of pip as variables; files that they name are below `HOST`."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    settings = {}
    for line in sorted(listed.stdout.splitlines(), reverse=True):  # :env: overrides files
        name, _, value = line.partition("=")
        words = [re.sub(r"^(file://)?(?=/)", rf"\1{HOST}", word) for word in value.strip("'").split()]
        settings["PIP_" + name.rpartition(".")[2].upper().replace("-", "_")] = " ".join(words)
    return settings


def call(
    root: Path,
    command: list[str],
    environment: dict[str, str],
    user: str = "root",
    folder: str = "/",
    volume: str = ":",
) -> None:
    """Run a command as this user and in this folder of `root`; CalledProcessError if it fails."""
    accounts = [line.split(":") for line in (root / "etc/passwd").read_text().splitlines()]
    home = next(account[5] for account in accounts if account[0] == user)
    values = [f"{name}={value}" for name, value in {"HOME": home, **environment}.items()]
    inside = ["/usr/bin/env", "-i", f"--chdir={folder}", *values, *command]
    enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", ENTER, "sh"]
    subprocess.run([*enter, user, str(root), *volume.split(":"), *inside], check=True, stdin=subprocess.DEVNULL)


def build(stage: Stage, root: Path, system: Path, built: dict[str, Path]) -> None:
    """Do a stage's steps in `root`, a copy of `system`."""
    subprocess.run(["cp", "-a", system, root], check=True)
    for keyword, words, environment in stage.steps:
        began_s = time.monotonic()
        if keyword == "RUN":
            call(root, ["/bin/sh", "-c", *words], {**pip_settings(), **environment})
        else:
            source, target = copied(words, built)
            to = root / target.lstrip("/")
            (to if target.endswith("/") else to.parent).mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", "--no-preserve=ownership", source, to], check=True)
        print(f"{time.monotonic() - began_s:5.0f} s  {keyword} {' '.join(words)}", flush=True)


def main() -> None:
    """Build, print what the image is, and run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--volume", default=":", metavar="HERE:THERE")
    parser.add_argument("--run", action="append", default=[], metavar="ARGUMENTS")
    given = parser.parse_args()
    stages = read_dockerfile(given.dockerfile, dict(each.split("=", 1) for each in given.build_arg))
    built, root = dict[str, Path](), given.folder
    for number, stage in enumerate(stages):
        system = given.folder / stage.base.replace(":", "-")
        if not system.exists():
            release = re.fullmatch(r"debian:(\w+)-slim", stage.base)
            if release is None:
                raise ValueError(f"expected FROM debian:RELEASE-slim, got {stage.base}")
            subprocess.run(
                ["debootstrap", "--variant=minbase", release[1], system], check=True, stdout=subprocess.DEVNULL
            )
        root = given.folder / ("image" if stage is stages[-1] else f"stage-{number}")
        build(stage, root, system, built)
        built[stage.name] = root
    image = stages[-1]
    size = subprocess.run(["du", "-sm", "--apparent-size", root], check=True, capture_output=True, text=True)
    print(f"image of {size.stdout.split()[0]} MiB, user {image.user}, port {', '.join(image.ports)}", flush=True)
    for arguments in given.run:
        command = [*image.entrypoint, *shlex.split(arguments)]
        call(root, command, image.environment, image.user, image.folder, given.volume)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"status {error.returncode}: {shlex.join(map(str, error.cmd[-3:]))}")
