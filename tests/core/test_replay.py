import random
import sys
from contextlib import contextmanager, suppress

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm

from lightning_memopt.core import replay
from lightning_memopt.core.replay import (
    Anew,
    Replay,
    copy_containers,
    tensors_in,
    versions_of,
)


class Average(nn.Module):
    """Adds a moving average, which it updates; `is_moving` and `is_assigned` say how."""

    def __init__(self, size=4, is_assigned=False):
        super().__init__()
        self.register_buffer("average", torch.zeros(size))
        self.register_buffer("constant", torch.ones(size))
        self.is_moving, self.is_assigned = True, is_assigned

    def forward(self, x):
        if self.is_moving and self.is_assigned:
            self.average = 0.9 * self.average + x.mean(0)
        elif self.is_moving:
            self.average.mul_(0.9).add_(x.mean(0))
        return x * self.constant + self.average


class OwnBatchNorm(nn.Module):
    """Normalizes by a kernel that writes to its buffers and doesn't tell their version counters."""

    def __init__(self, size=4):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))

    def forward(self, x):
        return batch_norm(x, self.mean, self.variance, training=self.training)


class Renorm(nn.BatchNorm1d):
    """A subclass whose output in training depends on the running statistics."""

    def forward(self, x):
        y = (x - self.running_mean) * self.running_var.rsqrt()
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.1)
            self.running_var.lerp_(x.var(0), 0.1)
            self.num_batches_tracked.add_(1)
        return y


