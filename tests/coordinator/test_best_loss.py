"""The best checkpoint, and runs that stop early: the decision alone, and runs of scripted workers."""

import math
from dataclasses import replace

import pytest
from coordinator.conftest import ScriptedWorker
from coordinator.test_returning import AGAIN

from tahq.comm.control import messages as say
from tahq.coordinator.best_loss import BestLoss
from tahq.coordinator.journal import Journal
from tahq.coordinator.link_codecs import CodecOptions
from tahq.pipeline.config import EarlyStopping

EARLY = {"eval_every": 2, "early_stopping": {"patience": 2}}


@pytest.mark.parametrize(
    ("losses", "min_delta", "best", "num_worse"),
    [
        ([3.0, 2.0, 2.5, math.nan], 0.0, 2.0, 2),
        ([math.nan, 2.0, math.inf, 1.5], 0.0, 1.5, 0),
        ([3.0, 2.75, 2.5, 2.25], 0.5, 2.25, 3),  # lower each time, but never by enough
        ([3.0, 2.75, 2.0], 0.5, 2.0, 0),
        ([math.nan], 0.0, math.inf, 1),
    ],
)
def test_loss_counts_as_lower_only_by_more_than_min_delta(losses, min_delta, best, num_worse):
    rule, found = EarlyStopping(patience=2, min_delta=min_delta), BestLoss()
    for step, loss in enumerate(losses, start=1):
        found = found.after(step, loss, rule)
    assert (found.loss, found.num_worse) == (best, num_worse)
    assert found.step == (losses.index(best) + 1 if math.isfinite(best) else 0)
    assert bool(found.why_over(rule)) == (num_worse >= 2)
    assert found.why_over(None) == ""
    assert BestLoss.restored(found.saved()) == found


class Evaluating(ScriptedWorker):
    """Reports these losses without codecs, by step; and writes a checkpoint of the step before as it is told."""

    losses: dict

    def report(self, commit):
        if commit.snapshot_before:
            self.send(say.Snapshotted(commit.step, self.stage, f"stage-{self.stage:03d}-ab", "ab", 100))
        if commit.evaluate and self.stage == self.num_stages - 1:
            self.send(say.Evaluated(commit.step, [10], [30.0], [10 * self.losses[commit.step + 1]]))
        super().report(replace(commit, evaluate=False))


def evaluated(scene, losses, journal=None, **options):
    Evaluating.losses = losses
    scene.workers(Evaluating)
    scene.build(journal, **({"steps": 12, "eval_every": 2, "best": "after"} | options))
    scene.coordinator.restart = scene.restart


def published(scene):
    return [(parts.step, parts.is_best) for parts in scene.published]


def test_lowest_loss_has_a_checkpoint_of_its_step_and_no_other_evaluation_has(scene):
    evaluated(scene, {2: 3.0, 4: 2.0, 6: 2.5, 8: 1.0, 10: 1.5, 12: 1.25}, checkpoint_every=8)
    assert scene.run() == 0
    assert published(scene) == [(2, True), (4, True), (8, True), (12, False)]  # 8 was due anyway
    told = scene.server.told(b"worker-1", say.Commit)
    assert [commit.step for commit in told if commit.snapshot_before] == [2, 4]
    assert [commit.best_snapshot for commit in told] == [0, 0, 0, 2, 2, 4, 4, 4, 8, 8, 8, 8]
    assert [record.is_best for record in scene.observer.of("snapshot_written")] == [True, True, True, False]


def test_state_that_changes_within_a_step_is_written_with_each_evaluation(scene):
    evaluated(scene, {4: 2.0, 8: 3.0, 12: 1.0}, best="at once", eval_every=4)
    assert scene.run() == 0
    assert published(scene) == [(4, True), (8, False), (12, True)]


def test_run_stops_one_step_after_its_patience_with_reason_and_status_0(scene):
    evaluated(scene, {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.25}, **EARLY)
    assert scene.run() == 0
    assert scene.steps() == [*range(1, 10)]
    assert published(scene) == [(2, True), (4, True), (9, False)]
    why = "stopped after step 9 of 12: no validation loss was lower in 2 evaluations (training.early_stopping)"
    assert scene.end.message == f"{why}; the lowest is 2.0000, after step 4"
    assert scene.published[-1].point.saved_codecs["best_loss"] == [2.0, 4, 2]


def test_stage_that_is_lost_writes_its_part_of_the_best_checkpoint_when_it_is_back(scene):
    evaluated(scene, {step: 3.0 - step / 10 for step in range(2, 13, 2)})
    first = scene.stages[1]
    first.report = lambda commit, report=Evaluating.report: scene.kill(1) if commit.step == 4 else report(first, commit)
    assert scene.run() == 0
    assert published(scene) == [(step, True) for step in range(2, 13, 2)]
    assert next(each.step for each in scene.server.told(AGAIN, say.Commit) if each.snapshot_before) == 4


@pytest.mark.parametrize("after_steps", [3, 7, 9])
def test_restarted_coordinator_stops_at_the_same_step_for_the_same_reason(scene, new_scene, tmp_path, after_steps):
    losses = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.25}
    evaluated(calm := new_scene(), losses, **EARLY)
    assert calm.run() == 0

    class KilledError(Exception):
        pass

    def die():
        raise KilledError

    with Journal(tmp_path / "journal.sqlite") as journal:
        evaluated(scene, losses, journal, **EARLY)
        scene.one_message_a_turn()
        scene.after(after_steps, die)
        with pytest.raises(KilledError):
            scene.run()
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.note(is_over=False)  # a process that is killed writes no end
        facts = journal.facts
        later = new_scene()
        origin = {"start_step": facts.step, "snapshot": facts.snapshot, "snapshot_files": facts.files}
        codecs = CodecOptions(saved=facts.codecs)
        evaluated(later, losses, journal, **EARLY, **origin, next_sample=8 * facts.step, epoch=2, codecs=codecs)
        assert later.run() == 0
    assert later.end.message == calm.end.message
    assert later.steps()[-1] == 9
