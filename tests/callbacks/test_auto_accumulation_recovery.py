"""A batch that runs out of memory is done again, and nothing shows that it was."""

from __future__ import annotations

import random
import weakref
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
BATCH = 16
STEPS = 20
N = BATCH * STEPS - 3


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


def train(
    fault: Fault, *, size: int, ask: tuple[int, int] | None = None, n: int = N, **kwargs: Any
) -> Any:
    torch.manual_seed(1)
    random.seed(1)
    model = Model(fault, n)
    auto = AutoAccumulation(micro_batch_size=size)
    before = [Ask(auto, *ask)] if ask else []
    recorder, outputs = Recorder(), Outputs()
    trainer = make_trainer(*before, auto, outputs, logger=recorder, log_every_n_steps=1, **kwargs)
    trainer.fit(model)
    return model, trainer, recorder, outputs, auto


def state(run: Any) -> dict[str, Any]:
    model, trainer, recorder, outputs, auto = run
    keys = ("loss_step", "loss_epoch", "accuracy_step", "accuracy_epoch")
    assert all(recorder.of(key) for key in keys)
    return {
        "weights": dict(model.state_dict()),
        "outputs": model.outputs,
        "samples": model.samples_seen,
        "steps": trainer.global_step,
        "logged": [recorder.of(key) for key in keys],
        "logits": outputs.logits,
        "optimizer": trainer.optimizers[0].state_dict()["state"],
        "schedule": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        "random": [torch.get_rng_state(), torch.tensor(random.getstate()[1])],
        "chosen": auto.chosen,
    }


@pytest.mark.parametrize("batch_idx", range(STEPS))
def test_the_run_is_that_of_the_smaller_parts_from_the_start_of_the_step(batch_idx: int) -> None:
    factor = 1 + 2 * (batch_idx % 2)  # windows of three batches too
    samples = BATCH if batch_idx < STEPS - 1 else BATCH - 3
    smaller = 8 if samples == BATCH else 7
    asked = train(Fault(), size=BATCH, ask=(batch_idx, smaller), accumulate_grad_batches=factor)
    expected = state(asked)
    assert expected["samples"] == N
    steps_here = (batch_idx + 1) % factor == 0 or batch_idx == STEPS - 1
    for phase in ("forward", "backward", "optimizer")[: 3 if steps_here else 2]:
        fault = Fault(phase, batch_idx)
        failed = train(fault, size=BATCH, accumulate_grad_batches=factor)
        assert fault.left == 0
        assert failed[2].values("accumulation/recoveries")[-1] == 1
        torch.testing.assert_close(state(failed), expected, rtol=0, atol=0)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_later_part_may_fail_too(phase: str, part: int) -> None:
    fault, several = Fault(phase, 4, part), {"n": BATCH * 6, "accumulate_grad_batches": 3}
    failed = train(fault, size=4, **several)
    asked = train(Fault(), size=4, ask=(4, 2), **several)
    assert (fault.left, fault.part) == (0, 0)
    torch.testing.assert_close(state(failed), state(asked), rtol=0, atol=0)


def test_a_batch_is_done_again_as_often_as_it_takes() -> None:
    fault = Fault("forward", 3, left=2)
    failed = train(fault, size=BATCH)
    assert failed[4].chosen == 4
    assert failed[2].values("accumulation/recoveries")[-1] == 2
    asked = train(Fault(), size=BATCH, ask=(3, 4))
    torch.testing.assert_close(state(failed), state(asked), rtol=0, atol=0)


def test_one_sample_is_the_original_error_with_advice() -> None:
    model = Model(Fault("forward", 3, left=100), N)
    model.block.norm = nn.Identity()  # which takes one sample too
    with pytest.raises(RuntimeError, match=rf"^{OOM_TEXT} AutoAccumulation: this was one sample"):
        make_trainer(AutoAccumulation(micro_batch_size=BATCH)).fit(model)
    assert model.fault.left == 100 - 5  # 16, 8, 4, 2 and 1 samples


def test_weights_that_have_changed_already_end_the_run() -> None:
    class HalfWay(FailingAdam):
        def step(self, closure: Any = None) -> Any:
            closure()
            with torch.no_grad():
                self.param_groups[0]["params"][0].mul_(0.5)
            raise RuntimeError(OOM_TEXT)

    class Changed(Model):
        def configure_optimizers(self) -> Any:
            return HalfWay(self.parameters())

    with pytest.raises(RuntimeError, match="the optimizer had begun to change weights"):
        make_trainer(AutoAccumulation(micro_batch_size=BATCH)).fit(Changed(Fault(), 16))


def test_another_error_is_the_users_own() -> None:
    fault = Fault("forward", 2, text="no such feature")
    with pytest.raises(RuntimeError, match=r"^no such feature$"):
        train(fault, size=4)


def test_without_recovery_the_error_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match=rf"^{OOM_TEXT}$"):
        make_trainer(AutoAccumulation(micro_batch_size=BATCH, recover=False)).fit(
            Model(Fault("forward", 2), 64)
        )


def test_what_the_failed_attempt_held_is_gone_when_the_batch_is_done_again() -> None:
    held: list[weakref.ref[Tensor]] = []

    class Holding(Model):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
            assert not held or held[0]() is None  # of the attempt that failed
            large = self.stem(batch[0]) * 2
            if batch_idx == 2:
                held.append(weakref.ref(large))
            output = super().training_step(batch, batch_idx)
            self.kept = large
            return output

    fault = Fault("forward", 2)
    make_trainer(AutoAccumulation(micro_batch_size=BATCH)).fit(Holding(fault, 3 * BATCH))
    assert fault.left == 0
    assert len(held) == 3


def test_it_says_what_it_did(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    train(Fault("backward", 3), size=BATCH)
    assert (
        "AutoAccumulation: out of memory in backward (1.00 GiB asked for) at batch 3: put back and "
        "done again in 2 parts of 8 samples, which holds from here"
    ) in caplog.text
