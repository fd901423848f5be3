import collections
import dataclasses
import functools
import gc
import queue
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


@dataclasses.dataclass(slots=True)
class Slotted:
    kept: object
    more: object = None


class OddKey:
    __str__ = __repr__ = __format__ = Odd._fail


class Forbidding(Tensor):
    """Fails whatever is asked of it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise LookupError("not for you")


def search(name, root, skip=(), **kwargs):
    """Return how many tensors each path holds."""
    found = TensorSearch(skip, **kwargs)
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


@pytest.mark.parametrize("make", [lambda: Helper(x=torch.ones(2)), lambda: Slotted(torch.ones(2))])
def test_each_of_many_objects_is_counted(make):
    root = Helper(kept=[make() for _ in range(1000)])
    assert search("x", root) == {"x.kept": 1000}
    root.kept += [make() for _ in range(500)]
    assert search("x", root) == {"x.kept": 1500}


def test_each_of_many_partials_is_counted():
    parts = [functools.partial(print, torch.ones(2), end=[torch.ones(2)]) for _ in range(500)]
    found = search("x", Helper(kept=parts))
    assert sum(found.values()) == 1000


def test_no_dictionary_is_made_for_an_object_in_a_container():
    class Sized:
        def __init__(self):
            self.x = torch.ones(2)

    one = Sized()
    before = sum(type(part) is dict for part in gc.get_referents(one))
    assert search("x", Helper(kept=[one])) == {"x.kept": 1}
    assert sum(type(part) is dict for part in gc.get_referents(one)) == before


def test_slots_are_attributes():
    assert search("x", Slotted(tensors())) == {"x.kept": 3}
    assert search("x", Helper(part=Slotted(torch.ones(1)))) == {"x.part.kept": 1}


@pytest.mark.parametrize("kind", [queue.Queue, queue.LifoQueue])
def test_what_waits_in_a_queue_is_counted(kind):
    waiting = kind()
    for tensor in tensors():
        waiting.put(tensor)
    assert search("x", Helper(waiting=waiting, all=[waiting])) == {"x.waiting": 3}
    assert search("x", Helper(all=[waiting])) == {"x.all": 3}


def test_a_key_is_named_without_its_own_code():
    modules = {OddKey(): Helper, "a": nn.Module(), OddKey(): nn.Module(), 10**5000: nn.Module()}
    for value in list(modules.values())[1:]:
        value.kept = tensors(1)
    assert search("x", Helper(by=modules)) == {
        "x.by[a].kept": 1,
        "x.by[OddKey].kept": 1,
        "x.by[int].kept": 1,
    }


def test_what_goes_by_the_same_name_is_added_up():
    modules = {OddKey(): nn.Module(), OddKey(): nn.Module()}
    for value in modules.values():
        value.kept = tensors(2)
    assert search("x", Helper(by=modules)) == {"x.by[OddKey].kept": 4}


def test_a_long_key_is_cut():
    module = nn.Module()
    module.kept = tensors(1)
    (path,) = search("x", Helper(by={"a" * 10_000: module}))
    assert len(path) < 100


def _odd_view():
    one, two = (torch.ones(2, 3, requires_grad=True) * 2).unbind()
    with torch.no_grad():
        one.mul_(2)
    return two


@pytest.mark.parametrize(
    "make",
    [
        nn.UninitializedBuffer,
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        _odd_view,
        lambda: torch.ones(2).as_subclass(Forbidding),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_tells_nothing_is_counted_and_ends_no_search(make):
    found = search("x", Helper(one=make(), all=[make(), torch.ones(2)], kept=tensors()))
    assert found == {"x.one": 1, "x.all": 2, "x.kept": 3}


def test_a_budget_ends_the_search_of_one_root_and_not_of_the_next():
    large, small = Helper(kept=tensors(100), more=tensors(5)), Helper(kept=tensors())
    found = TensorSearch((), max_visits=50)
    found.look_into("large", large)
    found.look_into("small", small)
    counts = {path: tally.tensors for path, tally in found.tallies.items()}
    assert counts == {"large.kept": 50, "small.kept": 3}


@pytest.mark.parametrize(
    "values",
    [
        list(range(5000)),
        [(str(i), i) for i in range(5000)],
        {i: (i, None) for i in range(5000)},
        collections.deque({"a": i} for i in range(5000)),
        {(i, str(i)) for i in range(5000)},
    ],
    ids=lambda values: type(values).__name__,
)
def test_a_long_container_without_tensors_takes_no_budget(values):
    root = Helper(samples=values, kept=tensors())
    assert search("x", root, max_visits=10) == {"x.kept": 3}


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (1, x), lambda x: {"y": [x]}])
def test_a_long_container_with_tensors_is_looked_through(wrap):
    values = [wrap(x) for x in tensors(300)]
    root = Helper(a=values, b=collections.deque(values), c=dict(enumerate(values)))
    assert search("x", root)["x.a"] == 300
    for kind in (tuple, collections.deque, lambda x: dict(enumerate(x))):
        assert search("x", Helper(kept=kind(values))) == {"x.kept": 300}


def test_the_end_of_a_long_list_is_sampled():
    values = [*range(1000), torch.ones(1)]
    assert search("x", Helper(kept=values)) == {"x.kept": 1}
