"""`tahq doctor` on faults that are really there: hosts are network namespaces, each behind its own sshd."""

import getpass
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml
from support.runs import environment, finish, start, tiny, write_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel

import tahq
import tahq_launch
import tahq_netem
from tahq import __version__
from tahq_launch.doctor.fix import built_wheel, packed_again

from .conftest import SSHD, assert_one_line, needs_sshd

CODE = list(dict.fromkeys(str(Path(each.__file__).parents[1]) for each in (tahq, tahq_launch, tahq_netem)))
THIS_MACHINE = "10.9.0.254"
NUM_HOSTS = 20
SHIFTED_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 7200;
    return status;
}
"""
NETWORK = """
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/netns /run/sshd
mount -t tmpfs -o size=16k tmpfs full/runs
mount -t tmpfs -o ro tmpfs read-only
ip link set lo up
ip link add br0 type bridge
ip address add {this}/24 dev br0
ip link set br0 up
for n in $(seq 0 {last}); do
  ip netns add h$n
  ip link add v$n type veth peer name eth0 netns h$n
  ip link set v$n master br0 up
  ip -n h$n link set lo up
  ip -n h$n address add 10.9.0.$((n + 1))/24 dev eth0
  ip -n h$n link set eth0 up
  ip netns exec h$n {sshd} -D -e -f {ssh}/sshd_config 2>>{ssh}/log &
done
firewall() {{  # drops what arrives at a port, on the host that the options of ip name
  ip $1 rule add pref 1000 lookup local
  ip $1 rule del pref 0
  ip $1 rule add pref 10 $2 ipproto tcp dport $3 blackhole
}}
for n in 2 3 5; do firewall "-n h$n" "iif eth0" 7701; done
firewall "" "iif br0 from 10.9.0.2" 7700
for n in $(seq 0 {last}); do
  until ip netns exec h$n ss -Hltn | grep -q :22; do sleep 0.1; done
