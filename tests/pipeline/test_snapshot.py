import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tahq.errors import SnapshotError, UserError
from tahq.pipeline.checkpoint.durable_file import DiskFullError, check_room, wait_for_room, write_durably
from tahq.pipeline.checkpoint.manifest import StageMeta, latest_folder, read_latest, read_manifest, snapshot_folder
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
    skipped=2,
    versions={"tahq": "0.1.0", "torch": "2.13.0"},
)
CONFIG = {"run": {"name": "demo"}, "training": {"betas": [0.9, 0.95], "clip_norm": None}}
RUN = {"run_id": 2**62 + 1, "config": CONFIG}


def make_tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/h.4.weight": torch.randn(16, 8, generator=generator),
        "model/h.4.bias": torch.randn(7, generator=generator).bfloat16(),
        "optimizer/exp_avg/h.4.weight": torch.randn(16, 8, generator=generator),
        "optimizer/step/h.4.weight": torch.tensor(3.0),
    }


def write_snapshot(snapshots, step, num_stages=2, **meta):
    folder = snapshot_folder(snapshots, step)
    files = [
        write_stage(
            folder,
            stage,
            {f"model/{stage}": torch.full((64,), float(step + stage))},
            replace(META, step=step, stage=stage),
        )
        for stage in range(num_stages)
    ]
    return publish(snapshots, step, files, RUN | meta)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_file_is_what_the_safetensors_library_reads(tmp_path):
    tensors = make_tensors()
    written = write_stage(tmp_path, 0, tensors, META)
    content = (tmp_path / written.file).read_bytes()
    assert written.nbytes == len(content)
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    reader = SnapshotReader(tmp_path, {written.file: written.sha256})
    assert reader.names() == set(tensors) == set(written.tensors)
    assert reader.stage_meta(written.file) == META
    loaded = load_file(tmp_path / written.file)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


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
    written = write_stage(folder, 0, tensors, META)
    reader = SnapshotReader(folder, {written.file: written.sha256})
    assert reader.names() == set(tensors)
    assert all(torch.equal(reader.tensor(name), tensor) for name, tensor in tensors.items())
    assert all(reader.tensor(name).dtype == tensor.dtype for name, tensor in tensors.items())


def test_non_finite_values_keep_their_bits(tmp_path):
    bits = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000, 0x00000001], dtype=torch.int32)
    written = write_stage(tmp_path, 0, {"model/x": bits.view(torch.float32)}, META)
    found = SnapshotReader(tmp_path, {written.file: written.sha256}).tensor("model/x")
    assert torch.equal(found.view(torch.int32), bits)


def test_tensors_are_in_memory_of_their_own(tmp_path):
    written = write_stage(tmp_path, 0, {"model/x": torch.ones(1000)}, META)
    reader = SnapshotReader(tmp_path, {written.file: written.sha256})
    reader.tensor("model/x").zero_()
    assert torch.equal(reader.tensor("model/x"), torch.ones(1000))
    kept = reader.tensor("model/x")
    reader.close()
    (tmp_path / written.file).write_bytes(b"\0" * written.nbytes)
    assert torch.equal(kept, torch.ones(1000))


def test_equal_content_gives_an_equal_file(tmp_path):
    first = write_stage(tmp_path / "a", 0, make_tensors(), META)
    second = write_stage(tmp_path / "b", 0, dict(reversed(make_tensors().items())), META)
    assert first == second


@pytest.mark.parametrize("place", ["header", "data", "end", "longer"])
def test_damage_is_found_and_the_file_named(tmp_path, place):
    written = write_stage(tmp_path, 0, make_tensors(), META)
    path = tmp_path / written.file
    content = bytearray(path.read_bytes())
    if place == "header":
        content[content.index(b"c0ffee")] ^= 1
    elif place == "data":
        content[-5] ^= 0x40
    elif place == "end":
        del content[-1]
    else:
        content += b"\0"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=written.file):
        SnapshotReader(tmp_path, {written.file: written.sha256}).tensor("model/h.4.bias")
    with pytest.raises(SnapshotError, match=written.file):
        _ = SnapshotReader(tmp_path, {written.file: written.sha256}).stage_meta(written.file)


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
    with pytest.raises(SnapshotError, match="damaged"):
        reader.tensor("model/1")
    with pytest.raises(SnapshotError, match="damaged"):
        reader.verify()


def test_foreign_safetensors_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    sha256 = hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    with pytest.raises(SnapshotError, match="was not written by tahq"):
        _ = SnapshotReader(tmp_path, {"x.safetensors": sha256}).stage_meta("x.safetensors")
    (tmp_path / "y.safetensors").write_bytes(b"not at all")
    with pytest.raises(SnapshotError, match=r"y\.safetensors is not a safetensors file"):
        SnapshotReader(tmp_path, {"y.safetensors": "00"})


