"""What is kept of a step that had NaN or infinity."""

import torch
from safetensors import safe_open

from tahq.data.batches import StepBatch
from tahq.pipeline.stage import MAX_KEPT_BATCHES as MAX_KEPT
from tahq.pipeline.stage import keep_batch


def batch(first: int) -> StepBatch:
    tokens = torch.arange(first, first + 12).reshape(4, 3)
    return StepBatch(tokens, tokens + 1, torch.arange(4), 12, f"digest{first}", micro_batch_size=2)


def test_batch_is_kept_as_it_was(tmp_path):
    path = keep_batch(tmp_path / "non_finite", 13, batch(100))
    assert path == tmp_path / "non_finite" / "step-00000013.safetensors"
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"step": "13", "digest": "digest100", "micro_batch": "2"}
        assert torch.equal(file.get_tensor("tokens"), batch(100).tokens)
        assert torch.equal(file.get_tensor("labels"), batch(100).labels)
        assert torch.equal(file.get_tensor("sample_ids"), torch.arange(4))


def test_of_many_the_latest_are_kept(tmp_path):
    for step in range(1, MAX_KEPT + 4):
        keep_batch(tmp_path, step, batch(step))
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [f"step-{step:08}.safetensors" for step in range(4, MAX_KEPT + 4)]
