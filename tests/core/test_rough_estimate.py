"""Rough figures, where shapes alone can't tell what a step does."""

from __future__ import annotations

import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_memopt import anatomy, estimate
from lightning_memopt.core import rough_estimate
from lightning_memopt.core.anatomy_tables import anatomy_tables
from lightning_memopt.core.estimate import Estimate
from lightning_memopt.core.rough_estimate import SCALED

WEIGHTS = 4 * 64 * 64  # bytes


class Chooses(nn.Module):
    """Drops nothing, but only values can tell."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        x = x[x[:, 0] >= 0]
        return self.linear(x).relu()


class NeedsTrainer(pl.LightningModule):
    """Asks its Trainer for what an estimate has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        self.frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.linear(batch).sum() * self.trainer.max_epochs

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.linear.weight], lr=0.1)


def rough(module: nn.Module, batch: Any = None, **kwargs: Any) -> Estimate:
    """Return an estimate that is known to be rough."""
    found = estimate(module, torch.ones(128, 64) if batch is None else batch, **kwargs)
    assert found.reason
    assert not found.anatomy.is_measured
    sizes = [part.size for part in found.anatomy.parts]
    assert sum(sizes) == found.anatomy.peak
    assert sizes == sorted(sizes, reverse=True)
    return found


def test_the_reason_names_the_line_and_what_stopped_there() -> None:
    reason = rough(Chooses()).reason
    assert reason.startswith("what runs depends on values, not on shapes alone (aten.nonzero")
    assert "test_rough_estimate.py" in reason
    assert "\n" not in reason


def test_small_batches_are_extrapolated() -> None:
    module, batch = Chooses(), torch.ones(4096, 64)
    found = rough(module, batch, optimizer="SGD", device="cpu").anatomy
    real = anatomy(module, torch.optim.SGD(module.parameters(), 0.1), batch)
    assert found.size_of("parameters") == WEIGHTS
    assert found.size_of(SCALED) > 0
    assert found.peak == pytest.approx(real.peak, rel=0.1)


def test_no_largest_batch_is_told_from_a_rough_figure() -> None:
    found = rough(Chooses(), device="24GiB")
    assert (found.fits, found.largest) == (True, None)


@pytest.mark.parametrize(
    ("optimizer", "states"), [("SGD", 0), ("Adagrad", 1), ("AdamW", 2), (None, 2)]
)
def test_without_values_the_update_alone_is_counted(optimizer: Any, states: int) -> None:
    found = rough(Chooses("meta"), optimizer=optimizer, device="cpu").anatomy
    assert found.size_of("parameters") == WEIGHTS
    assert found.size_of("gradients") == WEIGHTS
    steps = 4 if states else 0  # bytes of a step count
    assert found.size_of("optimizer state") == states * WEIGHTS + steps


def test_what_needs_a_trainer_has_its_own_optimizer_and_frozen_weights() -> None:
    found = rough(NeedsTrainer(), device="cpu")
    assert "Trainer" in found.reason
    assert found.anatomy.size_of("parameters") == WEIGHTS
    assert found.anatomy.size_of("frozen parameters") == WEIGHTS
    assert found.anatomy.size_of("gradients") == WEIGHTS
    assert found.anatomy.size_of("optimizer state") == 0


def test_adam_is_taken_where_an_optimizer_needs_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def configure_optimizers(self: NeedsTrainer) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0 / self.trainer.max_epochs)

    monkeypatch.setattr(NeedsTrainer, "configure_optimizers", configure_optimizers)
    found = rough(NeedsTrainer(), device="cpu").anatomy
    assert found.size_of("optimizer state") == 2 * WEIGHTS + 4


def test_libraries_are_counted_on_cuda() -> None:
    of_cpu = rough(Chooses("meta"), device="cpu").anatomy
    of_cuda = rough(Chooses("meta"), device="h200").anatomy
    assert of_cpu.size_of("libraries and others") == 0
    assert of_cuda.size_of("libraries and others") == 2 * 32 * 2**20


def test_a_frozen_model_has_its_weights_alone() -> None:
    found = rough(nn.Linear(64, 64, bias=False).requires_grad_(False), device="cpu").anatomy
    assert found.peak == found.size_of("frozen parameters") == WEIGHTS


def test_a_module_that_forbids_copies_has_a_figure() -> None:
    class Alone(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("it holds a lock")

    found = rough(Alone(64, 64, bias=False), device="cpu")
    assert "it holds a lock" in found.reason
    assert found.anatomy.peak == 4 * WEIGHTS


def test_the_table_of_a_rough_figure_shows_its_libraries() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(anatomy_tables(rough(Chooses("meta"), device="h200").anatomy))
    assert isinstance(console.file, io.StringIO)
    (row,) = [x for x in console.file.getvalue().splitlines() if "libraries and others" in x]
    assert "64.00 MiB" in row


def test_a_model_without_room_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rough_estimate, "usable_bytes", lambda: 7 * WEIGHTS)
    assert rough(Chooses()).anatomy.size_of(SCALED) == 0


def test_lazy_modules_run_on_the_cpu() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.LazyLinear(64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    found = rough(Lazy(), optimizer="SGD", device="cpu").anatomy
    assert found.size_of(SCALED) > 0


def test_random_numbers_and_the_module_stay_as_they_are() -> None:
    module = Chooses()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    rough(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.linear.weight.grad is None