def test_publish_writes_the_manifest_and_moves_latest(tmp_path):
    written = write_snapshot(tmp_path, 100, version="0.1.0")
    folder, manifest = read_latest(tmp_path)
    assert folder == latest_folder(tmp_path) == tmp_path / "step-00000100"
    assert manifest == written
    assert (manifest.step, manifest.run_id, manifest.config) == (100, 2**62 + 1, CONFIG)
    assert manifest.meta["version"] == "0.1.0"
    assert [entry.tensors for entry in manifest.files] == [("model/0",), ("model/1",)]
    assert (tmp_path / "latest").read_text() == "step-00000100\n"
    write_snapshot(tmp_path, 200)
    assert latest_folder(tmp_path).name == "step-00000200"


def test_publish_reads_tensor_names_that_it_was_not_told(tmp_path):
    folder = snapshot_folder(tmp_path, 5)
    local = replace(write_stage(folder, 0, make_tensors(), META), tensors=())
    remote = replace(local, file="stage-001-0000000000000000.safetensors")
    manifest = publish(tmp_path, 5, [remote, local], RUN)
    assert [(entry.file, entry.tensors) for entry in manifest.files] == [
        (local.file, tuple(sorted(make_tensors()))),
        (remote.file, ()),
    ]


def test_publish_sweeps_what_does_not_belong(tmp_path):
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
    # killed here: the published snapshot is still whole
    assert read_latest(tmp_path)[1] == first
    SnapshotReader(folder, first.sha256).verify()


def test_publish_without_run_or_config_is_refused(tmp_path):
    with pytest.raises(SnapshotError, match="a manifest needs config; got run_id"):
        publish(tmp_path, 1, [], {"run_id": 1})


