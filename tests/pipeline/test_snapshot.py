"""The files of checkpoints: writing, publishing, pruning and reading, with damage, hostile content and full disks."""

import hashlib
import json
import os
import resource
import shutil
import signal
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.disks import can_mount, small_disk

from tahq.errors import SnapshotError, UserError
from tahq.pipeline.checkpoint import durable_file
from tahq.pipeline.checkpoint import manifest as manifest_module
from tahq.pipeline.checkpoint.durable_file import DiskFullError, check_room, wait_for_room, write_durably
from tahq.pipeline.checkpoint.manifest import (
    StageMeta,
    arithmetic_differences,
    arithmetic_of,
    latest_folder,
    read_latest,
    read_manifest,
    snapshot_folder,
)
from tahq.pipeline.checkpoint.snapshot import prune, publish
from tahq.pipeline.checkpoint.stage_file import DTYPE_NAMES, SnapshotReader, write_stage

META = StageMeta(
    step=100,
    stage=1,
    num_stages=2,
    block_start=4,
    block_stop=8,
    cursor={"step": 100, "sample": 3200},
    config_hash="c0ffee",
    versions={"tahq": "0.1.0", "torch": "2.13.0"},
)
CONFIG = {"run": {"name": "demo"}, "training": {"betas": [0.9, 0.95], "clip_norm": None}}
RUN = {"run_id": 2**62 + 1, "config": CONFIG}


def make_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "model/h.4.weight": torch.randn(16, 8, generator=generator),
        "model/h.4.bias": torch.randn(7, generator=generator).bfloat16(),
        "optimizer/exp_avg/h.4.weight": torch.randn(16, 8, generator=generator),
        "optimizer/step/h.4.weight": torch.tensor(3.0),
    }


def write_snapshot(snapshots, step, **meta):
    folder = snapshot_folder(snapshots, step)
    files = [
        write_stage(
            folder,
            stage,
            {f"model/{stage}": torch.full((64,), float(step + stage))},
            replace(META, step=step, stage=stage),
        )
        for stage in (0, 1)
    ]
    return publish(snapshots, step, files, RUN | meta)


def read(folder, written):
    return SnapshotReader(folder, {written.file: written.sha256})


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# -- a stage's file ----------------------------------------------------------------------------------


def test_file_is_what_the_safetensors_library_reads(tmp_path):
    tensors = make_tensors()
    written = write_stage(tmp_path, 0, tensors, META)
    content = (tmp_path / written.file).read_bytes()
    assert written.nbytes == len(content)
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    reader = read(tmp_path, written)
    assert reader.names() == set(tensors)
    assert reader.stage_meta(written.file) == META
    loaded = load_file(tmp_path / written.file)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert write_stage(tmp_path / "again", 0, dict(reversed(tensors.items())), META) == written


def test_writing_and_reading_say_how_far_they_are(tmp_path):
    said: list[str] = []
    tensors = {f"model/{name}": torch.zeros(250_000) for name in "abc"}
    written = write_stage(tmp_path, 0, tensors, META, said.append)
    reader = SnapshotReader(tmp_path, {written.file: written.sha256}, said.append)
    reader.tensor("model/a")
    assert said[-3:] == [
        "checkpoint, 3 MB of 3 MB",
        "verifying the checkpoint, 3 MB of 3 MB",
        "reading the checkpoint, 1 MB of 3 MB",
    ]
    assert said[-4] == "checkpoint, 2 MB of 3 MB"


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(list(DTYPE_NAMES)), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 2**31)),
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_tensors_survive(tmp_path_factory, shapes):
    folder = tmp_path_factory.mktemp("any")
    tensors = {}
    for name, (dtype, shape, seed) in shapes.items():
        values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed))
        tensors[name] = values.to(dtype).mT if len(shape) >= 2 else values.to(dtype)
    reader = read(folder, write_stage(folder, 0, tensors, META))
    assert reader.names() == set(tensors)
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in tensors.items())
    assert all(reader.tensor(name).dtype == tensor.dtype for name, tensor in tensors.items())


def test_tensors_are_in_memory_of_their_own(tmp_path):
    written = write_stage(tmp_path, 0, {"model/x": torch.ones(1000)}, META)
    reader = read(tmp_path, written)
    reader.tensor("model/x").zero_()
    kept = reader.tensor("model/x")
    assert torch.equal(kept, torch.ones(1000))
    (tmp_path / written.file).write_bytes(b"\0" * written.nbytes)
    assert torch.equal(kept, torch.ones(1000))


def flip(content, at):
    content[at] ^= 0x40