class Filled(nn.Module):
    """Has a state only from the first forward on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", None)

    def forward(self, x):
        y = x if self.state is None else x + self.state
        self.state = y.detach().clone()
        return y


BLOCKS = {
    "BatchNorm": lambda: nn.BatchNorm1d(4),
    "BatchNorm, momentum None": lambda: nn.BatchNorm1d(4, momentum=None),
    "BatchNorm in eval": lambda: nn.BatchNorm1d(4).eval(),
    "BatchNorm without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "InstanceNorm": lambda: nn.InstanceNorm1d(5, track_running_stats=True),
    "spectral norm by hook": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "moving average": Average,
    "assigned average": lambda: Average(is_assigned=True),
    "own batch norm": OwnBatchNorm,
    "own subclass": lambda: Renorm(4),
    "filled": Filled,
}
IDLE = {"BatchNorm in eval", "BatchNorm without statistics"}


def buffers(block):
    return {name: value.clone() for name, value in block.named_buffers()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def run_twice(block, x, known, times=1):
    """Run a block for real and again, and return what the runs gave."""
    run = Replay(block, known)
    with run.first():
        first = block(x)
    after = buffers(block)
    for _ in range(times):
        with run.again():
            again = block(x)
        assert_equal(buffers(block), after)
    return first, again


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_second_run_gives_the_same_and_touches_no_buffer(name, times):
    torch.manual_seed(0)
    block = nn.Sequential(BLOCKS[name]())
    known = {}
    for _ in range(3):
        before = buffers(block)
        first, again = run_twice(block, torch.randn(5, 4), known, times)
        assert torch.equal(first, again)
        is_same = before.keys() == buffers(block).keys() and all(
            torch.equal(value, before[key]) for key, value in block.named_buffers()
        )
        assert is_same == (name in IDLE)


def test_the_real_buffers_keep_their_identity_and_version():
    block = nn.Sequential(nn.BatchNorm1d(4), Average())
    run = Replay(block, {})
    with run.first():
        block(torch.randn(5, 4))
    before = [(id(value), value._version) for value in block.buffers()]
    with run.again():
        assert all(id(value) not in dict(before) for value in (block[0].running_mean,))
        block(torch.randn(5, 4))
    assert [(id(value), value._version) for value in block.buffers()] == before


@pytest.mark.parametrize("error", [ValueError("in the block"), KeyboardInterrupt("in the block")])
def test_a_second_run_that_fails_puts_buffers_and_random_states_back(error):
    block = Average()
    run = Replay(block, {})
    with run.first():
        block(torch.ones(2, 4))
    expected = buffers(block)
    random.seed(3)
    numpy.random.seed(3)
    draws = random.random(), numpy.random.rand()
    random.seed(3)
    numpy.random.seed(3)

    def fail():
        with run.again():
            block(torch.ones(2, 4))
            random.random()
            numpy.random.rand()
            raise error

    with pytest.raises(type(error), match="in the block"):
        fail()
    assert_equal(buffers(block), expected)
    assert (random.random(), numpy.random.rand()) == draws


def test_python_and_numpy_draw_the_same_again_and_go_on_where_they_were():
    random.seed(0)
    numpy.random.seed(0)
    run = Replay(nn.Identity(), {})
    with run.first():
        first = random.random(), numpy.random.rand(), random.gauss(0, 1), numpy.random.randn()
    between = random.random(), numpy.random.rand()
    with run.again():
        again = random.random(), numpy.random.rand(), random.gauss(0, 1), numpy.random.randn()
    after = random.random(), numpy.random.rand()
    assert again == first
    random.seed(0)
    numpy.random.seed(0)
    draws = [(random.random(), numpy.random.rand())]
    random.gauss(0, 1), numpy.random.randn()
    draws += [(random.random(), numpy.random.rand()) for _ in range(2)]
    assert [first[:2], between, after] == draws


def test_numpy_is_not_needed(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    random.seed(0)
    run = Replay(nn.Identity(), {})
    with run.first():
        first = random.random()
    with run.again():
        assert random.random() == first


# Large buffers are copied only where they were seen to change


@pytest.fixture
def no_small(monkeypatch):
    """Let every buffer count as large."""
    monkeypatch.setattr(replay, "_SMALL_BYTES", -1)


@pytest.mark.usefixtures("no_small")
@pytest.mark.parametrize("name", BLOCKS)
def test_large_buffers_are_as_right_as_small_ones(name):
    torch.manual_seed(0)
    block = nn.Sequential(BLOCKS[name]())
    known = {}
    for is_training in (True, True, False, False, True):
        block.train(is_training)
        first, again = run_twice(block, torch.randn(5, 4), known)
        assert torch.equal(first, again)


@pytest.mark.usefixtures("no_small")
def test_a_large_buffer_that_never_changes_is_copied_once():
    block, known, copied = Average(), {}, []
    for _ in range(3):
        run = Replay(block, known)
        with run.first():
            block(torch.ones(2, 4))
        looked = [run._look(slot) for slot in run._buffers()]
        copied.append([seen.value is not None for seen in looked])
        with run.again():
            # It is the real one in the second run too, and the other is not.
            assert block.constant is looked[1].tensor
            assert block.average is not looked[0].tensor
    assert copied == [[True, True], [True, False], [True, False]]


@pytest.mark.usefixtures("no_small")
def test_a_large_buffer_that_changes_late_is_an_error_once_and_right_from_then_on():
    block, known = Average(), {}
    block.is_moving = False
    run_twice(block, torch.ones(2, 4), known)
    block.is_moving = True
    run = Replay(block, known)
    with run.first():
        block(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="`average` changed, which it never did"), run.again():
        pass
    first, again = run_twice(block, torch.ones(2, 4), known)
    assert torch.equal(first, again)


@pytest.mark.usefixtures("no_small")
def test_a_first_run_that_fails_teaches_nothing():
    block, known = Average(), {}

    def fail():
        with Replay(block, known).first():
            raise ValueError("before the buffer changed")

    with pytest.raises(ValueError, match="before the buffer"):
        fail()
    first, again = run_twice(block, torch.ones(2, 4), known)
    assert torch.equal(first, again)


def test_a_small_buffer_may_change_late():
    block, known = Average(), {}
    for is_moving in (False, True, False, True):
        block.is_moving = is_moving
        first, again = run_twice(block, torch.ones(2, 4), known)
        assert torch.equal(first, again)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_sparse_buffer_is_left_alone(monkeypatch, is_large):
    if is_large:
        monkeypatch.setattr(replay, "_SMALL_BYTES", -1)

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("adjacency", torch.eye(5).to_sparse())

        def forward(self, x):
            return self.adjacency @ x

    run = Replay(block := Graph(), {})
    with run.first():
        first = block(torch.ones(5, 4))
    with run.again():
        assert torch.equal(block(torch.ones(5, 4)), first)


def test_a_buffer_made_in_inference_mode_is_left_alone():
    block = nn.Module()
    with torch.inference_mode():
        block.register_buffer("made", torch.ones(2))
    run = Replay(block, {})
    with run.first():
        made = block.made
    with run.again():
        assert block.made is made


# Helpers


def test_a_context_is_made_anew_each_time_also_within_itself():
    log = []

    @contextmanager
    def make():
        number = len(log)
        log.append(f"in {number}")
        yield number
        log.append(f"out of {number}")

    context = Anew(make)
    with context as first:
        pass
    with context as second, context as third:
        pass
    assert (first, second, third) == (0, 2, 3)
    assert log == ["in 0", "out of 0", "in 2", "in 3", "out of 3", "out of 2"]


def test_a_context_made_anew_hands_exceptions_on():
    @contextmanager
    def swallow():
        with suppress(KeyError):
            yield

    with Anew(swallow):
        raise KeyError
    with pytest.raises(ValueError, match="not mine"), Anew(swallow):
        raise ValueError("not mine")


def test_tensors_are_found_in_nested_containers():
    a, b, c, d = torch.zeros(4, 1)
    value = {"a": (a, [b, 1, None]), "c": [{"c": c}], "d": "text"}
    assert [id(t) for t in tensors_in([value, d])] == [id(t) for t in (a, b, c, d)]


def test_copies_of_containers_hold_the_same_things():
    tensor, thing = torch.ones(1), object()
    value = {"list": [tensor, (thing, [tensor])]}
    twin = copy_containers(value)
    assert twin is not value
    assert twin["list"] is not value["list"]
    assert twin["list"][1][1] is not value["list"][1][1]
    assert twin["list"][0] is tensor
    assert twin["list"][1][0] is thing


@pytest.mark.parametrize("value", [torch.Size([1, 2]), torch.return_types.max((1, 2)), range(3)])
def test_a_container_of_another_type_stays_itself(value):
    assert copy_containers(value) is value


def test_versions_tell_a_change_in_place():
    a, b = torch.zeros(2, 1)
    with torch.inference_mode():
        made = torch.ones(1)
    before = versions_of([a, b, "text", made])
    b.add_(1)
    after = versions_of([a, b, "text", made])
    assert len(before) == len(after) == 2
    assert before != after
