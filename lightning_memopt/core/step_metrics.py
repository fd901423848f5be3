"""What metrics give for a batch that is done in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

from lightning_memopt.core.rewind import Attributes, TensorValues

_MERGES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dim_zero_sum: torch.add,
    dim_zero_max: torch.maximum,
    dim_zero_min: torch.minimum,
}


class StepMetrics:
    """The values that `metric(preds, target)` would have returned for the whole batch.

    Called once a part, a metric gives the value of the part, and the mean of those is not the value
    of the batch for most metrics (AUROC, F1, macro averages). Within such a call torchmetrics holds
    the state of that call alone: it is taken there, and the states of the parts are merged as those
    of several processes are, by each state's own `dist_reduce_fx`. What the metric accumulates, and
    what `update`, `compute` and `reset` do, is not touched. It costs a copy of the states and, for
    metrics that are called, one more `compute` a batch.

    A metric has no value here, so that something else must stand in for it, where it wasn't called
    as a function; where a state has a reduction other than sum, max, min or the concatenation of
    lists; where it synchronises in each step (`dist_sync_on_step`); where it wraps or combines
    metrics, or has a `forward` or `reset` of its own; and where its `compute` fails for the batch.

    Args:
        metrics: The metrics of a model.

    Example:
        >>> from torchmetrics import MaxMetric
        >>> metric = MaxMetric()
        >>> step = StepMetrics([metric])
        >>> step.begin()
        >>> metric(1.0), metric(3.0), metric(2.0)
        (tensor(1.), tensor(3.), tensor(2.))
        >>> step.end()
        >>> step.value_of(metric)
        tensor(3.)
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)
        self._mergeable = [metric for metric in self._metrics if _is_mergeable(metric)]
        self._before: Attributes | None = None
        self._values_before = TensorValues()
        self._updates: list[tuple[Metric, Any]] = []
        # By id: a metric's hash goes through its states.
        self._states: dict[int, _MergedStates] = {}
        self._values: dict[int, Any] = {}

    def begin(self) -> None:
        """Start a batch, before its first part; `end` or `cancel` must follow."""
        self._before = Attributes(self._metrics)
        self._values_before.keep(self._before.tensors())
        self._values, self._states = {}, {}
        self._updates = [(metric, vars(metric)["update"]) for metric in self._mergeable]
        for metric, update in self._updates:
            vars(metric)["update"] = partial(self._update, metric, update)

    def end(self, parts: int | None = None) -> None:
        """Finish a batch, after its last part; what metrics last returned is now the batch's.

        Args:
            parts: Number of parts, to leave out metrics that were called several times in each:
                one value for all their calls is none that they would have returned.
        """
        for metric, update in self._updates:
            vars(metric)["update"] = update
            states = self._states.get(id(metric))
            if states is not None and (parts is None or states.calls <= parts):
                value = states.compute(metric)
                if value is not None:
                    self._values[id(metric)] = vars(metric)["_forward_cache"] = value
        self._before, self._updates, self._states = None, [], {}

    def cancel(self) -> None:
        """Put all metrics back to where they were at `begin`; does nothing after `end`."""
        if self._before is not None:
            self._before.put_back()
            self._values_before.put_back()
        self._before, self._updates, self._states = None, [], {}

    def value_of(self, metric: Metric) -> Any:
        """Return the value of a metric for the last batch that ended.

        Args:
            metric: One of the metrics.

        Returns:
            What calling it with the whole batch would have returned, or `None`; see above.
        """
        return self._values.get(id(metric))

    def find_returned(self, value: Any) -> Metric | None:
        """Return the metric that returned `value` when it was last called, if one did."""
        is_it = (m for m in self._metrics if vars(m).get("_forward_cache") is value)
        return next(is_it, None) if isinstance(value, Tensor) else None

    def _update(self, metric: Metric, update: Callable[..., None], *args: Any, **kw: Any) -> None:
        update(*args, **kw)
        if metric._enable_grad:  # set only while `forward` holds the state of this call alone
            self._states.setdefault(id(metric), _MergedStates()).add(metric)


class _MergedStates:
    """The states of several calls of a metric, merged."""

    def __init__(self) -> None:
        self.calls = 0
        self._states: dict[str, Any] = {}
        self._is_broken = False

    def add(self, metric: Metric) -> None:
        self.calls += 1
        try:
            for name, state in metric.metric_state.items():
                if isinstance(state, list):
                    self._states.setdefault(name, []).extend(map(_detach, state))
                elif name in self._states:
                    merge = _MERGES[metric._reductions[name]]
                    self._states[name] = merge(self._states[name], state.detach())
                else:
                    self._states[name] = state.detach()
        except Exception:  # a metric must never stop a training
            self._is_broken = True

    def compute(self, metric: Metric) -> Any:
        """Return the metric's value for these states, without a trace, or `None` if it fails."""
        if self._is_broken:
            return None
        attributes = vars(metric)
        before = dict(attributes)
        attributes.update(self._states, _update_count=1, _computed=None, _to_sync=False)
        try:
            return metric.compute()
        except Exception:
            return None
        finally:
            attributes.clear()
            attributes.update(before)


def _is_mergeable(metric: Metric) -> bool:
    own = type(metric)
    return (
        bool(metric._defaults)
        and own.forward is Metric.forward
        and own.reset is Metric.reset
        and not metric.dist_sync_on_step
        and sum(isinstance(module, Metric) for module in metric.modules()) == 1
        and all(
            reduction in (dim_zero_cat, None)
            if isinstance(metric._defaults[name], list)
            else reduction in _MERGES
            for name, reduction in metric._reductions.items()
        )
    )


def _detach(item: Any) -> Any:
    return item.detach() if isinstance(item, Tensor) else item
