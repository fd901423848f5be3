import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_memopt.core.autograd_graph import graph_nodes, is_freed, saved_tensors
from lightning_memopt.core.storages import WeakStorage


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def names(tensors, **kwargs):
    return sorted(node.name() for node in graph_nodes(tensors, **kwargs))


def sizes(tensor):
    return sorted(
        saved.untyped_storage().nbytes()
        for node in graph_nodes([tensor])
        for saved in saved_tensors(node)
    )


def test_each_node_is_met_once_however_many_ways_lead_to_it():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    assert names([y * y + y, y]) == [
        "AddBackward0",
        "ExpBackward0",
        "MulBackward0",
        "torch::autograd::AccumulateGrad",
    ]


def test_no_more_nodes_than_the_limit_are_met():
    x = torch.ones(3, requires_grad=True)
    for _ in range(100):
        x = x + 1
    assert len(names([x])) == 101
    assert len(names([x], limit=7)) == 7


def test_a_tensor_without_a_graph_has_no_nodes():
    assert names([torch.ones(3), torch.ones(3, requires_grad=True)]) == []


def test_what_a_node_keeps_is_seen_without_a_change_to_backward():
    weight = torch.full((4, 4), 2.0, requires_grad=True)
    x = torch.ones(8, 4)
    loss = (x @ weight).relu().sum()
    assert sizes(loss) == [8 * 4 * 4, 8 * 4 * 4]  # the input of the product, the result of relu
    loss.backward()
    assert torch.equal(weight.grad, torch.full((4, 4), 8.0))


def test_a_function_of_the_users_own_is_seen():
    x = torch.ones(10, requires_grad=True)
    assert sizes(Square.apply(x.neg())) == [40]


def test_what_was_looked_at_is_freed_with_its_graph():
    x = torch.ones(3, requires_grad=True)
    loss = x.exp().tanh().sum()  # both keep their own result
    storages = [
        WeakStorage(saved.untyped_storage())
        for node in graph_nodes([loss])
        for saved in saved_tensors(node)
    ]
    assert [storage.is_freed for storage in storages] == [False, False]
    del loss
    assert [storage.is_freed for storage in storages] == [True, True]


def test_a_checkpoint_is_not_unpacked():
    calls = []

    def block(x):
        calls.append(1)
        return x.exp().sin()

    loss = checkpoint(block, torch.ones(3, requires_grad=True), use_reentrant=False).sum()
    assert sizes(loss) == []
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


def test_a_node_is_freed_once_backward_has_been_through_it():
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("stopped here")

    x = torch.ones(3, requires_grad=True)
    loss = Stop.apply(x.exp()).sin().sum()
    nodes = {node.name(): node for node in graph_nodes([loss])}
    assert not any(is_freed(node) for node in nodes.values())
    with pytest.raises(RuntimeError, match="stopped here"):
        loss.backward()
    assert is_freed(nodes["SinBackward0"])
    assert not is_freed(nodes["ExpBackward0"])
    assert not is_freed(nodes["SumBackward0"])  # which kept nothing


def test_a_function_of_the_users_own_is_known_to_be_freed():
    y = Square.apply(torch.ones(10, requires_grad=True).neg())
    assert not is_freed(y.grad_fn)
    y.sum().backward()
    assert is_freed(y.grad_fn)
    assert list(saved_tensors(y.grad_fn)) == []
