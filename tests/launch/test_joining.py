"""Machines that join by an invite: real sockets, real processes, homes of their own."""

import json
import os
import re
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import children, wait_until
from support.runs import TINY, write_config
from support.runs import start as start_program

from tahq import __version__
from tahq.comm.control.client import ControlClient
from tahq.comm.control.members import Admission, Members
from tahq.comm.control.messages import Heartbeat, Join, Message, Ready, Redeem, Start, Welcome
from tahq.comm.control.server import ControlServer
from tahq.comm.keys import Credentials, KeyPair, new_key_pair, write_key_file
from tahq.comm.link.shaping import Shaping
from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config
from tahq.errors import ConfigError, ModelError, RefusedError, UserError
from tahq_launch.joining.invitation import (
    Invitation,
    address_of,
    last_joined,
    make_invites,
    parse_invitation,
    reach_warning,
)
from tahq_launch.joining.member import redeem
from tahq_launch.start.run_folder import members_of

from .conftest import TWO_STAGES, assert_one_line, wait_for_steps

SOON_S = 10.0
COORDINATOR, OWN, OTHER = (new_key_pair() for _ in range(3))


@pytest.fixture(autouse=True)
def account(monkeypatch, tmp_path):
    """The account's own folder for keys."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


# -- the string ----------------------------------------------------------------------------------

WHOLE = Invitation("192.0.2.1:7700", COORDINATOR.public, new_key_pair())


@pytest.mark.parametrize("address", ["192.0.2.1:7700", "gpu.example.net:1", "[2001:db8::1]:65535"])
def test_invite_is_one_word_that_is_read_back_and_that_prints_no_secret(address):
    invite = Invitation(address, COORDINATOR.public, new_key_pair())
    assert re.fullmatch(r"tahq-[A-Za-z0-9_-]+", invite.text)
    assert len(invite.text) < 200
    assert parse_invitation(f" {invite.text[:50]}\n{invite.text[50:]} ") == invite
    assert invite.keys.secret not in f"{invite!r} {invite}"


@given(st.integers(0, len(WHOLE.text) - 1), st.sampled_from("abcXYZ019-_ .é"))
def test_invite_with_another_character_is_refused_and_not_repeated(place, character):
    altered = WHOLE.text[:place] + character + WHOLE.text[place + 1 :]
    with suppress(UserError):
        assert parse_invitation(altered) == WHOLE  # the last character has bits to spare
        return
    with pytest.raises(UserError, match=r"expected an invite|damaged|cut off or altered") as error:
        parse_invitation(altered)
    assert altered[20:40] not in str(error.value)


@given(st.integers(0, len(WHOLE.text) - 1))
def test_invite_that_is_cut_off_is_refused(length):
    with pytest.raises(UserError, match=r"expected an invite|damaged|cut off or altered"):
        parse_invitation(WHOLE.text[:length])


# -- admission -----------------------------------------------------------------------------------


class Serving:
    """A coordinator's socket with its members, polled by a thread; `told` is what its person reads."""

    def __init__(self, folder: Path, needs: dict[str, list[str]], port: int = 0) -> None:
        self.now_s = 1000.0
        self.members = Members(folder / "members.sqlite", lambda: self.now_s)
        self.server = ControlServer(f"127.0.0.1:{port}", heartbeat_s=0.1, keys=COORDINATOR)
        self.told: list[str] = []
        self.heard: list[tuple[bytes, Message]] = []
        self._admission = Admission(self.members, self.server, Welcome(needs), self.told.append)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            self._admission.look()
            for identity, message in self.server.poll(0.02):
                if self._admission.takes(identity, message):
                    continue
                self.heard.append((identity, message))
                if isinstance(message, Ready):
                    self.server.send(identity, Start(message.stage))
            self.told += self.server.take_refused()
        self.server.close(linger_s=0.1)

    def invite(self) -> Invitation:
        invite = Invitation(self.server.address, COORDINATOR.public, new_key_pair())
        self.members.invite(invite.keys.public, 3600.0)
        time.sleep(0.7)  # until the coordinator has looked
        return invite

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()


