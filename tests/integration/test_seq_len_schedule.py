"""Samples that are cut into shorter sequences in the first steps."""

from typing import Any

import pytest
from support.exactness import assert_equal_to_the_bit, plain
from support.runs import assert_same_run, overrides, tiny, train

SCHEDULE = [[8, 2], [16, 4]]


def config(training: dict[str, Any] | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    always = {"steps": 6, "seq_len_schedule": SCHEDULE, "eval_every": 3, "eval_batches": 1}
    return tiny(training={**always, **(training or {})}, model={"dropout": 0.1}, **sections)


@pytest.fixture(scope="module")
def expected():
    return plain(config())


@pytest.mark.parametrize("pipeline", [{"stages": 1, "schedule": "gpipe"}, {"stages": 3, "schedule": "zero-bubble"}])
def test_any_number_of_stages_gives_the_plain_loop_over_shorter_samples(tmp_path, expected, pipeline):
    assert_equal_to_the_bit(train(tmp_path, config(pipeline=pipeline)), expected)


def test_evaluations_have_whole_samples_and_steps_as_many_tokens(tmp_path):
    """The rate is too small to change a weight."""
    keys = {"steps": 2, "lr": 1e-30, "eval_every": 1}
    short, whole = (
        train(tmp_path / name, config({**keys, "seq_len_schedule": schedule}, pipeline={"stages": 2}))
        for name, schedule in (("short", [[8, 2]]), ("whole", []))
    )
    for key in ("tokens", "validation"):
        assert [row[key] for row in short.metrics] == [row[key] for row in whole.metrics]
    assert all(row["validation"] for row in short.metrics)
    assert short.losses != whole.losses


def test_codecs_see_whole_samples(tmp_path):
    """Also one that remembers samples: three steps are an epoch, so each is seen again at another length."""
    text = tmp_path / "text"
    text.write_text("".join(chr(97 + number * number % 23) for number in range(32 * 27)))
    wire = {"activations": "aqsgd:bits=4", "gradients": "fixed:bits=8"}
    lossy = config(wire=wire, pipeline={"stages": 2}, data={"text": str(text)})
    assert_equal_to_the_bit(train(tmp_path, lossy), plain(lossy, cut=True))


@pytest.mark.acceptance
def test_a_run_resumed_before_the_length_changes_is_equal_to_the_bit(tmp_path):
    halfway = config({"steps": 4}, pipeline={"stages": 2})
    whole = train(tmp_path / "whole", config(pipeline={"stages": 2}))
    train(tmp_path, halfway)
    run = train(tmp_path, halfway, "--resume", *overrides("training.steps=6"))
    assert "no longer exact" not in run.stdout
    assert_same_run(run, whole)