DAMAGE = {
    "header": lambda content: flip(content, content.index(b"c0ffee")),
    "data": lambda content: flip(content, -5),
    "end": lambda content: content.pop(),
    "longer": lambda content: content.append(0),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_and_the_file_named(tmp_path, damage):
    written = write_stage(tmp_path, 0, make_tensors(), META)
    content = bytearray((tmp_path / written.file).read_bytes())
    damage(content)
    (tmp_path / written.file).write_bytes(content)
    with pytest.raises(SnapshotError, match=written.file):
        read(tmp_path, written).tensor("model/h.4.bias")
    with pytest.raises(SnapshotError, match=written.file):
        read(tmp_path, written).stage_meta(written.file)


def test_missing_tensor_names_the_files_that_are_elsewhere(tmp_path):
    written = write_stage(tmp_path, 0, make_tensors(), META)
    with pytest.raises(SnapshotError, match=r"none of stage-000-gone\.safetensors is in"):
        SnapshotReader(tmp_path, {"stage-000-gone.safetensors": "00"})
    reader = SnapshotReader(tmp_path, {written.file: written.sha256, "stage-001-far.safetensors": "00"})
    with pytest.raises(SnapshotError, match=r"has model/wte; missing here: stage-001-far\.safetensors"):
        reader.tensor("model/wte")
    assert torch.equal(reader.tensor("model/h.4.weight"), make_tensors()["model/h.4.weight"])


def test_files_that_are_not_needed_are_not_hashed(tmp_path):
    manifest = write_snapshot(tmp_path, 7)
    folder = snapshot_folder(tmp_path, 7)
    damaged = folder / manifest.files[1].file
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    reader = SnapshotReader(folder, manifest.sha256)
    assert reader.tensor("model/0")[0] == 7
    for use in (lambda: reader.tensor("model/1"), reader.verify):
        with pytest.raises(SnapshotError, match="damaged"):
            use()


def test_stage_meta_ignores_what_other_versions_add():
    other = json.dumps(json.loads(META.to_json()) | {"skipped": 2, "codec_states": 3})
    assert StageMeta.from_json(other) == META


@pytest.mark.parametrize("text", ["", "3", "{}", '{"step": 1}', "null"])
def test_malformed_stage_meta_is_refused(text):
    with pytest.raises(ValueError):
        StageMeta.from_json(text)


# -- publishing --------------------------------------------------------------------------------------


def test_publish_writes_the_manifest_and_moves_latest(tmp_path):
    written = write_snapshot(tmp_path, 100, version="0.1.0")
    folder, manifest = read_latest(tmp_path)
    assert folder == latest_folder(tmp_path) == tmp_path / "step-00000100"
    assert manifest == written
    assert (manifest.step, manifest.run_id, manifest.config) == (100, 2**62 + 1, CONFIG)
    assert manifest.meta["version"] == "0.1.0"
    assert (tmp_path / "latest").read_text() == "step-00000100\n"
    write_snapshot(tmp_path, 200)
    assert latest_folder(tmp_path).name == "step-00000200"


def test_publish_removes_files_that_do_not_belong(tmp_path):
    folder = snapshot_folder(tmp_path, 5)
    folder.mkdir(parents=True)
    (folder / "stage-003.tmp").write_bytes(b"half")
    write_stage(folder, 3, {"model/old": torch.ones(1)}, META)
    manifest = write_snapshot(tmp_path, 5)
    assert names_in(folder) == sorted(["manifest.json", *manifest.sha256])
    assert names_in(tmp_path) == ["latest", "step-00000005"]


def test_writing_a_step_again_never_changes_a_published_file(tmp_path):
    first = write_snapshot(tmp_path, 5)
    folder = snapshot_folder(tmp_path, 5)
    write_stage(folder, 0, {"model/0": torch.zeros(64)}, META)
    # killed here: the published checkpoint is still whole
    assert read_latest(tmp_path)[1] == first
    SnapshotReader(folder, first.sha256).verify()


# -- bytes that others have put there ----------------------------------------------------------------

MANIFEST_START = '{"format": 1, "step": 1, "meta": {"config": {}, "run_id": 1}, "files": '
BROKEN = {
    "not JSON": "{",
    "not an object": "[]",
    "no format": "{}",
    "later format": '{"format": 2}',
    "no run": '{"format": 1, "step": 1, "files": [], "meta": {"config": {}}}',
    "malformed file": MANIFEST_START + "[3]}",
    "outside": MANIFEST_START + '[{"file": "../../x", "sha256": "", "nbytes": 0, "tensors": []}]}',
    "brackets": "[" * 100_000,
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_broken_manifest_is_one_error(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(SnapshotError, match=r"manifest\.json is not a usable manifest"):
        read_manifest(tmp_path)


def test_missing_manifest_and_latest_are_one_error(tmp_path):
    with pytest.raises(SnapshotError, match=r"cannot read .*manifest\.json: No such file"):
        read_manifest(tmp_path)
    with pytest.raises(SnapshotError, match=r"no complete checkpoint in .*: nothing to resume"):
        latest_folder(tmp_path)
    for name in ("step-00000009", "..", "", "step-x"):
        (tmp_path / "latest").write_text(name)
        with pytest.raises(SnapshotError, match="which is not a complete checkpoint"):
            latest_folder(tmp_path)


@given(st.binary(max_size=40))
@settings(max_examples=60)
def test_any_bytes_as_latest_or_manifest_are_one_error(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("fuzz")
    for name, use in (("latest", latest_folder), ("manifest.json", read_manifest)):
        (folder / name).write_bytes(content)
        with pytest.raises(SnapshotError):
            use(folder)


NOT_FILES = {
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "1 GiB": lambda path: (path.touch(), os.truncate(path, 1 << 30)),
}


@pytest.mark.parametrize("make", NOT_FILES.values(), ids=NOT_FILES)
@pytest.mark.timeout(20)
def test_manifest_that_is_not_a_small_file_is_one_error(tmp_path, make):
    make(tmp_path / "manifest.json")
    with pytest.raises(SnapshotError, match=rf"^cannot read {tmp_path}/manifest.json: [^\n]*$"):
        read_manifest(tmp_path)


# -- pruning -----------------------------------------------------------------------------------------


def removed(*arguments, **options):
    return [folder.name for folder in prune(*arguments, **options)]


def test_prune_keeps_the_newest(tmp_path):
    for step in (10, 99_999_998, 99_999_999, 100_000_000):  # compared as numbers
        write_snapshot(tmp_path, step)
    assert removed(tmp_path, 2) == ["step-00000010", "step-99999998"]
    assert names_in(tmp_path) == ["latest", "step-100000000", "step-99999999"]
    assert removed(tmp_path, 2) == []
    prune(tmp_path, 1)
    assert names_in(tmp_path) == ["latest", "step-100000000"]


def test_prune_keeps_the_checkpoint_of_a_lost_stage_and_newer_ones(tmp_path):
    for step in (10, 20, 30, 40):
        write_snapshot(tmp_path, step)
    assert removed(tmp_path, 1, base=20) == ["step-00000010"]
    assert removed(tmp_path, 1, base=40) == ["step-00000020", "step-00000030"]


def test_prune_removes_incomplete_checkpoints_before_latest_and_keeps_those_in_progress(tmp_path):
    write_snapshot(tmp_path, 10)
    write_stage(snapshot_folder(tmp_path, 15), 0, make_tensors(), META)
    write_snapshot(tmp_path, 20)
    write_stage(snapshot_folder(tmp_path, 25), 0, make_tensors(), META)
    assert removed(tmp_path, 5) == ["step-00000015"]
    assert names_in(tmp_path) == ["latest", "step-00000010", "step-00000020", "step-00000025"]


def test_prune_never_removes_what_latest_names(tmp_path):
    for step in (10, 20):
        write_snapshot(tmp_path, step)
    (tmp_path / "latest").write_text("step-00000010\n")  # killed between manifest and latest
    assert removed(tmp_path, 1) == []
    assert latest_folder(tmp_path).name == "step-00000010"


@pytest.mark.parametrize(("complete", "num_removed"), [(0, 0), (10, 0), (20, 0), (30, 1), (39, 1), (40, 2)])
def test_prune_on_a_host_without_manifests_uses_the_coordinators_newest(tmp_path, complete, num_removed):
    for step in (10, 20, 30, 40):
        write_stage(snapshot_folder(tmp_path, step), 1, make_tensors(), META)
    stale = ["step-00000010", "step-00000020"][:num_removed]
    assert removed(tmp_path, 2, complete, best=10) == stale[1:]
    assert removed(tmp_path, 2, complete) == stale[:1]


# -- disks without room, and writers that are killed -------------------------------------------------


@pytest.fixture
def small_files():
    """The kernel refuses files above 4 kB, as a full disk or a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_refused_write_names_the_file_and_leaves_the_previous_checkpoint(tmp_path, small_files):
    before = write_snapshot(tmp_path, 10)
    folder = snapshot_folder(tmp_path, 20)
    with pytest.raises(SnapshotError, match=r"cannot write .*stage-001.*: File too large; free space"):
        write_stage(folder, 1, {"model/x": torch.ones(10_000)}, META)
    assert names_in(folder) == []
    with pytest.raises(SnapshotError, match=r"cannot write .*manifest"):
        publish(tmp_path, 20, [], RUN | {"config": {"text": "x" * 10_000}})
    assert read_latest(tmp_path)[1] == before
    SnapshotReader(snapshot_folder(tmp_path, 10), before.sha256).verify()


def test_write_waits_for_room_and_gives_up_in_time(caplog):
    attempts, pauses = [], []

    def attempt(succeeds_at):
        attempts.append(1)
        if len(attempts) < succeeds_at:
            raise DiskFullError("cannot write x: No space left on device")
        return "written"

    assert wait_for_room(lambda: attempt(4), 60, pauses.append) == "written"
    assert pauses == [1, 2, 4]
    assert caplog.text.count("waiting for room, for at most 60 s (run.give_up)") == 1
    attempts.clear(), pauses.clear()
    with pytest.raises(DiskFullError, match=r"No space left on device; there was no room within 10 s \(run.give_up\)"):
        wait_for_room(lambda: attempt(100), 10, pauses.append)
    assert sum(pauses) == 10


@pytest.mark.skipif(not can_mount(), reason="mounting a small disk needs root")
def test_manifest_and_latest_wait_for_room_on_a_full_disk(tmp_path, monkeypatch):
    disk, filler = tmp_path / "disk", tmp_path / "disk" / "filler"
    monkeypatch.setattr(durable_file, "FIRST_PAUSE_S", 0.1)
    with small_disk(disk, 64 << 10):
        written = write_stage(snapshot_folder(disk, 5), 0, {"model/0": torch.zeros(64)}, META)
        filler.write_bytes(bytes(shutil.disk_usage(disk).free))
        with pytest.raises(DiskFullError, match=r"manifest.*no room within 0 s"):
            publish(disk, 5, [written], RUN)
        freed = threading.Timer(0.3, filler.unlink)
        freed.start()
        publish(disk, 5, [written], RUN, give_up_s=20.0)
        freed.join()
        assert latest_folder(disk).name == "step-00000005"


def test_disk_without_room_for_a_checkpoint_is_refused_with_both_sizes(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    check_room(tmp_path / "runs" / "x" / "snapshots", free // 2)
    with pytest.raises(UserError, match=r"takes [\d,]+ bytes \(.*\), but .*/runs/x has [\d,]+ bytes \(.*\) free; free"):
        check_room(tmp_path / "runs" / "x", 2 * free)


def test_run_folder_removed_while_a_checkpoint_is_written_is_one_error(tmp_path):
    def vanish(file):
        shutil.rmtree(tmp_path / "run")
        return "x"

    with pytest.raises(SnapshotError, match=r"^cannot write [^\n]*: No such file or directory[^\n]*$"):
        write_durably(snapshot_folder(tmp_path / "run" / "snapshots", 5) / "stage-000.tmp", vanish)


# -- what computed a checkpoint ----------------------------------------------------------------------

EPYC = {"device": "AMD EPYC 7B13", "torch": "2.13.0", "threads": "4", "codec backend": "cpu"}


def test_this_machine_is_like_itself():
    here = arithmetic_of(torch.device("cpu"), "auto")
    assert {"device", "torch", "threads", "codec backend", "vector instructions", "matrix library"} == set(here)
    assert here["torch"] == torch.__version__
    assert here["threads"] == str(torch.get_num_threads())
    assert all(here.values())
    assert arithmetic_differences(here, arithmetic_of(torch.device("cpu"), "cpu")) == ()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ()),
        ({"threads": "8"}, ("threads: 4 -> 8",)),
        (
            {"device": "NVIDIA H200", "codec backend": "triton"},
            ("device: AMD EPYC 7B13 -> NVIDIA H200", "codec backend: cpu -> triton"),
        ),
        ({"torch": "2.14.0+cu128"}, ("torch: 2.13.0 -> 2.14.0+cu128",)),
        ({"cuDNN": "91002"}, ()),  # a name that a later version of tahq records as well
    ],
)
def test_differences_name_what_was_and_what_is(change, expected):
    assert arithmetic_differences(EPYC, EPYC | change) == expected


def test_processor_without_a_model_name_has_its_architecture(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_module, "CPU_INFO", tmp_path / "cpuinfo")
    for content in (None, "processor\t: 0\nBogoMIPS\t: 50.00\n"):
        if content:
            (tmp_path / "cpuinfo").write_text(content)
        assert arithmetic_of(torch.device("cpu"), "auto")["device"]
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some: CPU\n")
    assert arithmetic_of(torch.device("cpu"), "auto")["device"] == "Some: CPU"