@pytest.fixture
def serving(tmp_path) -> Iterator[Serving]:
    serving = Serving(tmp_path, {})
    yield serving
    serving.close()


def connected(address: str, own: KeyPair) -> ControlClient:
    times = {"peer_timeout_s": 5.0, "heartbeat_s": 0.1, "connect_timeout_s": 30.0}
    return ControlClient(
        address, "a test", shaping=Shaping(), credentials=Credentials(own, COORDINATOR.public), **times
    )


def exchange_s(client: ControlClient, number: int) -> float:
    """Seconds from a message to its answer."""
    started_s = time.monotonic()
    client.send(Ready(number))
    assert client.recv(SOON_S) == Start(number)
    return time.monotonic() - started_s


def refused(invite: Invitation, own: KeyPair) -> str:
    started_s = time.monotonic()
    with pytest.raises(RefusedError) as refusal:
        redeem(invite, own, None)
    assert time.monotonic() - started_s < SOON_S
    assert refusal.value.exit_status == 2
    assert invite.keys.secret not in str(refusal.value)
    return str(refusal.value)


def test_invite_admits_one_machine_whose_key_alone_comes_back(serving, tmp_path):
    invite = serving.invite()
    redeem(invite, OWN, None)
    assert last_joined() == (serving.server.address, COORDINATOR.public)
    assert "was used by another machine" in refused(invite, OTHER)
    serving.now_s += 2 * 3600
    redeem(invite, OWN, "203.0.113.9:7001")
    client = connected(serving.server.address, OWN)
    exchange_s(client, 1)
    client.close()
    (admitted, refusal) = serving.told
    assert f"was admitted by an invite; its key is {OWN.public}" in admitted
    assert "refused the invite of" in refusal
    assert serving.members.all[OWN.public].address == "203.0.113.9"
    seen = [*map(str, serving.told), serving.members.path.read_bytes().hex(), serving.members.path.read_text("latin1")]
    assert not [text for text in seen if invite.keys.secret in text]


def test_machines_that_dial_before_the_coordinator_has_read_its_members_are_all_admitted(tmp_path):
    """As those do that wait for a coordinator which is started again."""
    members = Members(tmp_path / "members.sqlite", lambda: 0.0)
    server = ControlServer("127.0.0.1:0", heartbeat_s=0.1, keys=COORDINATOR)
    invites = [Invitation(server.address, COORDINATOR.public, new_key_pair()) for _ in range(8)]
    for invite in invites:
        members.invite(invite.keys.public, 3600.0)
    with closing(server), ThreadPoolExecutor(len(invites)) as pool:
        redeeming = [pool.submit(redeem, invite, new_key_pair(), None) for invite in invites]
        time.sleep(0.5)  # until their handshakes wait for an answer
        admission = Admission(members, server, Welcome({}), print)
        deadline_s = time.monotonic() + SOON_S
        while not all(each.done() for each in redeeming) and time.monotonic() < deadline_s:
            admission.look()
            for identity, message in server.poll(0.02):
                assert admission.takes(identity, message)
        for each in redeeming:
            each.result(timeout=0)
    assert len(members.all) == len(invites)


def test_expired_forged_and_misdirected_invites_are_refused_on_both_sides(serving, caplog):
    invite, forged = serving.invite(), new_key_pair()
    serving.now_s += 2 * 3600
    assert "this invite expired on" in refused(invite, OWN)
    assert "it does not know this invite" in refused(
        Invitation(serving.server.address, COORDINATOR.public, forged), OWN
    )
    assert "its key is not the one in this invite" in refused(
        Invitation(serving.server.address, OTHER.public, invite.keys), OWN
    )
    wait_until(lambda: len(serving.told) >= 2, SOON_S, "both refusals are told")
    assert "this invite expired on" in serving.told[0]
    assert f"its public key {forged.public} is not one of" in serving.told[1]
    wait_until(lambda: "another public key for this end" in caplog.text, SOON_S, "the third is logged")
    assert serving.members.all == {}
    assert serving.heard == []


