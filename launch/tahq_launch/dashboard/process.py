"""Where the dashboard listens, and the process that serves it beside a run.

Other programs of this machine can reach loopback, so a token in the address admits. The process serves at low priority;
nothing that happens to it changes the run, and it ends with its launcher.
"""

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tahq.coordinator.observer import RunEnd, RunHeader, RunObserver
from tahq.errors import UserError
from tahq_launch.command_line import announce

LEAVE_S = 3.0
"""Time for open pages to get the last figures when a run has ended."""


def check_installed() -> None:
    """UserError if the packages of the dashboard are missing."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise UserError("the dashboard needs starlette and uvicorn; install them with: pip install 'tahq[dashboard]'")


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket on loopback that listens, and the token that requests must have."""

    socket: socket.socket
    token: str

    @classmethod
    def open(cls, port: int = 0) -> "Listener":
        """Listen on a port of 127.0.0.1, 0: any free one; OSError if it is taken."""
        return cls(socket.create_server(("127.0.0.1", port)), secrets.token_urlsafe())

    def lines(self) -> Iterator[str]:
        """The address, and how another machine reaches it."""
        port = self.socket.getsockname()[1]
        # by the name that the user's machine has for this one
        connection = os.environ.get("SSH_CONNECTION", "").split()
        host = connection[2] if len(connection) == 4 else socket.gethostname()
        user = f"{os.environ['USER']}@" if "USER" in os.environ else ""
        yield f"dashboard: http://127.0.0.1:{port}/?token={self.token}"
        yield f"  on another machine, first: ssh -N -L {port}:127.0.0.1:{port} {user}{host}"


class DashboardProcess(RunObserver):
    """Serves the dashboard in another process while the run lasts, and a little longer."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def opened(self, header: RunHeader) -> None:
        """Start the process, and print the address."""
        listener = Listener.open()
        with listener.socket, self._log.open("ab") as log:
            descriptor = listener.socket.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tahq_launch.dashboard.server", str(header.run_folder), str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[descriptor],
                start_new_session=True,  # Ctrl-C is for the launcher
                text=True,
            )
            for line in listener.lines():
                announce(line)
        if self._process.stdin is not None:
            print(listener.token, file=self._process.stdin, flush=True)  # a command line would be public

    def ended(self, end: RunEnd) -> None:
        """Let the process end."""
        if self._process is None:
            return
        try:
            self._process.communicate(timeout=LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
