"""A pipeline of scripted workers on a virtual clock: whole runs without a socket or a sleep."""

import json
import math
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import pytest
from support.at_once import AtOnce

from tahq.comm.control import messages as say
from tahq.coordinator.context import CoordinatorOptions
from tahq.coordinator.observer import RunObserver
from tahq.coordinator.service import Coordinator
from tahq.pipeline.config import TrainingConfig

VERSION = "0.1.0"
CONFIG_HASH = "c0ffee"


def make_hello(stage, **changes):
    hello = say.Hello(stage, VERSION, CONFIG_HASH, "", "", f"10.0.0.{stage}:9000", "cpu", "2.13.0", 1000, 0)
    return replace(hello, **changes)


def make_prepare(step, stage, num_stages=3, **changes):
    last = stage == num_stages - 1
    forward = [] if last else [[stage, 0.0, 4.0, 1000.0, 1100.0, 2000.0, 0.5, 0.4, 0.25, 0.01]]
    backward = [[stage - 1, 1.0, 4.0, 2000.0, 2100.0, 2000.0, 0.5, 0.4, 0.25, 0.01]] if stage else []
    prepare = say.Prepare(
        step=step,
        stage=stage,
        norm2=[0.25, 0.5 * (stage + 1)],
        finite=True,
        loss_sum=32.0 if last else None,
        tokens=16 if last else None,
        batch_digest=f"batch{step}" if stage == 0 or last else "",
        timing={"forward": 1.0, "wait": 3.0},
        links=[[float(value) for value in row] for row in forward + backward],
    )
    return replace(prepare, **changes)


class VirtualClock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class ScriptedServer:
    """Stands for the socket: workers answer at once, polling costs virtual time."""

    address = "127.0.0.1:5555"

    def __init__(self, clock):
        self.clock = clock
        self.inbox = []
        self.sent = []
        self.num_left = 0
        """Messages that have left, of those sent; only `flush` counts them."""
        self.workers = {}
        self.offsets = {}
        self.keys = {}
        self.random = None

    def poll(self, timeout_s):
        if not self.inbox:
            self.clock.now_s += timeout_s
            for worker in self.workers.values():
                worker.beat()
        if self.random is not None and self.inbox:  # the workers' lines are mixed, and each keeps its order
            return [self.inbox.pop(self.pick()) for _ in range(self.random.randint(1, len(self.inbox)))]
        ready, self.inbox = self.inbox, []
        return ready

    def pick(self):
        lines = [who for who, _ in self.inbox]
        return lines.index(self.random.choice(lines))

    def send(self, identity, message):
        self.sent.append((identity, message))
        if identity in self.workers:
            self.workers[identity].receive(message)

    def flush(self):
        self.num_left = len(self.sent)

    def clock_offset(self, identity):
        return self.offsets.get(identity)

    def public_key(self, identity):
        return self.keys.get(identity, "")

    def is_owner(self, identity):
        return identity == b"owner"

    def take_refused(self):
        return []

    def told(self, identity, kind):
        return [message for who, message in self.sent if who == identity and isinstance(message, kind)]


@dataclass
class ScriptedWorker:
    """A worker that keeps to the protocol, unless told to do otherwise.

    `hello` and `prepare` are fields to change; `say` maps a step to messages sent instead of its Prepare; `ignores` are
    types of messages that it does not react to; of the checkpoints `damaged`, by step, its host has no whole file.
    """

    server: ScriptedServer
    stage: int
    num_stages: int = 3
    hello: dict = field(default_factory=dict)
    prepare: dict = field(default_factory=dict)
    silent_from_step: int | None = None
    say: dict = field(default_factory=dict)
    version: str = VERSION
    snapshot_error: str = ""
    copies_through: float = math.inf
    damaged: tuple = ()
    ignores: tuple = ()
    cannot_dial: tuple = ()
    left: bool = False
    silent: bool = False
    step: int = -1
    generation: int = 0
    lacking: list = field(default_factory=list)

    @property
    def identity(self):
        return f"worker-{self.stage}{'-again' * self.generation}".encode()

    def start(self):
        self.server.workers[self.identity] = self
        self.send(say.Join(self.stage, self.version, f"host{self.stage}", 100 + self.stage))

    def send(self, message):
        if not self.left and not self.silent:
            self.server.inbox.append((self.identity, message))

    def beat(self):
        self.send(say.Heartbeat(self.stage, self.step, "F0"))

    def receive(self, message):
        if isinstance(message, say.Refuse | say.Abort | say.Bye):
            self.left = True
        elif not isinstance(message, self.ignores):
            self.react(message)

    def react(self, message):
        match message:
            case say.Assign() if message.start_step in self.damaged and message.snapshot:
                self.send(say.NoCheckpoint(message.stage, message.start_step, "stage-001-ab is damaged"))
            case say.Assign():
                first_or_last = self.stage in (0, self.num_stages - 1)
                data = {"tokenizer_hash": "t", "data_hash": "d", "num_train_samples": 100} if first_or_last else {}
                self.send(make_hello(message.stage, start_step=message.start_step, **(data | self.hello)))
            case say.TryPeers(peers):
                for peer, address, _ in peers:
                    self.send(say.Tried(self.stage, peer, address, "timed out" if peer in self.cannot_dial else ""))
            case say.Plan():
                self.send(say.Ready(self.stage))
            case say.Relink():
                self.send(say.Relinked(self.stage, message.epoch, self.lacking))
            case say.Copy():
                error = "" if message.step <= self.copies_through else "no room"
                self.send(say.Copied(message.step, message.stage, self.stage, error))
            case say.Start(step):
                self.begin(step)
            case say.Commit():
                self.report(message)
                if not message.stop:
                    self.begin(message.step + 1)

    def begin(self, step):
        self.step = step
        if step == self.silent_from_step:
            self.silent = True
        for message in self.say.get(step, [make_prepare(step, self.stage, self.num_stages, **self.prepare)]):
            self.send(message)

    def resume(self):
        """Go on with the step at which it was told to stop."""
        self.say, self.silent, self.silent_from_step = {}, False, None
        self.begin(self.step)

    def report(self, commit):
        if commit.evaluate and self.stage == self.num_stages - 1:
            self.send(say.Evaluated(commit.step, [10], [30.0], [25.0]))
        if commit.snapshot:
            step, error = commit.step + 1, self.snapshot_error
            self.send(say.Snapshotted(step, self.stage, f"stage-{self.stage:03d}-ab", "ab", 100, error))


