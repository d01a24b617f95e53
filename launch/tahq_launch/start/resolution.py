"""What only the machine that starts a run can fill into its configuration: vocabulary, layers of each stage.

Workers that hold no data do not read the tokenizer, and a measured division would come out differently
on every machine; so both are written into the configuration before anybody receives it.
"""

import dataclasses
import logging
import math
from collections.abc import Sequence
from functools import partial

import torch
from pydantic import ValidationError

from tahq.comm.host_shaping import host_shaping
from tahq.comm.network_config import HostChanges, PairConfig
from tahq.config.cluster import ClusterConfig
from tahq.config.file import resolve
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import ConfigError
from tahq.models.costs import counted_costs, measured_costs
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import LayerCosts, divide
from tahq.typed_yaml.mistakes import Origins, one_line
from tahq.worker.assembly import computes_in_bf16, random_parts
from tahq_launch.measured_links import with_measured

log = logging.getLogger(__name__)


def resolve_for_run(config: ClusterConfig) -> ClusterConfig:
    """The configuration with nothing left to the machine that reads it.

    Beyond `tahq.config.file.resolve`: `model.vocab_size` (unless a folder has it), `pipeline.layers`, divided
    by counted or by measured cost, and what `links.profile` and `links.measured` stand for. Resolving twice
    changes nothing.

    Raises:
        ConfigError: no such profile, or one that does not go with the rest; a cap that is a share of nothing known.
        DataError: a tokenizer that cannot be loaded.
        ModelError: a model that cannot be built, cut into so many stages, or take so long samples.
    """
    config = resolve(with_measured(with_profile(config)))
    _check_caps(config)
    vocab_size = load_tokenizer(config.data).vocab_size
    spec = load_spec(config.model, vocab_size=vocab_size, seq_len=config.data.seq_len)
    model = config.model
    if model.path is None:
        model = model.model_copy(update={"vocab_size": spec.vocab_size})
    ranges = divide(_costs(config, spec), config.pipeline.num_chunks, config.pipeline.layers)
    layers = [blocks.stop - blocks.start for blocks in ranges]
    pipeline = config.pipeline.model_copy(update={"layers": layers})
    return config.model_copy(update={"model": model, "pipeline": pipeline})


def _check_caps(config: ClusterConfig) -> None:
    stages = range(config.pipeline.stages)
    shapings = [host_shaping(config.links, config.hosts, stage, len(stages)) for stage in stages]
    free = [stage for stage in stages if shapings[stage].up_bits_per_s == math.inf and not config.has_group(stage)]
    if config.links.first != "oldest" and free:
        log.warning(
            "links.first: %s has little effect on stage %d's host, whose uplink nothing holds back: TCP shares it out; "
            "set links.cap_up a little below its rate",
            *(config.links.first, free[0]),
        )


def with_profile(config: ClusterConfig) -> ClusterConfig:
    """The configuration with the hosts that `links.profile` stands for in its place, changed as `links.hosts` says.

    Raises:
        ConfigError: there is no such profile, or it does not go with the rest.
    """
    links = config.links
    if config.hosts != "namespaces" or links.profile is None:
        return config
    from tahq_netem.network.profiles import profile

    try:
        network = profile(links.profile, config.pipeline.stages)
    except ConfigError as error:
        raise ConfigError(f"links.profile: {error}") from error
    hosts = {name: HostChanges(**host.model_dump()) for name, host in network.hosts.items()}
    hosts |= {name: _changed(hosts.get(name, HostChanges()), own) for name, own in links.hosts.items()}
    control = links.congestion_control or network.congestion_control
    slow_start = links.tcp_slow_start_after_idle
    if slow_start is None:
        slow_start = network.tcp_slow_start_after_idle
    pairs = [*links.pairs, *(pair for pair in network.pairs if not _has(links.pairs, pair))]
    of_tcp = {"congestion_control": control, "tcp_slow_start_after_idle": slow_start}
    expanded = {"profile": None, "hosts": hosts, "pairs": pairs, **of_tcp}
    values = config.model_copy(update={"links": links.model_copy(update=expanded)}).model_dump(mode="json")
    try:
        return ClusterConfig.model_validate(values)
    except ValidationError as error:
        source = f"with links.profile {links.profile}"
        raise ConfigError(one_line(error, values, ClusterConfig, Origins(source, {}, {}))) from error


def _changed(host: HostChanges, own: HostChanges) -> HostChanges:
    said = {key: value for key, value in own.model_dump().items() if value is not None}
    return host.model_copy(update=said)


def _has(pairs: Sequence[PairConfig], wanted: PairConfig) -> bool:
    return any(set(pair.between) == set(wanted.between) for pair in pairs)


def _costs(config: ClusterConfig, spec: ModelSpec) -> LayerCosts:
    if config.pipeline.balance == "counted" or config.pipeline.layers is not None:
        return counted_costs(spec, config.data.seq_len)
    device = torch.device("cuda" if torch.cuda.is_available() and config.run.device != "cpu" else "cpu")
    costs = measured_costs(
        *(spec, config.training.micro_batch, config.data.seq_len, device),
        bf16=computes_in_bf16(config, device),
        build=partial(random_parts, config, spec, device=device),
    )
    log.info("measured costs in seconds on %s: %s", device, dataclasses.asdict(costs))
    return costs
