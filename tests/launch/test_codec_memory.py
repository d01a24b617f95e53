"""What a dry run says about codecs that remember samples."""

import pytest
from support.cluster_files import EXAMPLES

from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config, resolve
from tahq.errors import DataError
from tahq_launch.plan.dry_run import WIDTH, dry_run, seen_samples


@pytest.fixture
def load(tmp_path):
    """The example over a text of 40 samples of 256 tokens."""
    (tmp_path / "text.txt").write_text("x" * (256 * 40 + 1))

    def loaded(*overrides: str) -> ClusterConfig:
        source = (f"data.text={tmp_path / 'text.txt'}", "data.validation=0", "run.device=cpu")
        return resolve(load_config(EXAMPLES / "gpt2.yaml", [*source, *overrides]))

    return loaded


def part(config: ClusterConfig) -> list[str]:
    return next((part for part in dry_run(config).split("\n\n") if part.startswith("What aqsgd")), "").splitlines()


def test_memory_of_every_stage_is_predicted(load):
    lines = part(load("wire.activations=aqsgd:cache=file", "training.steps=100"))
    assert lines[0].startswith("What aqsgd:bits=4,cache=file remembers")
    an_end = 40 * 256 * 256 * 2
    rows = [line.split() for line in lines[2:6]]
    assert [row[:3] for row in rows] == [[str(i), str(n), f"{n * an_end:,}"] for i, n in enumerate((1, 2, 2, 1))]
    assert lines[6].strip().startswith("40 samples of 131 kB")
    # header, 4 records, 1,024 marks, 256 scales, 4 bits per element
    later = 16 + 4 * 16 + 128 + 512 + 4 * 256 * 256 // 2
    assert f"{later:,} bytes each, 4.022 bits/element" in lines[7]
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize("activations", ["tah", "aqsgd:cache=none"])
def test_nothing_is_said_where_nothing_is_remembered(load, activations):
    assert part(load(f"wire.activations={activations}")) == []
    assert part(load("wire.activations=aqsgd", "pipeline.stages=1")) == []


@pytest.mark.parametrize(
    ("length", "seen"), [(["training.steps=1"], 32), (["training.steps=2"], 40), (["training.epochs=0.5"], 20)]
)
def test_a_run_that_is_shorter_than_an_epoch_sees_fewer_samples(load, length, seen):
    unset = "training.epochs=null" if "steps" in length[0] else "training.steps=null"
    config = load(*length, unset)
    assert seen_samples(config) == seen


def test_data_that_is_not_here_is_named(load, tmp_path):
    config = load("wire.activations=aqsgd", f"data.text={tmp_path / 'nothing'}")
    with pytest.raises(DataError, match="nothing"):
        part(config)
