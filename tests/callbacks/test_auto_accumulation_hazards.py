"""Models that do what models do: each of these went wrong once."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import AutoAccumulation
from tests.models import OOM_TEXT, Recorder, make_trainer

N, BATCH = 32, 8


class Model(pl.LightningModule):
    """`limit` is what fits; with `fails_at` one batch runs out of memory once."""

    def __init__(self, limit: int = 10**9, fails_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.limit, self.faults = limit, {fails_at} if fails_at >= 0 else set()
        self.kept: tuple[list[int], set[int]] = ([], set(self.faults))

    def meet(self, samples: int, batch_idx: int) -> None:
        self.kept[0].append(samples)
        faults = self.kept[1]
        if samples > self.limit or batch_idx in faults:
            faults.discard(batch_idx)
            raise RuntimeError(OOM_TEXT)

    def loss(self, x: Tensor) -> Tensor:
        return (self.net(x) - x.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch[0])
        self.meet(len(batch[0]), batch_idx)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x), BATCH)


def train(model: Model, *callbacks: pl.Callback, **kwargs: Any) -> Model:
    torch.manual_seed(1)
    random.seed(1)
    make_trainer(*callbacks, **kwargs).fit(model)
    return model


def assert_trained_alike(model: Model, other: Model, **kwargs: Any) -> None:
    torch.testing.assert_close(model.state_dict(), other.state_dict(), **kwargs)


CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def test_a_search_in_a_window_leaves_its_gradients() -> None:
    auto = AutoAccumulation(micro_batch_size=BATCH)

    class Ask(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            if batch_idx == 1:
                auto.set_micro_batch_size(None)

    model = train(Model(limit=BATCH), Ask(), auto, accumulate_grad_batches=2)
    assert len(model.kept[0]) > 4
    assert_trained_alike(model, train(Model(), accumulate_grad_batches=2), **CLOSE)


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_that_has_begun_is_not_done_again(foreach: bool) -> None:
    class Halfway(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            closure()
            super().step()
            raise RuntimeError(OOM_TEXT)

    class Unused(Model):
        def configure_optimizers(self) -> Any:
            self.unused = nn.Parameter(torch.zeros(2))
            return Halfway([self.unused, *self.net.parameters()], foreach=foreach)

    with pytest.raises(RuntimeError, match="the optimizer had begun to change weights"):
        train(Unused(), AutoAccumulation(micro_batch_size=BATCH))


def test_weights_that_forward_changes_can_not_be_put_back() -> None:
    class Momentum(Model):
        def __init__(self) -> None:
            super().__init__(fails_at=1)
            self.teacher = nn.Linear(4, 1).requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.net.weight, 0.5)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="the step had begun to change weights"):
        train(Momentum(), AutoAccumulation(micro_batch_size=BATCH))


@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_a_part_without_weight_may_have_no_loss(kind: str) -> None:
    class Masked(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            counts = torch.arange(len(x)) < (2 if len(x) == BATCH or self.is_first else 0)
            self.is_first = not self.is_first
            return (self.net(x).squeeze(1).square() * counts).sum() / counts.sum()

        is_first = True

    weights = iter([2, 0] * 100)

    def weigh(batch: Any) -> Any:
        weight = 2 if len(batch[0]) == BATCH else next(weights)
        return torch.tensor(weight) if kind == "tensor" else weight

    plain = train(Masked())
    model = train(Masked(), AutoAccumulation(micro_batch_size=4, weigh_by=weigh))
    assert_trained_alike(model, plain, **CLOSE)


def test_a_step_may_take_items_out_of_its_batch() -> None:
    class Popping(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return super().training_step([batch.pop("x")], batch_idx)

        def train_dataloader(self) -> Any:
            return DataLoader(
                [{"x": x} for x in super().train_dataloader().dataset.tensors[0]], BATCH
            )

    assert_trained_alike(train(Popping(limit=4), AutoAccumulation()), train(Model()), **CLOSE)
    again = train(Popping(fails_at=2), AutoAccumulation(micro_batch_size=BATCH))
    assert_trained_alike(again, train(Model()), **CLOSE)


def test_a_batch_that_is_changed_in_place_is_not_done_again() -> None:
    class Changing(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            batch[0].mul_(2)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="changes its batch in place: copy it there first"):
        train(Changing(fails_at=1), AutoAccumulation(micro_batch_size=BATCH))
    searched = train(Changing(limit=4), AutoAccumulation())
    assert_trained_alike(searched, train(Changing()), **CLOSE)


def test_nested_containers_and_generators_go_back() -> None:
    class Keeping(Model):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.history: dict[str, list[float]] = {"loss": []}
            self.inner = Inner()
            self.generator = torch.Generator().manual_seed(0)
            self.random = random.Random(0)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            noise = torch.rand((), generator=self.generator) + self.random.random()
            loss = self.loss(batch[0]) * noise
            self.history["loss"].append(loss.item())
            self.inner.seen.append(len(batch[0]))
            self.meet(len(batch[0]), batch_idx)
            return loss

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

    plain = train(Keeping())
    searched = train(Keeping(), AutoAccumulation())
    assert len(searched.kept[0]) > 4
    assert searched.history == plain.history
    assert searched.inner.seen == plain.inner.seen
    failed = train(Keeping(fails_at=2), AutoAccumulation(micro_batch_size=BATCH))
    assert failed.inner.seen == [8, 8, 4, 4, 4, 4]
    assert failed.history["loss"][:2] == plain.history["loss"][:2]


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_batch_start"])
def test_what_a_step_needs_may_be_made_by_a_later_hook(hook: str) -> None:
    def make(self: Any, *_: Any) -> None:
        self.made = 1

    class Late(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            assert self.made
            return super().training_step(batch, batch_idx)

    setattr(Late, hook, make)
    auto = AutoAccumulation()
    model = train(Late(limit=4), auto)
    assert auto.largest == 4
    assert_trained_alike(model, train(Model()), **CLOSE)


def test_buffers_that_can_not_be_written_to() -> None:
    class Expanded(Model):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.register_buffer("mask", torch.ones(1).expand(4))
            with torch.inference_mode():
                self.register_buffer("cache", torch.ones(4))

    for model in (
        train(Expanded(limit=4), AutoAccumulation()),
        train(Expanded(fails_at=1), AutoAccumulation(micro_batch_size=BATCH)),
    ):
        assert_trained_alike(model, train(Expanded()), **CLOSE)


@pytest.mark.filterwarnings("ignore:.*dry-run")
@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.filterwarnings("ignore:The total number of parameters")
def test_lazy_parameters_are_not_tried() -> None:
    class Lazy(Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.LazyLinear(1)

    auto = AutoAccumulation()
    model = train(Lazy(), auto)
    assert auto.chosen is None
    assert model.kept[0] == [8] * 4


def test_an_empty_batch_is_one_part() -> None:
    class WithEmpty(Model):
        def train_dataloader(self) -> Any:
            return DataLoader([torch.ones(4, 4), torch.ones(0, 4)], batch_size=None)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.kept[0].append(len(batch))
            return self.net(batch).sum()

    model = train(WithEmpty(), AutoAccumulation(micro_batch_size=2))
    assert model.kept[0] == [2, 2, 0]


def test_a_log_of_ones_own_and_one_bound_early() -> None:
    class Own(Model):
        def __init__(self) -> None:
            super().__init__(limit=4)
            self.early: Any = None

        def on_fit_start(self) -> None:
            self.early = Holder(super().log)

        def log(self, key: str, val: Any) -> None:
            super().log(key, val, on_step=True, on_epoch=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            self.log("mine", loss)
            self.log("step", float(49 + batch_idx))
            self.early.function("early", loss)
            return loss

    class Holder:
        def __init__(self, function: Any) -> None:
            self.function = function

    recorder, plain = Recorder(), Recorder()
    train(Own(), AutoAccumulation(), logger=recorder, log_every_n_steps=1)
    whole = Own()
    whole.limit = BATCH
    train(whole, logger=plain, log_every_n_steps=1)
    for key in ("mine_step", "mine_epoch", "early"):
        assert recorder.values(key) == pytest.approx(plain.values(key), rel=1e-5)
        assert recorder.steps(key) == plain.steps(key)
    assert recorder.values("step_step") == [49, 50, 51, 52]  # exactly


def test_an_epoch_weighs_the_parts_of_a_batch_as_the_gradient_does() -> None:
    class Weighted(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            counts = (x[:, 0] > 0).float()
            loss = (self.net(x).squeeze(1).square() * counts).sum() / counts.sum().clamp(min=1)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    def positives(batch: Any) -> Tensor:
        return (batch[0][:, 0] > 0).sum()

    values = []
    for callbacks in ([], [AutoAccumulation(micro_batch_size=3, weigh_by=positives)]):
        recorder = Recorder()
        train(Weighted(), *callbacks, logger=recorder, log_every_n_steps=1)
        values.append([recorder.values(key) for key in ("loss_step", "loss_epoch")])
    for found, expected in zip(values[1], values[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_random_augmentation_on_the_way_to_the_device_draws_nothing_in_a_search() -> None:
    class Augmented(Model):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [x + torch.rand(()) for x in batch]

    assert_trained_alike(train(Augmented(), AutoAccumulation()), train(Augmented()), rtol=0, atol=0)


def test_a_split_that_can_not_go_on_ends_with_the_original_error() -> None:
    class Halves(AutoAccumulation):
        def split_batch(self, batch: Any, k: int) -> list[Any]:
            return [[x] for x in batch[0].x.chunk(2)]

    class Opaque:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class OfOpaque(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.kept[0].append(0)
            raise RuntimeError(OOM_TEXT)

        def train_dataloader(self) -> Any:
            return DataLoader(torch.ones(8, 4), 8, collate_fn=lambda x: [Opaque(torch.stack(x))])

    model = OfOpaque()
    with (
        pytest.warns(UserWarning, match="can't tell the samples of a `list`.*stay whole"),
        pytest.raises(RuntimeError, match="can't be cut further: override its `split_batch`"),
    ):
        train(model, Halves(micro_batch_size=4))
    assert len(model.kept[0]) <= 3


@pytest.mark.parametrize(
    "kwargs", [{"memory": "80%"}, {"effective_batch_size": 16}, {"batch_size": 16}]
)
def test_a_choice_made_for_something_else_is_not_resumed(kwargs: Any, tmp_path: Any) -> None:
    path = tmp_path / "last.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)

    train(Model(limit=4), AutoAccumulation(), Save(), max_epochs=2)
    batch_size = kwargs.pop("batch_size", BATCH)
    model = Model(limit=4)
    loader = DataLoader(model.train_dataloader().dataset, batch_size)
    trainer = make_trainer(AutoAccumulation(**kwargs), max_epochs=2)
    trainer.fit(model, loader, ckpt_path=path)
    assert max(model.kept[0]) == batch_size  # tried again
