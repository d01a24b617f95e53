"""`emulate:` of cluster.yaml: what is imitated, so that slow links and many machines can be tried on one."""

from tahq.comm.network_config import EmulatedNetwork
from tahq.models.config import SleepConfig


class EmulateConfig(EmulatedNetwork):
    """An imitated network, and stages that sleep."""

    sleep: SleepConfig | None = None
    """Stages sleep instead of computing; tensors between them have the model's shapes but meaningless values."""
