"""Segments that are recomputed train as the plain model does, to the bit."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from lightning_memopt.core.patching import PatchedMethod
from lightning_memopt.core.recomputing import is_recomputing
from lightning_memopt.core.saved_tensors import record_saved_tensors
from lightning_memopt.core.segments import checkpoint_segments
from tests.core.test_recompute import (
    BATCH,
    KINDS,
    WIDTH,
    assert_equal,
    block,
    chain,
    counts,
    seed,
    square_sum,
    state,
)


def steps_of(model: nn.Module, step: Any = square_sum, steps: int = 3) -> list[Any]:
    """Train and return gradients, buffers and the random states after each step."""
    ends = []
    for number in range(steps):
        seed(number)
        model.zero_grad()
        step(model, torch.randn(BATCH, WIDTH))
        ends.append((state(model), torch.rand(1).item(), random.random()))
    return ends


def assert_as_plain(
    model: nn.Module, segments: list[list[str]], step: Any = square_sum, steps: int = 3
) -> None:
    plain = copy.deepcopy(model)
    undo = checkpoint_segments(model, segments)
    found, expected = steps_of(model, step, steps), steps_of(plain, step, steps)
    for (mine, *rest), (theirs, *others) in zip(found, expected, strict=True):
        assert_equal(mine, theirs)
        assert rest == others
    assert not is_recomputing()
    undo()
    undo()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_as_it_was(kind: str) -> None:
    seed(0)
    model = chain(KINDS[kind](), KINDS[kind]())
    assert_as_plain(model, [["1"], ["2"]], steps=5)
    assert all(repeated for _, repeated in counts(model))


@pytest.mark.parametrize("kind", KINDS)
def test_modules_in_a_row_are_as_they_were(kind: str) -> None:
    seed(0)
    model = chain(KINDS[kind](), nn.Dropout(0.3), KINDS[kind](), nn.Tanh())
    assert_as_plain(model, [["1", "2", "3"]], steps=5)
    assert all(repeated for _, repeated in counts(model))


def row(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)


def kept(model: nn.Module) -> int:
    """Count the bytes that a forward keeps, its input left out."""
    x = torch.randn(64, WIDTH)
    with record_saved_tensors(model) as saved:
        model(x)
    return sum(
        size
        for address, size in saved.storages.items()
        if address != x.untyped_storage().data_ptr()
    )


def test_a_segment_keeps_its_input_alone() -> None:
    model = row(nn.Tanh(), nn.Sigmoid(), nn.Tanh(), nn.Linear(WIDTH, 1))
    activation = 64 * WIDTH * 4
    assert kept(model) == 3 * activation
    checkpoint_segments(model, [["1", "2", "3"]])
    assert kept(model) == 2 * activation  # the input, and what the last layer saves
    checkpoint_segments(nn.Sequential(model), [])


def test_a_recomputation_ends_with_the_last_thing_that_is_needed() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = row(nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))
    flops = []
    for segments in ([], [["1", "2"]]):
        undo = checkpoint_segments(model, segments)
        with FlopCounterMode(display=False) as counter:
            square_sum(model, torch.randn(BATCH, WIDTH))
        flops.append(counter.get_total_flops())
        undo()
    assert flops[0] == flops[1]


class Branches(nn.Module):
    """Uses what lies between two modules of a row once more."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.second, self.changes = nn.Linear(WIDTH, WIDTH), changes

    def forward(self, x: Tensor) -> Tensor:
        between = self.norm(self.first(x))
        if self.changes:
            between.add_(1.0)
        return self.second(between) * between.detach().abs() + between


def test_what_lies_between_is_there_for_others() -> None:
    seed(0)
    assert_as_plain(chain(Branches()), [["1.norm", "1.second"]])


def test_what_is_changed_in_between_runs_as_usual_with_one_warning() -> None:
    seed(0)
    with pytest.warns(UserWarning, match="is not given what the module before") as caught:
        assert_as_plain(chain(Branches(changes=True)), [["1.norm", "1.second"]])
    assert len(caught) == 1