class Recorder(RunObserver):
    """Keeps all calls, and forwards them to another observer if it has one."""

    def __init__(self):
        self.calls = []
        self.other = RunObserver()

    def __getattribute__(self, name):
        if name in RunObserver.__dict__ and not name.startswith("_"):
            forward = getattr(self.other, name)
            return lambda *args: (self.calls.append((name, *args)), forward(*args))
        return super().__getattribute__(name)

    def of(self, name):
        return [call[1] if len(call) == 2 else call[1:] for call in self.calls if call[0] == name]


@dataclass
class Scene:
    """A coordinator, its socket, its workers, its observer, and what is to happen when."""

    clock: VirtualClock
    server: ScriptedServer
    observer: Recorder
    options: CoordinatorOptions
    published: list = field(default_factory=list)
    publish_error: Exception | None = None
    executor: Executor = field(default_factory=AtOnce)
    coordinator: Coordinator | None = None
    stages: list = field(default_factory=list)
    """The worker of each stage, by stage."""
    events: list = field(default_factory=list)

    def build(self, journal=None, relay=None, **changes):
        training = {name: changes.pop(name) for name in list(changes) if name in TrainingConfig.model_fields}
        if training:
            changes["training"] = TrainingConfig(**(self.options.training.model_dump() | training))
        self.options = replace(self.options, **changes)
        means = {
            "publish": self.publish,
            "executor": self.executor,
            "journal": journal,
            "relay": relay,
            "clock": self.clock,
        }
        self.coordinator = Coordinator(self.options, self.server, self.observer, **means)
        return self.coordinator

    def publish(self, parts):
        if self.publish_error is not None:
            raise self.publish_error
        self.published.append(parts)

    def workers(self, kind=ScriptedWorker, only=None, **changes_by_stage):
        """Start one worker per stage (`only`: these); `stage1={...}` changes that one."""
        made = []
        for stage in range(self.options.num_stages) if only is None else only:
            changes = changes_by_stage.get(f"stage{stage}", {})
            made.append(kind(self.server, stage, self.options.num_stages, **changes))
        for worker in made:
            worker.start()
        self.stages = made
        return made

    def when(self, condition, action):
        """Have an action happen once, as soon as its condition holds."""
        self.events.append((condition, action))

    def after(self, num_steps, action):
        """Have an action happen once, as soon as so many steps are committed."""
        self.when(lambda: len(self.losses()) >= num_steps, action)

    def kill(self, stage):
        """The stage's worker dies: nothing that it has not said yet is ever heard."""
        worker = self.stages[stage]
        if not worker.left:
            worker.left = True
            del self.server.workers[worker.identity]
            self.coordinator.worker_exited(stage, -9)

    def restart(self, stage, **changes):
        """Start the stage's next worker."""
        before = self.stages[stage]
        self.server.workers.pop(before.identity, None)
        fresh = {"generation": before.generation + 1, "left": False, "silent": False, "step": -1}
        self.stages[stage] = replace(before, **(fresh | changes))
        self.stages[stage].start()
        return True

    def start_over_when_told(self, **changes):
        """Workers that are told to start over do so, and killed ones are started again."""
        self.coordinator.restart = self.restart

        def tick():
            for stage, worker in enumerate(self.stages):
                if self.server.told(worker.identity, say.StartOver) and worker.identity in self.server.workers:
                    self.restart(stage, **changes)

        self.events.append((None, tick))

    def one_message_a_turn(self):
        """So that a worker can be killed between any two."""
        original = self.server.poll

        def poll(timeout_s):
            if self.server.inbox:
                self.clock.now_s += 0.11
                return [self.server.inbox.pop(0)]
            return original(timeout_s)

        self.server.poll = poll

    def tick(self):
        for event in list(self.events):
            condition, action = event
            if condition is None:
                action()
            elif condition():
                self.events.remove(event)
                action()

    def run(self, tick=None, **changes):
        return (self.coordinator or self.build(**changes)).run(tick or self.tick)

    @property
    def end(self):
        return self.observer.of("ended")[0]

    def warnings(self):
        return "\n".join(self.observer.of("warned"))

    def losses(self):
        return [record.loss for record in self.observer.of("step_committed")]

    def steps(self):
        return [record.step for record in self.observer.of("step_committed")]


def make_scene(run_folder):
    clock = VirtualClock()
    options = CoordinatorOptions(
        num_stages=3,
        run_id=7,
        run_folder=run_folder,
        config_json=json.dumps({"a": 1}),
        config_hash=CONFIG_HASH,
        version=VERSION,
        training=TrainingConfig(steps=4, global_batch=8),
        resume_command="tahq-launch c.yaml --resume",
    )
    return Scene(clock, ScriptedServer(clock), Recorder(), options)


@pytest.fixture
def scene(tmp_path):
    return make_scene(tmp_path)


@pytest.fixture(scope="session")
def new_scene(tmp_path_factory):
    """For properties: a fresh scene for every example."""
    return lambda: make_scene(tmp_path_factory.getbasetemp())
