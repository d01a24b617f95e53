import pytest

from tahq.pipeline.schedule.generators import generate
from tahq.pipeline.schedule.grid import Cell, render
from tahq.plan.simulate.costs import CutCosts, HostCosts, uniform_costs
from tahq.plan.simulate.simulator import draw_grid, simulate


def test_grid_draws_backwards_twice_as_wide():
    assert draw_grid(generate("1f1b", 2, 2)).splitlines() == [
        "stage 0  0F0 0F1 .   .   0B0---- .   0B1----",
        "stage 1  .   1F0 1B0---- 1F1 1B1---- .   .",
    ]


def test_grid_keeps_labels_of_unequal_length_apart():
    lines = draw_grid(generate("gpipe", 1, 11)).splitlines()
    assert lines[0].startswith("stage 0  0F0  0F1  ")
    assert "0F10 0B0------ 0B1" in lines[0]


@pytest.mark.parametrize("width", [40, 60, 79, 80, 100])
def test_grid_is_cut_at_the_terminal_and_says_so(width):
    whole = draw_grid(generate("1f1b", 4, 8)).splitlines()
    *rows, note = draw_grid(generate("1f1b", 4, 8), width).splitlines()
    assert all(len(row) <= width for row in rows)
    assert all(whole_row.startswith(row) for row, whole_row in zip(rows, whole, strict=True))
    # 4 stages and 8 micro-batches take (8 + 4 - 1) * 3 slots
    assert "of 33 time slots shown" in note
    needed = int(note.split("needs ")[1].split()[0])
    assert draw_grid(generate("1f1b", 4, 8), needed).splitlines() == whole


def test_grid_of_a_simulated_step_is_to_scale():
    # forward 1 s, backward 2 s; 3 s for the activation's bytes, 1 s for the gradient's
    costs = uniform_costs(
        2,
        2,
        forward_s=1,
        backward_s=2,
        cut=CutCosts(3, 1),
        host=HostCosts(8, 8),
    )
    assert draw_grid(simulate(generate("1f1b", 2, 1), costs)).splitlines() == [
        "stage 0  0F0 .   .   .   .   .   .   .   0B0----",
        "stage 1  .   .   .   .   1F0 1B0---- .   .   .",
    ]


def test_render_marks_a_cell():
    picture = render([Cell(0, 0, 1, "0F0"), Cell(1, 1, 2, "1F0", marked=True)], ["a ", "b "])
    assert picture.splitlines() == ["a 0F0   .", "b .     >1F0<"]


def test_render_of_nothing_is_the_names():
    assert render([], ["a", "b"]).splitlines() == ["a", "b"]
