"""What only the machine that starts a run can fill into its configuration: vocabulary, layers of each stage.

Workers that hold no data do not read the tokenizer, and a measured division would come out differently
on every machine; so both are written into the configuration before anybody receives it.
"""

import dataclasses
import logging

import torch

from tahq.config import ClusterConfig
from tahq.config_file import resolve
from tahq.data.tokenizer import load_tokenizer
from tahq.models.costs import counted_costs, measured_costs
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import LayerCosts, divide

log = logging.getLogger(__name__)


def resolve_for_run(config: ClusterConfig) -> ClusterConfig:
    """The configuration with nothing left to the machine that reads it.

    Beyond `tahq.config_file.resolve`: `model.vocab_size` (unless a folder has it) and `pipeline.layers`,
    divided by counted or by measured cost. Resolving twice changes nothing.

    Raises:
        DataError: a tokenizer that cannot be loaded.
        ModelError: a model that cannot be built, cut into so many stages, or take so long samples.
    """
    config = resolve(config)
    vocab_size = load_tokenizer(config.data).vocab_size
    spec = load_spec(config.model, vocab_size=vocab_size, seq_len=config.data.seq_len)
    model = config.model
    if model.path is None:
        model = model.model_copy(update={"vocab_size": spec.vocab_size})
    ranges = divide(_costs(config, spec), config.pipeline.stages, config.pipeline.layers)
    layers = [blocks.stop - blocks.start for blocks in ranges]
    pipeline = config.pipeline.model_copy(update={"layers": layers})
    return config.model_copy(update={"model": model, "pipeline": pipeline})


def _costs(config: ClusterConfig, spec: ModelSpec) -> LayerCosts:
    if config.pipeline.balance == "counted" or config.pipeline.layers is not None:
        return counted_costs(spec, config.data.seq_len)
    device = "cuda" if torch.cuda.is_available() and config.run.device != "cpu" else "cpu"
    costs = measured_costs(spec, config.training.micro_batch, config.data.seq_len, device)
    log.info("measured costs in seconds on %s: %s", device, dataclasses.asdict(costs))
    return costs
