"""tahq: pipeline-parallel training of language models over slow networks."""

__version__ = "0.1.0"