class Switching(nn.Module):
    """Takes another way in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(WIDTH, WIDTH), nn.Tanh(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.first(x)
        return self.second(y if self.calls % 2 else 2 * y) + y


def test_a_module_that_is_given_something_else_runs_as_usual_with_one_warning() -> None:
    seed(0)
    with pytest.warns(UserWarning, match=r"`1\.second` runs as if it were not checkpo") as caught:
        assert_as_plain(chain(Switching()), [["1.first", "1.second"]], steps=6)
    assert len(caught) == 1


def test_a_row_that_is_left_early_keeps_nothing_alive() -> None:
    model = row(nn.Tanh(), nn.Sigmoid())
    checkpoint_segments(model, [["1", "2"]])
    output = model[1](model[0](torch.ones(BATCH, WIDTH)))
    gone = weakref.ref(output)
    del output
    assert gone() is None
    assert model[1].forward.segment._next is None


def test_a_model_with_a_graph_behind_it_dies_with_its_last_reference() -> None:
    model = row(nn.Tanh(), nn.Sigmoid())
    checkpoint_segments(model, [["0", "1", "2"]])
    gc.collect()
    gc.disable()
    try:
        output = model(torch.ones(BATCH, WIDTH, requires_grad=True))
        gone = weakref.ref(output)
        output.sum().backward()
        del output
        assert gone() is None
        output = model(torch.ones(BATCH, WIDTH, requires_grad=True))
        gone = weakref.ref(output)
        del output
        assert gone() is None
    finally:
        gc.enable()


def test_a_graph_that_is_kept_gives_its_gradients_twice() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    seed(0)
    assert_as_plain(chain(block(nn.Dropout()), block()), [["1", "2"]], step)


def test_double_backward_is_right() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()

    seed(0)
    assert_as_plain(chain(block(), nn.Tanh()), [["1", "2"]], step)


def test_autocast_is_that_of_the_forward() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).square().sum()
        loss.backward()

    seed(0)
    assert_as_plain(chain(block(nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, 3)), [["1", "2"]], step)


def test_two_forwards_before_one_backward_are_right() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        (model(x).square().sum() + model(2 * x).sum()).backward()

    seed(0)
    assert_as_plain(
        chain(block(nn.BatchNorm1d(WIDTH), nn.Dropout()), nn.Tanh()), [["1", "2"]], step
    )


def test_an_input_that_the_first_module_changes_is_an_error_with_its_name() -> None:
    model = row(nn.ReLU(inplace=True), nn.Tanh())
    checkpoint_segments(model, [["1", "2"]])
    with pytest.raises(RuntimeError, match="`1` changes its input in place"):
        model(torch.ones(BATCH, WIDTH))


def test_a_later_module_may_change_its_input() -> None:
    seed(0)
    assert_as_plain(row(nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)), [["1", "2"]])


def test_an_input_that_is_changed_before_backward_gives_no_wrong_gradient() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    checkpoint_segments(model, [["0", "1"]])
    x = torch.ones(BATCH, WIDTH)
    loss = model(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Changing(nn.Module):
    """Does not repeat itself, in one of several ways."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls = what, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2:
            return x.tanh()
        return {
            "more": lambda: x.exp().sin(),
            "less": lambda: x + 1,
            "shape": lambda: x[:, :3].tanh(),
            "error": lambda: x @ x,
        }[self.what]()


@pytest.mark.parametrize("what", ["more", "less", "shape", "error"])
def test_another_result_is_an_error_with_the_name_of_the_module(what: str) -> None:
    model = row(nn.Tanh(), Changing(what), nn.Sigmoid())
    checkpoint_segments(model, [["1", "2", "3"]])
    loss = model(torch.ones(BATCH, WIDTH)).sum()
    with pytest.raises(CheckpointError, match="`2` did not repeat itself"):
        loss.backward()


def test_a_forward_without_gradients_runs_once_and_says_nothing() -> None:
    model = chain(block(), nn.Tanh())
    checkpoint_segments(model, [["1", "2"]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(BATCH, WIDTH))
        model[2](torch.ones(BATCH, WIDTH))
    assert counts(model) == [(1, 0)]


def test_copies_and_pickles_are_plain() -> None:
    model = row(nn.Tanh())
    keys = list(model.state_dict())
    checkpoint_segments(model, [["0", "1"]])
    assert list(model.state_dict()) == keys
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(isinstance(module.forward, PatchedMethod) for module in made.modules())


@pytest.mark.parametrize(
    ("segments", "text"),
    [([["0", "9"]], "got '9'"), ([["0"], ["1", "0"]], "two hold '0'")],
)
def test_a_wrong_name_is_refused_and_nothing_stays(segments: list[list[str]], text: str) -> None:
    model = row(nn.Tanh())
    with pytest.raises(ValueError, match=text):
        checkpoint_segments(model, segments)
    assert not any("forward" in vars(module) for module in model.modules())
