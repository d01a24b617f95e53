"""Resolves a configuration: fills in values that only the machine that starts a run can know.

Workers that hold no data do not read the tokenizer; so vocabulary and layers are written into the configuration before
any worker receives it. So are the hosts that `emulate.profile` stands for, and the figures of `links.measured`: caps
that are shares become rates, and links get as many TCP connections as two neighbours were found to need.
"""

import logging
import math
from collections.abc import Iterable
from pathlib import Path

from tahq.comm.config import HostRates, with_measured_rates
from tahq.comm.link.spec import MAX_CONNECTIONS
from tahq.comm.network_config import HostChanges
from tahq.config.cluster import ClusterConfig
from tahq.config.file import resolve
from tahq.config.stage_estimate import block_ranges, check_layers
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import ConfigError
from tahq.hub import local_folder, pinned, pinned_data
from tahq.models.model_spec import load_spec, require_folder
from tahq.plan.cluster_numbers import ClusterNumbers, host_labels
from tahq.typed_yaml.mistakes import Origins, validated
from tahq_launch.plan.numbers import check_names, read_numbers

log = logging.getLogger(__name__)


def resolve_for_run(config: ClusterConfig) -> ClusterConfig:
    """The configuration with every value that machines could choose differently filled in.

    Beyond `tahq.config.file.resolve`: the commits of what is on the Hub, `model.vocab_size` (unless a folder has it),
    `data.seq_len` as far as a folder's model has positions, `pipeline.layers`, divided by counted cost, and the figures
    of `emulate.profile` and `links.measured`. Resolving twice changes nothing. UserError if profile, caps, tokenizer or
    model do not fit the rest.
    """
    config = _pinned(config)
    if config.model.path is not None:
        config = _with_samples_that_fit(config)
    config = resolve(with_measured(with_profile(config)))
    _check_uplinks(config)
    vocab_size = load_tokenizer(config.data).vocab_size
    spec = load_spec(config.model, vocab_size=vocab_size, seq_len=config.data.seq_len, adapter=config.adapter)
    check_layers(config, spec)
    ranges = block_ranges(config, spec)
    vocabulary = {"vocab_size": spec.vocab_size} if config.model.path is None else {}
    model = config.model.model_copy(update=vocabulary)
    pipeline = config.pipeline.model_copy(update={"layers": list(map(len, ranges))})
    return config.model_copy(update={"model": model, "pipeline": pipeline})


def _with_samples_that_fit(config: ClusterConfig) -> ClusterConfig:
    """Lower an open `data.seq_len` to the positions of a folder's model."""
    if "seq_len" in config.data.model_fields_set:
        return config
    longest = load_spec(config.model, vocab_size=1, seq_len=1, needs_weights=False).max_seq_len
    if longest >= config.data.seq_len:
        return config
    values = config.model_dump(mode="json", exclude_unset=True)
    values["data"]["seq_len"] = longest
    return validated(ClusterConfig, values, Origins(f"with the {longest} positions of {config.model.path}"))


def _pinned(config: ClusterConfig) -> ClusterConfig:
    """The configuration with the present commits of model, tokenizer and records, if they are on the Hub.

    The records are those to train on and those of validation sets.
    """
    model, data = config.model, config.data
    if model.path is not None:  # before its tokenizer, so that the message names this key
        model = model.model_copy(update={"path": pinned(model.path)})
        require_folder(local_folder(model.path or ""))
    changes: dict[str, object] = {"tokenizer": pinned(data.tokenizer)}
    if data.records is not None:
        changes["records"] = _pinned_paths("data.records", data.records)
    if isinstance(data.validation, dict):
        sets = data.validation.items()
        changes["validation"] = {name: _pinned_paths(f"data.validation.{name}", each) for name, each in sets}
    elif not isinstance(data.validation, float):
        changes["validation"] = _pinned_paths("data.validation", data.validation)
    return config.model_copy(update={"model": model, "data": data.model_copy(update=changes)})


