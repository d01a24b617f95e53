"""What workers must agree on before a run starts, compared field by field.

Version and configuration hash are compared with the coordinator's own; hashes of tokenizer and data
only between the workers that have them (the first and the last stage), whoever said Hello first being
right. An empty hash means that a stage needs no data.
"""

from collections.abc import Sequence

from tahq.comm.control.messages import Hello

SHARED_FIELDS = ("tokenizer_hash", "data_hash", "num_train_samples")
"""Fields of a Hello that must be equal wherever they are given."""


def differences(hello: Hello, version: str, config_hash: str, others: Sequence[tuple[str, Hello]]) -> list[list[str]]:
    """Rows of (field, this worker's, expected and by whom); empty if it agrees.

    Args:
        hello: what the worker says.
        version: the coordinator's.
        config_hash: the coordinator's.
        others: name and Hello of those that were accepted before.
    """
    own = (("version", hello.version, version), ("config_hash", hello.config_hash, config_hash))
    rows = [[name, yours, f"{expected} (coordinator)"] for name, yours, expected in own if yours != expected]
    return rows + [row for name in SHARED_FIELDS for row in _shared_difference(name, hello, others)]


def _shared_difference(name: str, hello: Hello, others: Sequence[tuple[str, Hello]]) -> list[list[str]]:
    yours = getattr(hello, name)
    given = [(who, getattr(other, name)) for who, other in others if getattr(other, name)]
    if not yours or not given or given[0][1] == yours:
        return []
    who, expected = given[0]
    return [[name, str(yours), f"{expected} ({who})"]]


def torch_warning(hello: Hello, others: Sequence[tuple[str, Hello]]) -> str:
    """One line if a worker has another torch than those before it: allowed, but bits may differ."""
    who = next((name for name, other in others if other.torch_version != hello.torch_version), "")
    if not who:
        return ""
    theirs = next(other.torch_version for name, other in others if name == who)
    return (
        f"stage {hello.stage} has torch {hello.torch_version}, {who} has {theirs}: "
        "a run is only the same to the bit with one version everywhere"
    )
