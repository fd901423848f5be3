"""A batch done in parts is the whole batch, and the search for the parts leaves no trace."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryF1Score

from lightning_memopt import AutoAccumulation, GradientAccumulation
from tests.models import OOM_TEXT, Block, Recorder, make_trainer

pytestmark = pytest.mark.filterwarnings(r"ignore:No (positive|negative) samples in targets")


class Classifier(pl.LightningModule):
    """Logs every kind of value; its data are the same for each instance."""

    def __init__(self, n: int = 26, batch_size: int = 8, limit: int = 10**9) -> None:
        super().__init__()
        self.n, self.batch_size, self.limit = n, batch_size, limit
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        self.accuracy, self.auroc, self.f1 = BinaryAccuracy(), BinaryAUROC(), BinaryF1Score()
        self.sizes = Sizes()
        self.rates: list[float] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        self.sizes.seen.append(len(x))
        if len(x) > self.limit:
            raise RuntimeError(OOM_TEXT)
        logits = self.net(x).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
        both = {"on_step": True, "on_epoch": True}
        self.log("loss", loss, **both)
        self.log("positives", y.sum(), reduce_fx="sum", **both)
        self.log("highest", logits.max(), reduce_fx="max", **both)
        self.accuracy(logits.detach().sigmoid(), y.int())
        self.log("accuracy", self.accuracy, **both)
        self.auroc(logits.detach().sigmoid(), y.int())
        self.log("auroc", self.auroc, **both)
        self.log_dict({"returned": self.f1(logits.detach().sigmoid(), y.int())}, **both)
        return {"loss": loss, "logits": logits.detach(), "count": torch.tensor(len(x))}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.02, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(self.n, 4, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(x, (x.sum(1) > 0).float())
        return DataLoader(data, self.batch_size, shuffle=True)


class Sizes:
    """Remembers, whatever is put back."""

    def __init__(self) -> None:
        self.seen: list[int] = []


class Outputs(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.seen.append(outputs)


def train(
    *callbacks: pl.Callback, model: pl.LightningModule | None = None, **kwargs: Any
) -> tuple[Any, pl.Trainer, Recorder, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = model or Classifier()
    recorder, outputs = Recorder(), Outputs()
    defaults = {"logger": recorder, "log_every_n_steps": 1, "max_epochs": 2}
    trainer = make_trainer(*callbacks, outputs, **(defaults | kwargs))
    trainer.fit(model)
    return model, trainer, recorder, outputs.seen


def assert_close(found: nn.Module, expected: nn.Module, **kwargs: Any) -> None:
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), **kwargs)


LOGGED = ["loss", "positives", "highest", "accuracy", "auroc", "returned"]


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("recover", [True, False])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_parts_train_and_log_as_the_whole_batch(size: int, recover: bool, factor: int) -> None:
    plain, trainer, logs, outputs = train(*([GradientAccumulation(factor)] if factor > 1 else []))
    auto = AutoAccumulation(micro_batch_size=size, recover=recover)
    model, split_trainer, split_logs, split_outputs = train(auto, accumulate_grad_batches=factor)
    assert max(model.sizes.seen) == min(size, 8)
    assert_close(model, plain, rtol=1e-5, atol=1e-6)
    assert split_trainer.global_step == trainer.global_step
    for key in LOGGED:
        for of in ("step", "epoch"):
            assert logs.values(f"{key}_{of}")
            assert split_logs.steps(f"{key}_{of}") == logs.steps(f"{key}_{of}")
            assert split_logs.values(f"{key}_{of}") == pytest.approx(
                logs.values(f"{key}_{of}"), rel=1e-4, abs=1e-5
            )
    torch.testing.assert_close(split_outputs, outputs, rtol=1e-4, atol=1e-5)
    assert model.rates == plain.rates


def test_a_batch_that_is_not_cut_trains_bit_equally() -> None:
    plain, _, logs, _ = train()
    model, _, split_logs, _ = train(AutoAccumulation(micro_batch_size=8))
    assert_close(model, plain, rtol=0, atol=0)
    assert split_logs.values("loss_step") == logs.values("loss_step")


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16"])
def test_mixed_precision_and_clipping(precision: str) -> None:
    def kind() -> dict[str, Any]:
        return (
            {"plugins": [MixedPrecision("16-mixed", "cpu")]}
            if precision == "fp16"
            else {"precision": precision}
        )

    plain, *_ = train(gradient_clip_val=0.1, **kind())
    model, *_ = train(AutoAccumulation(micro_batch_size=3), gradient_clip_val=0.1, **kind())
    assert max(model.sizes.seen) == 3
    assert_close(model, plain, rtol=1e-2, atol=1e-2)


# The search


def test_only_sizes_that_ran_are_returned() -> None:  # case 6
    for n, batch_size, limit, found in [(64, 16, 8, 8), (20, 64, 10**9, 20), (512, 512, 100, 100)]:
        auto = AutoAccumulation()
        model, trainer, _, _ = train(auto, model=Classifier(n, batch_size, limit), max_epochs=1)
        tried = model.sizes.seen[: model.sizes.seen.index(auto.chosen) + 1]
        assert auto.largest == found
        assert {auto.largest, auto.chosen} <= set(model.sizes.seen)
        assert len(tried) <= 2 * 13
        assert trainer.state.finished
        assert max(model.sizes.seen[-4:]) <= limit


def test_not_even_one_sample_is_an_error_that_helps() -> None:  # case 6 (c)
    model = Classifier(limit=0)
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"^Not even one sample fits: the smallest size tried, 1, runs out of memory in "
        r"forward: CUDA out of memory.*What helps: `GradientCheckpointing\(\)`[^\n]*$",
    ):
        train(AutoAccumulation(), model=model)
    assert 1 in model.sizes.seen


def test_a_failure_that_is_not_memory_fails_clearly() -> None:
    class Broken(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            raise ValueError("no such feature")

    with pytest.raises(RuntimeError, match=r"no size that runs.*ValueError: no such feature"):
        train(AutoAccumulation(), model=Broken())


def test_a_failure_of_a_larger_size_keeps_the_last_good_one() -> None:
    class Limited(Classifier):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            if len(batch[0]) > 4:
                raise ValueError("more than four")
            return super().training_step(batch, batch_idx)

    auto = AutoAccumulation()
    with pytest.warns(UserWarning, match="ended its trials early.*ValueError: more than four"):
        train(auto, model=Limited(n=64, batch_size=64))
    assert auto.chosen == 2


def test_a_search_in_the_middle_of_training(tmp_path: Path) -> None:  # case 7
    auto = AutoAccumulation(micro_batch_size=2)

    class Ask(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module) -> None:
            if trainer.current_epoch == 1:
                assert trainer.global_step == 4
                auto.set_micro_batch_size(None)

    model, trainer, _, _ = train(Ask(), auto, model=Classifier(64, 16, limit=8))
    assert auto.largest == auto.chosen == 8
    assert trainer.global_step == 8
    assert model.sizes.seen[-2:] == [8, 8]


class Everything(pl.LightningModule):
    """Case 8: BatchNorm, dropout, a metric, a list, counters, and all random states."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), Block(8), nn.Linear(8, 1))
        self.net[1].norm.eval()
        self.net[0].weight.requires_grad_(False)
        self.accuracy = BinaryAccuracy()
        self.outputs: list[float] = []
        self.seen = 0
        self.losses = Sizes()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x + random.random() + float(numpy.random.rand())).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
        self.accuracy(logits.detach().sigmoid(), y.int())
        self.log("accuracy", self.accuracy)
        self.log("loss", loss)
        self.outputs.append(loss.item())
        self.losses.seen.append(loss.item())
        self.seen += len(x)
        self.logger.log_metrics({"by_hand": loss.item()}, step=self.seen)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    train_dataloader = Classifier.train_dataloader
    n, batch_size = 64, 8


