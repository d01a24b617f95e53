"""What `tahq doctor --fix` repairs on hosts that ssh reaches, several at a time; each action is printed first.

- install: this tahq's wheel goes to the host, and pip installs it into a venv there, with its requirements from the
  package index that the host uses;
- workdir: the work folder is created;
- chmod: a key file is closed to others;
- copy-key: a host without this account's key gets a copy, so that workers can be started there by hand;
- copy-model, copy-data: copied to the same place on the host, only on request.
"""

import csv
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from glob import glob
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Final

import tahq
from tahq.comm.config import MachineConfig
from tahq.comm.keys import default_key_path
from tahq.config.cluster import ClusterConfig
from tahq.errors import UserError
from tahq.units import format_size
from tahq_launch.start.host_check import data_paths, place_of
from tahq_launch.start.machine_checks import Finding, fault
from tahq_launch.start.preflight import AT_ONCE
from tahq_launch.start.worker_command import ssh_script

VENV: Final = "tahq-venv"
"""The folder, below the login folder, for hosts whose `python` is not in a venv."""
_TIMEOUT_S: Final = 1800.0


_INSTALL: Final = """set -e
wanted=%s
if [ -n "$wanted" ] && { [ -e "$wanted/pyvenv.cfg" ] || [ ! -e "$wanted" ]; }; then venv=$wanted; else venv=$HOME/%s; fi
[ -x "$venv/bin/python" ] || python3 -m venv "$venv" >&2
cat > "$venv/"%s
"$venv/bin/python" -m pip --disable-pip-version-check install --no-compile "$venv/"%s >&2
rm "$venv/"%s
echo "venv $venv"
"""
_COPY_KEY: Final = """set -e
folder=${XDG_CONFIG_HOME:-$HOME/.config}/tahq
umask 077
mkdir -p "$folder"
set -C
cat > "$folder/key.secret"
"""


