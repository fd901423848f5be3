"""Two real processes: one number of parts for both, gradients synchronised once, and no hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt import AutoAccumulation
from tests.models import OOM_TEXT, Recorder, make_trainer
from tests.ranks import make_rank_trainer, run_two_ranks

PER_RANK, BATCH = 24, 8


def data(n: int = 2 * PER_RANK) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(0))


class Model(pl.LightningModule):
    """Has a buffer that DDP broadcasts; rank `rank` takes half of the data, batch by batch."""

    def __init__(
        self, rank: int | None, limit: int = 100, fails: tuple[str, int] = ("", 0)
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rank, self.limit, self.fails = rank, limit, fails
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        self.register_buffer("average", torch.zeros(()))
        # Tuples keep what a step does to their lists, whatever is put back.
        self.kept: tuple[list[int], list[int]] = ([], [1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        self.kept[0].append(len(x))
        if len(x) > self.limit:
            raise RuntimeError(OOM_TEXT)
        self.average = 0.9 * self.average + 0.1 * x.mean()
        y = self.net(x)
        self.trip("forward")
        if y.requires_grad:
            y.register_hook(lambda grad: self.trip("backward"))
        return (y - x.sum(1, keepdim=True)).square().mean()

    def trip(self, phase: str) -> None:
        if self.fails == (phase, self.trainer.fit_loop.batch_idx) and self.kept[1]:
            self.kept[1].clear()
            raise RuntimeError(OOM_TEXT)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        x = data()
        if self.rank is not None:
            x = x.view(-1, 2, BATCH, 4)[:, self.rank].reshape(-1, 4)
        batch_size = BATCH if self.rank is not None else 2 * BATCH
        return DataLoader(TensorDataset(x), batch_size)


class CountSyncs(pl.Callback):
    """Counts the buckets that each step reduces."""

    def __init__(self) -> None:
        self.syncs = 0

    def on_train_start(self, trainer, pl_module) -> None:
        def hook(state, bucket):
            self.syncs += 1
            work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda future: future.value()[0] / 2)

        trainer.model.register_comm_hook(None, hook)


def result(model: Model, auto: AutoAccumulation, count: CountSyncs) -> dict[str, Any]:
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "sizes": model.kept[0],
        "chosen": auto.chosen,
        "largest": auto.largest,
        "syncs": count.syncs,
    }


def fit(rank: int, auto: AutoAccumulation, **kwargs: Any) -> dict[str, Any]:
    model, count = Model(rank, **kwargs), CountSyncs()
    make_rank_trainer(auto, count).fit(model)
    return result(model, auto, count)


def fit_all(rank: int) -> dict[str, Any]:
    runs = {
        "one rank is smaller": fit(rank, AutoAccumulation(), limit=3 if rank else 100),
        "given": fit(rank, AutoAccumulation(micro_batch_size=4)),
        "whole": fit(rank, AutoAccumulation(micro_batch_size=8)),
    }
    for phase in ("forward", "backward"):
        # Rank 1 alone runs out of memory; a backward of two parts begins before they synchronise.
        fails = (phase, 1) if rank else ("", 0)
        auto = AutoAccumulation(micro_batch_size=8 if phase == "forward" else 4)
        runs[f"{phase} fails"] = fit(rank, auto, fails=fails)
    return runs


def fit_failing_in_sync(rank: int) -> str:
    fails = ("backward", 1) if rank else ("", 0)
    try:
        fit(rank, AutoAccumulation(micro_batch_size=8), fails=fails)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_two_ranks(fit_all, tmp_path_factory.mktemp("ranks"))


def one_process() -> dict[str, Tensor]:
    model = Model(None)
    make_trainer().fit(model)
    return model.state_dict()


@pytest.mark.parametrize(
    "name", ["one rank is smaller", "given", "whole", "forward fails", "backward fails"]
)
def test_both_ranks_end_with_the_weights_of_one_big_batch(name, ranks):
    first, second = (rank[name]["weights"] for rank in ranks)
    expected = one_process()
    for key in expected:
        if key != "average":  # of a rank's own samples
            assert torch.equal(first[key], second[key])
            torch.testing.assert_close(first[key], expected[key], rtol=1e-4, atol=1e-5)


def test_gradients_are_synchronised_once_a_step(ranks):
    for rank in ranks:
        assert rank["given"]["sizes"] == [4] * 6
        assert rank["given"]["syncs"] == rank["whole"]["syncs"] == 3


def test_ranks_take_the_least_that_one_of_them_found(ranks):
    first, second = (rank["one rank is smaller"] for rank in ranks)
    assert first["largest"] == second["largest"] == 3
    assert first["chosen"] == second["chosen"] <= 3
    assert max(first["sizes"]) == 8  # rank 0 alone would have taken the whole batch
    assert first["sizes"][-4:] == second["sizes"][-4:]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_ranks_do_a_batch_again_together(phase, ranks):
    size = 4 if phase == "forward" else 2
    for rank in ranks:
        found = rank[f"{phase} fails"]
        assert found["chosen"] == size
        assert found["sizes"][-16 // size :] == [size] * (16 // size)
        assert found["syncs"] == 3


def test_out_of_memory_while_gradients_synchronise_stops_both_with_the_reason(tmp_path: Path):
    first, second = run_two_ranks(fit_failing_in_sync, tmp_path)
    assert "Out of memory while gradients were synchronised" in second
    assert "Another rank has stopped, probably out of memory" in first


class Logging(Model):
    """Synchronises a value of each step, as `sync_dist=True` does."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def fit_with_synchronised_logs(rank: int) -> list[list[float]]:
    values = []
    for fails in (("", 0), ("forward", 1) if rank else ("", 0)):
        model, recorder = Logging(rank, fails=fails), Recorder()
        auto = AutoAccumulation(micro_batch_size=8)
        make_rank_trainer(auto, logger=recorder, log_every_n_steps=1).fit(model)
        values.append(recorder.values("loss_step"))
    return values


def test_a_value_that_ranks_synchronise_is_synchronised_once_they_are_all_done(tmp_path: Path):
    first, _ = run_two_ranks(fit_with_synchronised_logs, tmp_path)
    assert len(first[0]) == 3
    assert first[1] == pytest.approx(first[0], rel=1e-4)
