import pytest
import torch

from tahq.models.keyed_dropout import DrawName, KeyedDropout, RandomContext

ONES = torch.ones(64, 64)


def drop(path="h.0", p=0.25, seed=1, **name):
    random = RandomContext(seed)
    random.at(**({"step": 0, "replica": 0, "micro_batch": 0, "purpose": 0} | name))
    return KeyedDropout(p, path, random)(ONES)


def test_the_mask_scales_what_it_keeps():
    y = drop()
    assert torch.equal(y.unique(), torch.tensor([0.0, 4 / 3]))
    # 4096 draws of p = 1/4: six standard deviations are 6 · √(3/16 / 4096) = 0.04
    assert abs((y == 0).float().mean().item() - 0.25) < 0.04


@pytest.mark.parametrize(
    "other",
    [{"path": "h.1"}, {"seed": 2}, {"step": 1}, {"replica": 1}, {"micro_batch": 1}, {"purpose": 1}],
    ids=lambda other: next(iter(other)),
)
def test_every_part_of_the_name_changes_the_mask(other):
    assert torch.equal(drop(), drop())
    assert not torch.equal(drop(), drop(**other))


def test_dropout_is_the_identity_in_evaluation_and_at_zero():
    module = KeyedDropout(0.5, "h.0", RandomContext(0))
    assert module.eval()(ONES) is ONES
    assert KeyedDropout(0.0, "h.0", RandomContext(0))(ONES) is ONES


def test_the_global_generator_is_neither_read_nor_moved():
    before = torch.get_rng_state()
    drop()
    assert torch.equal(torch.get_rng_state(), before)


def test_pinned_restores_the_name_even_after_an_error():
    random = RandomContext(0)
    random.at(5, 0, 1, 0)

    def compute():
        with random.pinned(DrawName(4, 0, 0, 0)):
            raise RuntimeError(f"step {random.current.step}")

    with pytest.raises(RuntimeError, match="step 4"):
        compute()
    assert random.current == DrawName(5, 0, 1, 0)
