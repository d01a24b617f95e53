"""Copies of other stages' files on this host, and where a worker begins its stage again: real files, no network."""

import hashlib
import queue

import pytest

from tahq.comm.control.messages import Assign, Copied, Copy
from tahq.errors import PeerLostError
from tahq.pipeline.checkpoint.copies import CopyKeeper, restored

CONTENT = {step: f"stage 3 after step {step}".encode() * 1000 for step in (5, 10)}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def order(step, **changes):
    fields = {"file": "stage-003-x.safetensors", "sha256": sha256(CONTENT[step]), "address": "host3:7"} | changes
    return Copy(step, 3, **fields)


class Scene:
    """A keeper whose bytes come from `CONTENT`, and all that it said."""

    def __init__(self, folder):
        self.folder = folder
        self.said = queue.Queue()
        self.offered = []
        self.fetched = []
        self.keeper = self.start()

    def start(self):
        return CopyKeeper(
            self.folder, 4, self.fetch, self.said.put, lambda hash_, path: self.offered.append((hash_, path))
        )

    def fetch(self, order, offset, is_wanted):
        self.fetched.append((order.step, offset))
        if order.address == "nobody:7":
            raise PeerLostError("nobody:7: silent for 30 s")
        while order.address == "slow:7" and is_wanted():
            yield CONTENT[order.step][:10]
        yield CONTENT[order.step][offset:]

    def path(self, step):
        return self.keeper.path_of(order(step))


@pytest.fixture
def scene(tmp_path):
    scene = Scene(tmp_path / "copies")
    yield scene
    scene.keeper.close()


def test_copy_is_kept_and_offered_and_only_compared_the_next_time(scene):
    scene.keeper.order(order(5))
    assert scene.said.get(timeout=5) == Copied(5, 3, 4)
    assert scene.path(5).read_bytes() == CONTENT[5]
    assert scene.path(5).parent.parent == scene.folder / "stage-003"
    assert scene.offered == [(sha256(CONTENT[5]), scene.path(5))]
    scene.keeper.close()
    scene.keeper = scene.start()
    scene.keeper.order(order(5, address=""))
    assert scene.said.get(timeout=5) == Copied(5, 3, 4)
    assert scene.fetched == [(5, 0)]


def test_newer_order_takes_the_place_of_one_under_way(scene):
    scene.keeper.order(order(5, address="slow:7"))
    scene.keeper.order(order(10))
    assert scene.said.get(timeout=5) == Copied(10, 3, 4)
    assert not scene.path(5).exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"address": "nobody:7"}, "silent"),
        ({"address": ""}, "no other worker has it"),
        ({"file": "../stage-003-x"}, "not a plain file name"),
        ({"sha256": "ab" * 32}, "SHA-256"),
    ],
)
def test_what_cannot_be_copied_is_reported_and_nothing_is_kept(scene, changes, why):
    scene.keeper.order(order(5, **changes))
    said = scene.said.get(timeout=5)
    assert (said.step, said.stage, said.holder) == (5, 3, 4)
    assert why in said.error
    assert list(scene.folder.rglob("*.safetensors")) == []


def test_older_copies_are_removed_when_nobody_will_want_them(scene):
    for step in (5, 10):
        scene.keeper.order(order(step))
        scene.said.get(timeout=5)
    scene.keeper.prune(10)
    scene.keeper.order(order(10))
    scene.said.get(timeout=5)
    assert scene.path(10).exists()
    assert not scene.path(5).parent.exists()


# -- beginning again ---------------------------------------------------------------------------------

NAMES = [f"stage-{stage:03d}-x.safetensors" for stage in range(4)]


def files(step):
    return {name: sha256(CONTENT[step] if name == NAMES[3] else name.encode()) for name in NAMES}


def assignment(*sources):
    """Of stage 3: the newest snapshot is after 10 steps, the base after 5."""
    newest = {"snapshot": "snapshots/step-00000010", "snapshot_files": files(10), "start_step": 10}
    base = {"copied_snapshot": "snapshots/step-00000005", "copied_files": files(5), "copied_step": 5}
    rows = [[step, address, f"key of {address}"] for step, address in sources]
    return Assign(3, 1, "{}", "", **newest, **base, sources=rows)


def fetch(address, public_key, wanted, offset):
    assert public_key == f"key of {address}"
    if address == "nobody:7":
        raise PeerLostError("nobody:7: silent for 30 s")
    yield next(content for content in CONTENT.values() if sha256(content) == wanted)[offset:]


def begin(assign, folder):
    return restored(assign, folder, 4, fetch, lambda activity: None)


def test_stage_begins_at_the_newest_snapshot_that_its_host_has(tmp_path):
    path = tmp_path / "snapshots" / "step-00000010" / NAMES[3]
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[10])
    assert begin(assignment(), tmp_path).start_step == 10
    path.write_bytes(CONTENT[10][:-1])
    with pytest.raises(PeerLostError, match=f"stage 3 cannot restart: {NAMES[3]} is missing or damaged"):
        begin(assignment(), tmp_path)


@pytest.mark.parametrize(
    ("sources", "step"),
    [
        ([(5, "host4:7")], 5),
        ([(10, "host4:7"), (5, "host4:7")], 10),
        ([(10, "nobody:7"), (5, "nobody:7"), (5, "host4:7")], 5),
    ],
)
def test_another_host_begins_at_the_newest_that_it_can_get(tmp_path, sources, step):
    assign = begin(assignment(*sources), tmp_path)
    assert assign.start_step == step
    assert (tmp_path / assign.snapshot / NAMES[3]).read_bytes() == CONTENT[step]
    assert assign.snapshot_files == files(step)


def test_file_that_nobody_gives_is_named_with_the_reason(tmp_path):
    with pytest.raises(PeerLostError, match=rf"{NAMES[3]} is missing or damaged .*; nobody:7: silent for 30 s"):
        begin(assignment((5, "nobody:7")), tmp_path)


def test_run_without_a_snapshot_begins_anew_anywhere(tmp_path):
    assign = Assign(3, 1, "{}", "")
    assert begin(assign, tmp_path) == assign
