"""`emulate:` of cluster.yaml: what is imitated, so that slow links and many machines can be tried on one."""

from tahq.comm.network_config import EmulatedNetwork
from tahq.models.config import SleepConfig


class EmulateConfig(EmulatedNetwork):
    """Slow links and stages that sleep, to try many machines on one.

    `rate` and `delay` are imitated inside the workers, or, with `hosts: namespaces`, by a real network on this machine,
    for which the keys from `up` on are.

    Example: `emulate: {rate: 100mbit, delay: 20ms}` or `emulate: {profile: cable}`
    """

    sleep: SleepConfig | None = None
    """Stages sleep instead of computing, to measure networks with fewer cores than stages; learns nothing."""