def test_file_that_cannot_be_written_refuses_the_machine_and_does_not_end_the_run(serving):
    invite = serving.invite()
    with closing(sqlite3.connect(serving.members.path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        assert "cannot write the members in" in refused(invite, OWN)
    redeem(invite, OWN, None)
    assert "cannot write the members in" in serving.told[0]


def test_member_that_dials_before_the_coordinator_is_up_is_let_in(serving, tmp_path):
    serving.members.allow(OWN.public)
    port = serving.server.address.rpartition(":")[2]
    serving.close()
    client = connected(f"127.0.0.1:{port}", OWN)
    time.sleep(0.5)
    again = Serving(tmp_path, {}, port=int(port))
    exchange_s(client, 1)
    client.close()
    again.close()


def test_key_of_an_invite_is_not_a_workers(serving):
    invite = serving.invite()
    client = connected(serving.server.address, invite.keys)
    client.send(Join(0, "0.1", "host", 1))
    assert "an invite's key cannot be a worker's" in client.recv(SOON_S).reason
    client.close()
    assert serving.heard == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "0.0.1"}, "runs another version of tahq"),
        ({"address": "192.0.2.1:7701"}, "got the address '192.0.2.1:7701'"),
        ({"public_key": "5f"}, "expected a public key of 64 hexadecimal digits"),
        ({"host": "\x1b[2J" * 100}, ""),
    ],
    ids=["version", "address", "key", "name"],
)
def test_wrong_fields_are_refused_without_using_the_invite_up(serving, changes, reason):
    invite = serving.invite()
    client = connected(serving.server.address, invite.keys)
    client.send(replace(Redeem(OWN.public, "host", "192.0.2.1", __version__), **changes))
    reply = client.recv(SOON_S)
    assert reason in reply.reason if reason else reply == Welcome({})
    assert serving.members.num_open == bool(reason)
    client.close()
    assert all(line.isprintable() for line in serving.told)


def test_recorded_connection_cannot_be_replayed(serving, caplog):
    invite, recorded = serving.invite(), bytearray()
    host, _, port = serving.server.address.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        recorder = threading.Thread(target=_record, args=(listener, (host, int(port)), recorded))
        recorder.start()
        redeem(Invitation(f"127.0.0.1:{listener.getsockname()[1]}", COORDINATOR.public, invite.keys), OWN, None)
    recorder.join()
    assert len(recorded) > 500
    told = list(serving.told)
    with socket.create_connection((host, int(port))) as replayed:
        replayed.sendall(recorded)
        replayed.settimeout(SOON_S)
        with suppress(ConnectionResetError):
            while replayed.recv(4096):
                continue
    wait_until(lambda: "rejected a connection" in caplog.text, SOON_S, "the replay is logged")
    assert (serving.told, serving.heard) == (told, [])


def _record(listener: socket.socket, target: tuple[str, int], recorded: bytearray) -> None:
    """Carry one connection, and keep what its dialling end sends."""
    near, _ = listener.accept()
    with near, socket.create_connection(target) as far:
        answers = threading.Thread(target=_carry, args=(far, near, bytearray()))
        answers.start()
        _carry(near, far, recorded)
        answers.join()


