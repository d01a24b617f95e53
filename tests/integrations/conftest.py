"""A process group of this process alone, and which torch these tests are for."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed

from tahq.errors import ConfigError
from tahq.integrations.torch_pipelining import check_torch


@pytest.fixture(scope="session")
def _tried_torch() -> None:
    try:
        check_torch(torch.__version__)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def _group(_tried_torch: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        yield
        distributed.destroy_process_group()
