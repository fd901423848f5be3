from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_memopt.core.rewind import Attributes, Rewind, TensorValues


class Model(nn.Module):
    """Changes whatever a step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.metric, self.lists = nn.BatchNorm1d(3), MeanMetric(), CatMetric()
        self.inner = Inner()
        self.register_buffer("rebound", torch.zeros(2))
        self.register_buffer("large", torch.zeros(2**16))
        self.register_buffer("nothing", None)
        self.plain = torch.zeros(2)
        self.outputs: list[int] = [1]
        self.by_key: dict[str, int] = {"a": 1}
        self.seen = {1}
        self.queue: deque[int] = deque([1], maxlen=2)
        self.ordered, self.default = OrderedDict(a=1), defaultdict(int, a=1)
        self.count = 0

    def step(self) -> None:
        self.norm(torch.randn(4, 3))
        self.metric(torch.rand(3))
        self.lists(torch.rand(3))
        self.inner.count += 1
        self.rebound = self.rebound + 1
        self.large[0] += 1
        self.nothing = torch.ones(1)
        self.plain += 1
        self.outputs.append(2)
        for container in (self.by_key, self.ordered, self.default):
            container["b"] = 2
        self.seen.add(2)
        self.queue.extend([2, 3])
        self.count += 1
        self.new = 1


class Inner(nn.Module):
    count = 0


def look(model: Model) -> dict[str, Any]:
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "metrics": [model.metric.compute().item(), model.lists.compute()],
        "updates": [model.metric.update_count, model.lists.update_count],
        "plain": model.plain.clone(),
        "rest": [
            list(model.outputs),
            dict(model.by_key),
            sorted(model.seen),
            list(model.queue),
            dict(model.ordered),
            dict(model.default),
            model.count,
            model.inner.count,
            model.nothing,
            hasattr(model, "new"),
        ],
    }


def test_what_a_step_changes_goes_back_as_often_as_asked() -> None:
    model = Model()
    model.metric(torch.rand(2))
    model.lists(torch.rand(2))
    rewind, containers = Rewind(model), (model.outputs, model.by_key, model.seen, model.queue)
    for _ in range(3):
        model.step()
        model.nothing = None
        rewind.mark()
        before = look(model)
        for _ in range(2):
            model.step()
            assert look(model)["rest"] != before["rest"]
            rewind.put_back()
            torch.testing.assert_close(look(model), before, rtol=0, atol=0)
    assert all(
        a is b
        for a, b in zip(
            containers, (model.outputs, model.by_key, model.seen, model.queue), strict=True
        )
    )


def test_a_large_tensor_is_copied_only_when_it_has_changed() -> None:
    large, values = torch.zeros(2**16), TensorValues()
    values.keep([large])
    (first,) = values._copies
    values.keep([large])
    assert values._copies[0] is first
    large.add_(1)
    values.keep([large])
    assert values._copies[0] is not first
    large.add_(1)
    values.put_back()
    assert large.eq(1).all()


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.zeros(2, requires_grad=True), torch.zeros(4)[::2]],
    ids=["sparse", "trained", "strided"],
)
def test_tensors_of_any_kind_go_back(tensor: torch.Tensor) -> None:
    values = TensorValues()
    for _ in range(2):
        values.keep([tensor])
        before = tensor.detach().clone()
        with torch.no_grad():
            tensor.mul_(0).sub_(tensor.clone()) if tensor.is_sparse else tensor.add_(1)
        values.put_back()
        assert torch.equal(tensor.detach().to_dense(), before.to_dense())


def test_an_unknown_container_is_left_alone() -> None:
    class Holder:
        pass

    holder = Holder()
    holder.count = Counter("a")
    attributes = Attributes([holder])
    holder.count.update("b")
    holder.other = 1
    attributes.put_back()
    assert vars(holder) == {"count": Counter("ab")}
