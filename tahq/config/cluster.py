"""cluster.yaml as one typed, frozen tree, composed of the sections that live beside their owners.

A key is checked where it is declared, keys of one section by that section, and here what two
sections say about each other. Whatever needs the model's folder, the tokenizer or the data is checked
where they are read.
"""

import math

from pydantic import Field, model_validator

from tahq.comm.config import Hosts, LinksConfig, LinkTransport, MachineConfig
from tahq.comm.keys import SecurityConfig
from tahq.comm.network_config import NetworkConfig
from tahq.config.run import RunConfig
from tahq.data.config import DataConfig
from tahq.errors import CodecError, ConfigError, ScheduleError
from tahq.memory.config import COAT_FAMILIES, MemoryConfig
from tahq.models.config import ModelConfig
from tahq.pipeline.config import PipelineConfig, TrainingConfig
from tahq.pipeline.schedule.generators import generate
from tahq.quant import get_codec
from tahq.quant.config import WireConfig
from tahq.quant.ladder import ladder_for
from tahq.typed_yaml.mistakes import DisagreementError
from tahq.units import Section, format_size, write_duration

NUM_BYTE_TOKENS = 256
"""Vocabulary of the `bytes` tokenizer."""
MAX_MICRO_BATCHES = 65_536
"""Per step; the schedule lists each of them."""


