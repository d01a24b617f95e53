"""A small cluster.yaml, and ways to read changed copies of it."""

from pathlib import Path

import pytest

from tahq.config.cluster import ClusterConfig
from tahq.config.file import load_config
from tahq.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "launch" / "examples"

LEAST = """\
run: {name: test}
model:
  family: gpt2
  num_layers: 4
  hidden_size: 32
  num_heads: 2
data:
  text: stdlib
training:
  steps: 10
  global_batch: 8
  micro_batch: 2
emulate:
  rate: 100mbit
hosts: local
"""


def changed(old: str, new: str) -> str:
    """The small file with one part of it replaced."""
    assert LEAST.count(old) == 1
    return LEAST.replace(old, new)


class ClusterFile:
    """A file that is named without its folder in messages: the working folder is its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        self._path = Path("cluster.yaml")

    def load(self, text: str, *overrides: str) -> ClusterConfig:
        """What a file with this text is read as."""
        self._path.write_text(text, encoding="utf-8")
        return load_config(self._path, overrides)

    def refusal(self, text: str, *overrides: str) -> str:
        """The one line that a file with this text is refused with."""
        with pytest.raises(ConfigError) as caught:
            self.load(text, *overrides)
        assert "\n" not in str(caught.value)
        return str(caught.value)
