"""AQ-SGD in cluster.yaml: what it may pack, and what is said of the rest."""

import pytest
from support.cluster_files import LEAST, ClusterFile

from tahq.quant import CodecSpec
from tahq.quant.spec import AqsgdSpec


@pytest.fixture
def file(tmp_path, monkeypatch) -> ClusterFile:
    return ClusterFile(tmp_path, monkeypatch)


def test_spec_has_a_canonical_text():
    assert str(CodecSpec.parse("aqsgd")) == "aqsgd:bits=4,cache=memory"
    assert CodecSpec.parse("aqsgd:cache=file,bits=6") == AqsgdSpec(6, "file")
    assert [AqsgdSpec(4, cache).has_cache for cache in ("memory", "file", "none")] == [True, True, False]


def test_activations_take_it_with_a_cache_and_gradients_without(file):
    wire = file.load(LEAST, "wire.activations=aqsgd:cache=file", "wire.gradients=aqsgd:bits=8,cache=none").wire
    assert (wire.activations, wire.gradients) == ("aqsgd:cache=file", "aqsgd:bits=8,cache=none")


@pytest.mark.parametrize("spec", ["aqsgd", "aqsgd:bits=6", "aqsgd:cache=file"])
def test_gradients_are_not_remembered(file, spec):
    message = file.refusal(LEAST, f"wire.gradients={spec}")
    assert "wire.gradients" in message
    assert "AQ-SGD remembers activations, not gradients" in message
    assert "cache=none for its quantiser alone" in message


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("aqsgd:bits=1", "bits must be a whole number from 2 to 8; got 1"),
        ("aqsgd:bits=9", "bits must be a whole number from 2 to 8; got 9"),
        ("aqsgd:cache=disk", "cache must be memory, file or none; got disk"),
        ("aqsgd:group=64", "no parameter 'group'"),
        ("aqsdg", "did you mean aqsgd?"),
    ],
)
def test_mistakes_are_named(file, spec, message):
    assert message in file.refusal(LEAST, f"wire.activations={spec}")
