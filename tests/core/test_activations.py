import pytest
import torch
from torch import nn

from lightning_memopt.core.activations import KeptForBackward
from lightning_memopt.core.saved_tensors import record_saved_tensors


class Net(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5)) for _ in range(blocks)]
        )
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def addresses(model):
    return {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}


def kept(model, *tensors):
    return KeptForBackward(model, tensors, addresses(model))


def test_what_is_kept_is_what_autograd_was_given_to_keep():
    model = Net()
    with record_saved_tensors(model) as saved:
        loss = model(torch.ones(16, 4)).square().sum()
    # Those hooks are on all that was kept: the same once more, seen from the graph.
    loss = model(torch.ones(16, 4)).square().sum()
    found = kept(model, loss)
    assert found.total_bytes == saved.total_bytes > 0
    assert sorted(each.size for each in found.storages) == sorted(saved.storages.values())


def test_storages_count_to_the_module_whose_parameters_were_used_last():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    found = kept(model, model(torch.ones(16, 4)).square().sum())
    assert found.by_module() == [
        # Its input, and what GELU keeps, which is its output; the output of GELU is the last's.
        ("0", 16 * 4 * 4 + 16 * 8 * 4),
        ("2", 16 * 8 * 4 + 16 * 2 * 4),
    ]


def test_under_autocast_a_cast_leads_to_the_module_too():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.autocast("cpu", torch.bfloat16):
        found = kept(model, model(torch.ones(16, 4)).sum())
    assert {each.module for each in found.storages} == {"0", "2"}
    assert {each.dtype for each in found.storages} <= {torch.bfloat16, torch.float32}


def test_a_table_of_vectors_is_a_module_like_others_and_so_is_what_uses_it():
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4, bias=False))
    rows = dict(kept(model, model(torch.arange(5)).square().sum()).by_module())
    assert rows == {"0": 5 * 8, "1": 5 * 8 * 4 + 5 * 4 * 4}  # indices; then vectors and the square


def test_many_modules_are_taken_together():
    model = Net(blocks=30)
    rows = kept(model, model(torch.ones(16, 4)).sum()).by_module()
    assert {name for name, _ in rows} == {"stem", "blocks", "norm"}
    assert sum(size for _, size in rows) == kept(model, model(torch.ones(16, 4)).sum()).total_bytes
    assert [size for _, size in rows] == sorted((size for _, size in rows), reverse=True)


def test_what_comes_before_any_parameter_counts_to_no_module():
    model = nn.Linear(4, 2)
    x = torch.ones(16, 4, requires_grad=True)
    found = kept(model, model(x.exp()).sum())
    assert ("", 16 * 4 * 4) in found.by_module()


def test_a_forward_has_no_position_in_backward():
    model = Net()
    assert kept(model, model(torch.ones(16, 4)).sum()).position is None


def test_a_backward_that_failed_is_found_where_it_failed():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no memory")

    model = Net()
    x = model.blocks[1](model.blocks[0](model.stem(torch.ones(16, 4))))
    loss = model.norm(model.blocks[2](Failing.apply(x))).square().sum()
    with pytest.raises(RuntimeError, match="no memory"):
        loss.backward()
    position = kept(model, loss).position
    assert position.operation == "FailingBackward"
    assert position.module == "blocks.1.0"


def test_nothing_is_kept_behind_tensors_without_a_graph():
    model = Net()
    with torch.no_grad():
        found = kept(model, model(torch.ones(16, 4)))
    assert found.total_bytes == 0
    assert found.by_module() == []
