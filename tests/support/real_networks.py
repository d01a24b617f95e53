"""The backends whose hosts are namespaces, for tests of what they have in common."""

import pytest

from tahq_netem.backends.kernel import KernelNetwork
from tahq_netem.backends.tun import TunNetwork

BUILDERS = {"tun": TunNetwork, "kernel": KernelNetwork}

BACKENDS = ["tun", pytest.param("kernel", marks=pytest.mark.netem_kernel)]
"""The kernel's variants run here as far as this kernel can, and all of them in the VM."""

on_each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=["tun", "kernel"])
"""The argument `backend`."""