def _carry(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(4096):
            kept += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def test_guesses_do_not_hold_up_members(serving):
    redeem(serving.invite(), OWN, None)
    member = connected(serving.server.address, OWN)
    exchange_s(member, 0)
    forged = Invitation(serving.server.address, COORDINATOR.public, new_key_pair())
    guesses = [connected(serving.server.address, new_key_pair()) for _ in range(30)]
    assert max(exchange_s(member, number) for number in range(1, 50)) < 1
    assert "it does not know this invite" in refused(forged, OTHER)
    assert sum("is not one of" in line for line in serving.told) <= 3
    for client in [member, *guesses]:
        client.close(linger_s=0.1)
    assert {type(message) for _, message in serving.heard} == {Ready, Heartbeat}


def test_machine_without_the_model_is_admitted_and_told_what_it_lacks(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "tahq")
    serving = Serving(tmp_path, {"model.path": ["models/llama"], "data.text": ["corpus/*.txt"]})
    invite = serving.invite()
    with pytest.raises(ModelError, match=r"lacks the model: .* models/llama, relative to .*then `tahq join`, without"):
        redeem(invite, OWN, None)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    redeem(invite, OWN, None)
    assert "if this machine gets the first or the last stage, it needs data.text: corpus/*.txt" in caplog.text
    serving.close()


# -- the configuration ---------------------------------------------------------------------------


def invited(count: object = 3, **run: object) -> ClusterConfig:
    return ClusterConfig.model_validate({**TINY, "pipeline": {}, "hosts": {"invited": count}, "run": run})


def test_invited_machines_are_as_many_hosts_of_which_nothing_is_known():
    config = invited()
    assert [host.address for host in config.hosts] == ["invited-1", "invited-2", "invited-3"]
    assert config.pipeline.stages == 3


@pytest.mark.parametrize("hosts", [{"invited": 0}, {"invited": True}, {"invited": 2, "ssh": "a"}, {"invite": 2}, {}])
def test_other_mappings_of_hosts_are_refused(tmp_path, hosts):
    path = write_config(tmp_path, {**TINY, "hosts": hosts})
    with pytest.raises(ConfigError, match=r"cluster.yaml:\d+: hosts.*\{invited: 3\}"):
        load_config(path)


def test_address_of_an_invite_can_be_dialled_or_is_refused_or_warned_of(tmp_path):
    assert address_of(invited(bind="0.0.0.0:7700", advertise="203.0.113.9:80")) == "203.0.113.9:80"
    assert address_of(invited(bind="192.0.2.4:7700")) == "192.0.2.4:7700"
    with pytest.raises(UserError, match=r"run.bind: an invite names the coordinator's port"):
        address_of(invited(bind="0.0.0.0:0"))
    assert "only this machine reaches" in reach_warning("127.0.0.1:7700")
    assert "this network or VPN only" in reach_warning("172.20.0.1:7700")
    assert reach_warning("203.0.113.9:80") == reach_warning("172.32.0.1:80") == ""
    off = ClusterConfig.model_validate({**TINY, "pipeline": {}, "hosts": {"invited": 2}, "security": {"curve": False}})
    with pytest.raises(UserError, match=r"security.curve is off"):
        make_invites(off, Members(tmp_path / "members.sqlite"), 1, 60.0)


# -- commands ------------------------------------------------------------------------------------


def test_mistakes_are_one_line(tahq, tmp_path):
    write_config(tmp_path, TWO_STAGES)
    cut_off = WHOLE.text[:-9]
    outcome = tahq("tahq", "join", cut_off)
    assert_one_line(outcome, 2, "this invite is cut off or altered; copy the whole word again")
    assert cut_off[9:] not in outcome[2]
    assert_one_line(tahq("tahq", "join"), 2, "has not joined a run yet")
    assert_one_line(tahq("tahq", "invite", "cluster.yaml"), 2, "hosts: expected {invited: 3}")
    assert_one_line(tahq("tahq", "invite", "cluster.yaml", "--expires", "soon"), 2, "--expires")
    assert_one_line(tahq("tahq", "allow", "5f1c"), 2, "expected a public key of 64 hexadecimal digits")
    assert_one_line(tahq("tahq", "allow", OWN.public), 2, "no run under runs is live")
    assert_one_line(tahq("tahq", "allow", OWN.public, "--run", "runs/none"), 2, "no such folder: runs/none")


def test_key_is_allowed_while_the_coordinator_waits(tmp_path, start):
    for name, keys in (("stage0", OWN), ("stage1", OTHER)):
        write_key_file(tmp_path / name, keys)
    write_config(tmp_path, {**TWO_STAGES, "security": {"allow": [OWN.public]}})
    coordinator = start("tahq", "coordinator", "cluster.yaml", "--bind", "127.0.0.1:0")
    peer = coordinator.stdout.readline().split()[-1]
    key = re.search("--coordinator-key ([0-9a-f]{64})", "".join(coordinator.stdout.readline() for _ in range(2)))[1]

    def worker(stage: int):
        flags = ("--stage", str(stage), "--peer", peer, "--key", f"stage{stage}", "--coordinator-key", key)
        return start("tahq-worker", *flags)

    first, early = worker(0), worker(1)
    _, stderr = early.communicate(timeout=60)
    assert early.returncode == 2
    assert f"admit it to the run with `tahq allow {OTHER.public}` there" in stderr
    allow = start("tahq", "allow", OTHER.public)
    assert allow.communicate(timeout=60)[0] == f"runs/tiny: {OTHER.public} may join from now on\n"
    time.sleep(1)
    late = worker(1)
    for process in (first, late, coordinator):
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
    assert "`tahq allow KEY --run runs/tiny` admits it" in stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.ci
def test_three_invited_machines_are_measured_planned_and_trained_and_leave_and_come_back(tmp_path, start):
    """Each machine is a process with a home of its own; the one that leaves is killed with all that it has started."""
    sections = {
        "run": TINY["run"] | {"bind": f"127.0.0.1:{free_port()}", "checkpoint_every": 5, "peer_timeout": "10s"},
        "training": {"steps": 1_000_000, "global_batch": 4, "micro_batch": 1, "optimizer": "adamw"},
        "pipeline": {"stages": 3},  # else the plan may leave a machine out
        "hosts": {"invited": 3},
    }
    path = write_config(tmp_path, TINY | sections)
    invite = start("tahq", "invite", "cluster.yaml", "--count", "2", "--expires", "1h")
    words = re.findall(r"tahq join (\S+)", invite.communicate(timeout=60)[0])
    launcher = start("tahq-launch", "cluster.yaml")
    assert launcher.stdout.readline().startswith("1 invite to 127.0.0.1:")
    words.append(launcher.stdout.readline().split()[-1])
    machines, run_folder = [], tmp_path / "runs" / "tiny"

    def join(number: int, *arguments: str):
        home = tmp_path / f"home{number}"
        home.mkdir(exist_ok=True)
        extra = {"HOME": str(home), "XDG_CONFIG_HOME": ""}
        machines.append(start_program(home, "tahq", "join", *arguments, extra=extra))
        return machines[-1]

    def train_five_steps(launcher) -> str:
        done = len((run_folder / "metrics.jsonl").read_text().splitlines())
        wait_for_steps(launcher, run_folder, done + 5)
        launcher.send_signal(signal.SIGINT)
        stdout, stderr = launcher.communicate(timeout=120)
        assert launcher.returncode == 130, stderr
        for machine in machines:
            machine.communicate(timeout=60)
        assert machines[-1].returncode == 130
        return stdout

    try:
        for number, word in enumerate(words):
            join(number, word)
        wait_until(lambda: len(members_of(path).all) == 3, 120, "all invites are used")
        _, stderr = join(3, words[0]).communicate(timeout=120)
        assert "this invite was used by another machine" in stderr
        wait_for_steps(launcher, run_folder, 3)
        leaving = machines[1]
        for pid in [leaving.pid, *children(leaving.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        leaving.communicate(timeout=30)
        join(1)  # without the invite
        stdout = train_five_steps(launcher)
        resumed = start("tahq-launch", "cluster.yaml", "--resume")
        for number in range(3):
            join(number)
        assert "exact" in train_five_steps(resumed)
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate(timeout=30)
    for line in ("is there: 3 of 3", "measuring 3 hosts", "planned for", "it was started again"):
        assert line in stdout
    events = [json.loads(line) for line in (run_folder / "events.jsonl").read_text().splitlines()]
    assert any("is back after" in str(event) for event in events), events
    exported = start("tahq", "export", "tiny", "out")
    assert "parameters" in exported.communicate(timeout=60)[0]
    config = load_config(run_folder / "config.yaml")
    known = members_of(path).all
    assert {host.public_key for host in config.hosts} == known.keys()
    kept = [file for file in tmp_path.rglob("*") if file.is_file() and "cache" not in file.parts]
    for word in words:
        secret = parse_invitation(word).keys.secret
        assert not [file for file in kept if secret.encode() in file.read_bytes() or word.encode() in file.read_bytes()]
