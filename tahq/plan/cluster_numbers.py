"""The numbers of a cluster: the compute times of its hosts and the paths between them.

`tahq measure` writes this file, users may write it by hand, and the planner reads it. Times are seconds, sizes bytes,
rates bits per second. Paths that are not listed have the slower of the two hosts' rates and `round_trip`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from tahq.comm.config import MachineConfig
from tahq.comm.network_config import host_names
from tahq.errors import ConfigError
from tahq.quant import CodecSpec
from tahq.units import Duration, Rate, Section, Size

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class LayerTimes(Section):
    """A host's seconds for the parts of the model, for micro-batches of `micro_batch` samples.

    `block` is one transformer block. Of its backward, `block_input_gradient` is the part that the previous stage
    waits for; None: half. `first` is the embedding, `last` the final norm, the head and the loss.
    """

    micro_batch: int = Field(ge=1)
    block_forward: Seconds
    block_backward: Seconds
    block_input_gradient: Seconds | None = None
    first_forward: Seconds = 0.0
    first_backward: Seconds = 0.0
    last_forward: Seconds = 0.0
    last_backward: Seconds = 0.0
    block_activation_bytes: int = Field(default=0, ge=0)
    """Bytes that a block keeps of a micro-batch from its forward to its backward."""

    @model_validator(mode="after")
    def _backward_has_its_part(self) -> "LayerTimes":
        own = self.block_input_gradient
        if self.block_forward + self.block_backward == 0:
            raise ValueError(f"micro_batch {self.micro_batch}: a block takes no time; give block_forward seconds")
        if own is not None and own > self.block_backward:
            raise ValueError(
                f"micro_batch {self.micro_batch}: expected block_input_gradient to be at most block_backward, "
                f"{self.block_backward:g}; got {own:g}"
            )
        return self


class CodecTimes(Section):
    """A codec's seconds per element on a host."""

    encode_per_element: Seconds
    decode_per_element: Seconds


class HostNumbers(Section):
    """One host.

    `compute` has an entry for each measured micro-batch size; times of other sizes are interpolated. `codecs` is by
    full spec, whatever the file has; a missing one takes as long as one that is listed (`ClusterTable.codec_s`).
    """

    name: str = Field(min_length=1)
    memory: Size | None = None
    """Memory for a stage; None: unlimited."""
    host_memory: Size | None = None
    """Memory of the machine for what a GPU's stage offloads; None: unlimited."""
    host_link: Rate | None = None
    """Rate of copies between pinned host memory and the GPU, each way; None: not measured, so the planner offloads
    nothing."""
    up: Rate | None = None
    """Rate of its uplink; None: unlimited."""
    down: Rate | None = None
    site: str | None = None
    device: str | None = None
    """A GPU that all hosts with this value share, each timed while it had the GPU alone; None: its own."""
    compute: list[LayerTimes] = Field(min_length=1)
    codecs: dict[str, CodecTimes] = Field(default_factory=dict)

    @field_validator("codecs")
    @classmethod
    def _specs_in_full(cls, codecs: dict[str, CodecTimes]) -> dict[str, CodecTimes]:
        found: dict[str, CodecTimes] = {}
        for text, times in codecs.items():
            try:
                spec = str(CodecSpec.parse(text))
            except ConfigError as error:
                raise ValueError(str(error)) from error
            if spec in found:
                raise ValueError(f"{text} is {spec}, which is listed already")
            found[spec] = times
        return found

    @model_validator(mode="after")
    def _sizes_once(self) -> "HostNumbers":
        sizes = [times.micro_batch for times in self.compute]
        if sorted(set(sizes)) != sizes:
            raise ValueError(f"host {self.name}: compute must list micro-batches ascending, each once; got {sizes}")
        return self


class PathNumbers(Section):
    """A path from one host to another: TCP's goodput and the round trip.

    A site stands for all of its hosts, the same site twice for the paths inside it; paths of hosts take precedence.
    """

    source: str
    target: str
    rate: Rate | None = None
    round_trip: Duration | None = None
    connections: int | None = Field(default=None, ge=1)
    """Number of TCP connections that carry this rate; None: one."""
    relayed: bool | None = None
    """Whether it goes over the relay, because neither host can dial the other; rate and round trip are of both legs."""
    failure: str | None = None
    """Reason why it could not be measured, so that the planner avoids it; None: it works."""

    @model_validator(mode="after")
    def _carries_or_fails(self) -> "PathNumbers":
        if self.failure is not None and self.rate is not None:
            raise ValueError(f"{self.source} to {self.target} has a rate and a failure; remove one of them")
        return self


class RelayNumbers(Section):
    """The coordinator's machine, whose uplink and downlink all relayed paths share."""

    host: str | None = None
    """Its name among the hosts, whose uplink and downlink these are; None: it has no stage."""
    up: Rate | None = None
    """None: unlimited."""
    down: Rate | None = None


class ClusterNumbers(Section):
    """All hosts, and the known paths between them."""

    hosts: list[HostNumbers] = Field(min_length=1)
    paths: list[PathNumbers] = Field(default_factory=list)
    relay: RelayNumbers | None = None
    """None: no path is relayed."""
    round_trip: Duration = 0.0
    """Between hosts without a listed path."""
    source: str = ""
    """Origin of the numbers: hardware and date, or how they were estimated."""

    @model_validator(mode="after")
    def _names_fit(self) -> "ClusterNumbers":
        names = {host.name for host in self.hosts}
        sites = {host.site for host in self.hosts if host.site is not None}
        if len(names) != len(self.hosts):
            listed = [host.name for host in self.hosts]
            raise ValueError(f"two hosts are named {next(name for name in listed if listed.count(name) > 1)}")
        if names & sites:
            raise ValueError(f"{min(names & sites)} is the name of a host and of a site; rename one of them")
        for index, path in enumerate(self.paths):
            for end, name in (("source", path.source), ("target", path.target)):
                if name not in names and name not in sites:
                    raise ValueError(f"paths.{index}.{end}: unknown host or site {name}")
        if self.relay is None and any(path.relayed for path in self.paths):
            raise ValueError("relay is missing, but a path is relayed; give the rates of the coordinator's machine")
        if self.relay is not None and self.relay.host is not None and self.relay.host not in names:
            raise ValueError(f"relay.host: unknown host {self.relay.host}")
        listed_ends = Counter((path.source, path.target) for path in self.paths)
        for (source, target), count in listed_ends.items():
            if count > 1:
                raise ValueError(f"paths: {source} to {target} is listed {count} times; expected once")
        return self


def host_labels(hosts: str | Sequence[MachineConfig], num_stages: int) -> list[str]:
    """The names of a configuration's hosts (`hosts` of cluster.yaml) in these numbers, by stage.

    Listed machines have their address as name, with ``#1``, ``#2`` … if several stages run on one; on this machine
    hosts are host0, host1, …
    """
    if isinstance(hosts, str):
        return host_names(num_stages)
    counts = Counter(host.address for host in hosts)
    seen: Counter[str] = Counter()
    labels = []
    for host in hosts:
        seen[host.address] += 1
        labels.append(f"{host.address}#{seen[host.address]}" if counts[host.address] > 1 else host.address)
    return labels
