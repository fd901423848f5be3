from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memopt.callbacks.gradient_checkpointing import GradientCheckpointing
from tests.models import make_trainer
from tests.ranks import run_two_ranks

WIDTH, BATCH, STEPS = 8, 4, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "gradients are views of the buckets": {"gradient_as_bucket_view": True},
    "block used twice": {"times": 2},
    "block used twice, find unused": {"times": 2, "find_unused_parameters": True},
    "block used twice, static graph": {"times": 2, "static_graph": True},
    "one unused layer": {"has_unused": True, "find_unused_parameters": True},
    "one unused layer, static graph": {"has_unused": True, "static_graph": True},
}
KINDS = ("plain", "checkpointed", "kept")


class Middle(nn.Module):
    """A block that counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.last(self.first(x).relu()).tanh()


class Net(pl.LightningModule):
    """Linear, block, linear, over the part of the data that is a rank's."""

    def __init__(self, rank: int = 0, ranks: int = 1, times: int = 1, has_unused: bool = False):
        super().__init__()
        self.rank, self.ranks, self.times = rank, ranks, times
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList([Middle(), Middle()])
        self.unused = nn.Linear(WIDTH, WIDTH) if has_unused else None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            for _ in range(self.times):
                x = block(x)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def train_dataloader(self) -> DataLoader[Any]:
        """Give each rank its share of every batch, so that all ranks together see what one does."""
        x = torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
        share = BATCH // self.ranks
        part = x[:, self.rank * share : (self.rank + 1) * share].reshape(-1, WIDTH)
        return DataLoader(TensorDataset(part), batch_size=share)


def fit(model: Net, kind: str, **kwargs: Any) -> dict[str, Any]:
    callbacks = {
        "plain": [],
        "checkpointed": [GradientCheckpointing("blocks.*")],
        "kept": [GradientCheckpointing("blocks.*", keep="matmul")],
    }[kind]
    make_trainer(*callbacks, **kwargs).fit(model)
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "runs": [block.runs for block in model.blocks],
    }


def make_model(setting: str, **kwargs: Any) -> Net:
    options = {key: SETTINGS[setting].get(key) for key in ("times", "has_unused")}
    torch.manual_seed(0)
    return Net(**kwargs, **{key: value for key, value in options.items() if value is not None})


def fit_on_two_ranks(rank: int) -> dict[str, Any]:
    """Run all settings, one after the other, in the same two processes."""
    found: dict[str, Any] = {}
    for setting, options in SETTINGS.items():
        options = {k: v for k, v in options.items() if k not in ("times", "has_unused")}
        for kind in KINDS if setting == "plain" else KINDS[:2]:
            found[f"{setting}, {kind}"] = fit(
                make_model(setting, rank=rank, ranks=2),
                kind,
                devices=2,
                strategy=DDPStrategy(process_group_backend="gloo", **options),
                use_distributed_sampler=False,
            )
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_two_ranks(fit_on_two_ranks, tmp_path_factory.mktemp("ranks"))


def runs_of(setting: str, kind: str) -> list[int]:
    return [STEPS * SETTINGS[setting].get("times", 1) * (1 if kind == "plain" else 2)] * 2


CASES = [(setting, "checkpointed") for setting in SETTINGS] + [("plain", "kept")]


@pytest.mark.parametrize(("setting", "kind"), CASES)
def test_both_ranks_have_the_weights_of_a_run_without(ranks, setting, kind):
    for rank in ranks:
        plain, found = rank[f"{setting}, plain"], rank[f"{setting}, {kind}"]
        assert plain["runs"] == runs_of(setting, "plain")
        assert found["runs"] == runs_of(setting, kind)
        assert list(found["weights"]) == list(plain["weights"])
        for name, value in found["weights"].items():
            assert torch.equal(value, plain["weights"][name]), name
    first, second = (rank[f"{setting}, {kind}"]["weights"] for rank in ranks)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("setting", SETTINGS)
def test_two_ranks_train_as_one_process_over_all_samples(ranks, setting):
    start = dict(make_model(setting).named_parameters())
    expected = fit(make_model(setting), "checkpointed")
    assert expected["runs"] == runs_of(setting, "checkpointed")
    found = ranks[0][f"{setting}, checkpointed"]["weights"]
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(value, start[name]) == name.startswith("unused"), name
