from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from lightning_memopt.core.step_metrics import StepMetrics

SIZES = [15, 15, 12]


class Plain(Metric):
    """A metric as users write them: it says nothing of `full_state_update`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("correct", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.correct += (preds.argmax(-1) == target).sum()
        self.total += target.numel()

    def compute(self) -> Tensor:
        return self.correct / self.total


class Seen(Metric):
    full_state_update = True

    def __init__(self, reduction: Any, default: Any) -> None:
        super().__init__()
        self.add_state("seen", default, dist_reduce_fx=reduction)

    def update(self, preds: Tensor, target: Tensor) -> None:
        if isinstance(self.seen, list):
            self.seen.append(target)
        else:
            self.seen = self.seen + target.numel()

    def compute(self) -> Tensor:
        return sum(map(len, self.seen)) if isinstance(self.seen, list) else self.seen


class Keeps(Plain):
    def reset(self) -> None:
        correct = self.correct
        super().reset()
        self.correct = correct


class Ragged(Plain):
    def update(self, preds: Tensor, target: Tensor) -> None:
        self.correct = preds.argmax(-1) == target
        self.total = torch.tensor(1)


class Fails(Plain):
    def compute(self) -> Tensor:
        if self.total == sum(SIZES):
            raise RuntimeError("no value for a whole batch")
        return super().compute()


class Warns(Plain):
    def compute(self) -> Tensor:
        if self.total == sum(SIZES):
            warnings.warn("strange batch", stacklevel=1)
        return super().compute()


def of_classes(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = sum(SIZES)
    logits = torch.randn(n, 3, generator=generator)
    return logits.softmax(-1), torch.arange(n) % 3  # all classes are in each part


def of_numbers(seed: int) -> tuple[Tensor, Tensor]:
    preds, target = of_classes(seed)
    return preds[:, 0], target.float()


def of_weighted(seed: int) -> tuple[Tensor, Tensor]:
    preds, target = of_classes(seed)
    return preds[:, 0], target + 1.0


def of_values(seed: int) -> tuple[Tensor]:
    return (of_classes(seed)[0][:, 0],)


MERGED = {
    "micro accuracy": (lambda: MulticlassAccuracy(3, average="micro"), of_classes),
    "macro accuracy": (lambda: MulticlassAccuracy(3), of_classes),
    "F1": (lambda: MulticlassF1Score(3), of_classes),
    "AUROC": (lambda: MulticlassAUROC(3), of_classes),
    "binned AUROC": (lambda: MulticlassAUROC(3, thresholds=9), of_classes),
    "confusion": (lambda: MulticlassConfusionMatrix(3), of_classes),
    "mean": (torchmetrics.MeanMetric, of_weighted),
    "sum": (torchmetrics.SumMetric, of_values),
    "cat": (torchmetrics.CatMetric, of_values),
    "max": (torchmetrics.MaxMetric, of_values),  # has `full_state_update=True`
    "min": (torchmetrics.MinMetric, of_values),
    "MSE": (torchmetrics.MeanSquaredError, of_numbers),
    "R2": (torchmetrics.R2Score, of_numbers),
    "plain": (Plain, of_classes),
}
LEFT_ALONE = {
    "Pearson": (torchmetrics.PearsonCorrCoef, of_numbers),
    "MinMax": (lambda: MinMaxMetric(MulticlassAccuracy(3)), of_classes),
    "classwise": (lambda: ClasswiseWrapper(MulticlassAccuracy(3, average=None)), of_classes),
    "sum of metrics": (lambda: Plain() + Plain(), of_classes),
    "synchronised": (lambda: Plain(dist_sync_on_step=True), of_classes),
    "mean state": (lambda: Seen("mean", torch.tensor(0.0)), of_classes),
    "own reduction": (lambda: Seen(torch.prod, torch.tensor(1.0)), of_classes),
    "own reduction of a list": (lambda: Seen(torch.cat, []), of_classes),
    "own reset": (Keeps, of_classes),
}


def merged(test):
    return pytest.mark.parametrize(("make", "data"), MERGED.values(), ids=MERGED)(test)


def every(test):
    both = MERGED | LEFT_ALONE
    return pytest.mark.parametrize(("make", "data"), both.values(), ids=both)(test)


def metrics_of(module: nn.Module) -> list[Metric]:
    return [each for each in module.modules() if isinstance(each, Metric)]


def call(function: Any, batch: tuple[Tensor, ...]) -> None:
    for part in zip(*(tensor.split(SIZES) for tensor in batch), strict=True):
        function(*part)


def state_of(module: nn.Module) -> list[Any]:
    """List what metrics hold, each with a copy of its value."""
    found = []
    for metric in metrics_of(module):
        held = {**metric.metric_state, "_computed": metric._computed, "_count": metric.update_count}
        held |= {"_forward_cache": metric._forward_cache, "update": metric.update}
        held["_flags"] = (metric._to_sync, metric._should_unsync, metric._enable_grad)
        found.append((held, {k: copy.deepcopy(v) for k, v in held.items() if k != "update"}))
    return found


def is_same(now: Any, then: Any) -> bool:
    if isinstance(then, Tensor):
        return now.dtype is then.dtype and torch.equal(now, then)
    if isinstance(then, list | tuple):
        return len(now) == len(then) and all(map(is_same, now, then))
    if isinstance(then, dict):
        return now.keys() == then.keys() and all(is_same(now[k], then[k]) for k in then)
    return bool(now == then)


def assert_unchanged(module: nn.Module, before: list[Any]) -> None:
    for (now, _), (held, values) in zip(state_of(module), before, strict=True):
        assert now["update"] is held["update"]
        for name, value in values.items():
            assert is_same(now[name], value), name
            assert not isinstance(held[name], list | Tensor) or now[name] is held[name], name


@merged
def test_the_value_is_that_of_the_whole_batch(make, data):
    metric = make()
    step = StepMetrics([metric])
    for seed in range(3):
        whole = make()(*data(seed))
        step.begin()
        call(metric, data(seed))
        step.end(parts=len(SIZES))
        torch.testing.assert_close(step.value_of(metric), whole)
        assert metric._forward_cache is step.value_of(metric)


def test_the_mean_of_the_parts_would_have_been_another_value():
    metric, parts = MulticlassAUROC(3), []
    call(lambda *part: parts.append(metric(*part)), of_classes(1))
    assert abs(sum(parts) / len(parts) - MulticlassAUROC(3)(*of_classes(1))) > 0.005


@every
@pytest.mark.parametrize("how", ["forward", "update"])
def test_what_is_accumulated_is_not_touched(make, data, how):
    metric = make()
    plain, step = copy.deepcopy(metric), StepMetrics(metrics_of(metric))
    for seed in range(4):
        call(getattr(plain, how), data(seed))
        if seed % 2:
            step.begin()
        call(getattr(metric, how), data(seed))
        step.end()
        pairs = zip(metrics_of(metric), metrics_of(plain), strict=True)
        for mine, other in pairs:
            assert is_same(mine.metric_state, other.metric_state)
            assert mine.update_count == other.update_count
    assert is_same(metric.compute(), plain.compute())


@pytest.mark.parametrize(("make", "data"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_cannot_be_merged_has_no_value_and_keeps_its_last(make, data):
    metric = make()
    plain, step = copy.deepcopy(metric), StepMetrics(metrics_of(metric))
    call(plain, data(0))
    step.begin()
    call(metric, data(0))
    step.end()
    assert step.value_of(metric) is None
    assert is_same(metric._forward_cache, plain._forward_cache)


@every
@pytest.mark.parametrize("end", [StepMetrics.end, StepMetrics.cancel])
def test_a_metric_that_is_not_called_is_left_as_it_is(make, data, end):
    metric = make()
    metric(*data(0))
    metric.compute()
    before, step = state_of(metric), StepMetrics(metrics_of(metric))
    step.begin()
    end(step)
    assert_unchanged(metric, before)
    assert step.value_of(metric) is None


@every
@pytest.mark.parametrize("how", ["forward", "update"])
def test_after_cancel_all_is_as_before(make, data, how):
    metric = make()
    metric.update(*data(0))
    before, step = state_of(metric), StepMetrics(metrics_of(metric))
    step.begin()
    call(getattr(metric, how), data(1))
    metric.compute()
    step.cancel()
    assert_unchanged(metric, before)
    call(metric, data(1))  # without begin: nothing is recorded
    step.end()
    assert step.value_of(metric) is None


@pytest.mark.parametrize("kind", [MulticlassAccuracy, MulticlassAUROC, Plain])
def test_a_metric_that_failed_half_way_works_again_after_cancel(kind, monkeypatch):
    metric = kind() if kind is Plain else kind(3)
    metric(*of_classes(0))
    before, step = state_of(metric), StepMetrics([metric])
    step.begin()
    metric(*of_classes(1))
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        metric(torch.zeros(2, 3), torch.zeros(5, dtype=torch.long))
    step.cancel()
    assert_unchanged(metric, before)


def test_cancel_after_end_changes_nothing():
    metric = Plain()
    step = StepMetrics([metric])
    step.cancel()
    step.begin()
    call(metric, of_classes(0))
    step.end()
    before = state_of(metric)
    step.cancel()
    assert_unchanged(metric, before)


def collection(lists: bool = False) -> MetricCollection:
    if lists:
        return MetricCollection({"auroc": MulticlassAUROC(3), "ap": MulticlassAveragePrecision(3)})
    names = {"acc": MulticlassAccuracy(3), "prec": MulticlassPrecision(3)}
    return MetricCollection(names | {"f1": MulticlassF1Score(3), "plain": Plain()}, prefix="train/")


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("is_grouped_first", [False, True])
def test_a_collection_with_compute_groups_is_right_by_forward(lists, is_grouped_first):
    metrics = collection(lists)
    if is_grouped_first:
        metrics.update(*of_classes(9))
        assert len(metrics.compute_groups) < len(metrics)
    plain, step = metrics.clone(), StepMetrics(metrics_of(metrics))
    for seed in range(3):
        whole = collection(lists)(*of_classes(seed))
        call(plain, of_classes(seed))
        step.begin()
        call(metrics, of_classes(seed))
        step.end(parts=len(SIZES))
        found = {name: step.value_of(each) for name, each in metrics.items(copy_state=False)}
        torch.testing.assert_close(found, whole)
        assert is_same(metrics.compute(), plain.compute())


@pytest.mark.parametrize("lists", [False, True])
def test_a_collection_with_compute_groups_is_right_by_update(lists):
    metrics = collection(lists)
    plain, step = metrics.clone(), StepMetrics(metrics_of(metrics))
    for seed in range(3):
        call(plain.update, of_classes(seed))
        step.begin()
        call(metrics.update, of_classes(seed))
        step.end()
        assert metrics.compute_groups == plain.compute_groups
        assert is_same(metrics.compute(), plain.compute())
    before = metrics.compute()
    step.begin()
    call(metrics.update, of_classes(7))
    step.cancel()
    assert is_same({name: each.compute() for name, each in metrics.items()}, before)


def test_metrics_are_found_wherever_a_model_has_them():
    model = nn.Module()
    model.list = nn.ModuleList([Plain(), nn.Linear(2, 2)])
    model.dict = nn.ModuleDict({"a": MulticlassF1Score(3), "deep": nn.ModuleList([Plain()])})
    model.again = model.list[0]  # one metric with two names
    step, metrics = StepMetrics(metrics_of(model)), metrics_of(model)
    assert len(metrics) == 3
    step.begin()
    for metric in metrics:
        call(metric, of_classes(0))
    step.end(parts=len(SIZES))
    for metric in metrics:
        fresh = copy.deepcopy(metric)
        fresh.reset()
        torch.testing.assert_close(step.value_of(metric), fresh(*of_classes(0)))


def test_compute_and_reset_within_a_step_mean_what_they_always_do():
    metric = Plain()
    plain, step = copy.deepcopy(metric), StepMetrics([metric])
    for each in (metric, plain):
        each.update(*of_classes(0))
    step.begin()
    for each in (metric, plain):
        each.update(*of_classes(1))
    assert metric.compute() == plain.compute()
    for each in (metric, plain):
        each.reset()
        each.update(*of_classes(2))
    step.end()
    assert is_same(metric.metric_state, plain.metric_state)


@pytest.mark.parametrize("method", ["compute", "reset"])
def test_the_value_is_that_of_the_batch_whatever_the_step_did_last(method):
    metric = Plain()
    metric.update(*of_classes(1))
    step = StepMetrics([metric])
    step.begin()
    call(metric, of_classes(0))
    getattr(metric, method)()
    after = state_of(metric)
    step.end()
    assert torch.equal(step.value_of(metric), Plain()(*of_classes(0)))
    assert is_same(metric._computed, after[0][1]["_computed"])
    assert metric.update_count == after[0][1]["_count"]


@pytest.mark.parametrize("kind", [Fails, Warns])
def test_a_compute_that_fails_for_the_batch_stops_nothing(kind):
    metric = kind()
    step = StepMetrics([metric])
    step.begin()
    call(metric, of_classes(0))
    step.end()  # warnings are errors here
    assert step.value_of(metric) is None
    metric.update(*of_classes(1))
    assert metric.compute() == metric.correct / (2 * sum(SIZES))


def test_states_that_do_not_fit_together_stop_nothing():
    metric = Ragged()
    step = StepMetrics([metric])
    step.begin()
    call(metric, of_classes(0))
    step.end()
    assert step.value_of(metric) is None


@pytest.mark.parametrize(("parts", "has_value"), [(len(SIZES), False), (2 * len(SIZES), True)])
def test_a_metric_called_twice_a_part_has_no_one_value(parts, has_value):
    metric = Plain()
    step = StepMetrics([metric])
    step.begin()
    call(metric, of_classes(0))
    call(metric, of_classes(1))
    step.end(parts)
    assert (step.value_of(metric) is not None) == has_value


def test_graphs_are_not_kept():
    metric = torchmetrics.MeanSquaredError()
    step = StepMetrics([metric])
    preds, target = of_numbers(0)
    step.begin()
    call(metric, (preds.requires_grad_(), target))
    held = step._states[id(metric)]._states.values()
    assert not any(state.requires_grad for state in held)
    step.end()
    assert not step.value_of(metric).requires_grad


def test_nothing_waits_for_the_device():
    metric = Plain().to("meta")
    step = StepMetrics([metric])
    step.begin()
    call(metric, tuple(tensor.to("meta") for tensor in of_classes(0)))
    step.end()
    assert step.value_of(metric).device.type == "meta"  # reading a value would have raised


def test_the_value_is_not_synchronised_between_processes():
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    metric = Plain(distributed_available_fn=lambda: True, dist_sync_fn=fail)
    step = StepMetrics([metric])
    step.begin()
    call(metric, of_classes(0))
    step.end()
    assert torch.equal(step.value_of(metric), Plain()(*of_classes(0)))
    with pytest.raises(AssertionError):
        metric.compute()