class ClusterConfig(Section):
    """A run's configuration; workers receive it, resolved, from the coordinator."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    pipeline: PipelineConfig = PipelineConfig()
    memory: MemoryConfig = MemoryConfig()
    wire: WireConfig = WireConfig()
    links: LinksConfig = LinksConfig()
    hosts: Hosts = Field(default="local")
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> "ClusterConfig":
        self._check_hosts()
        self._check_network()
        self._check_caps()
        self._check_inside()
        self._check_layers()
        self._check_schedule()
        self._check_sleep()
        self._check_memory()
        self._check_wire()
        self._check_sequence()
        self._check_evaluation()
        self._check_fused()
        self._check_timeouts()
        return self

    def _check_hosts(self) -> None:
        if isinstance(self.hosts, list) and len(self.hosts) != self.pipeline.stages:
            raise DisagreementError(
                ("hosts",),
                f"hosts lists {len(self.hosts)} machines, pipeline.stages is {self.pipeline.stages}; "
                "the n-th machine runs stage n",
            )

    def _check_network(self) -> None:
        if self.hosts == "namespaces":
            if self.links.profile is None:  # else it is checked when the profile has been put in its place
                self._network()
            return
        said = self.links.shapes_in_namespaces
        if said:
            raise DisagreementError(
                ("links", said[0]),
                f"links.{said[0]} is for hosts: namespaces, where the network is one of this machine's own; with "
                f"hosts: {'local' if self.hosts == 'local' else 'a list'} only rate, delay and piece can be enforced",
            )

    def _check_caps(self) -> None:
        """Under `hosts: local` links.rate is all that a share can be of; other rates are found out later."""
        caps = {"cap_up": self.links.cap_up, "cap_down": self.links.cap_down}
        shares = {key: cap for key, cap in caps.items() if isinstance(cap, str)}
        if self.hosts == "local" and self.links.rate is None and shares:
            key, share = next(iter(shares.items()))
            raise DisagreementError(
                ("links", key),
                f"links.{key}: {share} is a share of a rate, and with hosts: local none is known; set links.rate, or "
                "give the cap as a rate, such as 20mbit",
            )

    @property
    def sites(self) -> tuple[str, ...]:
        """The site of each stage; "" = a site of its own. Under `hosts: local` all stages share one."""
        if self.hosts == "local":
            return ("local",) * self.pipeline.stages
        hosts = self.hosts if isinstance(self.hosts, list) else self._network().hosts.values()
        return tuple(host.site or "" for host in hosts)

    def transport_between(self, one: int, other: int) -> LinkTransport:
        """What carries the frames between two neighbouring stages."""
        sites = self.sites
        return self.links.inside if sites[one] and sites[one] == sites[other] else "zmq"

    def _check_inside(self) -> None:
        inside = self.links.inside
        if inside == "zmq" or self.links.profile is not None:  # a profile's hosts are checked when it is in its place
            return
        why = self._why_no_groups() or self._why_no_caps()
        if why:
            raise DisagreementError(("links", "inside"), f"links.inside: {inside}: {why}; use links.inside: zmq")

    def _why_no_groups(self) -> str:
        """What keeps links inside a site off process groups; empty: nothing."""
        if self.hosts != "namespaces" and (self.links.rate is not None or self.links.delay):
            return "links.rate and links.delay are enforced on ZMQ links only"
        pairs = self._linked_stages()
        if pairs and all(self.transport_between(*pair) == "zmq" for pair in pairs):
            where = "links.hosts" if self.hosts == "namespaces" else "hosts"
            return f"no two neighbours are of one site (set site under {where})"
        return ""

    def _why_no_caps(self) -> str:
        """Which cap a group would not keep to; empty: none."""
        for stage in filter(self.has_group, range(self.pipeline.stages)):
            where: dict[str, LinksConfig | MachineConfig] = {"links": self.links}
            if isinstance(self.hosts, list):
                where[f"hosts.{stage}"] = self.hosts[stage]
            said = [f"{at}.{key}" for at, caps in where.items() for key in ("cap_up", "cap_down") if getattr(caps, key)]
            if said:
                return f"{said[0]} is enforced on ZMQ links only, and stage {stage} has a link inside its site"
        return ""

    def has_group(self, stage: int) -> bool:
        """Whether a process group carries the frames between a stage and one of its neighbours."""
        return any(stage in pair and self.transport_between(*pair) != "zmq" for pair in self._linked_stages())

    def _linked_stages(self) -> list[tuple[int, int]]:
        last = self.pipeline.stages - 1
        pairs = [(stage, stage + 1) for stage in range(last)]
        is_ring = self.model.tie == "sync" or self.pipeline.chunks > 1
        return [*pairs, (0, last)] if pairs and is_ring else pairs

    def _network(self) -> NetworkConfig:
        try:
            return self.links.network(self.pipeline.stages)
        except ValueError as error:
            raise DisagreementError(("links",), f"links.{error}") from error

    def _check_layers(self) -> None:
        num_layers, listed = self.model.num_layers, self.pipeline.layers
        if num_layers is None:
            return
        if listed is not None and sum(listed) != num_layers:
            raise DisagreementError(
                ("pipeline", "layers"),
                f"pipeline.layers {listed} adds up to {sum(listed)} layers, model.num_layers is {num_layers}",
            )
        if self.pipeline.num_chunks > num_layers:
            times = f" times pipeline.chunks {self.pipeline.chunks}" if self.pipeline.chunks > 1 else ""
            raise DisagreementError(
                ("pipeline", "stages"),
                f"pipeline.stages {self.pipeline.stages}{times} is above model.num_layers {num_layers}; "
                f"each {'chunk' if times else 'stage'} needs a layer",
            )

    def _check_schedule(self) -> None:
        pipeline, count = self.pipeline, self.training.num_micro_batches
        if count > MAX_MICRO_BATCHES:
            raise DisagreementError(
                ("training", "global_batch"),
                f"training.global_batch {self.training.global_batch} is {count} micro-batches of training.micro_batch "
                f"{self.training.micro_batch}; at most {MAX_MICRO_BATCHES} micro-batches fit into a step",
            )
        try:
            generate(
                pipeline.schedule, pipeline.stages, count, depths=pipeline.depths, chunks_per_stage=pipeline.chunks
            )
        except ScheduleError as error:
            raise DisagreementError(("pipeline", "in_flight"), f"pipeline.in_flight: {error}") from error

    def _check_sleep(self) -> None:
        sleep, stages = self.model.sleep, self.pipeline.stages
        for key in ("forward", "backward") if sleep is not None else ():
            count = len(getattr(sleep, key))
            if count not in (1, stages):
                raise DisagreementError(
                    ("model", "sleep", key),
                    f"model.sleep.{key} lists {count} durations, pipeline.stages is {stages}; give one each, or one",
                )

    def _check_memory(self) -> None:
        family = self.model.family
        if self.memory.activations != "coat":
            return
        if self.training.optimizer in ("qgalore", "galore"):
            raise DisagreementError(
                ("memory", "activations"),
                f"memory.activations: coat needs whole weights to code in FP8, training.optimizer "
                f"{self.training.optimizer} keeps those of attention and MLP otherwise; choose one of them",
            )
        if family is not None and family not in COAT_FAMILIES:
            raise DisagreementError(
                ("memory", "activations"),
                f"memory.activations: coat is for models of the families {', '.join(COAT_FAMILIES)}, "
                f"model.family is {family}; use memory.activations: none",
            )

    def _check_wire(self) -> None:
        channels = self.model.hidden_size
        if channels is None:
            return
        for direction, spec in self.wire.specs().items():
            try:
                get_codec(spec).encoded_nbytes((1, 1, channels))
            except CodecError as error:
                raise DisagreementError(
                    ("wire", direction), f"wire.{direction} does not go with model.hidden_size {channels}: {error}"
                ) from error
        self._check_ladders((self.training.micro_batch, self.data.seq_len, channels))

    def _check_ladders(self, boundary: tuple[int, int, int]) -> None:
        if self.wire.follow is None:
            return
        for direction, rungs in self.wire.rungs().items():
            try:
                ladder_for(rungs, boundary)
            except ConfigError as error:
                where = f"wire.follow.{direction}"
                raise DisagreementError(("wire", "follow", direction), f"{where}: {error}") from error

    def _check_sequence(self) -> None:
        longest, vocab_size = self.model.max_seq_len, self.model.vocab_size
        if longest is not None and self.data.seq_len > longest:
            raise DisagreementError(
                ("data", "seq_len"), f"data.seq_len {self.data.seq_len} is longer than model.max_seq_len {longest}"
            )
        if self.data.tokenizer == "bytes" and vocab_size is not None and vocab_size < NUM_BYTE_TOKENS:
            raise DisagreementError(
                ("model", "vocab_size"),
                f"model.vocab_size {vocab_size} is below the {NUM_BYTE_TOKENS} tokens of data.tokenizer bytes",
            )

    def _check_evaluation(self) -> None:
        if self.training.eval_every is not None and self.data.validation == 0:
            raise DisagreementError(
                ("training", "eval_every"), "training.eval_every needs validation samples, but data.validation is 0"
            )

    def _check_fused(self) -> None:
        if not self.training.is_fused:
            return
        if self.pipeline.stages > 1:
            raise DisagreementError(
                ("training", "qgalore", "fused"),
                f"training.qgalore.fused updates within the backward, before all {self.pipeline.stages} stages have "
                "agreed on a step: it is for pipeline.stages 1",
            )
        if self.model.tie == "sync":
            raise DisagreementError(
                ("training", "qgalore", "fused"),
                "training.qgalore.fused updates each parameter by its own gradient; model.tie: sync adds two first",
            )
        if self.pipeline.schedule == "zero-bubble":
            raise DisagreementError(
                ("training", "qgalore", "fused"),
                "training.qgalore.fused updates within the backward; pipeline.schedule: zero-bubble puts weight "
                "gradients off until after it, which gains nothing on one stage: use 1f1b",
            )

    def _check_timeouts(self) -> None:
        rate, delay_s = self._slowest()
        piece, timeout_s = self.links.piece, self.run.peer_timeout
        piece_s = 8 * piece / rate
        if 2 * delay_s + piece_s >= timeout_s:
            takes = f" and a piece of {format_size(piece)} takes {piece_s:.3g} s" if piece_s else ""
            raise DisagreementError(
                ("links",),
                f"a peer would look lost: a round trip takes {2 * delay_s:.3g} s{takes}, run.peer_timeout is "
                f"{write_duration(timeout_s)}; raise run.peer_timeout or lower links.piece",
            )

        if self.run.give_up < timeout_s:
            raise DisagreementError(
                ("run", "give_up"),
                f"run.give_up is {write_duration(self.run.give_up)} and run.peer_timeout {write_duration(timeout_s)}: "
                "a silent peer would be given up before a warning; raise run.give_up",
            )

    def _slowest(self) -> tuple[float, float]:
        """The lowest rate and the longest delay between any two hosts; inf and 0 where nothing is said."""
        if self.hosts != "namespaces" or self.links.profile is not None:
            return self.links.rate or math.inf, self.links.delay
        network = self._network()
        hosts, pairs = list(network.hosts.values()), network.pairs
        rates = [*(host.up for host in hosts), *(host.down for host in hosts), *(pair.rate for pair in pairs)]
        delays_s = [*(host.delay for host in hosts), *(pair.delay or 0.0 for pair in pairs)]
        return min((rate for rate in rates if rate), default=math.inf), max(delays_s)
