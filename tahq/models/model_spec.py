"""A model that is known but not built: its configuration, sizes and where its weights come from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tahq.errors import ModelError
from tahq.models.config import ModelConfig
from tahq.models.families import FAMILIES, FamilyLayout, HfConfig
from tahq.models.source_config import config_from_folder, config_from_sizes
from tahq.models.weights import FolderWeights


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All that building, dividing, loading and exporting a model needs to know; nothing is allocated.

    `tied`: the source model ties its head to its embedding, so the two parameters that tahq always
    keeps start equal. `tie`: whether training keeps them equal (`sync`) or not (`untied`).
    `folder`: where the weights are read; None: they are random.
    """

    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_seq_len: int
    tied: bool
    tie: Literal["untied", "sync"]
    folder: Path | None
    hf_config: HfConfig

    @property
    def layout(self) -> FamilyLayout:
        """Where the family has its parts."""
        return FAMILIES[self.family]


def load_spec(config: ModelConfig, *, vocab_size: int, seq_len: int) -> ModelSpec:
    """Read or make up a model's configuration, and check that the data fits it.

    Args:
        config: `model:` of cluster.yaml.
        vocab_size: the tokenizer's; the model's may be larger.
        seq_len: tokens a sample.

    Returns:
        The specification; weights are neither read nor drawn.

    Raises:
        ModelError: a folder without configuration or weights, a family that tahq does not train,
            sizes that contradict each other, a vocabulary smaller than the tokenizer's, or samples
            longer than the model takes.
    """
    folder = None if config.path is None else Path(config.path)
    if folder is None:
        layout, hf_config = config_from_sizes(config, vocab_size=vocab_size, seq_len=seq_len)
    else:
        layout, hf_config = config_from_folder(config, folder)
        FolderWeights.find(folder, trunk=layout.trunk)
    spec = _describe(config, layout, hf_config, folder)
    _check_data(spec, vocab_size, seq_len)
    _check_windows(spec)
    return spec


def _describe(config: ModelConfig, layout: FamilyLayout, hf_config: HfConfig, folder: Path | None) -> ModelSpec:
    spec = ModelSpec(
        family=layout.name,
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        vocab_size=hf_config.vocab_size,
        max_seq_len=hf_config.max_position_embeddings,
        tied=bool(hf_config.tie_word_embeddings),
        tie=config.tie,
        folder=folder,
        hf_config=hf_config,
    )
    if spec.tie == "sync" and not spec.tied:
        raise ModelError("model.tie: sync needs a model that ties its head; this one has tie_word_embeddings: false")
    if config.max_seq_len is not None and config.max_seq_len > spec.max_seq_len:
        raise ModelError(
            f"model.max_seq_len {config.max_seq_len} is above the {spec.max_seq_len} positions that {folder} has"
        )
    return spec


def _check_data(spec: ModelSpec, vocab_size: int, seq_len: int) -> None:
    if seq_len > spec.max_seq_len:
        raise ModelError(
            f"data.seq_len {seq_len} is longer than the model takes, {spec.max_seq_len} positions; "
            "lower data.seq_len or raise model.max_seq_len"
        )
    if vocab_size > spec.vocab_size:
        raise ModelError(
            f"the tokenizer has {vocab_size} tokens, the model's vocabulary {spec.vocab_size}; "
            "raise model.vocab_size or use the model's own tokenizer"
        )


def _check_windows(spec: ModelSpec) -> None:
    """Ask each block's attention window, so that a layer type unknown to tahq is refused now."""
    for block in range(spec.num_layers):
        spec.layout.window(spec.hf_config, block)
