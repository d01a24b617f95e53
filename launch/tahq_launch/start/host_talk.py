"""A conversation with `tahq check-host` on one host, over ssh unless it is this one; and what is wrong if it fails."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from tahq import __version__
from tahq.comm.config import MachineConfig
from tahq.errors import UserError
from tahq_launch.start.host_check import MARK, ssh_words
from tahq_launch.start.machine_checks import Finding, fault
from tahq_launch.start.worker_command import ssh_argv

TIMEOUT_S: Final = 90.0
"""For one reply, with the import of torch from a slow disk."""


class HostTalk:
    """A conversation with `tahq check-host` on one host; `close` ends it."""

    def __init__(self, host: MachineConfig) -> None:
        self._host = host
        self._process: subprocess.Popen[str] | None = None
        self._said: list[str] = []

    def ask(self, kind: str, request: Any) -> Mapping[str, Any] | None:
        """The reply; None if the host cannot be asked, or ended or hung before it replied."""
        process = self._process = self._process or self._begun()
        timer = threading.Timer(TIMEOUT_S, process.kill)
        timer.start()
        try:
            return self._reply(process, json.dumps({kind: request}) + "\n")
        finally:
            timer.cancel()

    def _reply(self, process: "subprocess.Popen[str]", line: str) -> Mapping[str, Any] | None:
        assert process.stdin is not None, "a pipe was asked for"
        assert process.stdout is not None, "a pipe was asked for"
        with suppress(BrokenPipeError):  # its output says why
            process.stdin.write(line)
            process.stdin.flush()
        for said in process.stdout:
            if said.startswith(MARK):
                reply: Mapping[str, Any] = json.loads(said.removeprefix(MARK))
                return reply
            self._said.append(said.strip())
        return None

    def _begun(self) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        env = dict(os.environ)
        if self._host.local:
            env.pop("SSH_CONNECTION", None)  # the caller is this machine, even if its user sits elsewhere
            argv: tuple[str, ...] = (sys.executable, "-m", "tahq_launch.cli", "check-host")
        else:
            argv = ssh_argv(self._host, ["check-host"])
        try:
            return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env)
        except OSError as error:
            raise UserError(f"cannot start ssh: {error.strerror}") from error

    def failure(self, stage: int) -> Finding:
        """Why the last request got no reply."""
        assert self._process is not None, "only after a failed request"
        return ssh_fault((self._process.wait(), [line for line in self._said if line]), self._host, stage)

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def ssh_fault(end: tuple[int, Sequence[str]], host: MachineConfig, stage: int) -> Finding:
    """What is wrong if `tahq check-host` ended with this status and these lines, and what to do."""
    status, lines = end
    if any(re.search("No module named '?tahq", line) for line in lines):
        remedy = f"{install_command(host)}, or correct hosts.{stage}.python"
        return fault("tahq", f"tahq is not installed for {host.python}", remedy, wanted=__version__, fix="install")
    for pattern, make in _known_ends(host, stage).items():
        line = next((line for line in reversed(lines) if re.search(pattern, line)), "")
        if line:
            return make(line if status != 255 or line.startswith("ssh: ") else f"ssh: {line}")
    if status < 0:
        return fault("ssh", f"no answer in {TIMEOUT_S:.0f} s", f"try: {ssh_words(host)} true")
    last = lines[-1] if lines else "nothing was printed"
    remedy = f"try: {ssh_words(host)} {host.python} -m tahq_launch.cli --version"
    return fault("tahq", f"status {status}: {last}", remedy)


def install_command(host: MachineConfig) -> str:
    """The commands that install this version of tahq on a host."""
    wheel = f"tahq-{__version__}-py3-none-any.whl"
    by_hand = f"copy {wheel} there and {ssh_words(host)} {host.python} -m pip install {wheel}"
    return f"tahq doctor CLUSTER.YAML --fix, or {by_hand}"


def _known_ends(host: MachineConfig, stage: int) -> Mapping[str, Callable[[str], Finding]]:
    """What ssh, the shell and Python print there, by pattern, and the fault that it means."""
    key, ssh = f"hosts.{stage}", ssh_words(host)

    def means(check: str, remedy: str, **more: Any) -> Callable[[str], Finding]:
        return lambda line: fault(check, line, remedy, **more)

    copy_id = ssh.replace("ssh", "ssh-copy-id", 1)
    folder = f"{ssh} mkdir -p {host.workdir}, or correct {key}.workdir"
    return {
        "Permission denied \\(|Too many authentication": means(
            "ssh", f"{copy_id}, or correct {key}.ssh, the user in it"
        ),
        "Host key verification failed": means("ssh", f"{ssh} once by hand, and accept its key"),
        "Could not resolve": means("ssh", f"correct the name in {key}.ssh, or use the IP address"),
        "Connection refused": means("ssh", f'start sshd there, or give its port: {key}.ssh_options: ["-p", "2222"]'),
        "timed out|No route to host|unreachable": means(
            "ssh", f"switch it on, or open port 22 in its firewall, or give its port: {key}.ssh_options"
        ),
        "No module named": means(
            "tahq", f"{install_command(host)}, with its requirements, or correct {key}.python", fix="install"
        ),
        "cd: ": means("work folder", folder, fix="workdir"),
        "not found|No such file": means("Python", f"install Python there, or correct {key}.python", fix="install"),
    }
