"""A batch that runs out of memory is done again, and nothing shows that it was."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import BinaryAccuracy

from lightning_memopt import AutoAccumulation
from tests.models import OOM_TEXT, Block, Recorder, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*normalise over the batch")
BATCH = 8
STEPS = 20


@dataclass
class Fault:
    """Runs out of memory once, or as long as a part is larger than `limit`."""

    phase: str | None = None
    batch_idx: int = 0
    part: int = 0
    limit: int = BATCH
    text: str = OOM_TEXT
    left: int = 1

    def meet(self, phase: str, batch_idx: int, samples: int = 0) -> None:
        if phase != self.phase or batch_idx != self.batch_idx or not self.left:
            return
        if self.part > 0:
            self.part -= 1
            return
        self.left -= 1
        raise RuntimeError(self.text)


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault, batch_idx: int) -> Tensor:
        ctx.fault, ctx.batch_idx = fault, batch_idx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.fault.meet("backward", ctx.batch_idx)
        return grad, None, None


class Model(pl.LightningModule):
    """All that a step can change: BatchNorm, dropout, NumPy-free randomness, a metric, a list."""

    def __init__(self, fault: Fault, n: int) -> None:
        super().__init__()
        self.fault, self.n = fault, n
        self.stem, self.block, self.head = nn.Linear(4, 8), Block(8), nn.Linear(8, 1)
        self.accuracy = BinaryAccuracy()
        self.outputs: list[float] = []
        self.samples_seen = 0
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        self.samples_seen += len(x)
        self.average = 0.9 * self.average + x.mean()
        h = self.block(self.stem(x) + random.random())
        h = FailingBackward.apply(h, self.fault, batch_idx)
        logits = self.head(h).squeeze(1)
        self.fault.meet("forward", batch_idx)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
        self.outputs.append(loss.item())
        self.accuracy(logits.detach().sigmoid(), y.int())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self) -> Any:
        optimizer = FailingAdam(self.parameters(), lr=0.05)
        optimizer.model = self
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def train_dataloader(self) -> Any:
        x = torch.randn(self.n, 4, generator=torch.Generator().manual_seed(0))
        data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).float())
        return torch.utils.data.DataLoader(data, BATCH, shuffle=True)


class FailingAdam(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.model.fault.meet("optimizer", self.model.trainer.fit_loop.epoch_loop.batch_idx)
        super().step()
        return loss


class Outputs(pl.Callback):
    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        assert len(outputs["logits"]) == len(batch[0])
        self.logits.append(outputs["logits"])


class Ask(pl.Callback):
    """What an out-of-memory error would ask for, asked for by hand."""

    def __init__(self, auto: AutoAccumulation, batch_idx: int, size: int) -> None:
        self.auto, self.batch_idx, self.size = auto, batch_idx, size

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == self.batch_idx:
            self.auto.set_micro_batch_size(self.size)


def train(fault: Fault, *, size: int, ask: tuple[int, int] | None = None, **kwargs: Any) -> Any:
    torch.manual_seed(1)
    random.seed(1)
    model = Model(fault, n=BATCH * STEPS - 3)
    auto = AutoAccumulation(micro_batch_size=size)
    before = [Ask(auto, *ask)] if ask else []
    recorder, outputs = Recorder(), Outputs()
    trainer = make_trainer(*before, auto, outputs, logger=recorder, log_every_n_steps=1, **kwargs)
    trainer.fit(model)
    return model, trainer, recorder, outputs, auto


def assert_same(one: Any, other: Any) -> None:
    for (name, value), expected in zip(
        one[0].state_dict().items(), other[0].state_dict().values(), strict=True
    ):
        assert torch.equal(value, expected), name
    assert one[0].outputs == other[0].outputs
    assert one[0].samples_seen == other[0].samples_seen == BATCH * STEPS - 3
    assert one[1].global_step == other[1].global_step
    for key in ("loss_step", "loss_epoch", "accuracy_step", "accuracy_epoch"):
        assert one[2].of(key)
        assert one[2].values(key) == other[2].values(key)
    assert all(map(torch.equal, one[3].logits, other[3].logits))
    states = [x[1].optimizers[0].state_dict()["state"] for x in (one, other)]
    for mine, expected in zip(states[0].values(), states[1].values(), strict=True):
        assert all(torch.equal(mine[key], expected[key]) for key in expected)
    assert torch.equal(torch.rand(3), torch.rand(3)) is False


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("batch_idx", range(STEPS))
def test_the_run_is_that_of_the_smaller_parts_from_the_start_of_the_step(phase, batch_idx, factor):
    if phase == "optimizer" and (batch_idx + 1) % factor and batch_idx != STEPS - 1:
        return
    fault = Fault(phase, batch_idx)
    failed = train(fault, size=BATCH, accumulate_grad_batches=factor)
    assert fault.left == 0
    samples = BATCH if batch_idx < STEPS - 1 else BATCH - 3
    smaller = 4 if samples == BATCH else 3
    asked = train(Fault(), size=BATCH, ask=(batch_idx, smaller), accumulate_grad_batches=factor)
    assert failed[4].chosen == smaller
    assert failed[2].values("accumulation/recoveries")[-1] == 1
    assert_same(failed, asked)
