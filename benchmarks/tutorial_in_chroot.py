"""The tutorial for three machines, typed on new Debian systems.

The machines are a chroot made by debootstrap, each with its own home, sshd, address and namespaces; each sends and
receives 50 Mbit/s (tbf), and pip's packages come over such a link too. The commands and cluster.yaml are read from
docs/tutorials/three-machines.md; the command before `--resume` gets a Ctrl-C after its second step. Needs root,
debootstrap and openssh-client, and leaves nothing behind.

    python benchmarks/tutorial_in_chroot.py --model FOLDER --output docs/dev/three-machines-transcript.md

FOLDER is any small model with 256 positions or more. Step 1 of docs/tutorials/fine-tune.md makes one, with
`--set data.seq_len=256 --set training.global_batch=16`.
"""

import argparse
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import main, say

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/tutorials/three-machines.md"
DEBIAN = "python3,python3-venv,openssh-server,openssh-client"
TORCH = "torch==2.13.0"
TYPED_PER_S = 200 / 60
"""Characters, at forty words a minute."""
KEPT_LINES = 5
TIMEOUT_S = 900

ACCOUNT = """
useradd --create-home --shell /bin/bash --password '*' me
echo 'UsePAM no' >> /etc/ssh/sshd_config
cat > /etc/pip.conf <<END
[global]
no-index = true
find-links = http://192.0.2.254/
trusted-host = 192.0.2.254
disable-pip-version-check = true
END
cd /home/me
install -d -m 700 .ssh
ssh-keygen -q -t ed25519 -N '' -f .ssh/id_ed25519
cp .ssh/id_ed25519.pub .ssh/authorized_keys
for n in 1 2 3; do echo "192.0.2.$n $(cut -d' ' -f1,2 /etc/ssh/ssh_host_ed25519_key.pub)"; done > .ssh/known_hosts
chown -R me:me .ssh
"""
NETWORK = """
mount -t tmpfs tmpfs /run
mkdir -p /run/netns
ip link set lo up
ip link add br0 type bridge
ip address add 192.0.2.254/24 dev br0
ip link set br0 up
for n in 1 2 3; do
  ip netns add machine$n
  ip link add v$n type veth peer name eth0 netns machine$n
  ip link set v$n master br0 up
  ip -n machine$n link set lo up
  ip -n machine$n address add 192.0.2.$n/24 dev eth0
  ip -n machine$n link set eth0 up
  tc qdisc add dev v$n root tbf rate 50mbit burst 64kb latency 50ms
  ip netns exec machine$n tc qdisc add dev eth0 root tbf rate 50mbit burst 64kb latency 50ms
  ip netns exec machine$n unshare --mount --uts --pid --fork --kill-child sh -ec "$MACHINE" sh $n &
done
"$PYTHON" -m http.server --directory wheels --bind 192.0.2.254 80 >/dev/null 2>&1 &
until ssh-keyscan -t ed25519 192.0.2.1 192.0.2.2 192.0.2.3 2>/dev/null | [ "$(wc -l)" = 3 ]; do sleep 0.2; done
exec ssh -tt -q -i homes/1/.ssh/id_ed25519 -o UserKnownHostsFile=homes/1/.ssh/known_hosts me@192.0.2.1 "$SHELL_THERE"
"""
MACHINE = """
hostname machine$1
mount --bind homes/$1 system/home/me
mount -t proc proc system/proc
mount -t tmpfs -o mode=1777 tmpfs system/tmp
mount -t tmpfs -o mode=1777 tmpfs system/dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts system/dev/pts
mount -t tmpfs tmpfs system/run
mkdir system/run/sshd
exec chroot system /usr/sbin/sshd -D
"""
SHELL_THERE = r"""
stty -echo columns 120
export TERM=dumb VIRTUAL_ENV_DISABLE_PROMPT=1 PS1= PS2= PROMPT_COMMAND='printf "\001%s\002" $?'
exec bash --noprofile --norc --noediting -i
"""


@dataclass(frozen=True, slots=True)
class Typed:
    """A command, what it printed, its exit status, and seconds until the next prompt and until the first step."""

    command: str
    output: str
    status: int
    seconds: float
    first_step_s: float | None


class Terminal:
    """A shell of `me` on the first machine; the network and all three machines end with it."""

    def __init__(self, folder: Path) -> None:
        self._terminal, there = pty.openpty()
        scripts = {"MACHINE": MACHINE, "SHELL_THERE": SHELL_THERE, "PYTHON": sys.executable}
        alone = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "setsid", "-c"]
        command = [*alone, "sh", "-ec", NETWORK]
        self._process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **scripts}, stdin=there, stdout=there, start_new_session=True
        )
        os.close(there)
        self._read()

    def type(self, command: str, *, interrupt: bool = False) -> Typed:
        """Run a command to its end, with a Ctrl-C after the second step of training if asked."""
        began_s = time.monotonic()
        os.write(self._terminal, command.encode() + b"\n")
        output, status, first_step_s = self._read(interrupt=interrupt)
        return Typed(command, output, status, time.monotonic() - began_s, first_step_s)

    def close(self) -> None:
        """End the machines."""
        self._process.kill()  # unshare passes on no SIGTERM; --kill-child ends the rest
        self._process.wait()
        os.close(self._terminal)

    def _read(self, *, interrupt: bool = False) -> tuple[str, int, float | None]:
        """What is printed before the next prompt, the status in it, and when the first step came."""
        began_s, text, first_step_s = time.monotonic(), "", None
        while (end := re.search("\x01(\\d+)\x02", text)) is None:
            if not select.select([self._terminal], [], [], TIMEOUT_S)[0]:
                raise TimeoutError(f"nothing was printed for {TIMEOUT_S} s after:\n{text}")
            text += os.read(self._terminal, 65536).decode(errors="replace").replace("\r", "")
            if first_step_s is None and re.search(r"^step \d+/", text, re.MULTILINE):
                first_step_s = time.monotonic() - began_s
            if interrupt and re.search(r"^step 2/", text, re.MULTILINE):
                os.write(self._terminal, b"\x03")
                interrupt = False
        return text[: end.start()], int(end[1]), first_step_s


