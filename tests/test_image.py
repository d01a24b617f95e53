"""The Dockerfiles: what they say, and the CPU's steps in a chroot."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from chroot_image import copied, read_dockerfile
from support.runs import tiny, write_config

from tahq import __version__
from tahq.version import is_same_source

ROOT = Path(__file__).parents[1]
CONFIG = tiny(
    run={"dir": "work/runs"},
    pipeline={"stages": 2},
    training={"steps": 2},
    model={"num_layers": 2, "hidden_size": 32},
)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_image_has_a_user_and_one_port_and_copies_what_the_build_is_sent(name, tmp_path):
    stages = read_dockerfile(ROOT / "docker" / name, {})
    assert stages[-1].user not in ("", "root", "0")
    assert len(stages[-1].ports) == 1
    sources = [
        copied(words, {"build": tmp_path})[0] for stage in stages for step, words, _ in stage.steps if step == "COPY"
    ]
    assert sources == [ROOT / "constraints.txt", ROOT / ".git", tmp_path / "opt/tahq"]


def test_unknown_step_and_hidden_file_are_refused(tmp_path):
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM debian:bookworm-slim\nHEALTHCHECK CMD true\n")
    with pytest.raises(ValueError, match="cannot do this step here: HEALTHCHECK"):
        read_dockerfile(dockerfile, {})
    with pytest.raises(ValueError, match=r"dockerignore does not let README\.md through"):
        copied(["README.md", "/src/"], {})


def test_variables_hold_from_their_line_on_and_are_expanded(tmp_path):
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(
        'FROM a:b AS c\nARG N="1 2"\nRUN one\nENV PATH=/x:$PATH \\\n    M=2\n# no\nRUN two \\\n  && three\n'
    )
    (stage,) = read_dockerfile(dockerfile, {"N": "3"})
    (_, first, before), (_, second, after) = stage.steps
    assert (stage.base, stage.name, first, second) == ("a:b", "c", ["one"], ["two && three"])
    assert before == {"N": "3", "PATH": after["PATH"].removeprefix("/x:")}
    assert after == {**before, "M": "2", "PATH": f"/x:{before['PATH']}"}


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
@pytest.mark.skipif(shutil.which("debootstrap") is None, reason="no debootstrap: apt-get install debootstrap")
@pytest.mark.skipif(not (ROOT / ".git").is_dir(), reason="the image is built from a clone")
def test_steps_of_the_image_in_a_chroot_give_a_tahq_that_trains_without_root():
    with tempfile.TemporaryDirectory(prefix="tahq-image-") as folder:  # of gigabytes, which tmp_path would keep
        work = Path(folder) / "work"
        work.mkdir()
        write_config(work, CONFIG)
        os.chown(work, 1000, 1000)
        script = [sys.executable, str(ROOT / ".ci/chroot_image.py"), str(ROOT / "docker/Dockerfile"), folder]
        torch = ["--build-arg", f"TORCH_PIP_FLAGS={os.environ.get('TORCH_PIP_FLAGS', '')}"]
        runs = ["--volume", f"{work}:/home/tahq/work", "--run=--version", "--run=launch work/cluster.yaml"]
        done = subprocess.run([*script, *torch, *runs], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        (version,) = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("tahq "))
        assert is_same_source(version, __version__)
        metrics = work / "runs/tiny/metrics.jsonl"
        assert metrics.stat().st_uid == 1000
        assert metrics.read_text().count("\n") == 2
