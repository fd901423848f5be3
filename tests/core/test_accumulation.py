from functools import partial

import pytest

from lightning_memopt.core.accumulation import (
    Windows,
    next_boundary,
    optimizer_steps,
    plan_windows,
    steps_at,
)


@pytest.mark.parametrize(
    ("batches", "steps", "count", "last"),
    [(12, 4, 3, 4), (10, 4, 3, 2), (3, 8, 1, 3), (8, 8, 1, 8), (9, 8, 2, 1), (5, 1, 5, 1)],
)
def test_an_epoch_falls_into_full_windows_and_a_shorter_last_one(batches, steps, count, last):
    assert plan_windows(batches, steps) == Windows(batches, steps, count, last)


@pytest.mark.parametrize("batches", range(1, 30))
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 40])
def test_windows_take_every_batch_and_step_as_lightning_does(batches, steps):
    windows = plan_windows(batches, steps)
    stepped = [i for i in range(1, batches + 1) if i % steps == 0 or i == batches]
    assert windows.count == len(stepped)
    assert (windows.count - 1) * steps + windows.last == batches
    assert 1 <= windows.last <= steps


def test_an_epoch_without_batches_has_no_window():
    windows = plan_windows(0, 4)
    assert (windows.count, windows.last) == (0, 0)


@pytest.mark.parametrize(
    ("batch_idx", "old", "new", "boundary"),
    [(4, 2, 3, 6), (5, 2, 4, 8), (0, 2, 3, 0), (6, 2, 3, 6), (7, 2, 3, 12), (1, 1, 5, 5)],
)
def test_a_boundary_begins_a_window_of_both_lengths(batch_idx, old, new, boundary):
    assert next_boundary(batch_idx, old, new) == boundary


@pytest.mark.parametrize("batch_idx", range(25))
@pytest.mark.parametrize(("old", "new"), [(1, 1), (2, 3), (4, 6), (6, 4), (5, 1), (8, 2)])
def test_the_boundary_is_the_first_of_all(batch_idx, old, new):
    first = next(i for i in range(batch_idx, 1000) if i % old == 0 and i % new == 0)
    assert next_boundary(batch_idx, old, new) == first


def test_one_number_holds_in_every_epoch():
    assert [steps_at(4, epoch) for epoch in (0, 1, 100)] == [4, 4, 4]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({0: 8, 4: 2}, [8, 8, 8, 8, 2, 2]),
        ({4: 2, 0: 8}, [8, 8, 8, 8, 2, 2]),
        ({2: 4}, [1, 1, 4, 4, 4, 4]),
        ({0: 3, 1: 5, 2: 1}, [3, 5, 1, 1, 1, 1]),
    ],
)
def test_a_schedule_holds_from_each_of_its_epochs_on_and_is_one_before(steps, expected):
    assert [steps_at(steps, epoch) for epoch in range(6)] == expected


@pytest.mark.parametrize(
    ("steps", "batches", "epochs", "expected"),
    [(4, 32, 2, 16), (5, 32, 2, 14), ({0: 4, 1: 2}, 32, 2, 24), ({1: 4}, 10, 3, 16), (4, 32, 0, 0)],
)
def test_the_steps_of_a_run_are_those_of_its_epochs(steps, batches, epochs, expected):
    assert optimizer_steps(partial(steps_at, steps), batches, epochs) == expected
