"""What the coordinator is told about a run: plain values from its resolved configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tahq.comm.config import LinkTransport
from tahq.coordinator.link_codecs import CodecOptions
from tahq.pipeline.config import TrainingConfig


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """A run as the coordinator sees it.

    Epochs become steps once the workers have said how many samples an epoch has. `start_step` is the number of steps
    behind the checkpoint that the run continues from.
    """

    num_stages: int
    run_id: int
    run_folder: Path
    config_json: str
    """The resolved configuration that every worker is sent."""
    config_hash: str
    version: str
    """tahq's version; a worker of another version is refused."""
    training: TrainingConfig
    snapshot_every: int | None = None
    """Steps between checkpoints; one is always written at the end and on interruption."""
    keep_snapshots: int = 2
    copies: int = 0
    """Copies of each stage's checkpoint on other hosts."""
    copies_within_host: bool = False
    """Whether a worker on the same host may hold them."""
    peer_timeout_s: float = 10.0
    give_up_s: float = 120.0
    """How long a lost worker is waited for; a worker that is silent for half of it is lost."""
    join_timeout_s: float = 600.0
    grace_s: float = 25.0
    """How long an orderly end may take after SIGTERM."""
    start_step: int = 0
    snapshot: str = ""
    """Folder of the checkpoint to continue from, relative to the run's folder; empty: start anew."""
    snapshot_files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each of its files, by name."""
    tie_link: bool = False
    """One more link between the first and the last stage, for the gradients of tied embeddings."""
    chunks_per_stage: int = 1
    """Chunks of the model on each stage (more than 1 under interleaved schedules)."""
    sites: tuple[str, ...] = ()
    """The site of each stage, "" = its own; empty: each has its own."""
    inside: LinkTransport = "zmq"
    """The transport between neighbours of one site."""
    hosts: tuple[str, ...] = ()
    """The host of each stage, for messages; empty: as the workers name them."""
    host_keys: tuple[str, ...] = ()
    """The public key that each stage's worker must have, "" = any key that may join; empty: any."""
    name: str = "run"
    epoch: int = 1
    """Number of this start of the run: frames of other epochs are rejected."""
    resume_command: str = ""
    """How to continue the run, for messages: `tahq-launch cluster.yaml --resume`."""
    codecs: CodecOptions = field(default_factory=CodecOptions)
    """The links' codecs, and what changes them."""
    next_sample: int | None = None
    """Number of the sample that `start_step` begins with; None: the workers say it."""
    is_measuring: bool = False
    """Whether workers measure instead of training (`tahq measure`)."""
    leave_timeout_s: float = 1.0
    """How long the coordinator waits for workers to leave at the end."""
