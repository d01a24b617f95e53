"""Faults of links: cut, reset, flapping, and bad for as long as the run lasts.

The run has an emulated network, at 20 Mbit/s unless a row says otherwise; faults begin at a step drawn from the number
of the attempt.
"""

import time
from functools import partial
from typing import Any

from chaos.memory import resident_kib
from chaos.row import Attempt, Figures, Row
from chaos.starting import LORA, STAGES, by_hand, faults, shaped_network, small_run
from tahq_netem.network.description import PathShape
from tahq_netem.network.faults import FaultEvent

RATE_BITS_PER_S = 20e6
STALL_BEYOND_OUTAGE_S = 5.0
BAD_S = 600.0
MAX_GROWTH_KIB = 32 * 1024
"""Of a worker in that time: its queues have bounds."""
_BAD = PathShape(delay_s=0.1, jitter_s=0.1, loss=0.02, reorder=0.02)


def _disturbed(
    attempt: Attempt, config: dict[str, Any], timeline: str, *, timeout_s: float, **shape: float
) -> tuple[Figures, list[FaultEvent]]:
    """A run with a timeline of faults: its outcome, and what was done to the network."""
    with (
        shaped_network(rate=RATE_BITS_PER_S, **shape) as network,
        by_hand(attempt.folder, config, network) as scene,
    ):
        began_s = time.time()
        with faults(scene, network, timeline) as player:
            scene.wait_for_end(timeout_s)
        assert not player.waiting, f"the run ended before {player.waiting}"
        assert all(event.change != "undone" for event in player.log), "the run ended before the fault did"
        times = [began_s + event.at_s for event in player.log]
        measured = attempt.finish(scene, config, min(times, default=began_s), max(times, default=began_s))
    downs = [event for event in player.log if event.fault.what == "down"]
    begins, ends = (
        [began_s + event.at_s for event in downs if event.change == change] for change in ("began", "ended")
    )
    outages = list(zip(begins, ends, strict=True))
    for before_s, after_s, stall_s in scene.stalls():
        outage_s = sum(max(0.0, min(end, after_s) - max(begin, before_s)) for begin, end in outages)
        assert not times or stall_s <= outage_s + STALL_BEYOND_OUTAGE_S, f"stalled {stall_s:.1f} s of {outage_s:.1f} s"
    if not times:  # nothing that began and ended
        measured = {name: measured[name] for name in ("restarts", "stall_s", "steps_lost")}
    return measured, player.log


def _cut(attempt: Attempt, duration_s: float, **sections: Any) -> Figures:
    num_steps = 8
    step, host = attempt.dice.randint(2, num_steps - 4), attempt.dice.randrange(STAGES)
    timeline = f"- {{step: {step}, link: host{host}, what: down, for: {duration_s}s}}"
    return _disturbed(attempt, small_run(num_steps, **sections), timeline, timeout_s=duration_s + 120)[0]


def resets(attempt: Attempt) -> Figures:
    """Three resets, each in the middle of a frame: links are busy for nearly all of a step."""
    steps = sorted(attempt.dice.sample(range(1, 7), 3))
    timeline = "\n".join(
        f"- {{step: {step}, link: host{attempt.dice.randrange(STAGES)}, what: reset}}" for step in steps
    )
    measured, log = _disturbed(attempt, small_run(8), timeline, timeout_s=120)
    num_reset = sum(event.num_connections or 0 for event in log)
    assert num_reset >= 3
    return {**measured, "connections_reset": num_reset}


def flapping(attempt: Attempt) -> Figures:
    """Down and up for 2 s each; steps are short, so that no outage but the present one keeps a step waiting."""
    host = attempt.dice.randrange(STAGES)
    downs = [4.0 * index + 1.0 for index in range(15)]
    timeline = "\n".join(f"- {{at: {at_s}s, link: host{host}, what: down, for: 2s}}" for at_s in downs)
    return _disturbed(attempt, small_run(260), timeline, timeout_s=300)[0]


def _bad_network(attempt: Attempt, **shape: float) -> Figures:
    """The network is bad from the first packet to the last; `stall` is the excess of the slowest step."""
    return _disturbed(attempt, small_run(8), "[]", timeout_s=300, **shape)[0]


def bad_for_10_min(attempt: Attempt) -> Figures:
    """Loss, jitter and reordering together, for ten minutes of a run that a good network then takes to its end."""
    lasts_s, config = BAD_S * attempt.scale, small_run(400)
    with shaped_network(rate=RATE_BITS_PER_S) as network, by_hand(attempt.folder, config, network) as scene:
        scene.wait_for_step(2)
        good, began_s = network.plan.paths, time.time()
        for source, destination in good:
            network.set_plan(network.plan.with_path(source, destination, _BAD))
        sizes_kib = {worker.pid: resident_kib(worker.pid) for worker in scene.workers}
        scene.wait(lambda: time.time() >= began_s + lasts_s, lasts_s + 10, "ten minutes")
        grown_kib = [resident_kib(pid) - before for pid, before in sizes_kib.items()]
        num_bad, ended_s = scene.num_steps, time.time()
        for (source, destination), path in good.items():
            network.set_plan(network.plan.with_path(source, destination, path))
        measured = attempt.finish(scene, config, began_s, ended_s, timeout_s=400)
    assert 2 < num_bad < 400, f"{num_bad} steps in the bad time"
    assert max(grown_kib) < MAX_GROWTH_KIB, f"workers grew by {grown_kib} KiB"
    return {**measured, "steps_in_it": num_bad, "grew_mb": max(grown_kib) * 1024 / 1e6}


_LINK = ("namespaces",)
_BORNE = "BX; no restarts; stall ≤ outage + 5 s"
_ALIVE = "BX; no restarts; no false death"
_RESET = "TCP connections of a host reset mid-frame, three times"
_BAD_TIME = "2 % loss, delays of 100 ± 100 ms and reordering, together, for ten minutes"
_reordering = partial(_bad_network, delay=0.02, reorder=0.05)

LINK_ROWS = (
    Row("cut-1s", "a host's link cut for 1 s", _BORNE, partial(_cut, duration_s=1.0), 10, True, _LINK),
    Row("reset", _RESET, _BORNE, resets, 10, True, (*_LINK, "tcp-reset")),
    Row(
        "cut-1s-adapters",
        "the same, training adapters",
        _BORNE,
        partial(_cut, duration_s=1.0, adapter=LORA),
        10,
        True,
        _LINK,
    ),
    Row("cut-30s", "a host's link cut for 30 s", _BORNE, partial(_cut, duration_s=30.0), 45, needs=_LINK),
    Row("flapping", "a host's link down for 2 s of every 4, for a minute", _BORNE, flapping, 110, needs=_LINK),
    Row("loss", "5 % of all packets lost", _ALIVE, partial(_bad_network, delay=0.02, loss=0.05), 40, needs=_LINK),
    Row("jitter", "delays of 200 ± 200 ms", _ALIVE, partial(_bad_network, delay=0.2, jitter=0.2), 40, needs=_LINK),
    Row("reordering", "5 % of all packets overtake others", _ALIVE, _reordering, 10, needs=_LINK),
    Row("bad-10min", _BAD_TIME, f"{_ALIVE}; queues bounded", bad_for_10_min, 750, needs=_LINK),
)
