import pytest
import torch

from lightning_memopt.core.recent_steps import RecentSteps, StepRecord
from lightning_memopt.core.units import MIB


def batch(n):
    return [torch.zeros(n, 3), torch.zeros(n, dtype=torch.int64)]


def shapes_of(batch):
    recent = RecentSteps(1)
    recent.begin_batch(batch, "train")
    return recent.batch


def test_only_the_last_steps_are_kept():
    recent = RecentSteps(2)
    for step in range(5):
        recent.end_step(step, 10 + step, 20 + step)
    assert list(recent.steps) == [StepRecord(3, 13, 23), StepRecord(4, 14, 24)]


def test_a_batch_is_compared_with_those_before_it():
    recent = RecentSteps(10)
    assert (recent.batch, recent.elements) == ("", None)
    recent.begin_batch(batch(4), "train")
    assert recent.usual_batch() == ""
    assert recent.usual_elements() is recent.largest_elements() is None
    for n in (4, 6, 4, 100):
        recent.begin_batch(batch(n), "train")
    assert (recent.batch, recent.elements) == ("[100, 3] float32, [100] int64", 400)
    assert recent.usual_batch() == "[4, 3] float32, [4] int64"
    assert (recent.usual_elements(), recent.largest_elements()) == (16, 24)


def test_batches_of_an_evaluation_are_compared_with_their_own_kind():
    recent = RecentSteps(10)
    recent.begin_batch(batch(4), "train")
    recent.begin_batch(batch(64), "evaluation")
    assert recent.usual_elements() is None
    recent.begin_batch(batch(8), "evaluation")
    assert recent.usual_elements() == 256
    recent.begin_batch(batch(4), "train")
    assert recent.usual_elements() == 16


def test_old_batches_are_forgotten():
    recent = RecentSteps(2)
    for n in (100, 4, 4, 4):
        recent.begin_batch(batch(n), "train")
    assert recent.largest_elements() == 16


def test_shapes_of_many_tensors_are_short():
    assert shapes_of([torch.zeros(2)] * 3) == "3 x [2] float32"
    assert shapes_of([torch.zeros(n) for n in range(1, 10)]).endswith("[6] float32, ...")
    assert shapes_of("text") == ""


def grown(values):
    recent = RecentSteps(50)
    for step, value in enumerate(values):
        recent.end_step(step, value * MIB, 0)
    size, rate = recent.growth()
    return size / MIB, rate / MIB


def test_growth_is_counted_since_the_warm_up_however_long_ago():
    assert grown([0, 7, *range(8, 208)]) == (200, pytest.approx(1, rel=0.03))
    assert grown([0, *(5 + step / 5 for step in range(1000))]) == (
        pytest.approx(199.8),
        pytest.approx(0.2),
    )


def test_a_growth_that_is_too_fast_for_the_leak_watch_is_told_too():
    assert grown(range(0, 4500, 100)) == (4300, 100)
    assert grown(range(0, 900, 100)) == (0, 0)  # nine steps are too few
    assert grown([*range(0, 3000, 100), 2800]) == (0, 0)


def test_a_growth_that_has_ended_is_none():
    assert grown([*range(60), *[60] * 40]) == (0, 0)
    assert grown([10] * 100) == grown([]) == (0, 0)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_a_batch_that_cannot_be_read_is_left_out():
    recent = RecentSteps(10)
    recent.begin_batch(batch(4), "train")
    recent.begin_batch([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])], "train")
    assert (recent.batch, recent.elements) == ("", None)
    recent.begin_batch(batch(4), "train")
    assert recent.usual_elements() == 16
