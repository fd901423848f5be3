import copy
import inspect
import io
import pickle
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from lightning_memopt.core.patching import PatchedMethod, surround


class Doubled(PatchedMethod):
    """Shows that it stands in."""

    def __call__(self, *args, **kwargs):
        return 2 * super().__call__(*args, **kwargs)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, *, scale: float = 1.0):
        """Scale."""
        return self.weight * x * scale


class Narrow(Layer):
    """Lets nobody set an attribute."""

    def __setattr__(self, name, value):
        if name == "forward":
            raise AttributeError("read-only")
        super().__setattr__(name, value)


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), through_torch],
    ids=["deepcopy", "pickle", "torch.save"],
)


def test_the_stand_in_is_called_and_restored():
    layer = Layer()
    patched = Doubled(layer, "forward")
    assert layer(torch.ones(3), scale=3.0).tolist() == [6, 6, 6]
    patched.restore()
    assert layer(torch.ones(3), scale=3.0).tolist() == [3, 3, 3]
    assert "forward" not in vars(layer)


def test_restoring_twice_is_harmless():
    layer = Layer()
    patched = Doubled(layer, "forward")
    patched.restore()
    patched.restore()
    assert "forward" not in vars(layer)


def test_a_method_of_the_object_itself_comes_back():
    layer = Layer()
    own = lambda x: x - 1  # noqa: E731
    layer.forward = own
    patched = Doubled(layer, "forward")
    assert layer(3) == 4
    patched.restore()
    assert vars(layer)["forward"] is own


def test_what_somebody_else_put_there_since_stays():
    layer = Layer()
    patched = Doubled(layer, "forward")
    other = lambda x: x  # noqa: E731
    layer.forward = other
    patched.restore()
    assert vars(layer)["forward"] is other


def test_two_stand_ins_are_taken_off_in_reverse_order():
    layer = Layer()
    inner, outer = Doubled(layer, "forward"), Doubled(layer, "forward")
    assert layer(torch.ones(3)).tolist() == [4, 4, 4]
    outer.restore()
    assert layer(torch.ones(3)).tolist() == [2, 2, 2]
    inner.restore()
    assert "forward" not in vars(layer)


def test_a_class_that_narrows_setattr_is_patched_and_restored():
    layer = Narrow()
    patched = Doubled(layer, "forward")
    assert layer(torch.ones(3)).tolist() == [2, 2, 2]
    patched.restore()
    assert "forward" not in vars(layer)


def test_who_inspects_sees_the_original():
    layer = Layer()
    signature = inspect.signature(layer.forward)
    Doubled(layer, "forward")
    assert inspect.signature(layer.forward) == signature
    assert layer.forward.__doc__ == "Scale."
    assert layer.forward.__name__ == "forward"


@COPIES
def test_a_copy_is_plain_and_runs_its_own_weights(copied):
    model = nn.Sequential(Layer(), nn.Tanh())
    Doubled(model[0], "forward")
    twin = copied(model)
    with torch.no_grad():
        twin[0].weight.fill_(5)
    assert twin[0](torch.ones(3)).tolist() == [5, 5, 5]
    assert twin[0].forward.__self__ is twin[0]
    assert model[0](torch.ones(3)).tolist() == [2, 2, 2]


@COPIES
def test_a_copy_of_an_object_with_its_own_method_gets_that_method(copied):
    layer = Layer()
    layer.forward = torch.neg
    Doubled(layer, "forward")
    assert layer(torch.ones(1)).item() == -2
    assert copied(layer)(torch.ones(1)).item() == -1


@COPIES
def test_an_object_under_two_names_is_one_object_in_the_copy(copied):
    model = nn.ModuleDict({"a": Layer(), "b": nn.Tanh()})
    model["c"] = model["a"]
    Doubled(model["a"], "forward")
    twin = copied(model)
    assert twin["a"] is twin["c"]
    assert twin["a"](torch.ones(3)).tolist() == [1, 1, 1]


def test_a_copy_of_the_method_alone_belongs_to_a_copy_of_its_owner():
    layer = Layer()
    Doubled(layer, "forward")
    method = copy.deepcopy(layer.forward)
    assert method.__self__ is not layer
    assert method(torch.ones(3)).tolist() == [1, 1, 1]


class Around:
    """Notes when a call begins and ends."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    @contextmanager
    def __call__(self):
        self.notes.append(f"+{self.name}")
        try:
            yield
        finally:
            self.notes.append(f"-{self.name}")


def test_a_surrounded_method_runs_within_its_contexts_and_then_as_before():
    layer, notes = Layer(), []
    undo = surround(layer, "forward", Around("a", notes))
    assert layer(torch.ones(3)).tolist() == [1, 1, 1]
    assert notes == ["+a", "-a"]
    undo()
    undo()
    assert "forward" not in vars(layer)
    layer(torch.ones(3))
    assert notes == ["+a", "-a"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_that_surround_a_method_leave_in_any_order(order):
    layer, notes = Layer(), []
    undos = [surround(layer, "forward", Around(name, notes)) for name in "ab"]
    layer(torch.ones(3))
    assert notes == ["+a", "+b", "-b", "-a"]
    notes.clear()
    undos[order[0]]()
    layer(torch.ones(3))
    assert notes == [f"{sign}{'ab'[order[1]]}" for sign in "+-"]
    undos[order[1]]()
    assert "forward" not in vars(layer)


def test_contexts_end_when_the_method_raises():
    layer, notes = Layer(), []
    undo = surround(layer, "forward", Around("a", notes))
    with pytest.raises(TypeError, match="unsupported operand"):
        layer(None)
    assert notes == ["+a", "-a"]
    undo()


@COPIES
def test_a_copy_of_a_surrounded_object_is_plain(copied):
    model, notes = nn.Sequential(Layer()), []
    surround(model[0], "forward", Around("a", notes))
    assert copied(model)(torch.ones(3)).tolist() == [1, 1, 1]
    assert notes == []
