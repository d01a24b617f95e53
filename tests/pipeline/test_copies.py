"""Copies of other stages' files on this host, and where a worker restarts its stage: real files, no network."""

import hashlib
import queue

import pytest

from tahq.comm.control.messages import Assign, Copied, Copy, Published
from tahq.errors import PeerLostError
from tahq.pipeline.checkpoint.copies import CheckpointCopies

CONTENT = {step: f"stage 3 after step {step}".encode() * 1000 for step in (5, 10)}
NAMES = [f"stage-{stage:03d}-x.safetensors" for stage in range(4)]


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def order(step, **changes):
    fields = {"file": NAMES[3], "sha256": sha256(CONTENT[step]), "address": "host3:7"} | changes
    return Copy(step, 3, **fields)


class Scene:
    """One worker's copies, whose bytes come from `CONTENT`, with everything that it reported."""

    def __init__(self, folder, assign):
        self.folder = folder
        self.assign = assign
        self.reports = queue.Queue()
        self.offered = []
        self.fetched = []
        self.start()

    def start(self):
        offer = lambda hash_, path: self.offered.append((hash_, path))  # noqa: E731
        self.copies = CheckpointCopies(self.assign, self.folder, 4, 1e6, self.fetch, offer, self.reports.put)

    def fetch(self, source, *, offset, rate_bits_per_s=None, is_wanted=lambda: True):
        step = next(step for step, content in CONTENT.items() if sha256(content) == source.sha256)
        self.fetched.append((step, offset))
        if source.address == "gone:7":
            raise PeerLostError("gone:7: silent for 30 s")
        while source.address == "slow:7" and is_wanted():
            yield CONTENT[step][:10]
        yield CONTENT[step][offset:]

    def path(self, step):
        return self.copies.path_of(order(step))

    def report(self):
        return self.reports.get(timeout=5)


@pytest.fixture
def make_scene(tmp_path):
    scenes = []

    def make(assign):
        scenes.append(Scene(tmp_path, assign))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.copies.close()


@pytest.fixture
def scene(make_scene):
    return make_scene(Assign(4, 1, "{}", ""))


def test_copy_is_kept_and_offered_and_only_compared_the_next_time(scene):
    scene.copies.obey(order(5))
    assert scene.report() == Copied(5, 3, 4)
    assert scene.path(5).read_bytes() == CONTENT[5]
    assert scene.path(5).parent.parent == scene.folder / "copies" / "stage-003"
    assert scene.offered == [(sha256(CONTENT[5]), scene.path(5))]
    scene.copies.close()
    scene.start()
    scene.copies.obey(order(5, address=""))
    assert scene.report() == Copied(5, 3, 4)
    assert scene.fetched == [(5, 0)]


def test_newer_order_replaces_the_one_in_progress(scene):
    scene.copies.obey(order(5, address="slow:7"))
    scene.copies.obey(order(10))
    assert scene.report() == Copied(10, 3, 4)
    assert not scene.path(5).exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"address": "gone:7"}, "silent"),
        ({"address": ""}, "no other worker has it"),
        ({"file": "../stage-003-x"}, "not a plain file name"),
    ],
)
def test_what_cannot_be_copied_is_reported_and_nothing_is_kept(scene, changes, why):
    scene.copies.obey(order(5, **changes))
    report = scene.report()
    assert (report.step, report.stage, report.holder) == (5, 3, 4)
    assert why in report.error
    assert list(scene.folder.rglob("*.safetensors")) == []


def test_copies_that_no_stage_will_need_are_removed(scene):
    for step in (5, 10):
        scene.copies.obey(order(step))
        scene.report()
    scene.copies.obey(Published(10, 10))
    scene.copies.obey(order(10))
    scene.report()
    assert scene.path(10).exists()
    assert not scene.path(5).parent.exists()


# -- restarting a stage ------------------------------------------------------------------------------


def files(step):
    return {name: sha256(CONTENT[step] if name == NAMES[3] else name.encode()) for name in NAMES}


def assignment(*sources):
    """The assignment of stage 3: the newest checkpoint is after 10 steps, the base after 5."""
    newest = {"snapshot": "snapshots/step-00000010", "snapshot_files": files(10), "start_step": 10}
    base = {"copied_snapshot": "snapshots/step-00000005", "copied_files": files(5), "copied_step": 5}
    rows = [[step, address, f"key of {address}"] for step, address in sources]
    return Assign(3, 1, "{}", "", **newest, **base, sources=rows)


def restore(scene):
    return scene.copies.restored(lambda activity: None)


def test_stage_restarts_from_the_newest_checkpoint_that_its_host_has(make_scene, tmp_path):
    path = tmp_path / "snapshots" / "step-00000010" / NAMES[3]
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[10])
    scene = make_scene(assignment())
    assert restore(scene).start_step == 10
    assert scene.offered == [(sha256(CONTENT[10]), path)]
    path.write_bytes(CONTENT[10][:-1])
    with pytest.raises(PeerLostError, match=f"stage 3 cannot restart: {NAMES[3]} is missing or damaged"):
        restore(scene)


@pytest.mark.parametrize(
    ("sources", "step"),
    [
        ([(5, "host4:7")], 5),
        ([(10, "host4:7"), (5, "host4:7")], 10),
        ([(10, "gone:7"), (5, "gone:7"), (5, "host4:7")], 5),
    ],
)
def test_another_host_restarts_from_the_newest_that_it_can_get(make_scene, tmp_path, sources, step):
    assign = restore(make_scene(assignment(*sources)))
    assert assign.start_step == step
    assert (tmp_path / assign.snapshot / NAMES[3]).read_bytes() == CONTENT[step]
    assert assign.snapshot_files == files(step)
