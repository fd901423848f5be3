import collections
import functools
import sys
import types

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC

from lightning_memopt.core.tensor_search import TensorSearch

KEPT: list[Tensor] = []
ONE = torch.ones(1)


class Helper:
    def __init__(self, **kept):
        vars(self).update(kept)


class Odd:
    """Every way to look at it from outside fails."""

    def __init__(self):
        self.kept = [torch.ones(2)]

    def _fail(self, *args):
        raise SystemError("the user's code was called")

    __len__ = __bool__ = __iter__ = __eq__ = __hash__ = __getattr__ = __class_getitem__ = _fail
    value = property(_fail)


class OddList(list):
    __len__ = __bool__ = __iter__ = __eq__ = Odd._fail


class Sharing:
    shared: list[Tensor] = []


def search(name, root, skip=()):
    """Return how many tensors each path holds."""
    found = TensorSearch(skip)
    found.look_into(name, root)
    return {path: tally.tensors for path, tally in found.tallies.items()}


def tensors(count=3):
    return [torch.ones(2) for _ in range(count)]


@pytest.mark.parametrize(
    "container",
    [
        tensors(),
        tuple(tensors()),
        set(tensors()),
        frozenset(tensors()),
        collections.deque(tensors()),
        dict(enumerate(tensors())),
        {"a": {"b": tensors(1)}, "c": [(1, tensors(2))]},
        [{"loss": x, "n": 1} for x in tensors()],
        [Helper(x=x) for x in tensors()],
        [1, "a", None, *tensors(), 2.0],
        collections.defaultdict(list, a=tensors()),
        OddList(tensors()),
    ],
    ids=lambda container: type(container).__name__,
)
def test_all_kinds_of_containers_are_counted_at_the_attribute(container):
    assert search("x", Helper(kept=container)) == {"x.kept": 3}


def test_modules_are_named_as_pytorch_names_them():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    model[1][0].kept = tensors()
    model.best = torch.ones(1)
    model.register_buffer("bank", torch.ones(4))
    assert search("model", model) == {"model.1.0.kept": 3, "model.best": 1, "model.bank": 1}


def test_parameters_are_left_out():
    model = nn.Linear(2, 2)
    assert search("model", Helper(model=model, all=list(model.parameters()))) == {}


def test_list_states_of_metrics_are_marked():
    model = nn.Module()
    model.auroc = BinaryAUROC()
    model.both = MetricCollection({"one": BinaryAUROC()})
    for metric in (model.auroc, model.both):
        metric.update(torch.rand(4), torch.ones(4, dtype=torch.int))
    found = TensorSearch(())
    found.look_into("model", model)
    names = {"model.auroc.preds", "model.auroc.target"}
    names |= {"model.both.one.preds", "model.both.one.target"}
    assert set(found.tallies) == names
    assert all(tally.is_metric for tally in found.tallies.values())


def test_a_deque_with_a_limit_is_marked():
    found = TensorSearch(())
    kept = {"a": collections.deque(tensors(), maxlen=9), "b": collections.deque(tensors())}
    found.look_into("x", Helper(**kept))
    assert {name: tally.is_bounded for name, tally in found.tallies.items()} == {
        "x.a": True,
        "x.b": False,
    }


def test_what_functions_close_over_is_named():
    def outer():
        closed = tensors()

        def inner(x, default=ONE):
            return closed, x, default

        return inner

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(outer())
    found = search("x", Helper(direct=outer(), part=functools.partial(outer(), 1), hooked=hooked))
    assert found["x.direct.closed"] == 3
    assert found["x.direct.<default>"] == 1
    assert any(path.startswith("x.part") and path.endswith(".closed") for path in found)
    assert any(path.startswith("x.hooked._forward_hooks") for path in found)


def test_an_object_behind_a_bound_method_is_searched():
    helper = Helper(kept=tensors())
    assert search("x", Helper(call=types.MethodType(print, helper))) == {"x.call.kept": 3}


def test_objects_are_followed_to_a_depth():
    chain = Helper(kept=tensors())
    for _ in range(3):
        chain = Helper(next=chain)
    assert search("x", chain) == {"x.next.next.next.kept": 3}
    deep = Helper(next=Helper(next=Helper(next=chain)))
    assert search("x", deep) == {}


def test_cycles_end():
    one, two = Helper(kept=tensors()), Helper()
    one.two, two.one = two, one
    one.ring = [one]
    one.ring.append(one.ring)
    assert search("x", one) == {"x.kept": 3}


def test_what_two_share_counts_for_the_first():
    kept = tensors()
    assert search("x", Helper(a=kept, b=kept)) == {"x.a": 3}


def test_no_code_of_the_user_is_run():
    odd = Odd()
    assert search("x", Helper(odd=odd, odds=[odd], more=OddList([Odd()]))) == {
        "x.odd.kept": 1,
        "x.more": 1,
    }
    assert search("x", odd) == {"x.kept": 1}


def test_types_to_skip_are_skipped():
    class Trainer:
        def __init__(self):
            self.kept = tensors()

    root = Helper(trainer=Trainer(), trainers=[Trainer()], kept=tensors(1))
    assert search("x", root, skip=(Trainer,)) == {"x.kept": 1}
    assert search("x", root) == {"x.trainer.kept": 3, "x.trainers": 3, "x.kept": 1}


def test_a_long_list_of_numbers_is_passed_over_and_a_long_list_of_tensors_is_not():
    found = TensorSearch(())
    found.look_into("x", Helper(numbers=list(range(100_000)), kept=tensors(1000)))
    assert found.tallies["x.kept"].tensors == 1000
    assert list(found.tallies) == ["x.kept"]


def test_globals_and_class_attributes_of_a_file_are_named():
    KEPT[:] = tensors()
    Sharing.shared = tensors(2)
    try:
        found = TensorSearch(())
        found.look_into_globals(sys.modules[__name__])
    finally:
        KEPT.clear()
        Sharing.shared = []
    counts = {path: tally.tensors for path, tally in found.tallies.items()}
    assert counts["KEPT of test_tensor_search.py"] == 3
    assert counts["Sharing.shared"] == 2


def test_storages_count_once_and_tensors_without_any_count_as_tensors():
    base = torch.ones(256)
    sparse = torch.ones(2, 2).to_sparse()
    found = TensorSearch(())
    found.look_into("x", Helper(views=[base[:1], base[1:], base], sparse=[sparse]))
    assert found.tallies["x.views"].tensors == 3
    assert list(found.tallies["x.views"].storages.values()) == [1024]
    assert found.tallies["x.sparse"].tensors == 1
