"""What the coordinator is told about a run: plain values, taken from a resolved configuration by whoever starts it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tahq.comm.config import LinkTransport
from tahq.coordinator.link_codecs import CodecOptions
from tahq.pipeline.config import Phases


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """All that the coordinator needs to know of a run.

    Exactly one of `steps` and `epochs` is given; epochs become steps once the workers have said how
    many samples an epoch has. `start_step` is the number of steps that the snapshot has behind it.
    """

    num_stages: int
    run_id: int
    run_folder: Path
    config_json: str
    """The resolved configuration that every worker is sent."""
    config_hash: str
    version: str
    """tahq's version; a worker of another one is refused."""
    steps: int | None
    epochs: float | None
    global_batch: int
    """Samples a step."""
    phases: Phases = field(default_factory=Phases)
    """Steps that the run must have room for."""
    clip_norm: float | None = 1.0
    non_finite: Literal["skip", "halt"] = "skip"
    max_skipped_in_a_row: int = 10
    eval_every: int | None = None
    """Steps between evaluations; the last step is then evaluated too. None: never."""
    snapshot_every: int | None = None
    """Steps between snapshots; one is always written at the end and on interruption."""
    keep_snapshots: int = 2
    copies: int = 0
    """Copies of each stage's snapshot on other hosts."""
    copies_within_host: bool = False
    """Whether a worker on the same host may hold them."""
    peer_timeout_s: float = 10.0
    give_up_s: float = 120.0
    """How long a silent or lost worker is waited for; one that is silent for half of it is lost."""
    join_timeout_s: float = 600.0
    grace_s: float = 25.0
    """How long an orderly end may take after SIGTERM."""
    start_step: int = 0
    snapshot: str = ""
    """Folder of the snapshot to continue from, seen from the run's folder; empty: start anew."""
    snapshot_files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each of its files, by name."""
    tie_link: bool = False
    """One more link between the first and the last stage, for the gradients of tied embeddings."""
    chunks_per_stage: int = 1
    """Pieces of the model on each stage, which interleaved schedules take turns at."""
    sites: tuple[str, ...] = ()
    """The site of each stage, "" = one of its own; empty: each has its own."""
    inside: LinkTransport = "zmq"
    """What carries the frames between neighbours of one site."""
    hosts: tuple[str, ...] = ()
    """Where each stage is meant to run, for messages; empty: what the workers call themselves."""
    host_keys: tuple[str, ...] = ()
    """The public key that each stage's worker must have, "" = any that may join; empty: any."""
    name: str = "run"
    epoch: int = 1
    """Number of this start of the run: frames of another one are not taken."""
    resume_command: str = ""
    """What continues the run, for messages: `tahq-launch cluster.yaml --resume`."""
    codecs: CodecOptions = field(default_factory=CodecOptions)
    """What links are packed with, and what changes it."""
    next_sample: int | None = None
    """Number of the sample that `start_step` begins with; None: as the workers say."""
    is_measuring: bool = False
    """Whether workers are told to measure in place of training."""
    leave_timeout_s: float = 1.0
    """How long workers are given to leave at the end before the coordinator does."""
