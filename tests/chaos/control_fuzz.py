"""Damaged and impossible control messages, against decoding and the coordinator itself.

What counts as accepted:

- *damaged*: bytes of a message are changed, taken away or added, and its checksum is left as it was: `decode_message`
  must refuse every one of them with RemoteProtocolError.
- *resealed*: bytes of the body are changed, or a value in it is replaced by another, and the checksum is made right
  again. If it still decodes, a real coordinator (with metrics file and console) gets it in place of the true message.
  The run must end in order, with an exit status of errors.py: 0 if the message made sense, otherwise another, with
  an error message. Any other exception is a crash.
"""

import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
from coordinator.conftest import (
    CONFIG_HASH,
    VERSION,
    ScriptedServer,
    VirtualClock,
    make_hello,
    make_prepare,
    make_scene,
)

from tahq.comm.control import messages as say
from tahq.comm.control.encoding import decode_message, encode_message
from tahq.comm.control.messages import ComputeMeasured, Message, PathsMeasured
from tahq.errors import RemoteProtocolError
from tahq.observe.run_view import watch_run

STAGES = 3
_SEAL_NBYTES = 5
_PEER = "worker 3"
_STEPS = 2
_SECOND_EPOCH = 2
_POLLS_OF_A_DEATH = 20
_OVER: Any = object()
_LOST = 1
"""The stage whose worker dies after the first step."""
_NEXT_WORKER = b"stage 1 again"
Heard = tuple[bytes, Message] | None
"""Sender and message; None: the worker of stage `_LOST` has died."""


def transcript() -> list[Heard]:
    """All messages to the coordinator in a run of three stages and two steps, each with evaluation and checkpoint.

    Between the steps the worker of a stage dies, and another takes its place.
    """
    first = [f"stage {stage}".encode() for stage in range(STAGES)]
    second = [_NEXT_WORKER if stage == _LOST else who for stage, who in enumerate(first)]
    return [
        *((who, _join(stage)) for stage, who in enumerate(first)),
        *((who, _hello(stage)) for stage, who in enumerate(first)),
        *((who, say.Ready(stage)) for stage, who in enumerate(first)),
        (first[1], say.Heartbeat(1, 0, "F0")),
        (first[1], say.LinkState(1, 0, 0, "nothing is heard")),
        (first[2], say.NotKept(2, 1, "no room")),
        *_step(0, first),
        None,
        (_NEXT_WORKER, _join(_LOST)),
        (_NEXT_WORKER, _hello(_LOST, 1)),
        *((who, say.Relinked(stage, _SECOND_EPOCH)) for stage, who in enumerate(first) if stage != _LOST),
        (_NEXT_WORKER, say.Ready(_LOST)),
        *_step(1, second),
    ]


def _step(step: int, workers: list[bytes]) -> list[Heard]:
    timing = {"forward": 1.0, "wait:1": 3.0, "backward": 2.0}
    errors = [[[float(stage), 0.0, 0.1]] if stage < STAGES - 1 else [] for stage in range(STAGES)]
    return [
        *(
            (worker, make_prepare(step, stage, timing=timing, active_s=6.0, codec_errors=errors[stage]))
            for stage, worker in enumerate(workers)
        ),
        (workers[-1], say.Evaluated(step, [10], [30.0], [25.0])),
        *((who, say.Snapshotted(step + 1, stage, f"stage-{stage}", "ab", 100)) for stage, who in enumerate(workers)),
    ]


def _join(stage: int) -> Message:
    return say.Join(stage, VERSION, f"host{stage}", 100 + stage)


def _hello(stage: int, start_step: int = 0) -> Message:
    data = {"tokenizer_hash": "t", "data_hash": "d", "num_train_samples": 100} if stage in (0, STAGES - 1) else {}
    return make_hello(stage, start_step=start_step, **data)


