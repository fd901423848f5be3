from __future__ import annotations

import re
import time
import warnings
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_memopt.callbacks.empty_cache import EmptyCache
from lightning_memopt.core import host_memory
from lightning_memopt.core.units import GIB, MIB
from tests.models import Blocks, Recorder, Unit, make_trainer
from tests.ranks import make_rank_trainer, run_two_ranks

WORDS = [
    "never",
    "step",
    "epoch",
    "before_validation",
    "after_validation",
    "before_optimizer_step",
    "fragmented",
]
# Trimming a heap that holds nothing free is warned of, and here the steps are tiny.
pytestmark = pytest.mark.filterwarnings("ignore:.*EmptyCache")


def cache_points(recorder: Recorder) -> list[tuple[int | None, dict[str, float]]]:
    return [point for point in recorder.points if any(key[:6] == "cache/" for key in point[1])]


class Hooks(pl.Callback):
    """Writes each hook that a word can mean into `events`; stands before the cache's callback."""

    def __init__(self, events: list[str]) -> None:
        for hook in (
            "on_train_batch_start",
            "on_before_optimizer_step",
            "on_train_batch_end",
            "on_train_epoch_end",
            "on_validation_start",
            "on_validation_end",
        ):
            setattr(self, hook, lambda *args, hook=hook: events.append(hook))


@pytest.fixture
def events(monkeypatch):
    """What happened in a fit; each real trim of the heap is an "emptied" among the hooks."""
    happened: list[str] = []
    trim = host_memory.release_free_memory

    def release_free_memory() -> None:
        happened.append("emptied")
        trim()

    monkeypatch.setattr(host_memory, "release_free_memory", release_free_memory)
    return happened


def fit(
    events: list[str], callback: EmptyCache, model: pl.LightningModule | None = None, **kwargs: Any
) -> list[str]:
    """Fit two epochs of six batches and return the hook that each emptying came after."""
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0} | kwargs
    make_trainer(Hooks(events), callback, **settings).fit(Blocks() if model is None else model)
    assert "on_train_batch_end" in events
    return [before for before, now in pairwise(events) if now == "emptied"]


# When it is emptied


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("step", ["on_train_batch_end"] * 12),
        ("epoch", ["on_train_epoch_end"] * 2),
        ("before_validation", ["on_validation_start"] * 2),
        ("after_validation", ["on_validation_end"] * 2),
        ("before_optimizer_step", ["on_before_optimizer_step"] * 12),
    ],
)
def test_each_word_empties_at_its_hook_and_only_there(when, expected, events):
    assert fit(events, EmptyCache(when)) == expected


def test_never_never_empties(events):
    assert fit(events, EmptyCache("never")) == []
    assert "emptied" not in events


def test_a_list_empties_at_each_of_its_words(events):
    epoch = ["on_train_batch_end"] * 6 + ["on_validation_end", "on_train_epoch_end"]
    assert fit(events, EmptyCache(["step", "after_validation", "epoch"])) == epoch * 2


@pytest.mark.parametrize("when", ["step", "before_optimizer_step"])
def test_a_step_is_one_of_the_optimizer(when, events):
    assert len(fit(events, EmptyCache(when), accumulate_grad_batches=4)) == 4


def test_a_fit_without_validation_never_comes_to_it(events):
    words = ["before_validation", "after_validation"]
    assert fit(events, EmptyCache(words), Unit(n=6)) == []


@pytest.mark.parametrize(
    ("above", "min_gap", "calls"),
    [(0.0, "1B", 12), (1.0, "1B", 0), (0.0, "1TiB", 0), (0.0, 10**15, 0)],
)
def test_fragmented_asks_for_both_a_share_and_a_size(above, min_gap, calls, events):
    # The pages of the program itself are resident and not in use by malloc: there is always a gap.
    callback = EmptyCache("fragmented", above=above, min_gap=min_gap)
    assert fit(events, callback) == ["on_train_batch_end"] * calls


