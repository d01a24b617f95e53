"""cluster.yaml as one typed, frozen tree, composed of the sections that live beside their owners.

A key is checked where it is declared, keys of one section by that section, and contradictions between
sections here. What needs the model's folder, the tokenizer or the data is checked where they are read.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, model_validator

from tahq.comm.config import Hosts, LinksConfig, LinkTransport, host_shaping
from tahq.comm.keys import SecurityConfig
from tahq.comm.link.shaping import Shaping
from tahq.comm.network_config import EmulatedNetwork, NetworkConfig
from tahq.comm.topology import Grid
from tahq.comm.zmq.addresses import LOOPBACK, WILDCARDS, parse_address
from tahq.config.run import RunConfig
from tahq.data.config import DataConfig
from tahq.errors import CodecError, ConfigError, ScheduleError
from tahq.memory.config import COAT_FAMILIES, NEEDS_BF16, READ_BF16_GRADIENTS, MemoryConfig, Shard
from tahq.models.adapters.config import AdapterConfig
from tahq.models.config import ModelConfig, SleepConfig
from tahq.pipeline.checkpoint.renamed_keys import with_present_names
from tahq.pipeline.config import MICRO_BATCH, PipelineConfig, TrainingConfig
from tahq.pipeline.schedule.generators import generate
from tahq.quant import get_codec
from tahq.quant.config import WireConfig
from tahq.quant.ladder import ladder_for
from tahq.units import Section, format_size, write_duration

_CAPS = ("cap_up", "cap_down")
_OTHER_NAMES = {
    "training.lr": "learning_rate max_lr peak_lr",
    "training.clip_norm": "max_grad_norm gradient_clipping grad_clip max_norm",
    "training.betas, a list of both": "adam_beta1 adam_beta2 beta1 beta2",
    "training.epsilon": "adam_epsilon eps",
    "training.optimizer": "optim optimizer_name",
    "training.lr_schedule": "lr_scheduler_type lr_scheduler scheduler",
    "training.warmup_steps, a number of steps": "warmup_ratio warmup",
    "training.epochs": "num_train_epochs num_epochs max_epochs",
    "training.steps": "max_steps num_steps total_steps train_iters",
    "training.micro_batch": "per_device_train_batch_size micro_batch_size local_batch_size",
    "training.global_batch": "train_batch_size batch_size global_batch_size",
    "training.global_batch, the samples of a step": "gradient_accumulation_steps",
    "training.precision": "bf16 fp16 mixed_precision torch_dtype dtype",
    "training.loss_scale.initial": "init_scale initial_scale_power fp16_init_scale",
    "training.loss_scale.growth_steps": "growth_interval loss_scale_window scale_growth_interval",
    "training.compile": "torch_compile use_torch_compile torch_compile_backend",
    "training.eval_every, in steps": "eval_steps eval_interval val_check_interval",
    "training.early_stopping, with patience": "early_stopping_patience early_stopping_rounds",
    "training.early_stopping.min_delta": "early_stopping_threshold early_stopping_min_delta",
    "run.keep_best, and tahq export --best": "load_best_model_at_end save_best_checkpoint",
    "training.best_set, a set of data.validation": "metric_for_best_model",
    "training.samples, with prompts": "sample_prompts eval_table_size do_sample_every",
    "run.checkpoint_every, in steps": "save_steps save_interval checkpoint_interval saves_per_epoch",
    "run.keep_checkpoints": "save_total_limit keep_latest_k",
    "run.dir": "output_dir save_dir dump_folder",
    "run.name": "run_name",
    "memory.recompute, such as block": "gradient_checkpointing activation_checkpointing",
    "data.seq_len, in tokens": "sequence_len max_seq_length max_length block_size seq_length context_length cutoff_len",
    "data.split": "dataset_split dataset_train_split",
    "data.subset": "dataset_config_name dataset_config",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "data.validation, a share of the data or files": "val_set_size validation_split validation_file test_datasets",
    "model.path, a folder or Hub name": "model_name_or_path base_model pretrained_model_name_or_path hf_assets_path",
    "data.text, data.tokens or data.records, files or a name on the Hub": "datasets dataset dataset_name train_file",
    "data.records, which may be chats; the template is the tokenizer's": "messages conversations chat_template",
    "data.packing, by default on where an epoch keeps 100 steps": "sample_packing multipack neat_packing",
    "data.truncation: end, start, drop or error": "excess_length_strategy truncation_mode truncation_side",
    "data.packing; rows have one length": "pad_to_sequence_len pad_to_max_length group_by_length length_column_name",
    "training.dpo, with beta; the loss is that of DPO": "rl rl_beta dpo_beta pref_beta pref_loss loss_type objective",
    "pipeline.stages": "pipeline_parallel_degree pipeline_parallel_size num_stages",
    "pipeline.replicas": "data_parallel_degree data_parallel_replicate_degree",
    "run.trackers, such as [wandb]": "report_to wandb use_wandb tensorboard",
    "run.trackers and WANDB_PROJECT in the environment": "wandb_project",
    "model.frozen_layers, the first layers that keep their weights": "unfrozen_parameters freeze_layers frozen_layers "
    "num_layers_to_freeze freeze_trainable_layers num_frozen_layers",
    "adapter: lora": "lora peft peft_config lora_config use_peft use_lora",
    "adapter.rank": "lora_r r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets, a list of names": "lora_target_modules target_modules lora_modules",
    "adapter.targets: all-linear, its default": "lora_target_linear",
    "adapter.layers": "layers_to_transform peft_layers_to_transform lora_layers_to_transform lora_layers",
    "adapter.rslora": "use_rslora peft_use_rslora lora_use_rslora",
    "adapter.dora": "use_dora peft_use_dora lora_use_dora",
    "adapter: qlora, which has weights in 4 bits (8 are not supported)": "load_in_4bit load_in_8bit quantization_bit "
    "quantization_config bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype",
}
OTHER_NAMES: Mapping[str, str] = {name: use for use, names in _OTHER_NAMES.items() for name in names.split()}
"""What to use instead of keys that transformers, axolotl, torchtitan and others have."""
FINE_TUNING_LR = 2e-5
"""Default of `training.lr` for a model that was trained before."""
ADAPTER_LR = 2e-4
"""The same for adapters, whose B begins at 0."""
DPO_LR = 5e-6
"""The same for adapters under `training.dpo`: that of LoRA in TRL's scripts/dpo.py and LLaMA-Factory's examples."""
NUM_BYTE_TOKENS = 256
"""Vocabulary of the `bytes` tokenizer."""
MAX_MICRO_BATCHES = 65_536
"""Per step; the schedule lists each of them."""


class EmulateConfig(EmulatedNetwork):
    """Slow links and stages that sleep, to try many machines on one.

    `rate` and `delay` are imitated inside the workers, or, with `hosts: namespaces`, by a real network on this machine,
    for which the keys from `up` on are.

    Example: `emulate: {rate: 100mbit, delay: 20ms}` or `emulate: {profile: cable}`
    """

    sleep: SleepConfig | None = None
    """Stages sleep instead of computing, to measure networks with fewer cores than stages; learns nothing."""


class ClusterConfig(Section):
    """A run's configuration; workers receive it, resolved, from the coordinator."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = OTHER_NAMES
    run: RunConfig = RunConfig()
    model: ModelConfig
    adapter: AdapterConfig | None = None
    """Train low-rank adapters beside the model's weights instead of these. Not set: all weights."""
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    memory: MemoryConfig = MemoryConfig()
    wire: WireConfig = WireConfig()
    links: LinksConfig = LinksConfig()
    emulate: EmulateConfig = EmulateConfig()
    hosts: Hosts = Field(default="local")
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="before")
    @classmethod
    def _with_old_names(cls, given: object) -> object:
        return with_present_names(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _sections_agree(self) -> "ClusterConfig":
        """Run all checks; the message of each begins with the key to look at first (`tahq.typed_yaml.mistakes`)."""
        self._place_local_hosts()
        self._check_hosts()
        self._check_replicas()
        self._check_inside()
        self._check_layers()
        self._check_share(self.training.num_micro_batches // self.pipeline.replicas)
        self._check_memory()
        self._check_adapter()
        self._check_dpo()
        self._check_compile()
        self._check_wire()
        self._check_data()
        self._check_fused()
        self._check_timeouts()
        return self

    def _place_local_hosts(self) -> None:
        """The others reach this machine where they reach its coordinator."""
        address, _ = parse_address(self.run.advertise or self.run.bind, "run.bind")
        for host in self.hosts if isinstance(self.hosts, list) and address not in WILDCARDS else ():
            if host.local and "address" not in host.model_fields_set:
                host.set_default("address", address)

    def _check_hosts(self) -> None:
        if self.pipeline.model_fields_set.isdisjoint(("stages", "layers")):
            self.pipeline.set_default("stages", self._default_stages())
        links, workers, replicas = self.links, self.pipeline.num_workers, self.pipeline.replicas
        if isinstance(self.hosts, list) and len(self.hosts) != workers:
            times = f" times pipeline.replicas {replicas}" if replicas > 1 else ""
            raise ValueError(
                f"hosts lists {len(self.hosts)} machines, pipeline.stages is {self.pipeline.stages}{times}; the n-th "
                "machine runs stage n"
            )
        if self.hosts == "namespaces":
            if self.emulate.profile is None:  # else it is checked when the profile has been applied
                self._network()
        elif self.emulate.shapes_in_namespaces:
            key, kind = self.emulate.shapes_in_namespaces[0], "local" if self.hosts == "local" else "a list"
            raise ValueError(
                f"emulate.{key} is for hosts: namespaces, where the network is made on this machine; with hosts: "
                f"{kind} only rate and delay can be enforced"
            )
        for key in _CAPS:
            cap = getattr(links, key)
            if self.hosts == "local" and self.emulate.rate is None and isinstance(cap, str):
                raise ValueError(
                    f"links.{key}: {cap} is a share of a rate, and with hosts: local no rate is known; set "
                    "emulate.rate, or give the cap as a rate, such as 20mbit"
                )

    def _check_replicas(self) -> None:
        replicas, training = self.pipeline.replicas, self.training
        if replicas == 1:
            return
        if "micro_batch" not in training.model_fields_set and training.num_micro_batches % replicas:
            share = max(1, training.global_batch // replicas)
            training.set_default("micro_batch", max(n for n in range(1, MICRO_BATCH + 1) if share % n == 0))
        if training.num_micro_batches % replicas:
            raise ValueError(
                f"training.global_batch {training.global_batch} is {training.num_micro_batches} micro-batches of "
                f"training.micro_batch {training.micro_batch}, which {replicas} replicas (pipeline.replicas) cannot "
                "share equally"
            )
        if training.is_low_rank:
            raise ValueError(
                f"training.optimizer {training.optimizer} finds a subspace from each replica's own gradients, so "
                "pipeline.replicas cannot sum them; use another optimizer or pipeline.replicas 1"
            )
        if self.model.tie == "sync":
            raise ValueError("model.tie: sync is for one pipeline; use model.tie: untied or pipeline.replicas 1")
        if get_codec(self.wire.activations).is_stateful:
            raise ValueError(
                f"wire.activations: {self.wire.activations} remembers the samples of one pipeline, and with "
                "pipeline.replicas they change places; use another codec"
            )
        if self.pipeline.replicas_wait is not None or self.pipeline.replay is not None:
            self._check_fewer_replicas()

    @property
    def shards(self) -> frozenset[Shard]:
        """What replicas divide among themselves (`memory.shard`); empty without replicas."""
        return frozenset(self.memory.shard if self.pipeline.replicas > 1 else ())

    @property
    def fp16_conflict(self) -> str:
        """What of this configuration rules out products in fp16, as the end of a sentence; empty: nothing."""
        training, memory = self.training, self.memory
        reasons = {
            f"is not for training.optimizer {training.optimizer}, which would search subspaces of gradients that have "
            "overflowed": training.is_low_rank,
            "is not for training.adamw_bf16.weights: bf16, which it would cast for each product": (
                training.has_bf16_weights
            ),
            "is not for memory.activations: coat, which multiplies in FP8 and bf16": memory.activations == "coat",
            "is not for memory.residual: bf16": memory.residual == "bf16",
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint with the lowest validation loss is kept."""
        run = self.run
        return run.keep_best and run.checkpoint_every != "never" and self.training.eval_every is not None

    @property
    def optimizer_shares(self) -> int:
        """Replicas that divide the optimizer states of a stage; 1: each has all of them."""
        return self.pipeline.replicas if "optimizer" in self.shards else 1

    def _check_fewer_replicas(self) -> None:
        """Whether some replicas can take the share of others."""
        pipeline, key = self.pipeline, "replay" if self.pipeline.replicas_wait is None else "replicas_wait"
        if self.optimizer_shares > 1:
            raise ValueError(
                f"pipeline.{key} lets replicas go on without another, but under memory.shard only that one could "
                "update its share of the parameters; remove one of them"
            )
        if pipeline.first_schedule == "gpipe":
            raise ValueError(
                f"pipeline.{key} gives a replica more micro-batches, all of which gpipe keeps in memory; use 1f1b or "
                "zero-bubble"
            )
        if any(map(self.has_group, range(pipeline.num_workers))):
            raise ValueError(
                f"pipeline.{key} needs links over ZMQ, since a process group does not survive a lost worker; use "
                "links.inside: zmq"
            )
        for count in range(1, pipeline.replicas):
            for share in set(map(len, self.grid.shares(self.training.num_micro_batches, range(count)).values())):
                self._check_share(share, f" (pipeline.{key}: {count} of {pipeline.replicas} replicas)")

    def shaping(self, stage: int) -> Shaping:
        """The limits that the worker of a stage enforces; profile and measured rates must have been applied."""
        return host_shaping(self.links, self.emulate, self.hosts, stage, self.pipeline.num_workers)

    @property
    def sites(self) -> tuple[str, ...]:
        """The site of each stage; "" = a site of its own. Under `hosts: local` all stages share one."""
        if self.hosts == "local":
            return ("local",) * self.pipeline.num_workers
        hosts = self.hosts if isinstance(self.hosts, list) else self._network().hosts.values()
        return tuple(host.site or "" for host in hosts)

    @property
    def local_stages(self) -> tuple[int, ...]:
        """The stages whose workers are started on this machine."""
        here = (isinstance(self.hosts, str) or self.hosts[stage].local for stage in range(self.pipeline.num_workers))
        return tuple(stage for stage, is_here in enumerate(here) if is_here)

    def worker_bind(self, stage: int) -> str:
        """host:port of a listed host's worker: its `bind`, with a port after `run.base_port` where it is open."""
        assert isinstance(self.hosts, list), "only listed hosts have addresses"
        host = self.hosts[stage]
        name, _, port = host.bind.rpartition(":")
        if name == "0.0.0.0" and ":" in host.address:
            name = "[::]"
        if int(port) or not self.run.base_port or host.address.startswith(LOOPBACK):
            return f"{name}:{port}"
        before = sum(other.address == host.address for other in self.hosts[:stage])
        return f"{name}:{self.run.base_port + 1 + before}"

    def transport_between(self, one: int, other: int) -> LinkTransport:
        """The transport of frames between two neighbouring stages."""
        sites = self.sites
        return self.links.inside if sites[one] and sites[one] == sites[other] else "zmq"

    def has_group(self, stage: int) -> bool:
        """Whether a process group carries the frames between a stage and one of its neighbours."""
        return any(self.transport_between(stage, ends.other(stage)) != "zmq" for ends in self.grid.links_of(stage))

    @property
    def grid(self) -> Grid:
        """The stages of all replicas, and their links."""
        return self.pipeline.grid(tie_link=self.model.tie == "sync")

    @property
    def sum_codecs(self) -> dict[int, str]:
        """The codec of the shards that replicas send each other, by link."""
        wire, sites = self.wire, self.sites
        inside = wire.all_reduce_inside or wire.all_reduce
        return {
            ends.link: inside if sites[ends.lower] and sites[ends.lower] == sites[ends.upper] else wire.all_reduce
            for ends in self.grid.links()[self.grid.first_sum_link :]
        }

    def _network(self) -> NetworkConfig:
        try:
            return self.emulate.network(self.pipeline.num_workers)
        except ValueError as error:
            raise ValueError(f"emulate.{error}") from error

    def _default_stages(self) -> int:
        """One per listed host; else the default, or fewer, so that each chunk has a layer."""
        if isinstance(self.hosts, list):
            return max(1, len(self.hosts) // self.pipeline.replicas)
        stages, num_layers = self.pipeline.stages, self.model.num_layers
        return stages if num_layers is None else max(1, min(stages, num_layers // self.pipeline.chunks))

    def _check_inside(self) -> None:
        inside = self.links.inside
        if inside == "zmq" or self.emulate.profile is not None:  # a profile's hosts are checked when it is applied
            return
        if obstacle := self._obstacle_to_groups():
            raise ValueError(f"links.inside: {inside}: {obstacle}; use links.inside: zmq")

    def _obstacle_to_groups(self) -> str:
        """The reason that no link can use a process group, or the cap that one would exceed; empty: no obstacle."""
        if self.hosts != "namespaces" and (self.emulate.rate is not None or self.emulate.delay):
            return "emulate.rate and emulate.delay are enforced on ZMQ links only"
        links = self.grid.links()
        if links and all(self.transport_between(ends.lower, ends.upper) == "zmq" for ends in links):
            section = "emulate.hosts" if self.hosts == "namespaces" else "hosts"
            return f"no two neighbouring stages are in one site (set site under {section})"
        for stage in filter(self.has_group, range(self.pipeline.num_workers)):
            own = [(f"hosts.{stage}", self.hosts[stage])] if isinstance(self.hosts, list) else []
            for where, owner in [("links", self.links), *own]:
                if caps := [f"{where}.{key}" for key in _CAPS if getattr(owner, key)]:
                    return f"{caps[0]} is enforced on ZMQ links only, and stage {stage} has a link inside its site"
        return ""

    def _check_layers(self) -> None:
        num_layers, listed, stages = self.model.num_layers, self.pipeline.layers, self.pipeline.stages
        if num_layers is not None and listed is not None and sum(listed) != num_layers:
            raise ValueError(
                f"pipeline.layers {listed} adds up to {sum(listed)} layers, model.num_layers is {num_layers}"
            )
        if num_layers is not None and self.pipeline.num_chunks > num_layers:
            times = f" times pipeline.chunks {self.pipeline.chunks}" if self.pipeline.chunks > 1 else ""
            raise ValueError(
                f"pipeline.stages {stages}{times} is above model.num_layers {num_layers}; "
                f"each {'chunk' if times else 'stage'} needs a layer"
            )
        sleep = self.emulate.sleep
        if sleep is not None and self.model.tie == "sync":
            raise ValueError(
                "emulate.sleep leaves no embedding whose gradients model.tie: sync could exchange; remove one of them"
            )
        for key in ("forward", "backward") if sleep is not None else ():
            count = len(getattr(sleep, key))
            if count not in (1, stages):
                raise ValueError(
                    f"emulate.sleep.{key} lists {count} durations, pipeline.stages is {stages}; give one for all "
                    "stages, or one for each"
                )

    def _check_share(self, count: int, why: str = "") -> None:
        """Whether a replica can compute so many micro-batches in a step."""
        pipeline, training = self.pipeline, self.training
        if count > MAX_MICRO_BATCHES:
            raise ValueError(
                f"training.global_batch {training.global_batch} is {count} micro-batches of training.micro_batch "
                f"{training.micro_batch}; at most {MAX_MICRO_BATCHES} micro-batches fit into a step{why}"
            )
        depths, chunks = pipeline.first_depths, pipeline.chunks
        try:
            generate(pipeline.first_schedule, pipeline.stages, count, depths=depths, chunks_per_stage=chunks)
        except ScheduleError as error:
            raise ValueError(f"pipeline.in_flight: {error}{why}") from error

    def _check_memory(self) -> None:
        family, optimizer = self.model.family, self.training.optimizer
        by_stage = [each for each in self.memory.offload if isinstance(each, tuple)]
        lists = {"agoq.bits": self.memory.agoq.bits, "recompute": self.memory.recompute, "offload": by_stage or None}
        for key, values in lists.items():
            if isinstance(values, list) and len(values) != self.pipeline.stages:
                raise ValueError(
                    f"memory.{key} lists {len(values)} stages, pipeline.stages is {self.pipeline.stages}; give one "
                    "value for all stages, or one for each"
                )
        self._check_offload()
        if self.model.frozen_layers and self.training.is_low_rank:
            raise ValueError(
                f"model.frozen_layers is not for training.optimizer {optimizer}, which stores all weights of attention "
                "and MLP in a form to train them; use another optimizer"
            )
        if (self.memory.loss_chunks or 1) > 1 and self.training.is_low_rank:
            raise ValueError(
                f"memory.loss_chunks: training.optimizer {optimizer} stores the head in another form, which is not "
                "computed in chunks; leave it out or set it to 1"
            )
        if self.memory.attention_chunks > 1 and self.model.dropout > 0:
            raise ValueError(
                "memory.attention_chunks divides the work of a fused kernel, but with model.dropout attention is "
                "written out and keeps S² weights per head; set one of them to its default"
            )
        if self.training.precision == "fp8":
            self._check_fp8()
        if self.training.precision == "fp16" and self.fp16_conflict:
            raise ValueError(f"training.precision: fp16 {self.fp16_conflict}; use bf16 or fp32")
        if self.memory.gradients == "bf16" and optimizer not in READ_BF16_GRADIENTS:
            raise ValueError(
                f"memory.gradients: bf16 is for the optimizers {', '.join(READ_BF16_GRADIENTS)}; training.optimizer "
                f"{optimizer} reads gradients in fp32: use fp32 or fp8"
            )
        if self.memory.residual == "bf16" and self.training.precision == "fp32":
            raise ValueError(
                "memory.residual: bf16 needs products in bf16, training.precision is fp32; use precision bf16, or "
                "residual fp32"
            )
        if self.memory.activations != "coat":
            return
        if optimizer in ("qgalore", "galore"):
            raise ValueError(
                f"memory.activations: coat needs whole weights to code in FP8, but training.optimizer {optimizer} "
                "stores those of attention and MLP in another form; choose one of them"
            )
        if family is not None and family not in COAT_FAMILIES:
            raise ValueError(
                f"memory.activations: coat is for models of the families {', '.join(COAT_FAMILIES)}, "
                f"model.family is {family}; use memory.activations: none"
            )

    def _check_adapter(self) -> None:
        """What needs weights that are trained, or another `forward` of linear layers."""
        training, memory = self.training, self.memory
        if self.adapter is None:
            return
        refused = {
            f"training.optimizer: {training.optimizer} trains the matrices of blocks in another form, but adapter "
            "keeps them as they are; use adamw or another optimizer": training.is_low_rank,
            "training.adamw_bf16.weights: bf16 is for weights that are trained, and with adapter only adapters are, in "
            "fp32; leave it out: under precision: bf16 all other matrices are bf16": training.has_bf16_weights,
            "training.precision: fp8 has its own products, which leave out adapters; use bf16": (
                training.precision == "fp8"
            ),
            "memory.activations: coat has its own layers, which leave out adapters; use agoq or none": (
                memory.activations == "coat"
            ),
            "memory.offload: master is the fp32 copy of weights that are trained, and adapter keeps them as they are; "
            "use weights": "master" in memory.all_offload,
            "memory.offload: weights stay on the device where adapter.kind: qlora keeps them in 4 bits; leave weights "
            "out, or use kind: lora": self.adapter.kind == "qlora" and "weights" in memory.all_offload,
            "memory.shard: gradients and weights of adapters are too small to be divided; use shard: [optimizer], or "
            "offload: [weights] for the model's own": len(memory.shard) > 1,
            "model.tie: sync sums gradients of embedding and head, which with adapter have none; leave it out, they "
            "stay as they are": self.model.tie == "sync",
            "model.frozen_layers: beside adapter all weights are frozen; use adapter.layers": self.model.frozen_layers
            > 0,
            "emulate.sleep learns nothing, so it has no adapters; remove one of them": self.emulate.sleep is not None,
        }
        for reason, holds in refused.items():
            if holds:
                raise ValueError(reason)

    def _check_dpo(self) -> None:
        """What a comparison of answers needs, and what it rules out."""
        if self.training.dpo is None:
            return
        dropouts = {"model": self.model.dropout, "adapter": 0.0 if self.adapter is None else self.adapter.dropout}
        dropout = " and ".join(f"{key}.dropout" for key, probability in dropouts.items() if probability)
        is_stateful = any(get_codec(spec).is_stateful for spec in self.wire.rungs()["activations"])
        refused = {
            "training.dpo needs adapter: lora: its reference is the model with the adapters switched off, as a second "
            "copy of all weights is not kept": self.adapter is None,
            "training.dpo learns from pairs: name files with prompt, chosen and rejected in data.records, not "
            "data.text or data.tokens": self.data.records is None,
            "data.packing: true puts several answers into a row, and training.dpo compares rows; leave it out": (
                self.data.packing is True
            ),
            f"{dropout} would drop other inputs of the model than of its reference (training.dpo); set it to 0, as TRL "
            "does": bool(dropout),
            "training.z_loss is for the loss of tokens, and training.dpo compares answers; leave it out": (
                self.training.z_loss > 0
            ),
            "wire.activations: aqsgd remembers one activation per sample, and with training.dpo there are four; use "
            "another codec": is_stateful,
        }
        for reason, holds in refused.items():
            if holds:
                raise ValueError(reason)
        self.data.set_default("packing", False)

    def _check_compile(self) -> None:
        """What computes blocks by other means than transformers' own layers."""
        training, memory, levels = self.training, self.memory, self.memory.recompute
        if not training.compile:
            return
        listed = [levels] if isinstance(levels, str) else levels
        level = next((each for each in listed if each not in ("auto", "none", "block")), "")
        refused = {
            "pipeline.schedule: zero-bubble, whose backwards are in two parts": self.pipeline.schedule == "zero-bubble",
            "adapter, which adds products to layers": self.adapter is not None,
            "training.precision: fp8, whose products are in other layers": training.precision == "fp8",
            f"training.optimizer: {training.optimizer}, which stores weights in another form": training.is_low_rank,
            f"memory.activations: {memory.activations}, which has other layers": memory.activations != "none",
            f"memory.recompute: {level}, which divides blocks; use none or block": bool(level),
            "memory.offload of more than m and v": bool(memory.all_offload - {"m", "v"}),
            "memory.shard: weights": "weights" in self.shards,
            "model.dropout, whose masks have names": self.model.dropout > 0,
        }
        for what, holds in refused.items():
            if holds:
                raise ValueError(f"training.compile does not combine with {what}; remove one of them")

    def _check_offload(self) -> None:
        offload, optimizer = self.memory.all_offload, self.training.optimizer
        if self.optimizer_shares > 1 and offload - {"residual"}:
            raise ValueError(
                f"memory.shard: replicas send each other weights that they keep on the device; memory.offload lists "
                f"{', '.join(sorted(offload - {'residual'}))}: remove these, or memory.shard"
            )
        if "master" in offload and self.training.precision == "fp32":
            raise ValueError(f"memory.offload: {NEEDS_BF16}; training.precision is fp32")
        if "gradients" in offload and self.pipeline.replicas > 1:
            raise ValueError(
                "memory.offload: gradients are on the host, but replicas (pipeline.replicas) sum them in pieces on the "
                "device; leave gradients out or use pipeline.replicas 1"
            )
        if self.training.is_low_rank and offload - {"residual", "m", "v"}:
            raise ValueError(
                f"memory.offload: training.optimizer {optimizer} keeps weights and gradients of attention and MLP in a "
                f"form that stays on the device; of {', '.join(sorted(offload))} it allows residual, m and v only"
            )

    def _check_fp8(self) -> None:
        if self.training.is_low_rank:
            raise ValueError(
                f"training.precision: fp8 needs whole weights to code in FP8, but training.optimizer "
                f"{self.training.optimizer} stores those of attention and MLP in another form; use another optimizer, "
                "or bf16"
            )
        if self.memory.activations == "coat":
            raise ValueError(
                "training.precision: fp8 is not for memory.activations: coat, which has FP8 products of its own; use "
                "bf16, or memory.activations none or agoq"
            )
        if "weights" in self.shards:
            raise ValueError(
                "training.precision: fp8 keeps codes of all weights during a step, so that memory.shard: weights would "
                "save nothing; use bf16, or leave weights out"
            )

    def _check_wire(self) -> None:
        channels = self.model.hidden_size
        if channels is None:
            return
        for direction, spec in self.wire.specs().items():
            try:
                get_codec(spec).encoded_nbytes((1, 1, channels))
            except CodecError as error:
                raise ValueError(f"wire.{direction} does not fit model.hidden_size {channels}: {error}") from error
        for direction, rungs in self.wire.rungs().items() if self.wire.follow is not None else ():
            try:
                ladder_for(rungs, (self.training.rows, self.data.seq_len, channels))
            except ConfigError as error:
                raise ValueError(f"wire.follow.{direction}: {error}") from error

    def _check_data(self) -> None:
        if self.model.path is not None:
            if "tokenizer" not in self.data.model_fields_set:
                self.data.set_default("tokenizer", self.model.path)
            if "lr" not in self.training.model_fields_set:
                self.training.set_default("lr", FINE_TUNING_LR)
        if self.adapter is not None and "lr" not in self.training.model_fields_set:
            self.training.set_default("lr", ADAPTER_LR if self.training.dpo is None else DPO_LR)
        longest, vocab_size = self.model.max_seq_len, self.model.vocab_size
        if longest is not None and "seq_len" not in self.data.model_fields_set:
            self.data.set_default("seq_len", min(longest, self.data.seq_len))
        if longest is not None and self.data.seq_len > longest:
            raise ValueError(f"data.seq_len {self.data.seq_len} is longer than model.max_seq_len {longest}")
        for length, last in self.training.seq_len_schedule:
            if length >= self.data.seq_len or self.data.seq_len % length:
                raise ValueError(
                    f"training.seq_len_schedule: {[length, last]} cuts samples of data.seq_len {self.data.seq_len} "
                    f"tokens into pieces of {length}; give a smaller length that divides it"
                )
        if self.training.seq_len_schedule and self.data.records is not None:
            raise ValueError(
                "training.seq_len_schedule cuts samples, but those of data.records are a prompt and its response, "
                "which would not see its prompt; remove it, or use data.text or data.tokens"
            )
        if self.data.tokenizer == "bytes" and vocab_size is not None and vocab_size < NUM_BYTE_TOKENS:
            raise ValueError(
                f"model.vocab_size {vocab_size} is below the {NUM_BYTE_TOKENS} tokens of data.tokenizer bytes"
            )
        if self.training.eval_every is not None and not self.data.validation_sets:
            raise ValueError("training.eval_every needs validation samples, but data.validation is 0")
        samples = self.training.samples
        if samples is not None and samples.max_tokens >= self.data.seq_len:
            raise ValueError(
                f"training.samples.max_tokens {samples.max_tokens} leaves no room for a prompt in data.seq_len "
                f"{self.data.seq_len} tokens; lower it"
            )
        if samples is not None and "weights" in self.shards:
            raise ValueError("training.samples cannot be written with memory.shard: weights; remove one of them")
        best, names = self.training.best_set, list(self.data.validation_sets)
        if best is not None and best not in names:
            known = ", ".join(filter(None, names)) or "no names"
            raise ValueError(f"training.best_set: data.validation has no set {best}; it has {known}")

    def _check_fused(self) -> None:
        if not self.training.is_fused:
            return
        fused = "training.qgalore.fused updates each parameter during the backward"
        if self.pipeline.stages > 1:
            raise ValueError(
                f"{fused}, before all {self.pipeline.stages} stages have agreed on a step; it needs pipeline.stages 1"
            )
        if self.model.tie == "sync":
            raise ValueError(f"{fused}, by its own gradient; model.tie: sync adds two gradients first")
        if self.pipeline.schedule == "zero-bubble":
            raise ValueError(
                f"{fused}; pipeline.schedule: zero-bubble computes weight gradients later, which gains nothing on one "
                "stage: use 1f1b"
            )

    def _check_timeouts(self) -> None:
        rate, delay_s = self._slowest()
        piece, timeout_s = self.links.piece, self.run.peer_timeout
        piece_s = 8 * piece / rate
        if 2 * delay_s + piece_s >= timeout_s:
            takes = f" and a piece of {format_size(piece)} takes {piece_s:.3g} s" if piece_s else ""
            raise ValueError(
                f"emulate: a peer would look lost: a round trip takes {2 * delay_s:.3g} s{takes}, run.peer_timeout is "
                f"{write_duration(timeout_s)}; raise run.peer_timeout or lower links.piece"
            )
        if self.run.give_up < timeout_s:
            raise ValueError(
                f"run.give_up is {write_duration(self.run.give_up)} and run.peer_timeout {write_duration(timeout_s)}: "
                "a silent peer would be given up before a warning; raise run.give_up"
            )

    def _slowest(self) -> tuple[float, float]:
        """The lowest rate and the longest delay between any two hosts; inf and 0 where nothing is configured."""
        if self.hosts != "namespaces" or self.emulate.profile is not None:
            return self.emulate.rate or math.inf, self.emulate.delay
        network = self._network()
        hosts, pairs = list(network.hosts.values()), network.pairs
        rates = [*(host.up for host in hosts), *(host.down for host in hosts), *(pair.rate for pair in pairs)]
        delays_s = [*(host.delay for host in hosts), *(pair.delay or 0.0 for pair in pairs)]
        return min((rate for rate in rates if rate), default=math.inf), max(delays_s)
