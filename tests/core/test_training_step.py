"""The loss that is found in an output, and the contexts that a forward runs in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memopt.core.training_step import (
    loss_of,
    optimizers_in,
    precision_context,
    run_step,
    without_metrics,
)


class Returns(nn.Module):
    """Returns what a function makes of its weight and its inputs."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 4.0]))
        self.make = make

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(self.weight, *args, **kwargs)


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda w, x: w.sum(), 6.0),
        (lambda w, x: w, 3.0),
        (lambda w, x: {"loss": w[0], "other": w[1]}, 2.0),
        (lambda w, x: {"box": w[0], "class": w[1]}, 6.0),
        (lambda w, x: ("text", w[1]), 4.0),
        (lambda w, x: {"out": w, "aux": w}, 3.0),
    ],
)
def test_the_loss_is_found_in_the_output(make: Any, loss: float) -> None:
    assert loss_of(Returns(make), torch.ones(1)).item() == loss


@pytest.mark.parametrize("batch", [{"a": 1.0, "b": 2.0}, (1.0, 2.0), [1.0, 2.0]])
def test_batches_become_arguments(batch: Any) -> None:
    assert loss_of(Returns(lambda w, a, b: w[0] * a + w[1] * b), batch).item() == 10.0


@pytest.mark.parametrize("value", [None, 3, "loss", torch.ones(1)])
def test_without_gradients_there_is_no_loss(value: Any) -> None:
    with pytest.raises(TypeError, match="must hold a tensor that needs gradients"):
        loss_of(Returns(lambda w, x: value), torch.ones(1))


def test_micro_batches_give_the_gradient_of_their_mean() -> None:
    phases: list[str] = []
    module = Returns(lambda w, x: (w * x).sum())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module.weight.grad = torch.full((2,), 9.0)
    batches = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    run_step(module, [optimizer], batches, begin_phase=phases.append)
    assert module.weight.tolist() == [0.0, 0.0]
    assert phases == ["forward", "backward"] * 2 + ["optimizer", "end"]


def test_contexts_cast_as_lightning_does_and_are_left() -> None:
    layer = nn.Linear(2, 2)
    with precision_context("bf16-mixed", "cpu"):
        assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
    with precision_context("bf16-true", "cpu"):
        assert torch.zeros(1).dtype == torch.bfloat16
    with pytest.raises(KeyError), precision_context("16-true", "cpu"):
        raise KeyError
    assert torch.zeros(1).dtype == torch.float32


def test_optimizers_are_found_in_what_is_configured() -> None:
    one, two = (torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1) for _ in range(2))
    assert optimizers_in({"optimizer": one, "lr_scheduler": "x"}) == [one]
    assert optimizers_in(([one, two], [])) == [one, two]
    assert optimizers_in(None) == []


def test_metrics_look_at_no_values_within() -> None:
    from torchmetrics import MeanMetric

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def forward(self, x: Tensor) -> Tensor:
            return x

    net = Net()
    with without_metrics(net):
        net.mean.update(torch.tensor(3.0))
        assert float(net.mean(torch.tensor(3.0))) == 0.0
    net.mean.update(torch.tensor(3.0))
    assert float(net.mean.compute()) == 3.0
