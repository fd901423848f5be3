from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt.core import kept_tensors as kept
from lightning_memopt.core.storages import WeakStorage

pytestmark = pytest.mark.skipif(
    not kept.can_read_kept(), reason="This PyTorch doesn't tell what a graph keeps."
)


def addresses(loss: Tensor, *left_out: Tensor) -> list[int]:
    found = [each.tensor.data_ptr() for each in kept.kept_tensors(loss)]
    return [each for each in found if each not in {x.data_ptr() for x in left_out}]


def test_tensors_come_in_the_order_in_which_they_were_saved():
    x = torch.randn(3, requires_grad=True)
    y = x.exp()
    z = y.tanh()
    assert addresses(z.sum()) == [y.data_ptr(), z.data_ptr()]
    numbers = [each.number for each in kept.kept_tensors(z)]
    assert numbers == sorted(set(numbers))
    assert max(numbers) < kept.next_number()


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_of_a_checkpoint_the_inputs_are_kept_and_nothing_is_computed_again(is_reentrant: bool):
    calls = []
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    layer.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 3, requires_grad=True).clone()
    loss = checkpoint(layer, x, use_reentrant=is_reentrant).sum()
    assert addresses(loss) == [x.data_ptr()]
    assert len(calls) == 1
    loss.backward()
    assert layer[0].weight.grad is not None


def test_of_nested_checkpoints_the_outer_inputs_are_kept():
    x = torch.randn(2, 3, requires_grad=True).clone()
    inner: Callable[[Tensor], Any] = lambda y: checkpoint(torch.tanh, y.exp(), use_reentrant=False)  # noqa: E731
    loss = checkpoint(inner, x, use_reentrant=False).sum()
    assert set(addresses(loss)) == {x.data_ptr()}


def test_hooks_of_the_user_are_not_called():
    def unpack(_: Any) -> Tensor:
        raise AssertionError

    x, packed = torch.randn(3, requires_grad=True), torch.zeros(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda _: (packed, "note"), unpack):
        y = x.exp()
    assert addresses(y) == [packed.data_ptr()]


def test_what_backward_has_freed_is_not_kept():
    y = torch.randn(3, requires_grad=True).exp()
    y.sum().backward()
    assert addresses(y) == []


def test_reading_keeps_nothing_alive():
    y = torch.randn(3, requires_grad=True).exp().tanh()
    storage = WeakStorage(y.untyped_storage())
    assert len(addresses(y)) == 2
    del y
    assert storage.is_freed
