"""Stages finish and stay within their depths under any schedule and any order of arrival.

Real engines on fake links with a virtual clock (`support/shuffled_links.py`); computing takes no time.
"""

import threading
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cuts import codec_table
from support.schedules import schedule
from support.shuffled_links import Deadlock, ShuffledNetwork

from tahq.data.batches import StepBatch
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import load_spec
from tahq.models.partition import BlockRange
from tahq.models.sleeping_slice import SleepingSlice
from tahq.pipeline.boundary import Boundary, CutIdentity
from tahq.pipeline.engine import Chunk, StageEngine, StepShape
from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.schedule import Schedule
from tahq.pipeline.spans import Stopwatch

CPU = torch.device("cpu")
CHANNELS = 2


@dataclass(frozen=True)
class Batches:
    """Tokens that are all zero."""

    count: int

    def train(self, step: int) -> StepBatch:
        tokens = torch.zeros(self.count, 1, dtype=torch.int64)
        return StepBatch(tokens, tokens, torch.arange(self.count), self.count, "", 1)


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble", "interleaved"]))
    chunks = draw(st.integers(2, 3)) if name == "interleaved" else 1
    stages = draw(st.integers(2 if chunks > 1 else 1, 5))
    count = draw(st.integers(1, 8))
    some = st.lists(st.integers(chunks, 2 * chunks * stages), min_size=stages, max_size=stages)
    depths = None if name == "gpipe" else draw(st.none() | some)
    return generate(name, stages, count, depths=depths, chunks_per_stage=chunks), depths


def engines(schedule: Schedule, network: ShuffledNetwork) -> list[StageEngine]:
    """One engine per stage, joined by the network's links."""
    table = codec_table("raw:dtype=fp16", "raw:dtype=fp16")
    links = [network.link(cut) for cut in range(schedule.num_chunks - 1)]
    cuts = [
        [Boundary(end, CutIdentity(1, 0, cut), table, CPU, Stopwatch()) for end in ends]
        for cut, ends in enumerate(links)
    ]
    config = ModelConfig(family="gpt2", num_layers=schedule.num_chunks, hidden_size=CHANNELS, num_heads=1)
    spec = load_spec(config, vocab_size=2, seq_len=1)

    def chunk(number: int) -> Chunk:
        blocks = BlockRange(number, number + 1, schedule.num_chunks)
        module = SleepingSlice(spec, blocks, 0.0, 0.0, device=CPU, random=RandomContext(0))
        incoming = cuts[number - 1][1] if number else None
        return Chunk(module, incoming, cuts[number][0] if number + 1 < schedule.num_chunks else None)

    return [
        StageEngine(
            chunks={number: chunk(number) for number, at in enumerate(schedule.placement) if at == stage},
            actions=row,
            shape=StepShape(schedule.num_micro_batches, 1, 1, CHANNELS),
            batches=Batches(schedule.num_micro_batches),
            random=RandomContext(0),
            device=CPU,
        )
        for stage, row in enumerate(schedule.actions)
    ]


def run(schedule: Schedule, seed: int) -> list[int]:
    """The peaks in flight of one step, by stage.

    Raises:
        Deadlock: the stages wait for each other.
    """
    network = ShuffledNetwork(schedule.num_stages, seed)
    peaks, errors = [0] * schedule.num_stages, []

    def note_held(number: int, engine: StageEngine) -> None:
        """Called before each action: activations are held after each forward but the last, which a backward follows."""
        held = engine._step.in_flight.keys() | engine._step.deferred.keys()
        peaks[number] = max(peaks[number], len(held))

    def stage(number: int, engine: StageEngine) -> None:
        try:
            engine.on_action = lambda *_: note_held(number, engine)
            engine.run_step(0)
        except BaseException as error:
            errors.append(error)
        finally:
            network.leave()

    threads = [threading.Thread(target=stage, args=each) for each in enumerate(engines(schedule, network))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return peaks


def check(case, seed) -> None:
    schedule, depths = case
    peaks = run(schedule, seed)
    assert peaks == [schedule.max_in_flight(stage) for stage in range(schedule.num_stages)]
    if depths is not None:
        assert all(peak <= depth for peak, depth in zip(peaks, depths, strict=True))


@given(schedules(), st.integers(0, 2**32))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_stages_finish_and_stay_within_their_depths(case, seed):
    check(case, seed)


@pytest.mark.acceptance
@pytest.mark.timeout(7200)
@given(schedules(), st.integers(0, 2**32))
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
def test_stages_finish_and_stay_within_their_depths_in_ten_thousand_cases(case, seed):
    check(case, seed)


def test_stages_that_wait_for_each_other_are_found_out():
    """An invalid schedule, whose stages wait for each other."""
    crossed = schedule("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(Deadlock):
        run(crossed, 0)