def other_messages() -> list[Message]:
    """Messages that are sent only if something is wrong, or only to a worker."""
    return [
        say.Assign(0, 7, json.dumps({"a": 1}), CONFIG_HASH, "step-4", {"stage-0": "ab"}, 4),
        say.Refuse("no", [["version", "1", "2"]]),
        say.Plan(1, 0, 4, [[0, 1, "host1", "10.0.0.1:9000", "zmq"]], 100, 0),
        say.Relink(2, [[0, 1, "host1", "10.0.0.1:9000", "zmq"]], [[0, 1, 1, -1]]),
        say.Relinked(0, _SECOND_EPOCH, [0]),
        say.Widen(0, 3),
        say.Published(4, 4),
        say.StartOver("a log is not whole"),
        say.StandBy(10.0, 120.0),
        say.Hold([0]),
        say.Copy(4, 1, "stage-001-ab", "ab", "10.0.0.1:9001", "cd" * 32),
        say.Admit(["ab" * 32]),
        say.FindFiles(1, True),
        say.FilePlaces(7, CONFIG_HASH, [["10.0.0.1:9001", "cd" * 32]]),
        say.ServeFiles("7699/3-1-0-" + "ab" * 16, "cd" * 32),
        say.Copied(4, 1, 2),
        say.Start(0, [[0, 0, 1]]),
        say.Commit(1, True, 0.5, True, True, False, [[0, 1, 2]]),
        say.Traced(0, 0, 0, 1, ["main"], ["compute"], ["F0"], [""], [1.0], [2.0], [0], [0.0]),
        say.StopRequest(1, 15),
        say.Failed(1, "out of memory", 4),
        ComputeMeasured(1, 1 << 30, [{"forward": 0.1, "width": None}], {"raw": [1e-9, 1e-9]}),
        PathsMeasured(1, 0, [0.01], [1e6], [1e6]),
    ]


# -- damaged --------------------------------------------------------------------------------------


def fuzz_damaged_control(count: int, seed: int) -> dict[str, int]:
    """Change bytes of messages under the old checksum; all must be refused."""
    dice = Random(seed)
    messages = [*(said[1] for said in transcript() if said is not None), *other_messages()]
    base = [encode_message(message) for message in messages]
    num_refused = 0
    for _ in range(count):
        true = dice.choice(base)
        data = _damage(dice, true)
        if data == true:
            continue
        assert isinstance(_read(data), str), f"accepted: {data.hex()}"
        num_refused += 1
    return {"refused": num_refused}