def page_blocks(language: str) -> list[str]:
    """The tutorial's blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The tutorial's commands, without the comments beside them; cluster.yaml is written before it is first named."""
    lines = [re.sub(r"\s+# .*", "", line) for block in page_blocks("sh") for line in block.splitlines()]
    first = next(number for number, line in enumerate(lines) if "cluster.yaml" in line)
    return [*lines[:first], f"cat > cluster.yaml <<'END'\n{page_blocks('yaml')[0]}END", *lines[first:]]


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def make_machines(folder: Path, model: Path) -> None:
    """The system, three homes, tahq's wheel and what pip needs besides; model and text are in the first home."""
    wheels, system, home = folder / "wheels", folder / "system", folder / "homes/1"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    release = {"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_TAHQ": "0.1.0", "SETUPTOOLS_SCM_PRETEND_VERSION": "0.1.0"}
    command = [*pip, "wheel", "-q", "--no-deps", "-w", wheels, ROOT]
    subprocess.run(command, check=True, env={**os.environ, **release})
    (wheel,) = wheels.glob("tahq-*.whl")
    run(*pip, "download", "-q", "-d", wheels, TORCH, f"{wheel}[dashboard]")
    run("debootstrap", "--variant=minbase", f"--include={DEBIAN}", "bookworm", system)
    run("chroot", system, "sh", "-ec", ACCOUNT)
    home.parent.mkdir()
    run("cp", "-a", system / "home/me", home)
    for number in (2, 3):
        run("cp", "-a", home, folder / f"homes/{number}")
    wheel.rename(home / wheel.name)
    path = re.search(r"model: \{path: ([^,}]+)", page_blocks("yaml")[0])
    assert path is not None, "the tutorial's cluster.yaml names a model"
    shutil.copytree(model, home / path[1])
    (home / "books").mkdir()
    for text in (system / "usr/share/common-licenses").iterdir():
        if not text.is_symlink():
            shutil.copy(text, home / f"books/{text.name}.txt")
    run("chown", "-R", "1000:1000", home)


def follow(options: argparse.Namespace) -> Iterator[str]:
    """Make the machines, type, and yield the parts of the transcript."""
    folder = Path(tempfile.mkdtemp(prefix="tahq-tutorial-"))
    try:
        make_machines(folder, options.model)
        terminal = Terminal(folder)
        try:
            torch = terminal.type(f"python3 -m venv tahq-env && tahq-env/bin/pip install -q {TORCH}")
            for number in (2, 3):
                run("cp", "-a", folder / "homes/1/tahq-env", folder / f"homes/{number}")
            typed = list(type_all(terminal))
        finally:
            terminal.close()
    finally:
        run("rm", "-rf", "--one-file-system", folder)
    yield from transcript(torch, typed)


def type_all(terminal: Terminal) -> Iterator[Typed]:
    """Type the tutorial, up to a command that fails."""
    todo = commands()
    for command, following in zip(todo, [*todo[1:], ""], strict=True):
        done = terminal.type(command, interrupt="--resume" in following)
        say(f"$ {command}\n{done.output}[status {done.status}, {done.seconds:.0f} s]")
        yield done
        if done.status not in (0, 130):
            return


def transcript(torch: Typed, typed: list[Typed]) -> Iterator[str]:
    """The parts of the page."""
    waited_s = sum(each.seconds for each in typed)
    typing_s = sum(map(len, (each.command for each in typed))) / TYPED_PER_S
    yield (
        f"**{(waited_s + typing_s) / 60:.1f} minutes**: {waited_s / 60:.1f} of waiting, and {typing_s / 60:.1f} for "
        f"typing {typing_s * TYPED_PER_S:.0f} characters, at 200 a minute. Before that, downloading and installing "
        f"torch took {torch.seconds:.0f} s on one machine.\n\n"
        "Commands and cluster.yaml are those of the [tutorial](../tutorials/three-machines.md). The model is a small "
        "stand-in, the books are the licences in `/usr/share/common-licenses`. Both, the wheel, sshd and ssh's keys "
        "were there before. All three machines share this one's processors, and have 50 Mbit/s each; pip downloads "
        "at that rate too."
    )
    for each in typed:
        note = "" if each.first_step_s is None else f", the first step after {each.first_step_s:.0f} s"
        lines = [
            line[:150].rstrip()
            for line in each.output.splitlines()
            if line.strip() and not line.startswith(" " * 5 + "━")
        ]
        if len(lines) > 2 * KEPT_LINES + 1:
            lines[KEPT_LINES:-KEPT_LINES] = ["…"]
        shown = "\n".join([f"$ {each.command}", *lines])
        status = f", status {each.status}" if each.status else ""
        yield f"{each.seconds:.1f} s{note}{status}\n\n```\n{shown}\n```"
    if typed[-1].status:
        sys.exit(f"the last command failed with status {typed[-1].status}")


if __name__ == "__main__":
    main(__doc__, follow, {"--model": {"type": Path, "required": True, "help": "folder of the model to train"}})