BROKEN = {
    "not JSON": "{",
    "not an object": "[]",
    "no format": "{}",
    "later format": '{"format": 2}',
    "no run": '{"format": 1, "step": 1, "files": [], "meta": {"config": {}}}',
    "files of no kind": '{"format": 1, "step": 1, "files": [3], "meta": {"config": {}, "run_id": 1}}',
    "climbing out": '{"format": 1, "step": 1, "files": [{"file": "../../x", "sha256": "", "nbytes": 0, "tensors": []}],'
    ' "meta": {"config": {}, "run_id": 1}}',
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
    (folder / "latest").write_bytes(content)
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(SnapshotError):
        latest_folder(folder)
    with pytest.raises(SnapshotError):
        read_manifest(folder)


def test_prune_keeps_the_newest(tmp_path):
    for step in (10, 99_999_998, 99_999_999, 100_000_000):  # compared as numbers
        write_snapshot(tmp_path, step)
    assert [folder.name for folder in prune(tmp_path, 2)] == ["step-00000010", "step-99999998"]
    assert names_in(tmp_path) == ["latest", "step-100000000", "step-99999999"]
    assert prune(tmp_path, 2) == []
    prune(tmp_path, 1)
    assert names_in(tmp_path) == ["latest", "step-100000000"]


def test_prune_keeps_where_a_lost_stage_may_begin_again_and_what_is_newer(tmp_path):
    for step in (10, 20, 30, 40):
        write_snapshot(tmp_path, step)
    assert [folder.name for folder in prune(tmp_path, 1, base=20)] == ["step-00000010"]
    assert [folder.name for folder in prune(tmp_path, 1, base=40)] == ["step-00000020", "step-00000030"]


def test_prune_removes_the_unfinished_before_latest_and_spares_what_is_under_way(tmp_path):
    write_snapshot(tmp_path, 10)
    write_stage(snapshot_folder(tmp_path, 15), 0, make_tensors(), META)
    write_snapshot(tmp_path, 20)
    write_stage(snapshot_folder(tmp_path, 25), 0, make_tensors(), META)
    assert [folder.name for folder in prune(tmp_path, 5)] == ["step-00000015"]
    assert names_in(tmp_path) == ["latest", "step-00000010", "step-00000020", "step-00000025"]


def test_prune_never_removes_what_latest_names(tmp_path):
    write_snapshot(tmp_path, 10)
    # killed between manifest and latest
    os.rename(tmp_path / "latest", tmp_path / "kept")
    write_snapshot(tmp_path, 20)
    os.rename(tmp_path / "kept", tmp_path / "latest")
    assert prune(tmp_path, 1) == []
    assert latest_folder(tmp_path).name == "step-00000010"


@pytest.mark.parametrize(("complete", "num_removed"), [(0, 0), (10, 0), (20, 0), (30, 1), (39, 1), (40, 2)])
def test_prune_on_a_host_without_manifests_goes_by_what_is_complete_elsewhere(tmp_path, complete, num_removed):
    for step in (10, 20, 30, 40):
        write_stage(snapshot_folder(tmp_path, step), 1, make_tensors(), META)
    removed = prune(tmp_path, 2, complete)
    assert [folder.name for folder in removed] == ["step-00000010", "step-00000020"][:num_removed]


@pytest.fixture
def small_files():
    """The kernel refuses files above 4 kB, as a full disk or a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_refused_write_names_the_file_and_leaves_the_previous_snapshot(tmp_path, small_files):
    before = write_snapshot(tmp_path, 10)
    folder = snapshot_folder(tmp_path, 20)
    with pytest.raises(SnapshotError, match=r"cannot write .*stage-001.*: File too large; free space"):
        write_stage(folder, 1, {"model/x": torch.ones(10_000)}, META)
    assert names_in(folder) == []
    with pytest.raises(SnapshotError, match=r"cannot write .*manifest"):
        publish(tmp_path, 20, [], RUN | {"config": {"text": "x" * 10_000}})
    assert read_latest(tmp_path)[1] == before
    SnapshotReader(snapshot_folder(tmp_path, 10), before.sha256).verify()


@pytest.fixture
def full_disk(tmp_path):
    """A real file system of 64 kB; needs the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_full_disk_names_the_file_and_leaves_the_previous_snapshot(full_disk):
    before = write_snapshot(full_disk, 10)
    folder = snapshot_folder(full_disk, 20)
    with pytest.raises(SnapshotError, match=r"cannot write .*stage-000.*: No space left on device"):
        write_stage(folder, 0, {"model/x": torch.ones(100_000)}, META)
    assert names_in(folder) == []
    assert read_latest(full_disk)[1] == before
    # and there is room again for a small one
    write_snapshot(full_disk, 30)


KILLED_WRITER = textwrap.dedent("""
    import os, signal, sys, torch
    from pathlib import Path
    from tahq.pipeline.checkpoint import durable_file
    from tahq.pipeline.checkpoint.manifest import StageMeta
    from tahq.pipeline.checkpoint.stage_file import write_stage

    fsync = os.fsync

    def die_before_the_first_rename(descriptor):
        fsync(descriptor)
        os.kill(os.getpid(), signal.SIGKILL)

    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    durable_file.os.fsync = die_before_the_first_rename
    write_stage(folder, 0, {"model/x": torch.ones(1000)}, StageMeta(5, 0, 1, 0, 1, {}, ""))
""")


def test_killed_writer_leaves_only_what_the_next_write_sweeps(tmp_path):
    folder = snapshot_folder(tmp_path, 5)
    killed = subprocess.run([sys.executable, "-c", KILLED_WRITER, folder], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert names_in(folder) == ["stage-000.tmp"]
    written = write_stage(folder, 0, {"model/x": torch.ones(1000)}, META)
    assert names_in(folder) == [written.file]


def test_stage_meta_ignores_what_later_versions_add():
    later = json.dumps(json.loads(META.to_json()) | {"codec_states": 3})
    assert StageMeta.from_json(later) == META


@pytest.mark.parametrize("text", ["", "3", "{}", '{"step": 1}', "null"])
def test_stage_meta_refuses_what_is_none(text):
    with pytest.raises(ValueError):
        StageMeta.from_json(text)


# -- files that others have put there, and disks without room -----------------------------------------

NOT_FILES = {
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "1 GiB": lambda path: (path.touch(), os.truncate(path, 1 << 30)),
}


@pytest.mark.parametrize("make", NOT_FILES.values(), ids=NOT_FILES)
@pytest.mark.parametrize("name", ["latest", "manifest.json"])
@pytest.mark.timeout(20)
def test_latest_or_manifest_that_is_not_a_small_file_is_one_error(tmp_path, name, make):
    make(tmp_path / name)
    with pytest.raises(SnapshotError, match=rf"^cannot read {tmp_path / name}: [^\n]*$"):
        latest_folder(tmp_path) if name == "latest" else read_manifest(tmp_path)


def test_manifest_of_100_000_brackets_is_one_error(tmp_path):
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(SnapshotError, match="is not a usable manifest"):
        read_manifest(tmp_path)


def test_run_folder_removed_while_a_checkpoint_is_written_is_one_error(tmp_path):
    folder = snapshot_folder(tmp_path / "run" / "snapshots", 5)

    def vanish(file):
        shutil.rmtree(tmp_path / "run")
        return "x"

    with pytest.raises(SnapshotError, match=r"^cannot write [^\n]*: No such file or directory[^\n]*$"):
        write_durably(folder / "stage-000.tmp", vanish)


def test_disk_without_room_for_a_checkpoint_is_refused_with_both_sizes(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    check_room(tmp_path / "runs" / "x" / "snapshots", free // 2)
    with pytest.raises(UserError, match=r"takes [\d,]+ bytes \(.*\), but .*/runs/x has [\d,]+ bytes \(.*\) free; free"):
        check_room(tmp_path / "runs" / "x", 2 * free)


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