class State(pl.Callback):
    """Takes down all that a search could leave behind, right before the first batch."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.state: dict[str, Any] = {}

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            self.calls.append(name)
        return super().__getattribute__(name)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx or trainer.current_epoch:
            return
        optimizer = trainer.optimizers[0]
        self.state = {
            "batch": batch,
            "weights": copy.deepcopy(pl_module.state_dict()),
            "attributes": {n: sorted(vars(m)) for n, m in pl_module.named_modules()},
            "modes": [module.training for module in pl_module.modules()],
            "trained": [p.requires_grad for p in pl_module.parameters()],
            "gradients": [p.grad for p in pl_module.parameters()],
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
            "metric": copy.deepcopy(pl_module.accuracy.metric_state),
            "updates": pl_module.accuracy.update_count,
            "counted": (pl_module.seen, list(pl_module.outputs)),
            "global_step": trainer.global_step,
            "progress": trainer.fit_loop.state_dict(),
            "torch": torch.get_rng_state(),
            "numpy": numpy.random.get_state()[1].tolist(),
            "python": random.getstate(),
            "logged": dict(trainer.logged_metrics),
            "files": sorted(
                str(path.relative_to(trainer.default_root_dir))
                for path in Path(trainer.default_root_dir).rglob("*")
            ),
            "calls": list(self.calls),
        }


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


@pytest.mark.filterwarnings("ignore:Found 1 module")
def test_a_search_leaves_no_trace(tmp_path: Path) -> None:  # case 8
    states, losses, ends = [], [], []
    for name, callback in {
        "searched": AutoAccumulation(),
        "given": AutoAccumulation(micro_batch_size=8),
        "without": None,
    }.items():
        state, root = State(), tmp_path / name
        root.mkdir()
        stop = EarlyStopping("loss", patience=100)
        torch.manual_seed(0)
        model, *_ = train(
            *([callback] if callback else []),
            state,
            stop,
            model=Everything(),
            logger=CSVLogger(root, name="log", version=0),
            default_root_dir=root,
        )
        tried = len(model.losses.seen) - 16
        assert (tried >= 4) == (name == "searched")
        states.append(state.state)
        losses.append(model.losses.seen[tried:])
        ends.append(model.state_dict())
    for other in (1, 2):
        for key, value in states[0].items():
            assert is_same(value, states[other][key]), key
        assert losses[0] == losses[other]
        torch.testing.assert_close(ends[0], ends[other], rtol=0, atol=0)


def test_the_choice_is_resumed_without_a_search(tmp_path: Path) -> None:
    path, auto = tmp_path / "last.ckpt", AutoAccumulation()

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module) -> None:
            trainer.save_checkpoint(path)
            trainer.should_stop = True

    train(auto, Save(), model=Classifier(64, 16, limit=8))
    resumed, again = Classifier(64, 16, limit=8), AutoAccumulation()
    make_trainer(again, max_epochs=2).fit(resumed, ckpt_path=path)
    assert (again.chosen, again.largest) == (auto.chosen, auto.largest) == (8, 8)
    assert resumed.sizes.seen == [8] * 8  # no trial
    other, plugin = Classifier(64, 16, limit=8), AutoAccumulation()
    make_trainer(plugin, max_epochs=2, precision="bf16-mixed").fit(other, ckpt_path=path)
    assert plugin.chosen == 8
    assert len(other.sizes.seen) > 8  # in another precision it searches again


# Schedules and effective batches


@pytest.mark.parametrize("split", ["step", "loader"])
def test_schedules_end_where_training_ends(split: Any) -> None:  # case 4
    auto = AutoAccumulation(effective_batch_size=8, micro_batch_size=1, split=split)
    model, trainer, _, _ = train(auto, model=Classifier(64, 2))
    schedule = trainer.lr_scheduler_configs[0].scheduler
    assert trainer.global_step == schedule.total_steps == 16
    assert set(model.sizes.seen) == {1}
    assert len(model.rates) == 16
    assert model.rates[-1] == pytest.approx(0.02 / 25 / 1e4, abs=2e-15)
    assert trainer.accumulate_grad_batches == 1


@pytest.mark.parametrize("split", ["step", "loader"])
def test_an_effective_batch_has_the_gradient_of_the_one_big_batch(split: Any) -> None:
    plain, *_ = train(model=Classifier(n=26, batch_size=8))
    auto = AutoAccumulation(effective_batch_size=8, micro_batch_size=3, split=split)
    small = 8 if split == "loader" else 4
    model, trainer, _, _ = train(auto, model=Classifier(n=26, batch_size=small))
    assert trainer.global_step == 8
    if split == "loader":
        assert_close(model, plain, rtol=1e-5, atol=1e-6)


def test_a_loader_of_micro_batches_is_searched_for() -> None:
    auto = AutoAccumulation(effective_batch_size=32, split="loader")
    model, trainer, _, _ = train(auto, model=Classifier(64, 4, limit=10))
    assert auto.largest == 10
    assert auto.chosen == 8
    assert trainer.global_step == 4
    assert model.sizes.seen[-8:] == [8] * 8


def test_the_nearest_effective_batch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    train(AutoAccumulation(effective_batch_size=10, micro_batch_size=4), model=Classifier(64, 4))
    assert "an effective batch of 8, the nearest to 10" in caplog.text


# What is refused, and what is said


def refused(match: str, *callbacks: pl.Callback, **kwargs: Any) -> None:
    with pytest.raises(MisconfigurationException, match=match):
        train(*callbacks, **kwargs)


def test_what_does_not_go_together_is_refused() -> None:
    auto = AutoAccumulation
    refused("GradientAccumulation.*AutoAccumulation.*both want", auto(), GradientAccumulation(2))
    refused("set the factor: keep one", auto(effective_batch_size=16), accumulate_grad_batches=2)
    scheduler = GradientAccumulationScheduler({0: 2})
    refused("set the factor", auto(split="loader"), scheduler)
    refused('loader gives 8 samples.*split="loader"', auto(effective_batch_size=4))
    manual = Classifier()
    manual.automatic_optimization = False
    refused("needs automatic optimization", auto(), model=manual)


def test_lbfgs_is_refused() -> None:
    class WithLBFGS(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    refused("LBFGS", AutoAccumulation(), model=WithLBFGS())


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class OfOpaque(Classifier):
    def training_step(self, batch: Opaque, batch_idx: int) -> Tensor:
        self.sizes.seen.append(len(batch.x))
        if len(batch.x) > self.limit:
            raise RuntimeError(OOM_TEXT)
        return self.net(batch.x).mean()

    def train_dataloader(self) -> Any:
        return DataLoader(
            torch.ones(16, 4), batch_size=8, collate_fn=lambda x: Opaque(torch.stack(x))
        )

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


def test_a_batch_that_can_not_be_cut_names_its_type_and_the_ways_out() -> None:
    refused(
        'can\'t tell the samples of a `Opaque`.*override its `split_batch`.*split="loader"',
        AutoAccumulation(),
        model=OfOpaque(),
    )


@pytest.mark.filterwarnings("ignore:The number of samples in a `Opaque`")
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
def test_split_batch_can_be_overridden() -> None:
    class Auto(AutoAccumulation):
        def split_batch(self, batch: Any, k: int) -> list[Any]:
            return [Opaque(x) for x in batch.x.chunk(k)]

    model, auto = OfOpaque(limit=2), Auto()
    train(auto, model=model, max_epochs=1)
    assert model.sizes.seen == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert auto.chosen is None


def test_worst_batch_can_be_overridden() -> None:
    looked = []

    class Auto(AutoAccumulation):
        def worst_batch(self, batches: list[Any]) -> Any:
            looked.extend(batches)
            return batches[1]

    auto = Auto()
    train(auto, model=Classifier(n=26, batch_size=8), max_epochs=1)
    assert [len(batch[0]) for batch in looked] == [8, 8, 8]


def test_the_longest_of_the_first_batches_is_tried() -> None:
    class Lengths(OfOpaque):
        def train_dataloader(self) -> Any:
            return DataLoader([torch.ones(4, length) for length in (2, 7, 3)], batch_size=None)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.sizes.seen.append(batch.shape[1])
            return (self.net[0].weight.sum() * batch).mean()

    model = Lengths()
    train(AutoAccumulation(), model=model, max_epochs=1)
    assert model.sizes.seen[0] == 7


def test_batch_norm_is_warned_of_once_and_named() -> None:
    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(1, nn.BatchNorm1d(8))

    with pytest.warns(UserWarning, match=r"`AutoAccumulation`: net\.1 normalise over the batch"):
        train(AutoAccumulation(micro_batch_size=4), model=Normed())


class Contrastive(Classifier):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if len(batch[0]) > 4:
            raise RuntimeError(OOM_TEXT)
        similar = self.net[0](batch[0]) @ self.net[0](batch[0]).T
        return nn.functional.cross_entropy(similar, torch.arange(len(similar)))


class OfTokens(Classifier):
    """Only positives count."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if len(batch[0]) > 6:
            raise RuntimeError(OOM_TEXT)
        losses = self.net(batch[0]).squeeze(1).square()
        return (losses * batch[1]).sum() / batch[1].sum().clamp(min=1)