class Fixer:
    """Repairs what findings name, each thing once.

    Attributes:
        overrides: changes of cluster.yaml that the next check needs, because of what was repaired.
        left: findings that remain for a person to do.

    Args:
        config: the cluster.yaml as read; None: only this machine is repaired.
        copies: whether a missing model and missing data are copied.
        say: prints a line.
    """

    def __init__(self, config: ClusterConfig | None, *, copies: bool, say: Callable[[str], None]) -> None:
        self.overrides: list[str] = []
        self.left: list[Finding] = []
        self._config, self._say, self._done = config, say, set[tuple[int | None, str]]()
        self._making_wheel = Lock()
        self._fixes: dict[str, Callable[[Finding], None]] = {
            "install": self._install,
            "workdir": self._make_folder,
            "chmod": self._close_key,
            "copy-key": self._copy_key,
        }
        if copies:
            self._fixes |= {"copy-model": self._copy_files, "copy-data": self._copy_files}

    def fix(self, findings: Sequence[Finding]) -> bool:
        """Repair what can be repaired and was not tried before; whether anything was."""
        todo = [each for each in findings if self._is_reached(each) and (each.stage, each.fix) not in self._done]
        self._done.update((each.stage, each.fix) for each in todo)
        by_host = defaultdict[str, list[Finding]](list)
        for each in todo:
            by_host[each.host].append(each)
        with tempfile.TemporaryDirectory(prefix="tahq-doctor-") as folder, ThreadPoolExecutor(AT_ONCE) as pool:
            self._folder = Path(folder)
            list(pool.map(self._fix_host, by_host.values()))
        return bool(todo)

    def _fix_host(self, todo: Sequence[Finding]) -> None:
        for each in todo:
            try:
                self._fixes[each.fix](each)
            except UserError as error:
                self._say(f"{each.host}: {error}")

    def _is_reached(self, finding: Finding) -> bool:
        """Whether it can be repaired from here: on this machine, or over ssh."""
        on_host = finding.stage is not None and self._host(finding).ssh is None
        return finding.fix in self._fixes and not on_host

    def _host(self, finding: Finding) -> MachineConfig:
        assert self._config is not None, "only hosts of a cluster.yaml have stages"
        assert isinstance(self._config.hosts, list), "only listed hosts are reached by ssh"
        assert finding.stage is not None, "this machine is not reached by ssh"
        return self._config.hosts[finding.stage]

    def _run(self, host: MachineConfig, script: str, content: bytes = b"", *, in_folder: bool = True) -> str:
        """What a script printed there, with this on its stdin; UserError if it failed."""
        env = shlex.join(["env", *(f"{name}={value}" for name, value in host.env.items()), "sh", "-c", script])
        folder = (host.workdir or "").removeprefix("~/") if in_folder else ""
        command = ssh_script(host, f"cd {shlex.quote(folder)} && {env}" if folder else env)
        try:
            done = subprocess.run(command, input=content, capture_output=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"ssh {host.ssh}: {error}") from None
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["nothing was printed"]
            raise UserError(f"failed with status {done.returncode}: {said[-1]}")
        return done.stdout.decode(errors="replace")

    def _install(self, finding: Finding) -> None:
        host, wheel = self._host(finding), self._wheel()
        python = PurePosixPath(host.python)
        wanted = str(python.parent.parent) if python.parent.name == "bin" else ""
        size = format_size(wheel.stat().st_size)
        self._say(f"{finding.host}: copying {wheel.name} ({size}); pip installs it there, and what it requires")
        name = shlex.quote(wheel.name)
        script = _INSTALL % (shlex.quote(wanted), VENV, name, name, name)
        venv = self._run(host, script, wheel.read_bytes()).strip().rpartition("venv ")[2]
        self._say(f"{finding.host}: installed in {venv}")
        if venv != wanted:
            key, value = f"hosts.{finding.stage}.python", f"{venv}/bin/python"
            self.overrides.append(f"{key}={value}")
            what = f"tahq is installed in {venv}, cluster.yaml names {host.python}"
            left = fault("Python", what, f"set {key}: {value} in cluster.yaml")
            self.left.append(replace(left, host=finding.host, stage=finding.stage))

    def _wheel(self) -> Path:
        """A wheel of this tahq: what was installed from one, or the files of this checkout."""
        source = Path(tahq.__file__).parents[1]
        with self._making_wheel:
            if not (made := list(self._folder.glob("*.whl"))):
                self._say(f"making a wheel of tahq {tahq.__version__} from {source}")
                installed = next(source.glob("tahq-*.dist-info"), None)
                made = [
                    built_wheel(source, self._folder) if installed is None else packed_again(installed, self._folder)
                ]
            return made[0]

    def _make_folder(self, finding: Finding) -> None:
        host = self._host(finding)
        self._say(f"{finding.host}: creating {host.workdir}")
        self._run(host, f"mkdir -p {shlex.quote((host.workdir or '.').removeprefix('~/'))}", in_folder=False)

    def _close_key(self, finding: Finding) -> None:
        command = finding.remedy
        self._say(f"{finding.host}: {command}")
        if finding.stage is not None:
            self._run(self._host(finding), command)
        else:
            Path(shlex.split(command)[-1]).chmod(0o600)

    def _copy_key(self, finding: Finding) -> None:
        path = default_key_path()
        if not path.exists() or (self._config is not None and not self._config.security.curve):
            return
        self._say(f"{finding.host}: copying {path}, so that workers can be started there by hand")
        self._run(self._host(finding), _COPY_KEY, path.read_bytes())

    def _copy_files(self, finding: Finding) -> None:
        assert self._config is not None, "only hosts of a cluster.yaml have stages"
        named = data_paths(self._config) if finding.fix == "copy-data" else [self._config.model.path or ""]
        paths = [path for name in named for path in (glob(name) or [name])]
        host = self._host(finding)
        place = place_of(host, paths)
        self._say(f"{finding.host}: copying {', '.join(paths)} to {place}")
        packed = subprocess.Popen(["tar", "-chf", "-", *paths], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        command = ssh_script(host, f"tar -xf - -C {shlex.quote(place)}")
        done = subprocess.run(command, stdin=packed.stdout, capture_output=True, check=False)
        _, said = packed.communicate()
        if packed.returncode or done.returncode:
            raise UserError(f"cannot copy: {(said or done.stderr).decode(errors='replace').strip()}")


def built_wheel(source: Path, folder: Path) -> Path:
    """A wheel of a checkout, its uncommitted files included."""
    has_backend = all(map(find_spec, ("hatchling", "hatch_vcs")))  # else pip fetches it
    options = ["--no-build-isolation"] if has_backend else []
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-deps", *options]
    done = subprocess.run([*command, "-w", str(folder), str(source)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"no wheel can be made of {source}: {done.stderr.strip().splitlines()[-1]}")
    return next(folder.glob("*.whl"))


def packed_again(installed: Path, folder: Path) -> Path:
    """The wheel that an installation came from: its files without those that pip added."""
    wheel = folder / f"{installed.name.removesuffix('.dist-info')}-py3-none-any.whl"
    record = f"{installed.name}/RECORD"
    added = tuple(f"{installed.name}/{name}" for name in ("INSTALLER", "REQUESTED", "direct_url.json"))
    rows = [row for row in csv.reader((installed / "RECORD").read_text().splitlines()) if row]
    rows = [row for row in rows if not row[0].startswith(("..", "/", *added)) and not row[0].endswith(".pyc")]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, *_ in rows:
            if name != record:
                packed.write(installed.parent / name, name)
        packed.writestr(record, "".join(f"{','.join(row)}\n" for row in rows))
    return wheel
