"""Whether an engine has the weights that were sent to it, by what it makes of a text."""

import pytest

from aglite.engine.arrival import ROUNDED, Answers, problem

OLD = [-1.0, -2.0, -3.0, -0.5]


def moved(values, by, sign=1.0):
    """`values` moved to and fro by `by`, so that the mean stays."""
    return [value + sign * by * (-1) ** at for at, value in enumerate(values)]


def test_equal_answers_are_fine_and_far_ones_are_not():
    assert problem(Answers(OLD, OLD), None, 1e-3) == ""
    assert problem(Answers(OLD, moved(OLD, 0.0009)), None, 1e-3) == ""
    assert "differ by 0.0011" in problem(Answers(OLD, moved(OLD, 0.0011)), None, 1e-3)
    assert "nan" in problem(Answers([*OLD[:3], float("nan")], OLD), None, 1e-3)


@pytest.mark.parametrize("change", [1e-5, 1e-4, 1e-3, 0.05])
def test_old_weights_are_noticed_however_small_the_update_was(change):
    before = Answers(OLD, moved(OLD, 1e-6))
    new = moved(OLD, change)
    assert problem(Answers(moved(new, 1e-6, -1), new), before, 0.1) == ""
    assert problem(Answers(moved(OLD, 1e-7), new), before, 0.1)


def test_the_very_same_answers_are_noticed_in_16_bits_too():
    before = Answers(OLD, moved(OLD, 0.02))  # rounding hides an update of 0.005
    new = moved(before.trainer, 0.005)
    assert "what it did before" in problem(Answers(OLD, new), before, ROUNDED)
    assert problem(Answers(moved(OLD, 0.004), new), before, ROUNDED) == ""


def test_an_update_that_changes_nothing_proves_nothing():
    before = Answers(OLD, moved(OLD, 1e-4))
    assert problem(before, before, 1e-3) == ""


def test_half_of_the_weights_is_not_enough():
    before = Answers(OLD, OLD)
    new = moved(OLD, 4e-4)
    assert problem(Answers([*new[:1], *OLD[1:]], new), before, 1e-3)
