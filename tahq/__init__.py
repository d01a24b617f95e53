"""tahq: pipeline-parallel training of language models over slow networks."""

from pathlib import Path

from tahq.version import source_version

__version__ = source_version(Path(__file__).parents[1])
