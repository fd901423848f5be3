import collections
import gc

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_memopt.core.tensor_census import compare_census, take_census

SHAPE = (3, 5, 7)  # of nothing else in this process
KEPT: list[Tensor] = []


class Keeper:
    def __init__(self):
        self.kept = []


def keep_in_closure():
    kept = []

    def keep(tensor):
        kept.append(tensor)

    return keep


@pytest.fixture(autouse=True, scope="module")
def _without_garbage():
    gc.collect()


@pytest.fixture
def few_objects():
    """Hide all that is there from the garbage collector: half a million objects take their time."""
    gc.freeze()
    yield
    gc.unfreeze()


def change_by(keep, count=6, **kwargs):
    """Return what a census tells of `count` tensors that were kept after two."""
    for _ in range(2):
        keep(torch.ones(SHAPE, **kwargs))
    before = take_census()
    for _ in range(count):
        keep(torch.ones(SHAPE, **kwargs))
    return compare_census(before)


@pytest.mark.usefixtures("few_objects")
def test_there_are_so_many_tensors_more_and_most_are_of_that_shape_and_type():
    change = change_by([].append, dtype=torch.float64)
    assert (change.more_tensors, change.shape, change.dtype) == (6, SHAPE, "float64")
    assert change.old_with_graph == 0


@pytest.mark.usefixtures("few_objects")
def test_tensors_that_a_compiler_has_only_traced_are_passed_over():
    real = torch.ones(SHAPE)
    before = take_census()
    traced = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(real, static_shapes=False)
    assert isinstance(traced.shape[0], torch.SymInt)
    assert compare_census(before) is None


@pytest.mark.usefixtures("few_objects")
def test_tensors_of_any_length_are_counted_together():
    kept = [torch.ones(3)]
    before = take_census()
    kept += [torch.ones(3 + n) for n in range(5)] + [torch.ones(SHAPE), torch.ones(SHAPE)]
    change = compare_census(before)
    assert (change.more_tensors, change.shape) == (7, SHAPE)


@pytest.mark.usefixtures("few_objects")
def test_no_tensor_more_is_none():
    before = take_census()
    assert compare_census(before) is None


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        (KEPT.append, "global `KEPT` of test_tensor_census.py"),
        (keep_in_closure(), "`kept` in the closure of `keep_in_closure.<locals>.keep`"),
        (Keeper().kept.append, None),
    ],
)
def test_the_container_that_became_longer_is_named_where_it_has_a_name(keep, name):
    try:
        assert change_by(keep).holders == ([name] if name else [])
    finally:
        KEPT.clear()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("kind", [list, collections.deque, dict])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (1, x), lambda x: {"y": x}])
def test_an_attribute_is_named_whatever_holds_the_tensors(kind, wrap):
    keeper = Keeper()
    keeper.kept = kind()

    def keep(tensor):
        if kind is dict:
            keeper.kept[len(keeper.kept)] = wrap(tensor)
        else:
            keeper.kept.append(wrap(tensor))

    assert change_by(keep).holders == ["`Keeper.kept`"]


@pytest.mark.usefixtures("few_objects")
def test_tensors_that_still_have_a_graph_are_counted_and_none_is_kept_alive():
    weight, keeper = nn.Parameter(torch.ones(SHAPE)), Keeper()
    keeper.kept += [weight * 2, weight * 3, weight * 4]
    before = take_census()
    keeper.kept[0] = None
    keeper.kept[1].detach_()
    keeper.kept += [weight * 5] * 2 + [torch.ones(SHAPE)]
    change = compare_census(before)
    assert change.old_with_graph == 1


@pytest.mark.usefixtures("few_objects")
def test_the_shape_named_is_that_of_most_bytes():
    before = take_census()
    kept = [torch.ones(1) for _ in range(9)] + [torch.ones((*SHAPE, 100)) for _ in range(2)]
    change = compare_census(before)
    assert (change.more_tensors, change.shape) == (len(kept), (*SHAPE, 100))


class Forbidding(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise LookupError("not for you")


def _odd_view():
    one, two = (torch.ones(2, 3, requires_grad=True) * 2).unbind()
    with torch.no_grad():
        one.mul_(2)
    return two


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LazyLinear(3),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        _odd_view,
        lambda: torch.ones(2).as_subclass(Forbidding),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_tells_nothing_ends_no_census(make):
    odd = make()
    change = change_by([].append)
    assert (change.more_tensors, change.shape) == (6, SHAPE)
    del odd
