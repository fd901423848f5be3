"""The anatomy of real steps on a CPU, to the byte, and that it leaves nothing behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_memopt import anatomy
from lightning_memopt.core.run_memory import GRADIENTS
from lightning_memopt.core.traced_step import trace_steps

ROW = 4 * 64
LAYER = 4 * (64 * 64 + 64)  # bytes


class Net(nn.Module):
    """A frozen layer, two trained ones that share their weights, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("scale", torch.zeros(8, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(self.frozen(x)).relu()))


TRAINED = LAYER + ROW + 2 * ROW  # one weight, two biases, BatchNorm's


def by_kind(module: nn.Module, optimizer: Any, batch: Any, **kwargs: Any) -> dict[Any, int]:
    """Return the bytes of each use and type at the peak."""
    found = anatomy(module, optimizer, batch, **kwargs)
    assert sum(part.size for part in found.parts) == found.peak
    return {(part.kind, part.dtype): part.size for part in found.parts}


def test_each_part_has_its_bytes() -> None:
    module = Net()
    parts = by_kind(module, torch.optim.Adam(module.parameters()), torch.ones(8, 64))
    assert parts["parameters", "float32"] == TRAINED
    assert parts["frozen parameters", "float32"] == LAYER
    assert parts["gradients", "float32"] == TRAINED
    assert parts["optimizer state", "float32"] == 2 * TRAINED + 5 * 4  # and step counts
    assert parts["buffers", "float32"] == 2 * ROW
    assert parts["buffers", "float16"] == 16
    assert parts["buffers", "int64"] == 8
    assert parts["batch", "float32"] == 8 * ROW


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (torch.optim.Adagrad, 1),
        (torch.optim.RMSprop, 1),
        (torch.optim.Adam, 2),
        (partial(torch.optim.Adam, amsgrad=True), 3),
    ],
)
def test_optimizers_hold_their_tensors(make: Any, states: int) -> None:
    module = nn.Linear(64, 64)
    parts = by_kind(module, make(module.parameters()), torch.ones(2, 64))
    held = parts.get(("optimizer state", "float32"), 0)
    assert held // LAYER == states
    assert held - states * LAYER in (0, 8)  # step counts of two tensors


def test_what_forward_keeps_is_by_module_operator_and_type() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Softmax(-1))
    found = anatomy(module, torch.optim.SGD(module.parameters(), 0.1), torch.ones(8, 64))
    assert found.kept_by("module") == [("0", 8 * ROW), ("1", 8 * ROW), ("3", 8 * ROW), ("", 4)]
    assert dict(found.kept_by("operator")) == {
        "addmm": 8 * ROW,
        "gelu": 8 * ROW,
        "_softmax": 8 * ROW,
        "mean": 4,
    }
    assert found.kept_by("dtype") == [("float32", 24 * ROW + 4)]


def test_mixed_precision_keeps_parameters_gradients_and_state_in_float32() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(module.parameters())
    parts = by_kind(module, optimizer, torch.ones(8, 64), precision="bf16-mixed")
    assert parts["parameters", "float32"] == parts["gradients", "float32"] == 2 * LAYER
    assert parts["optimizer state", "float32"] == 4 * LAYER + 16
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_gradients_are_there_after_the_first_backward_alone() -> None:
    module = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    trace = trace_steps(module, [optimizer], [torch.ones(1, 64)], "cpu", "32-true")
    made = [lifetime for lifetime in trace.lifetimes if lifetime.kind == GRADIENTS]
    assert {lifetime.phase for lifetime in made} == {"backward"}
    assert sum(lifetime.size for lifetime in made) == 2 * LAYER  # of two steps
    small = by_kind(module, optimizer, torch.ones(1, 64))
    assert small["gradients", "float32"] == LAYER


def test_a_step_leaves_everything_as_it_was() -> None:
    module = nn.Sequential(Net(), nn.Dropout())
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.rand(8, 64)).sum().backward()
    optimizer.step()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    states = [
        {name: value.clone() for name, value in state.items()} for state in optimizer.state.values()
    ]
    batch = torch.rand(8, 64)
    values, random = batch.clone(), torch.get_rng_state()
    anatomy(module, optimizer, batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(batch, values)
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    for p, before in zip(module.parameters(), gradients, strict=True):
        assert (p.grad is None) == (before is None)
        assert p.grad is None or torch.equal(p.grad, before)  # type: ignore[arg-type]
    for state, before_state in zip(optimizer.state.values(), states, strict=True):
        assert all(torch.equal(value, before_state[name]) for name, value in state.items())


def test_a_lightning_module_runs_its_training_step() -> None:
    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.linear(batch["x"]).mean()
            self.log("loss", loss)
            return {"loss": loss}

    module = Lit()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    found = anatomy(module, optimizer, {"x": torch.ones(2, 64), "name": ["a", "b"]})
    assert found.size_of("batch") == 2 * ROW
    assert found.size_of("parameters") == LAYER


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"precision": "scale"}, ValueError, "`precision` must be one of"),
        ({"batch": torch.ones(2, 64, dtype=torch.long)}, RuntimeError, "dtype"),
    ],
)
def test_what_is_wrong_is_told(kwargs: dict[str, Any], error: Any, text: str) -> None:
    module = nn.Linear(64, 64)
    weights = module.weight.clone()
    arguments = {"batch": torch.ones(2, 64), **kwargs}
    with pytest.raises(error, match=text):
        anatomy(module, torch.optim.SGD(module.parameters(), 0.1), **arguments)
    assert torch.equal(module.weight, weights)


def test_an_output_without_a_loss_is_told() -> None:
    class Says(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return "loss"

    module = Says(2, 2)
    with pytest.raises(TypeError, match="`Says` must hold a tensor that needs gradients"):
        anatomy(module, torch.optim.SGD(module.parameters(), 0.1), torch.ones(2, 2))
