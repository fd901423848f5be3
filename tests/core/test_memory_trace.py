from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt.core.memory_trace import WORKSPACES, MemoryTrace


def made(trace: MemoryTrace) -> list[tuple[int, str]]:
    return [(lifetime.size, lifetime.operator) for lifetime in trace.lifetimes]


def test_births_and_deaths_are_in_order():
    with MemoryTrace("cpu") as trace:
        a = torch.zeros(4)
        b = torch.ones(3, dtype=torch.float64)
        del a
        c = torch.zeros(5, dtype=torch.int8)
        del b, c
    assert made(trace) == [(16, "zeros"), (24, "ones"), (5, "zeros")]
    assert [each.dtype for each in trace.lifetimes] == [torch.float32, torch.float64, torch.int8]
    assert trace.events == [1, 2, -1, 3, -2, -3]


def test_a_storage_lives_as_long_as_one_of_its_views():
    with MemoryTrace("cpu") as trace:
        a = torch.zeros(4, 4)
        row = a[0].view(2, 2).t()
        del a
        assert trace.events == [1]
        row.add_(1)
        del row
    assert made(trace) == [(64, "zeros")]
    assert trace.events == [1, -1]


def test_what_backward_keeps_dies_in_backward():
    x = torch.ones(8, requires_grad=True)
    with MemoryTrace("cpu") as trace:
        loss = x.exp().sum()
        assert trace.events == [1, 2]
        loss.backward()
        assert -1 in trace.events
    assert made(trace)[0] == (32, "exp")


def test_memory_used_again_is_a_storage_of_its_own():
    with MemoryTrace("cpu") as trace:
        for _ in range(50):
            torch.zeros(1000)
    assert len(trace.lifetimes) == 50
    assert trace.events == [n for number in range(1, 51) for n in (number, -number)]


def test_operators_that_make_several_tensors_are_seen_whole():
    x = torch.rand(4, 6)
    with MemoryTrace("cpu") as trace:
        values, places = x.max(1)
        parts = x.unbind(0)
    assert [(each.size, each.dtype) for each in trace.lifetimes] == [
        (16, torch.float32),
        (32, torch.int64),
        (96, torch.float32),  # that of x, met as views of it
    ]
    del values, places, parts


def test_what_has_no_storage_on_the_device_is_left_out():
    sparse = torch.eye(3).to_sparse()
    with MemoryTrace("cpu") as trace:
        kept = [torch.zeros(4, device="meta"), torch.zeros(0)]
        trace.label([*kept, sparse], "batch")
    assert trace.events == []


def test_labels_name_what_was_there_and_what_is_made():
    weight = nn.Parameter(torch.zeros(3), requires_grad=False)
    trace = MemoryTrace("cpu")
    trace.label([weight, weight.view(-1)], "parameters")
    with trace:
        x = torch.zeros(5)
        trace.label([x], "gradients")
    found = [(each.size, each.kind, each.operator) for each in trace.lifetimes]
    assert found == [(12, "parameters", ""), (20, "gradients", "zeros")]
    assert not trace.lifetimes[1].is_frozen


def test_only_parameters_that_are_not_trained_are_frozen():
    trace = MemoryTrace("cpu")
    kept = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1), False), torch.zeros(1)]
    trace.label(kept, "parameters")
    assert [each.is_frozen for each in trace.lifetimes] == [False, True, False]


def test_tied_parameters_are_one_storage():
    flat = torch.zeros(10)
    trace = MemoryTrace("cpu")
    trace.label([nn.Parameter(flat[:5]), nn.Parameter(flat[5:]), flat], "parameters")
    assert [each.size for each in trace.lifetimes] == [40]


def test_modules_and_phases_are_known_and_nothing_stays_on_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Tanh()))
    with MemoryTrace("cpu") as trace, trace.naming_modules(model):
        trace.begin_phase("forward")
        y = model(torch.ones(2, 4))
        trace.begin_phase("backward")
        z = y + 1
    places = [(each.operator, each.module, each.phase) for each in trace.lifetimes]
    del y, z
    assert places == [
        ("ones", "", "forward"),
        ("t", "0", "forward"),
        ("addmm", "0", "forward"),
        ("relu", "1.0", "forward"),
        ("tanh", "1.1", "forward"),
        ("add", "", "backward"),
    ]
    assert trace.phases[0] == (0, "forward")
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called


def test_names_are_right_after_a_module_has_raised():
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.tanh = Fails(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            with suppress(ValueError):
                self.fails(x)
            return self.tanh(x) + 1

    model = nn.ModuleDict({"tries": Tries()})
    with MemoryTrace("cpu") as trace, trace.naming_modules(model):
        model["tries"](torch.ones(2))
    found = [(each.operator, each.module) for each in trace.lifetimes]
    assert found[-2:] == [("tanh", "tries.tanh"), ("add", "tries")]


def test_recomputed_activations_belong_to_the_module_that_recomputes():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = torch.ones(2, 4, requires_grad=True)
    with MemoryTrace("cpu") as trace, trace.naming_modules(model):
        loss = checkpoint(model[0], x, use_reentrant=False).sum()
        trace.begin_phase("backward")
        loss.backward()
    again = [each for each in trace.lifetimes if each.phase == "backward"]
    assert ("tanh", "0.1") in [(each.operator, each.module) for each in again]


def test_memory_within_an_operator_comes_and_goes_after_its_results():
    def extra(func: Any, args: tuple[Any, ...], results: list[Tensor]) -> int:
        return 7 * len(results) if func is torch.ops.aten.exp.default else 0

    with MemoryTrace("cpu", extra) as trace:
        x = torch.zeros(2)
        y = x.exp()
    assert trace.events[:4] == [1, 2, 3, -3]
    assert (trace.lifetimes[2].size, trace.lifetimes[2].kind) == (7, WORKSPACES)
    del x, y


def test_deaths_after_the_end_are_not_taken_down():
    with MemoryTrace("cpu") as trace:
        x = torch.zeros(2)
    trace.stop()
    del x
    gc.collect()
    assert trace.events == [1]


def test_what_operators_return_is_what_they_return_without_it():
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    expected = torch.linalg.qr(x)
    with MemoryTrace("cpu"):
        found = torch.linalg.qr(x)
    assert type(found) is type(expected)
    assert torch.equal(found.Q, expected.Q)
