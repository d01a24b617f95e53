"""What `links:` makes of the hosts' rates and delays, for estimates: shaped in the workers, or in namespaces.

In a namespace a rate counts everything that is on the wire, and 1448 bytes of each packet of 1514 are a
worker's; shaped in the workers it counts what they send.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tahq.comm.host_shaping import host_shaping
from tahq.config.cluster import ClusterConfig
from tahq_netem.description import NetworkPlan, plan_network
from tahq_netem.figures import GOODPUT_SHARE


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Rates by stage in bit/s of a worker's own bytes; inf: not shaped.

    `longest_delay_s` is one-way, of any link between neighbours; `caps` are of pairs of stages, below what
    their hosts have.
    """

    up: tuple[float, ...]
    down: tuple[float, ...]
    longest_delay_s: float
    caps: Mapping[tuple[int, int], float]

    @property
    def is_shaped(self) -> bool:
        """Whether anything is."""
        rates = (*self.up, *self.down, *self.caps.values())
        return self.longest_delay_s > 0 or min(rates) < math.inf

    def rate(self, source: int, target: int) -> float:
        """What a flow between two stages may have if it is alone."""
        return min(self.up[source], self.down[target], self.caps.get((source, target), math.inf))


def link_speeds(config: ClusterConfig) -> LinkSpeeds:
    """The speeds of a configuration without a profile, its caps kept.

    Raises:
        ConfigError: a cap is a share of a rate that is not known.
    """
    stages, links = config.pipeline.stages, config.links
    own = [host_shaping(links, config.hosts, stage, stages) for stage in range(stages)]
    network = LinkSpeeds((math.inf,) * stages, (math.inf,) * stages, links.delay, {})
    if config.hosts == "namespaces":
        network = _of_network(plan_network(links.network(stages)))
    up = tuple(min(rate, shaping.up_bits_per_s) for rate, shaping in zip(network.up, own, strict=True))
    down = tuple(min(rate, shaping.down_bits_per_s) for rate, shaping in zip(network.down, own, strict=True))
    return replace(network, up=up, down=down)


def _of_network(plan: NetworkPlan) -> LinkSpeeds:
    stage_of = {host: stage for stage, host in enumerate(plan.hosts)}
    links = [path for path in plan.paths if abs(stage_of[path[0]] - stage_of[path[1]]) == 1]
    shapes = [plan.host_shapes[host] for host in plan.hosts]
    return LinkSpeeds(
        up=tuple(_own_bytes(shape.up_bits_per_s) for shape in shapes),
        down=tuple(_own_bytes(shape.down_bits_per_s) for shape in shapes),
        longest_delay_s=max((plan.paths[path].delay_s for path in links), default=0.0),
        caps={
            (stage_of[source], stage_of[target]): _own_bytes(path.rate_bits_per_s)
            for (source, target), path in plan.paths.items()
            if path.rate_bits_per_s is not None
        },
    )


def _own_bytes(rate_bits_per_s: float | None) -> float:
    return GOODPUT_SHARE * rate_bits_per_s if rate_bits_per_s else math.inf
