"""TensorBoard, Weights & Biases and Prometheus: the figures of metrics.jsonl, in a process beside the coordinator.

They may wait for a network or a disk, start threads and stay at exit; so they have a process of their own, at low
priority. The coordinator's thread hands it a line of JSON per step, and never waits for it. A tracker that fails is
left out, with a warning, and the run goes on.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tahq.comm.zmq.addresses import parse_address
from tahq.config.cluster import ClusterConfig
from tahq.coordinator.observer import RunEnd, RunHeader, RunObserver, StepRecord, ValidationRecord
from tahq.errors import UserError, brief
from tahq.observe.metrics import step_object, validation_object
from tahq.units import WRITTEN_BY_HAND

CLOSE_S: Final = 20.0
"""Time for the trackers to send the last figures when a run has ended."""
MAX_UNSENT_NBYTES: Final = 16 * 1024 * 1024
"""Of lines that the process has not taken; beyond it the trackers are given up."""
_PACKAGES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "prometheus": "prometheus_client"}
_PARTS: Final = ("links", "stages", "validations")
_LABELS: Final = ("link", "direction", "from", "to", "stage")
"""Keys of links and stages in metrics.jsonl that say which one it is."""


def check_trackers(config: ClusterConfig) -> None:
    """UserError if a package that `run.trackers` needs is missing."""
    for name in config.run.trackers:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise UserError(f"run.trackers: {name} is not installed; install it with: pip install 'tahq[trackers]'")


class TrackerProcess(RunObserver):
    """Hands the figures of each step to the trackers' process; `warn` is called with a line for the user."""

    def __init__(self, config: ClusterConfig, run_id: int, warn: Callable[[str], None]) -> None:
        self._config = config
        self._run_id = run_id
        self._warn = warn
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = bytearray()
        self._said = b""

    def opened(self, header: RunHeader) -> None:
        """Start the process."""
        # hosts have the environments of workers, which may be secret
        config = self._config.model_dump(mode="json", context=WRITTEN_BY_HAND, exclude={"hosts", "security"})
        begin = {
            "folder": str(header.run_folder.absolute()),
            "id": f"{self._run_id:x}",
            "start_step": header.start_step,
            "config": config,
        }
        with (header.run_folder / "logs" / "trackers.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tahq_launch.trackers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "pipes were asked for"
            os.set_blocking(pipe.fileno(), False)
        self._send(begin)

    def step_committed(self, record: StepRecord) -> None:
        """Send a step's figures."""
        self._send({"figures": step_object(record)})

    def validated(self, record: ValidationRecord) -> None:
        """Send a validation loss."""
        self._send({"figures": {"step": record.step, **validation_object(record)}})

    def turned_back(self, step: int) -> None:
        """Send the step after which others follow."""
        self._send({"turned_back": step})

    def ended(self, end: RunEnd) -> None:
        """Wait a little until the trackers have sent everything."""
        if self._process is None:
            return
        try:
            said, _ = self._process.communicate(bytes(self._unsent), timeout=CLOSE_S)
            self._tell(said)
        except subprocess.TimeoutExpired:
            self._warn("the trackers did not end in time: their last figures may be missing")
        self._process.kill()
        self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        """As much as the process takes; the rest waits for the next message."""
        if self._process is None:
            return
        assert self._process.stdin is not None, "a pipe was asked for"
        assert self._process.stdout is not None, "a pipe was asked for"
        self._unsent += json.dumps(message).encode() + b"\n"
        with suppress(BlockingIOError):
            self._tell(os.read(self._process.stdout.fileno(), 1 << 16))
        try:
            while self._unsent:
                del self._unsent[: os.write(self._process.stdin.fileno(), self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_NBYTES:
                self._give_up("they are too slow")
        except BrokenPipeError:
            self._give_up("their process has ended; logs/trackers.log may say why")

    def _give_up(self, reason: str) -> None:
        assert self._process is not None, "there is one until now"
        self._process.kill()
        self._process.communicate()
        self._process = None
        self._warn(f"the trackers are left out: {reason}")

    def _tell(self, said: bytes) -> None:
        *lines, self._said = (self._said + said).split(b"\n")
        for line in lines:
            self._warn(line.decode("utf-8", "replace"))


# -- the process -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of one step; the labels say of which link or stage it is."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> str:
        """``loss``, ``link 0 activations 0-1/wire_bytes``, ``stage 1/timing_s/forward``."""
        values = dict(self.labels)
        if "link" in values:
            kind = f"link {values['link']} {values['direction']} {values['from']}-{values['to']}/"
        else:
            kind = f"stage {values['stage']}/" if "stage" in values else ""
        own = f"/{values['set']}" if "set" in values else ""
        return f"{kind}{self.name}{own}" + (f"/{values['part']}" if "part" in values else "")


def figures_of(row: Mapping[str, Any]) -> Iterator[Figure]:
    """The numbers of a line of metrics.jsonl, without those that are null."""
    yield from _numbers({name: value for name, value in row.items() if name not in ("step", *_PARTS)})
    for name, losses in row.get("validations", {}).items():
        yield from _numbers({"validations": losses}, (("set", name),))
    for part in (*row.get("links", ()), *row.get("stages", ())):
        labels = tuple((key, str(part[key])) for key in _LABELS if key in part)
        yield from _numbers({name: value for name, value in part.items() if name not in _LABELS}, labels)


def _numbers(values: Mapping[str, Any], labels: tuple[tuple[str, str], ...] = ()) -> Iterator[Figure]:
    for name, value in values.items():
        if isinstance(value, bool | int | float):
            yield Figure(name, float(value), labels)
        elif isinstance(value, Mapping):
            parts = ((key, each) for key, each in value.items() if isinstance(each, int | float))
            yield from (Figure(name, float(each), (*labels, ("part", key))) for key, each in parts)


class Tracker:
    """One of the programs that figures go to; any exception of its methods ends it."""

    def log(self, step: int, figures: Sequence[Figure]) -> None:
        """Take the figures of a step."""
        raise NotImplementedError

    def turned_back(self, step: int) -> None:
        """Later steps are taken again."""

    def close(self) -> None:
        """Send what is left."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files in `tensorboard/` of the run's folder."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        self._folder = Path(begin["folder"]) / "tensorboard"
        self._open(begin["start_step"])

    def _open(self, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # what earlier files say about later steps is hidden
        self._writer = SummaryWriter(self._folder, purge_step=last_step + 1 if last_step else None, flush_secs=10)

    def log(self, step: int, figures: Sequence[Figure]) -> None:
        """Add a scalar for each."""
        for figure in figures:
            self._writer.add_scalar(figure.path, figure.value, step)

    def turned_back(self, step: int) -> None:
        """Begin a file that hides later steps."""
        self._writer.close()
        self._open(step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run in `wandb/` of the run's folder, sent as the environment's WANDB_… variables say."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tahq"),
            name=begin["config"]["run"]["name"],
            id=begin["id"],
            resume="allow",
            dir=begin["folder"],
            config=begin["config"],
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )
        # its own count of steps cannot go back
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Sequence[Figure]) -> None:
        """Hand them to its process."""
        self._run.log({"step": step, **{figure.path: figure.value for figure in figures}})

    def close(self) -> None:
        """Wait until they are sent, or written if it is offline."""
        self._run.finish()


class Prometheus(Tracker):
    """The newest figures over HTTP, as ``tahq_loss`` or ``tahq_link_wire_bytes{link="0",…}``."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        self._client = importlib.import_module("prometheus_client")
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        host, port = parse_address(begin["config"]["run"]["prometheus"], "run.prometheus")
        self._server, _ = self._client.start_http_server(port, host, registry=self._registry)

    def log(self, step: int, figures: Sequence[Figure]) -> None:
        """Set the gauges."""
        for figure in (Figure("step", step), *figures):
            labels = dict(figure.labels)
            kind = next((f"{each}_" for each in ("link", "stage") if each in labels), "")
            name = f"tahq_{kind}{figure.name}"
            if name not in self._gauges:
                text = f"{figure.name} in metrics.jsonl of tahq"
                self._gauges[name] = self._client.Gauge(name, text, list(labels), registry=self._registry)
            gauge = self._gauges[name]
            (gauge.labels(**labels) if labels else gauge).set(figure.value)

    def close(self) -> None:
        """Stop to listen."""
        self._server.shutdown()


_TRACKERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Tracker]]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "prometheus": Prometheus,
}


class _Trackers:
    """Those that have not failed."""

    def __init__(self, begin: Mapping[str, Any]) -> None:
        self._trackers: dict[str, Tracker] = {}
        for name in begin["config"]["run"]["trackers"]:
            with self._left_out_if_it_fails(name):
                self._trackers[name] = _TRACKERS[name](begin)

    def take(self, message: Mapping[str, Any]) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._left_out_if_it_fails(name):
                if "turned_back" in message:
                    tracker.turned_back(message["turned_back"])
                else:
                    row = message["figures"]
                    tracker.log(row["step"], list(figures_of(row)))

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            with self._left_out_if_it_fails(name):
                tracker.close()

    @contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._trackers.pop(name, None)
            reason = brief(" ".join(str(error).split()), 300) or type(error).__name__
            print(f"{name} is left out: {reason}", flush=True)


def main() -> None:
    """Read the run's description and then its steps from stdin, until it ends."""
    os.nice(10)
    messages = map(json.loads, sys.stdin)
    trackers = _Trackers(next(messages))
    for message in messages:
        trackers.take(message)
    trackers.close()


if __name__ == "__main__":
    main()
