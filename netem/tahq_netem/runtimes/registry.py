"""The runtimes by the names that sweep.yaml has for them."""

from collections.abc import Mapping

from tahq_netem.runtimes.bare_async import start_bare
from tahq_netem.runtimes.session import StartSession
from tahq_netem.runtimes.tahq_runtime import TahqSession
from tahq_netem.runtimes.torch_pipelining import start_torch

RUNTIMES: Mapping[str, StartSession] = {"tahq": TahqSession, "torch": start_torch, "bare": start_bare}
"""A session of each; torch and bare run over gloo."""