def _pinned_paths(key: str, named: float | str | list[str]) -> float | str | list[str]:
    if isinstance(named, float):
        return named
    return pinned_data(key, named) if isinstance(named, str) else [pinned_data(key, each) for each in named]


def _check_uplinks(config: ClusterConfig) -> None:
    """Refuse caps that are shares of unknown rates; warn if `links.first` cannot take effect."""
    stages = range(config.pipeline.num_workers)
    shapings = [config.shaping(stage) for stage in stages]
    free = [stage for stage in stages if shapings[stage].up_bits_per_s == math.inf and not config.has_group(stage)]
    if config.links.first != "oldest" and free:
        log.warning(
            "links.first: %s has little effect on stage %d's host: its uplink has no limit here, so TCP shares it "
            "among the links; set links.cap_up a little below its rate",
            *(config.links.first, free[0]),
        )


def with_profile(config: ClusterConfig) -> ClusterConfig:
    """Replace `emulate.profile` by its hosts, changed as `emulate.hosts` and `emulate.pairs` say."""
    emulate = config.emulate
    if config.hosts != "namespaces" or emulate.profile is None:
        return config
    from tahq_netem.network.description import profile

    try:
        network = profile(emulate.profile, config.pipeline.num_workers)
    except ConfigError as error:
        raise ConfigError(f"emulate.profile: {error}") from error
    hosts = {name: HostChanges(**host.model_dump()) for name, host in network.hosts.items()}
    for name, own in emulate.hosts.items():
        changes = own.model_dump(exclude_none=True)
        hosts[name] = hosts.get(name, HostChanges()).model_copy(update=changes)
    slow_start = emulate.tcp_slow_start_after_idle
    listed = [set(pair.between) for pair in emulate.pairs]
    expanded = {
        "profile": None,
        "hosts": hosts,
        "pairs": [*emulate.pairs, *(pair for pair in network.pairs if set(pair.between) not in listed)],
        "congestion_control": emulate.congestion_control or network.congestion_control,
        "tcp_slow_start_after_idle": network.tcp_slow_start_after_idle if slow_start is None else slow_start,
    }
    values = config.model_copy(update={"emulate": emulate.model_copy(update=expanded)}).model_dump(mode="json")
    return validated(ClusterConfig, values, Origins(f"with emulate.profile {emulate.profile}"))


def with_measured(config: ClusterConfig) -> ClusterConfig:
    """Replace `links.measured` by the figures in that file, if that key is given."""
    if config.links.measured is None:
        return config
    if isinstance(config.hosts, str):
        raise ConfigError(
            f"links.measured is for a list of hosts; under hosts: {config.hosts} the rates are those that links sets"
        )
    path = Path(config.links.measured)
    try:
        cluster = read_numbers(path)
        check_names(config, cluster, path)
    except ConfigError as error:
        raise ConfigError(f"links.measured: {error}") from error
    names = host_labels(config.hosts, config.pipeline.num_workers)
    known = {host.name: HostRates(host.up, host.down) for host in cluster.hosts}
    # A host with a link inside its site has no cap: a process group would exceed it.
    rates = [HostRates() if config.has_group(stage) else known[name] for stage, name in enumerate(names)]
    hosts = with_measured_rates(config.links, config.emulate, config.hosts, rates)
    connections = max(config.links.connections, needed_connections(cluster, config.grid.pairs(names)))
    links = config.links.model_copy(update={"measured": None, "connections": connections})
    return config.model_copy(update={"hosts": hosts, "links": links})


def needed_connections(cluster: ClusterNumbers, pairs: Iterable[tuple[str, str]]) -> int:
    """The most TCP connections that any of these pairs of hosts were found to need."""
    neighbours = set(map(frozenset, pairs))
    needed = [path.connections or 1 for path in cluster.paths if frozenset((path.source, path.target)) in neighbours]
    return min(MAX_CONNECTIONS, max(needed, default=1))
