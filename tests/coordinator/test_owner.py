"""What the owner of a run may read: whole lines of a few files, from any byte on; and where checkpoint files are."""

from contextlib import closing

import pytest

from tahq.comm.control import messages as say
from tahq.comm.control.messages import ReadRun, RunLines
from tahq.comm.relay.process import Relay
from tahq.coordinator.owner import run_lines


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "events.jsonl").write_text("one\ntwö\nthree")
    (tmp_path / "secret").write_text("secret\n")
    (run / "config.yaml").write_text("secret\n")
    return run


def test_whole_lines_are_sent_from_an_offset_or_near_the_end(folder):
    assert run_lines(folder, ReadRun("events.jsonl", 0)) == RunLines("events.jsonl", "one\ntwö\n", 9, 14)
    assert run_lines(folder, ReadRun("events.jsonl", 4)) == RunLines("events.jsonl", "twö\n", 9, 14)
    assert run_lines(folder, ReadRun("events.jsonl", 9)) == RunLines("events.jsonl", "", 9, 14)
    assert run_lines(folder, ReadRun("events.jsonl", -12)) == RunLines("events.jsonl", "twö\n", 9, 14)
    assert run_lines(folder, ReadRun("events.jsonl", -99)).text == "one\ntwö\n"


def test_offset_beyond_the_end_of_a_file_that_was_cut_begins_anew(folder):
    assert run_lines(folder, ReadRun("events.jsonl", 99)) == RunLines("events.jsonl", "one\ntwö\n", 9, 14)


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "../secret", "logs/../../secret", "/etc/passwd", "logs/stage-0.log", "logs", "events.jsonl\n"],
)
def test_other_and_missing_files_are_not_sent(folder, name):
    assert run_lines(folder, ReadRun(name, 0)) == RunLines(name, "", 0, -1)


def test_files_are_at_a_stages_worker_and_at_those_with_copies_or_behind_a_ticket(scene, tmp_path):
    scene.server.keys = {b"owner": "key-owner"} | {f"worker-{stage}".encode(): f"key-{stage}" for stage in range(3)}
    scene.one_message_a_turn()
    scene.workers(stage2={"hello": {"address": ""}})
    requests = [say.FindFiles(0), say.FindFiles(2), say.FindFiles(3), say.FindFiles(-1), say.FindFiles(2, True)]
    scene.after(10, lambda: scene.server.inbox.extend((who, each) for each in requests for who in (b"owner", b"other")))
    relay = Relay("127.0.0.1", 0, secret="", run_id=7, num_links=5, log=tmp_path / "relay.log")
    with closing(relay):
        assert scene.run(steps=12, checkpoint_every=4, copies=1, relay=relay) == 0
        theirs, ours = (relay.ticket(2 + 2, 1, end) for end in (0, 1))
    first, *others = [answer.places for answer in scene.server.told(b"owner", say.FilePlaces)]
    assert first == [["10.0.0.0:9000", "key-0"], ["10.0.0.1:9000", "key-1"]]
    assert others == [[], [], [], [[ours, "key-2"]]]
    assert scene.server.told(b"worker-2", say.ServeFiles) == [say.ServeFiles(theirs, "key-owner")]
    assert {type(answer) for who, answer in scene.server.sent if who == b"other"} == {say.Refuse}
