"""Invites and members in their file: each invite makes one machine a member, whatever is tried with it."""

import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from coordinator.conftest import VERSION, ScriptedWorker

from tahq.comm.control import messages as say
from tahq.comm.control.members import Member, Members
from tahq.errors import UserError

INVITE, OTHER_INVITE = "11" * 32, "22" * 32
ADA, BOB = Member("aa" * 32, "ada", "192.0.2.1"), Member("bb" * 32, "bob", "192.0.2.2")


@pytest.fixture
def members(tmp_path):
    """With two invites, which expire a minute later; `members.now` is the time."""
    now = [1000.0]
    members = Members(tmp_path / "members.sqlite", lambda: now[0])
    members.now = now
    assert (members.stamp, members.all, members.invites, members.num_open) == ((), {}, frozenset(), 0)
    for key in (INVITE, OTHER_INVITE):
        members.invite(key, 60.0)
    return members


def test_invite_admits_the_first_machine_only_and_that_one_again(members):
    before = members.stamp
    assert members.num_open == 2
    assert members.redeem(INVITE, ADA) == ""
    assert members.stamp != before
    assert (members.all, members.num_open) == ({ADA.key: ADA}, 1)
    assert "was used by another machine, with the key aaaaaaaaaaaa…" in members.redeem(INVITE, BOB)
    assert members.redeem(INVITE, ADA) == ""
    assert "has joined with another invite" in members.redeem(OTHER_INVITE, ADA)
    assert "does not know this invite" in members.redeem("33" * 32, BOB)
    assert members.all == {ADA.key: ADA}
    assert members.redeem(OTHER_INVITE, BOB) == ""
    assert list(members.all.values()) == [ADA, BOB]


def test_invite_expires_and_a_member_does_not(members):
    assert members.redeem(INVITE, ADA) == ""
    members.now[0] += 60.0
    assert members.num_open == 0
    assert "expired on 1970-01-01 00:17 UTC" in members.redeem(OTHER_INVITE, BOB)
    assert members.redeem(INVITE, ADA) == ""
    assert list(members.all) == [ADA.key]


def test_of_many_machines_at_once_one_gets_the_invite(members):
    machines = [Member(f"{number:02x}" * 32, f"host{number}", "192.0.2.9") for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        refusals = list(pool.map(lambda each: Members(members.path, lambda: 1000.0).redeem(INVITE, each), machines))
    assert refusals.count("") == 1
    assert list(members.all) == [machines[refusals.index("")].key]


def test_key_is_allowed_once_and_only_this_account_reads_the_file(members):
    assert members.allow(ADA.key)
    assert not members.allow(ADA.key)
    assert members.all == {ADA.key: Member(ADA.key)}
    assert stat.S_IMODE(members.path.stat().st_mode) == 0o600


def test_file_that_is_damaged_or_locked_for_long_is_named(members, monkeypatch):
    monkeypatch.setattr("tahq.comm.control.members._BUSY_S", 0.05)
    holder = sqlite3.connect(members.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(UserError, match=r"cannot write the members in .*locked"):
        members.allow(ADA.key)
    holder.close()
    members.path.write_bytes(b"no database" * 100)
    with pytest.raises(UserError, match=r"cannot read the members in .*not a database"):
        _ = members.all


# -- stages by key -------------------------------------------------------------------------------

KEYS = ("key-0", "key-1", "key-2")


@dataclass
class MemberWorker(ScriptedWorker):
    """Names no stage, as `tahq join`; `takes_over`: its process was just started."""

    takes_over: bool = True

    def start(self):
        self.server.workers[self.identity] = self
        self.server.keys[self.identity] = KEYS[self.stage]
        self.send(say.Join(-1, self.version, f"host{self.stage}", 100, takeover=self.takes_over, spare=True))


def test_each_member_gets_the_stage_that_is_kept_for_its_key(scene):
    scene.workers(MemberWorker)
    scene.server.inbox.reverse()
    assert scene.run(host_keys=KEYS) == 0, scene.end.message
    for stage in range(3):
        (assign,) = scene.server.told(f"worker-{stage}".encode(), say.Assign)
        assert assign.stage == stage


def test_member_comes_back_by_its_key_before_its_silence_is_noticed_and_another_member_waits(scene):
    scene.one_message_a_turn()
    scene.workers(MemberWorker)
    scene.build(host_keys=KEYS, steps=8)
    scene.start_over_when_told()

    def come():
        scene.server.keys[b"late"] = "key-9"
        scene.server.inbox.append((b"late", say.Join(-1, VERSION, "late", 1, takeover=True, spare=True)))
        scene.stages[1].left = True
        scene.restart(1, takes_over=True)

    scene.after(3, come)
    assert scene.run() == 0, scene.end.message
    assert [order.stage for order in scene.server.told(b"worker-1-again", say.Assign)] == [1]
    assert scene.server.told(b"late", say.StandBy)
    assert not scene.server.told(b"late", say.Assign)


def test_member_that_lacks_a_file_is_refused_alone_and_the_others_wait_for_it(scene):
    scene.build(host_keys=KEYS, by_hand=frozenset(range(3)), by_invite=True)
    scene.workers(MemberWorker, stage1={"ignores": (say.Assign,)})
    lacking = scene.stages[1]

    def fail_and_come_back():
        scene.server.inbox.append((lacking.identity, say.Failed(1, "data.text: no such file", 2)))
        scene.restart(1, ignores=())

    scene.when(lambda: bool(scene.server.told(lacking.identity, say.Assign)), fail_and_come_back)
    assert scene.run() == 0, scene.end.message
    assert any("stages 0, 1, 2 (tahq join)" in missing for _, missing in scene.observer.of("phase_changed"))
    assert "data.text: no such file; correct that there, then `tahq join`" in scene.warnings()