@pytest.mark.parametrize("every", [1, 2, 5, 12])
def test_fragmented_empties_at_most_once_in_so_many_steps(every, events):
    recorder = Recorder()
    callback = EmptyCache("fragmented", every=every, above=0.0, min_gap="1B")
    calls = fit(events, callback, logger=recorder)
    steps = [step for step, _ in cache_points(recorder)]
    assert len(calls) == len(steps) >= 12 // every
    assert all(later - earlier >= every for earlier, later in pairwise(steps))


@pytest.mark.parametrize("when", ["step", "before_optimizer_step"])
def test_every_makes_the_calls_of_steps_rarer(when, events):
    assert len(fit(events, EmptyCache(when, every=4))) == 3


def test_by_default_it_empties_only_when_fragmented():
    callback = EmptyCache()
    kept = (callback.when, callback.every, callback.above, callback.min_gap)
    assert kept == ("fragmented", 1, 0.25, "1GiB")


# What it gives back


class Hole:
    """Freed memory that malloc keeps, since a piece at its far end is still in use."""

    def __init__(self, size: int) -> None:
        pieces = [str(i).encode().ljust(4000) for i in range(size // 4000)]
        self.last = pieces[-1]
        pieces.clear()


needs_glibc = pytest.mark.skipif(
    host_memory.allocated_bytes() is None, reason="malloc tells and trims on Linux with glibc only"
)


@needs_glibc
def test_freed_memory_leaves_the_process():
    host_memory.release_free_memory()
    hole = Hole(256 * MIB)
    before = host_memory.resident_bytes()
    make_trainer(EmptyCache("never")).fit(Unit())
    kept = host_memory.resident_bytes()
    recorder = Recorder()
    make_trainer(EmptyCache("epoch"), logger=recorder).fit(Unit())
    after = host_memory.resident_bytes()
    assert before - kept < 16 * MIB
    assert kept - after > 200 * MIB
    [(_, values)] = cache_points(recorder)
    assert 200 * MIB < values["cache/freed_gib"] * GIB < 300 * MIB
    assert hole.last


@needs_glibc
def test_fragmented_empties_once_there_is_a_gap_and_not_before(events):
    class Fragments(Unit):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                self.hole = Hole(1024 * MIB)
            return super().training_step(batch, batch_idx)

    host_memory.release_free_memory()
    gap = host_memory.resident_bytes() - host_memory.allocated_bytes()
    events.clear()
    callback = EmptyCache("fragmented", above=0.01, min_gap=gap + 512 * MIB)
    assert len(fit(events, callback, Fragments(n=8), max_epochs=1)) == 1
    ends = [event for event in events if event in ("emptied", "on_train_batch_end")]
    assert ends.index("emptied") == 4


# What it logs


def test_each_call_logs_what_it_freed_and_what_it_cost(events):
    recorder = Recorder()
    assert len(fit(events, EmptyCache("step"), logger=recorder)) == 12
    points = cache_points(recorder)
    assert [step for step, _ in points] == list(range(12))
    for _, values in points:
        assert set(values) == {"cache/freed_gib", "cache/empty_ms"}
        assert all(type(value) is float for value in values.values())
        assert values["cache/empty_ms"] > 0


def test_without_a_call_nothing_is_logged(events):
    recorder = Recorder()
    assert fit(events, EmptyCache("never"), logger=recorder) == []
    assert cache_points(recorder) == []


def test_it_needs_no_logger(events):
    assert len(fit(events, EmptyCache("step"), logger=False)) == 12


# What it warns of


def warned(callback: EmptyCache, model: pl.LightningModule, **kwargs: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(callback, **({"limit_val_batches": 0, "max_epochs": 3} | kwargs)).fit(model)
    return [str(entry.message) for entry in caught if "EmptyCache" in str(entry.message)]


def about_nothing(message: str) -> bool:
    return bool(re.search(r"nothing|free[sd]? (no|0)", message))


def about_cost(message: str) -> bool:
    return bool(re.search(r"took .*% of the time", message))


def test_calls_that_free_nothing_are_warned_of_once(monkeypatch):
    calls = []
    monkeypatch.setattr(host_memory, "release_free_memory", lambda: calls.append(1))
    messages = warned(EmptyCache("step"), Unit(n=20))
    assert len(calls) == 60
    assert len([message for message in messages if about_nothing(message)]) == 1


@needs_glibc
def test_calls_that_cost_too_much_are_warned_of_once(monkeypatch):
    class Fragments(Unit):
        def training_step(self, batch, batch_idx):
            self.hole = Hole(2 * MIB)
            return super().training_step(batch, batch_idx)

    def release_slowly() -> None:
        time.sleep(0.02)
        trim()

    trim = host_memory.release_free_memory
    monkeypatch.setattr(host_memory, "release_free_memory", release_slowly)
    messages = warned(EmptyCache("step"), Fragments(n=10))
    assert len([message for message in messages if about_cost(message)]) == 1


@needs_glibc
def test_calls_that_free_much_and_cost_little_are_not_warned_of():
    class Fragments(Unit):
        def training_step(self, batch, batch_idx):
            self.hole = Hole(4 * MIB)
            time.sleep(0.2)
            return super().training_step(batch, batch_idx)

    model = Fragments(n=8)
    assert warned(EmptyCache("step"), model, max_epochs=1) == []
    assert len(model.grads) == 8


def test_never_is_not_warned_of():
    assert warned(EmptyCache("never"), Unit()) == []


# What is refused


@pytest.mark.parametrize("when", ["always", "", "Step", ["step", "always"], [3]])
def test_an_unknown_word_is_refused_with_those_that_exist(when):
    with pytest.raises(ValueError, match=r"^`when` .* got ") as error:
        EmptyCache(when)
    assert all(repr(word) in str(error.value) for word in WORDS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("when", [None, 3, {"step": 1}])
def test_what_is_neither_a_word_nor_a_list_is_refused(when):
    with pytest.raises(TypeError, match=r"^`when` .* got .+\.$"):
        EmptyCache(when)


def test_an_empty_list_is_refused():
    with pytest.raises(ValueError, match=r"^`when` .* got \[\]\.?$"):
        EmptyCache([])


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_a_bad_cadence_is_refused(every):
    with pytest.raises((ValueError, TypeError), match=r"^`every` .* got .+\.$"):
        EmptyCache(every=every)


@pytest.mark.parametrize("above", [1.01, 25, -0.1, "25%", True, None])
def test_a_share_that_is_none_is_refused(above):
    with pytest.raises((ValueError, TypeError), match=r"^`above` .* got .+\.$"):
        EmptyCache(above=above)


@pytest.mark.parametrize("min_gap", ["a lot", "1 G", 0, -1, 0.5, "200%", None])
def test_a_bad_gap_is_refused(min_gap):
    with pytest.raises((ValueError, TypeError), match=r"^`min_gap` .* got .+\.$"):
        EmptyCache(min_gap=min_gap)


@pytest.mark.parametrize("when", [*WORDS, WORDS[1:]])
def test_arguments_are_kept_under_their_names(when):
    callback = EmptyCache(when, every=3, above=0.5, min_gap="2GiB")
    kept = (callback.when, callback.every, callback.above, callback.min_gap)
    assert kept == (when, 3, 0.5, "2GiB")


# Two processes


def fit_where_the_second_rank_has_a_gap(rank: int) -> list[int]:
    """Return the batches after which this rank emptied."""
    emptied: list[int] = []

    class Fragments(Unit):
        def training_step(self, batch, batch_idx):
            self.batch_idx = batch_idx
            if rank == 1 and batch_idx == 3:
                self.hole = Hole(512 * MIB)
            return super().training_step(batch, batch_idx)

    model, trim = Fragments(n=60), host_memory.release_free_memory

    def release_free_memory() -> None:
        emptied.append(model.batch_idx)
        trim()

    host_memory.release_free_memory = release_free_memory
    gap = host_memory.resident_bytes() - host_memory.allocated_bytes()
    callback = EmptyCache("fragmented", above=0.01, min_gap=gap + 256 * MIB)
    make_rank_trainer(callback).fit(model)
    assert model.batch_idx == 59
    return emptied


@needs_glibc
def test_all_ranks_empty_at_the_same_step_when_one_of_them_needs_it(tmp_path):
    # Ranks vote at every fiftieth step.
    assert run_two_ranks(fit_where_the_second_rank_has_a_gap, tmp_path) == [[50], [50]]