done
exec {python} -m tahq_launch.cli doctor cluster.yaml --json
"""

PLANTED = [
    (None, "key", "is open to others (mode 644)", "chmod 600 "),
    (None, "key", "security.allow.0: expected a public key of 64 digits or an existing file", "tahq keygen --show"),
    (1, "coordinator", "cannot dial the coordinator at 10.9.0.254:7700: no answer in 5 s", "sudo ufw allow 7700/tcp"),
    (3, "link", "cannot dial stage 2 at 10.9.0.3:7701: no answer in 5 s; stage 2 cannot", "sudo ufw allow 7701/tcp"),
    (4, "ssh", "Permission denied (publickey", "ssh-copy-id "),
    (6, "clock difference", "the clock is 2:00:00 ahead", "sudo timedatectl set-ntp true"),
    (7, "ssh", "Connection refused", "hosts.7.ssh_options"),
    (8, "ssh", "Could not resolve hostname no-such-host.invalid", "correct the name in hosts.8.ssh"),
    (9, "port", "cannot listen on 0.0.0.0:22: Address already in use", "set hosts.9.bind to another port"),
    (9, "open files", "a process may open 64 files", "nofile 65536"),
    (10, "ssh", "No route to host", "switch it on, or open port 22"),
    (11, "device", "hosts.11.device: cuda is not on this machine", "set hosts.11.device: cpu"),
    (11, "disk", "has 16.4 kB free", "set hosts.11.workdir to a folder on another disk"),
    (12, "ssh", "Host key verification failed", "accept its key"),
    (13, "Python", "/no/such/python", "correct hosts.13.python"),
    (14, "tahq", "tahq is not installed for /usr/bin/python3", "tahq doctor CLUSTER.YAML --fix"),
    (15, "tahq", f"tahq 0.0.9 is installed there, {__version__} here", "tahq doctor CLUSTER.YAML --fix"),
    (16, "tahq", "No module named 'typer'", "with its requirements"),
    (17, "work folder", "cd: ", "mkdir -p "),
    (18, "ssh", "Permission denied (publickey", "correct hosts.18.ssh, the user in it"),
    (19, "disk", "read-only cannot be written to", "set hosts.19.workdir to a folder of this account"),
    (19, "model", "model.path: no such folder: model", "tar -chf - model | ssh "),
    (19, "data", "data.text: no such file or folder: text.txt", "tar -chf - text.txt | ssh "),
]


def make_keys(folder: Path, *names: str) -> None:
    for name in names:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)


def make_ssh(folder: Path) -> None:
    """Keys, and the configuration of a sshd that takes one of them."""
    folder.mkdir()
    make_keys(folder, "host_key", "user_key", "strangers_key")
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\nAllowUsers {getpass.getuser()}\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    (folder / "changed").write_text(f"10.9.0.13 {(folder / 'strangers_key.pub').read_text()}")


def make_model(folder: Path, num_layers: int) -> None:
    """A folder with a model and a tokenizer."""
    sizes = {"n_layer": num_layers, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(folder / "tokenizer.json"))


def make_folders(folder: Path) -> None:
    """What the launching machine has, and the work folders of the hosts."""
    make_model(folder / "model", NUM_HOSTS)
    (folder / "text.txt").write_text("a b " * 10_000)
    for name in ("complete", "full"):
        (folder / name / "runs").mkdir(parents=True)
        for each in ("model", "text.txt"):
            (folder / name / each).symlink_to(folder / each)
    (folder / "read-only").mkdir()
    (folder / "no-data").mkdir()
    (folder / "no-data" / "model").symlink_to(folder / "model")
    old = folder / "old"
    (old / "tahq-0.0.9.dist-info").mkdir(parents=True)
    for each in (tahq, tahq_launch, tahq_netem):
        (old / each.__name__).symlink_to(Path(each.__file__).parent)
    limited = folder / "limited-python"
    limited.write_text(f'#!/bin/sh\nulimit -n 64\nexec {sys.executable} "$@"\n')
    limited.chmod(0o755)
    (folder / "shifted.c").write_text(SHIFTED_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "shifted.so", folder / "shifted.c", "-ldl"], check=True)
    (folder / "open.secret").write_text(f"tahq-secret-key {'0' * 64}\n")
    (folder / "open.secret").chmod(0o644)


def make_hosts(folder: Path) -> list[dict]:
    """The machines of cluster.yaml, by stage, with a fault each or none."""
    user, ssh = getpass.getuser(), folder / "ssh"
    trusting = ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={ssh}/known", "-o", "LogLevel=ERROR"]
    debian = {"python": "/usr/bin/python3", "env": {"PYTHONNOUSERSITE": "1", "PYTHONPATH": os.pathsep.join(CODE)}}
    changes = {
        4: {"ssh_options": ["-F", "none", *trusting, "-i", f"{ssh}/strangers_key"]},
        5: {"workdir": f"{folder}/no-data"},
        6: {"env": {"LD_PRELOAD": f"{folder}/shifted.so", "PYTHONPATH": os.pathsep.join(CODE)}},
        7: {"ssh_options": ["-p", "23", "-F", "none", *trusting]},
        8: {"ssh": f"{user}@no-such-host.invalid"},
        9: {"bind": "0.0.0.0:22", "python": f"{folder}/limited-python"},
        10: {"address": "10.9.0.99", "ssh": f"{user}@10.9.0.99"},
        11: {"device": "cuda", "workdir": f"{folder}/full"},
        12: {
            "ssh_options": ["-F", "none", "-o", "StrictHostKeyChecking=yes", "-o", f"UserKnownHostsFile={ssh}/changed"]
        },
        13: {"python": "/no/such/python"},
        14: {**debian, "env": {"PYTHONNOUSERSITE": "1"}},
        15: {"env": {"PYTHONPATH": f"{folder}/old"}},
        16: debian,
        17: {"workdir": f"{folder}/missing"},
        18: {"ssh": "daemon@10.9.0.19"},
        19: {"workdir": f"{folder}/read-only"},
    }
    usual = {
        "ssh_options": ["-F", "none", *trusting, "-i", f"{ssh}/user_key"],
        "python": sys.executable,
        "workdir": f"{folder}/complete",
        "env": {"PYTHONPATH": os.pathsep.join(CODE)},
    }
    addresses = [f"10.9.0.{stage + 1}" for stage in range(NUM_HOSTS)]
    places = [{"address": address, "ssh": f"{user}@{address}"} for address in addresses]
    return [{**place, **usual, **changes.get(stage, {})} for stage, place in enumerate(places)]


def make_config(folder: Path) -> dict:
    config = tiny(
        run={"relay": "never"},
        data={"text": "text.txt"},
        pipeline={"stages": NUM_HOSTS, "balance": "measured"},
        training={"lr": 1e-5},
    )
    security = {"key": "open.secret", "allow": ["keys.txt"]}
    return {**config, "model": {"path": "model"}, "hosts": make_hosts(folder), "security": security}


def findings_of_twenty_hosts(folder: Path) -> list[dict]:
    """What doctor says of them, in JSON."""
    if SSHD is None or shutil.which("cc") is None:
        pytest.skip("apt-get install openssh-server openssh-client gcc")
    make_ssh(folder / "ssh")
    make_folders(folder)
    (folder / "cluster.yaml").write_text(yaml.safe_dump(make_config(folder)))
    places = {"this": THIS_MACHINE, "last": NUM_HOSTS - 1, "sshd": SSHD, "ssh": folder / "ssh"}
    script = NETWORK.format(**places, python=sys.executable)
    alone = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    paths = {"PYTHONPATH": os.pathsep.join(CODE)}
    done = subprocess.run(
        [*alone, "sh", "-c", script],
        cwd=folder,
        env={**environment(), **paths},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode, done.stdout[:1]) == (2, "{"), (
        done.stdout + done.stderr + (folder / "ssh" / "log").read_text()[-2000:]
    )
    return json.loads(done.stdout)["findings"]


@pytest.mark.netns
@pytest.mark.acceptance
def test_planted_faults_are_named_with_their_remedies_and_nothing_else(tmp_path):
    found = findings_of_twenty_hosts(tmp_path)
    for stage, check, words, remedy in PLANTED:
        named = [each for each in found if (each["stage"], each["check"]) == (stage, check) and words in each["found"]]
        assert [each["level"] for each in named] == ["fault"], (stage, check, words, found)
        assert remedy in named[0]["remedy"], named
    faults = [(each["stage"], each["check"]) for each in found if each["level"] == "fault"]
    assert sorted(faults, key=str) == sorted(((stage, check) for stage, check, *_ in PLANTED), key=str)

    # a one-way firewall: its host dials the next one
    assert any(each["stage"] == 5 and each["found"].startswith("dials stage 6 at") for each in found)

    # a plan could have put this host, in the middle, at an end
    (data,) = (each for each in found if (each["stage"], each["check"]) == (5, "data"))
    assert (data["level"], data["wanted"]) == ("warning", "only if the plan may reorder the hosts")

    healthy = {each["check"]: each["found"] for each in found if each["stage"] == 0}
    assert {"Python", "tahq", "GPU", "disk", "memory", "model", "data", "port", "network card"} <= healthy.keys()
    assert healthy["coordinator"] == "dials 10.9.0.254:7700"
    assert healthy["network card"].startswith("eth0, 10.9.0.1, 10000 Mbit/s")
    (rate,) = (each["found"] for each in found if (each["stage"], each["check"]) == (1, "rate"))
    assert "bit/s to stage 0, " in rate
    assert "round trip" in rate


def borrowed(folder: Path) -> Path:
    """A folder with all that tahq requires, and not tahq."""
    folder.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith(("tahq", "_", "__editable__")):
            (folder / each.name).symlink_to(each)
    return folder


@pytest.fixture
def empty_host(sshd, tmp_path) -> dict:
    """A host with an account and Python, where pip finds what tahq requires without a network."""
    there = tmp_path / "there"
    there.mkdir()
    env = {
        "PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": str(borrowed(tmp_path / "borrowed")),
        "PIP_NO_INDEX": "1",
        "XDG_CONFIG_HOME": f"{there}/config",
    }
    places = {"python": f"{there}/venv/bin/python", "workdir": f"{there}/work", "bind": "127.0.0.1:0"}
    return {"address": "127.0.0.1", "ssh": f"{getpass.getuser()}@127.0.0.1", "ssh_options": sshd, "env": env, **places}


@needs_sshd
@pytest.mark.acceptance
def test_fix_makes_an_empty_host_ready(empty_host, tmp_path):
    make_model(tmp_path / "model", 2)
    (tmp_path / "text.txt").write_text("a b " * 10_000)
    config = tiny(data={"text": "text.txt"}, pipeline={"stages": 1}, training={"lr": 1e-5})
    write_config(tmp_path, {**config, "model": {"path": "model"}, "hosts": [empty_host]})
    public = finish(tmp_path, "tahq", "keygen", "--out", "key.secret").stdout
    own = {"XDG_CONFIG_HOME": f"{tmp_path}/config"}
    (tmp_path / "config" / "tahq").mkdir(parents=True)
    (tmp_path / "key.secret").rename(tmp_path / "config" / "tahq" / "key.secret")
    process = start(tmp_path, "tahq", "doctor", "cluster.yaml", "--fix", "--copy", extra=own)
    stdout, stderr = process.communicate(250)
    assert (process.returncode, stderr) == (0, ""), stdout
    there = tmp_path / "there"
    for line in (
        f"127.0.0.1 (stage 0): creating {there}/work",
        f"making a wheel of tahq {__version__} from {CODE[0]}",
        f"127.0.0.1 (stage 0): installed in {there}/venv",
        f"127.0.0.1 (stage 0): copying model to {there}/work",
        f"127.0.0.1 (stage 0): copying text.txt to {there}/work",
        "0 faults, 0 warnings",
    ):
        assert line in stdout
    assert (there / "work" / "model" / "config.json").read_bytes() == (tmp_path / "model" / "config.json").read_bytes()
    key = there / "config" / "tahq" / "key.secret"
    assert key.stat().st_mode & 0o777 == 0o600
    assert finish(tmp_path, "tahq", "keygen", "--show", "--out", str(key)).stdout == public


@pytest.mark.acceptance
def test_wheel_of_an_installation_is_the_wheel_that_was_installed(tmp_path):
    for name in ("built", "installed", "again"):
        (tmp_path / name).mkdir()
    wheel = built_wheel(Path(CODE[0]), tmp_path / "built")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, tmp_path / "installed", wheel], check=True)
    (information,) = (tmp_path / "installed").glob("tahq-*.dist-info")
    again = packed_again(information, tmp_path / "again")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert again.name == wheel.name
        assert sorted(one.namelist()) == sorted(other.namelist())
        names = [name for name in one.namelist() if not name.endswith("RECORD")]
        assert all(one.read(name) == other.read(name) for name in names)
    subprocess.run([*install, tmp_path / "anew", again], check=True)


def test_this_machine_alone_is_checked_without_a_file(tahq, tmp_path):
    status, stdout, _ = tahq("tahq", "doctor", "--json")
    found = {each["check"]: each for each in json.loads(stdout)["findings"]}
    assert {"Python", "tahq", "GPU", "clock", "open files", "network card", "disk", "memory", "ssh"} <= found.keys()
    assert status == (2 if any(each["level"] == "fault" for each in found.values()) else 0)
    assert found["Python"]["found"].endswith(sys.executable)


def test_copying_without_fixing_is_refused(tahq):
    assert_one_line(tahq("tahq", "doctor", "--copy"), 2, "--copy", "goes with --fix")
