from __future__ import annotations

import csv

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_memopt import AutomaticMixedPrecision, EmptyCache, GradientAccumulation
from tests.models import Blocks, Unit, make_trainer


def fit(*callbacks, **kwargs):
    torch.manual_seed(0)
    model = Blocks()
    make_trainer(*callbacks, accelerator="gpu", max_epochs=2, **kwargs).fit(model)
    return model.state_dict()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_the_weights_are_those_of_lightnings_precision(precision):
    mine, stock = fit(AutomaticMixedPrecision(precision)), fit(precision=precision)
    for name, value in stock.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=0)


def test_auto_takes_bf16_where_the_gpu_has_it(caplog):
    caplog.set_level("INFO", "lightning.pytorch")
    fit(AutomaticMixedPrecision())
    expected = "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "16-mixed"
    assert expected in caplog.text


def test_skipped_steps_are_counted_on_the_gpu(tmp_path):
    class Skips(Unit):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (torch.inf if batch_idx < 2 else 1)

    model, logger = Skips(n=10, lr=1.0), CSVLogger(tmp_path)
    make_trainer(AutomaticMixedPrecision("16-mixed"), accelerator="gpu", logger=logger).fit(model)
    logger.save()
    last = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    column = last[0].split(",").index("amp/skipped_steps")
    assert float(last[-1].split(",")[column]) == 2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_bf16_never_waits_for_the_device():
    class Strict(Callback):
        def on_train_batch_start(self, *args):
            torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, *args):
            torch.cuda.set_sync_debug_mode("default")

    class Quiet(Blocks):
        def train_dataloader(self):
            x = torch.randn(8, 4, 4, device="cuda")
            return torch.utils.data.DataLoader(
                [[batch, batch.sum(1, keepdim=True)] for batch in x], batch_size=None
            )

    model = Quiet()
    callbacks = [Strict(), AutomaticMixedPrecision("bf16-mixed"), GradientAccumulation(2)]
    trainer = make_trainer(*callbacks, accelerator="gpu")
    try:
        trainer.fit(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.global_step == 4


def test_a_window_has_the_gradient_of_the_one_big_batch():
    model = Unit(n=10, batch_size=1)
    make_trainer(GradientAccumulation(4), accelerator="gpu").fit(model)
    assert model.grads == pytest.approx([1, 1, 1])


# So small a step may be dwarfed by the calls, which is then said.
@pytest.mark.filterwarnings("ignore:.*calls took")
def test_emptying_the_cache_gives_reserved_memory_back(tmp_path):
    class Leaves(Blocks):
        def training_step(self, batch, batch_idx):
            torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
            return super().training_step(batch, batch_idx)

    logger = CSVLogger(tmp_path)
    cache = EmptyCache("fragmented", min_gap="128MiB")
    make_trainer(cache, accelerator="gpu", logger=logger).fit(Leaves())
    logger.save()
    with (tmp_path / "lightning_logs/version_0/metrics.csv").open() as file:
        cells = [row["cache/freed_gib"] for row in csv.DictReader(file)]
    freed = [float(cell) for cell in cells if cell]
    assert max(freed) >= 0.25, freed
    assert torch.cuda.memory_reserved() < 256 * 2**20