def _damage(dice: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    match dice.randrange(4):
        case 0:
            del changed[dice.randrange(len(changed)) :]
        case 1:
            changed += dice.randbytes(dice.randint(1, 20))
        case _:
            for _ in range(dice.randint(1, 8)):
                changed[dice.randrange(len(changed))] ^= dice.randint(1, 255)
    return bytes(changed)


# -- resealed -------------------------------------------------------------------------------------


def fuzz_resealed_control(count: int, seed: int) -> dict[str, int]:
    """Change and reseal messages; a coordinator gets those that still decode. Returns counts by outcome."""
    with TemporaryDirectory(prefix="tahq-chaos-") as folder:
        return _fuzz_resealed(Random(seed), count, Path(folder))


def _fuzz_resealed(dice: Random, count: int, folder: Path) -> dict[str, int]:
    calm, others = transcript(), other_messages()
    counts: Counter[str] = Counter()
    assert _status(calm, folder) == 0
    places = [place for place, said in enumerate(calm) if said is not None]
    for _ in range(count):
        place = dice.choice(places)
        who, true = calm[place] or (b"", say.Ready(0))
        is_in_place = dice.random() < 0.8
        message = _read(_mutate(dice, true if is_in_place else dice.choice(others)))
        if isinstance(message, str):
            counts["refused"] += 1
            continue
        said = [*calm[:place], (who, message), *calm[place + is_in_place :]]
        try:
            status = _status(said, folder)
        except Exception as error:
            error.add_note(f"after {message} in place {place}, from {who.decode()}")
            raise
        counts[f"status {status}"] += 1
    return dict(counts)


def _mutate(dice: Random, message: Message) -> bytes:
    data = encode_message(message)
    if dice.random() < 0.4:
        body = _damage(dice, data[_SEAL_NBYTES:])
    else:
        name, fields = msgpack.unpackb(data[_SEAL_NBYTES:])
        body = msgpack.packb([name, _with_one_replaced(dice, fields)])
    return data[:1] + zlib.crc32(body).to_bytes(4, "little") + body


def _with_one_replaced(dice: Random, value: Any) -> Any:
    """A copy in which one value, at any depth, is another; most often one of its own type."""
    if isinstance(value, dict) and value and dice.random() < 0.95:
        key = dice.choice(sorted(value))
        return {**value, key: _with_one_replaced(dice, value[key])}
    if isinstance(value, list) and value and dice.random() < 0.6:
        place = dice.randrange(len(value))
        return [*value[:place], _with_one_replaced(dice, value[place]), *value[place + 1 :]]
    own = _VALUES.get(type(value)) if dice.random() < 0.9 else None
    return dice.choice(own or dice.choice(list(_VALUES.values())))


_VALUES: dict[type, list[Any]] = {
    int: [0, 1, 2, 3, -1, -2, 7, 255, 2**31, 2**32, 2**63, 2**64 - 1, -(2**63)],
    float: [0.0, -0.0, 1.0, -1.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"), 2.0**53],
    bool: [True, False],
    str: ["", "0", "x" * 5000, "\0", "\x1b[2J", "../../etc/passwd", "\u202e", "[bold]", "{0}", "%s", "host:1", "\n"],
    list: [[], [[]], [0.0], [[0.0]], [[1.0] * 9], [[-1.0] * 9], [[float("nan")] * 9], [[1e300] * 9], [1.0] * 1000],
    dict: [{}, {"forward": -1.0}, {"forward": float("nan")}, {"": 1.0}, {"wait:": 1.0}, {"beside:": 1e308}],
    type(None): [None, 0, -1, 2**63, 1.0, float("nan")],
}


def _read(data: bytes) -> Message | str:
    """The message, or the text of the error that refuses it, which names the peer."""
    try:
        return decode_message(data, _PEER)
    except RemoteProtocolError as error:
        said = str(error)
    assert _PEER in said, said
    return said


class _Transcript(ScriptedServer):
    """The coordinator's socket, which yields the messages of a list, one per poll."""

    def __init__(self, said: list[Heard]) -> None:
        super().__init__(VirtualClock())
        self._said: Iterator[Heard] = iter(said)
        self._silent_polls = 0
        self.is_dead = False
        """Whether the worker of stage `_LOST` has died."""

    def poll(self, timeout_s: float) -> list[tuple[bytes, Message]]:
        said = None if self._silent_polls else next(self._said, _OVER)
        if said is not None and said is not _OVER:
            return [said]
        self.clock.now_s += timeout_s
        if said is None:
            self.is_dead = True
            self._silent_polls = (self._silent_polls or _POLLS_OF_A_DEATH) - 1
        return []

    def send(self, identity: bytes, message: Message) -> None:
        """A worker must be able to decode the message."""
        assert decode_message(encode_message(message), "coordinator") is not None


def _status(said: list[Heard], folder: Path) -> int:
    server = _Transcript(said)
    out = io.StringIO()
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    scene = make_scene(folder)
    scene.server, scene.clock, scene.observer = server, server.clock, watch_run(metrics, 0, out=out, err=out)
    coordinator = scene.build(
        steps=_STEPS,
        eval_every=1,
        checkpoint_every=1,
        peer_timeout_s=5.0,
        give_up_s=5.0,
        join_timeout_s=2.0,
        leave_timeout_s=0.1,
    )
    scene.when(lambda: server.is_dead, lambda: coordinator.worker_exited(_LOST, -9))
    status = scene.run()
    assert status in (0, 1, 2, 3, 4, 5, 130, 143), f"exit status {status}"
    assert status == 0 or "tahq-launch: " in out.getvalue(), "the run ended without a message"
    for line in metrics.read_text().splitlines():
        json.loads(line)
    return status