def positives(batch: list[Tensor]) -> Tensor:
    return batch[1].sum()


def test_a_loss_that_depends_on_how_a_batch_is_cut_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="mean of its halves.*compares the samples of a batch"):
        train(AutoAccumulation(), model=Contrastive(16, 8))
    with pytest.warns(UserWarning, match="mean over something else than samples.*`weigh_by`"):
        train(AutoAccumulation(), model=OfTokens(24, 12))
    train(AutoAccumulation(weigh_by=positives), model=OfTokens(24, 12))
    train(AutoAccumulation(), model=Classifier(16, 8, limit=4))


def test_a_weighed_window_has_the_gradient_of_the_whole_batch() -> None:
    class Whole(OfTokens):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            losses = self.net(batch[0]).squeeze(1).square()
            return (losses * batch[1]).sum() / batch[1].sum().clamp(min=1)

    plain, *_ = train(model=Whole())
    model, *_ = train(AutoAccumulation(micro_batch_size=3, weigh_by=positives), model=Whole())
    assert_close(model, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"effective_batch_size": 0}, ValueError, "`effective_batch_size` must be at least 1"),
        ({"micro_batch_size": 1.5}, TypeError, "`micro_batch_size` must be an `int`"),
        ({"memory": "110%"}, ValueError, "`memory` must be at most 100%"),
        ({"split": "batch"}, ValueError, "`split` must be one of 'step', 'loader'"),
        ({"recover": 1}, TypeError, "`recover` must be `True` or `False`"),
        ({"weigh_by": "tokens"}, ValueError, "`weigh_by` must be"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(kwargs: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=rf"^{match}[^\n]*$"):
        AutoAccumulation(**kwargs)


def test_a_limit_in_bytes_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    auto = AutoAccumulation(memory="1MiB")
    with pytest.raises(torch.OutOfMemoryError, match=r"needs .* where `memory` allows 1.00 MiB"):
        train(auto)


def test_it_says_what_it_did(capsys: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    auto = AutoAccumulation()
    _, _, recorder, _ = train(auto, model=Classifier(64, 16, limit=8))
    assert "at most 8 samples at once, as found; 1 batch of the loader a step" in caplog.text
    assert "largest, chosen" in capsys.readouterr().out
    sizes = recorder.steps("accumulation/search_peak_gib")
    assert sizes == sorted(sizes)
    assert {2, 8} <= set(sizes)
    assert recorder.values("accumulation/micro_batch_size") == [8]
    assert recorder.values("accumulation/recoveries") == [0]


def test_off_is_whole_batches_from_the_next_one_on() -> None:
    auto = AutoAccumulation(micro_batch_size=2)

    class Switch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            auto.disable() if batch_idx == 0 else auto.enable()

    model, *_ = train(Switch(), auto, model=Classifier(24, 8), max_epochs=1)
    assert model.sizes.seen == [2] * 4 + [8] + [2] * 4


def test_batches_that_can_be_read_only_once_are_looked_at_when_they_come() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
            return iter([(row, (row.sum() > 0).float()) for row in x])

    class Streaming(Classifier):
        def train_dataloader(self) -> Any:
            return DataLoader(Stream(), batch_size=16)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    auto = AutoAccumulation()
    model, trainer, *_ = train(auto, model=Streaming(limit=8), max_epochs=1)
    assert auto.chosen == auto.largest == 8
    assert trainer.global_step == 3
    assert model.sizes.seen[-5:] == [8] * 5


@pytest.mark.parametrize("split", ["step", "loader"])
def test_the_loader_the_factor_and_the_loop_are_the_users_again(split: Any) -> None:
    auto = AutoAccumulation(effective_batch_size=16, micro_batch_size=4, split=split)
    model, trainer, *_ = train(auto, model=Classifier(32, 8), max_epochs=1)
    assert trainer.accumulate_grad_batches == 1
    assert max(model.sizes.seen) == 4
    assert trainer.train_dataloader.batch_size == 8
    assert trainer.num_training_batches == 4
    assert type(trainer).__name__ == "Trainer"
    assert "estimated_stepping_batches" not in vars(type(trainer)) or type(trainer) is pl.Trainer
    assert trainer.global_step == 2
