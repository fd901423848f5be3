"""Real training loops, watched by the memory that malloc hands out."""

import collections
import gc
import random
import re
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics.classification import BinaryAUROC

from lightning_memopt.callbacks import _leak_watch
from lightning_memopt.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_memopt.callbacks.memory_monitor import MemoryMonitor
from lightning_memopt.core.growth import MemoryGrowthWarning
from lightning_memopt.core.units import GIB, MIB
from tests.models import Recorder, make_trainer
from tests.ranks import make_rank_trainer, run_two_ranks

STEPS = 150
ROWS, WIDTH = 64, 128
OUTPUT = ROWS * WIDTH * 4  # bytes
KEPT: list[Tensor] = []


@pytest.fixture(autouse=True, scope="module")
def _few_objects():
    """Hide what was there before: to collect garbage among half a million objects takes long."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Net(pl.LightningModule):
    """Small, with activations that malloc sees; `step` is what a test does in each step."""

    def __init__(self, step=None, n=STEPS, depth=2, **kept):
        super().__init__()
        self.n = n
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
        self.net = nn.Sequential(*layers)
        self.step = None if step is None else step.__get__(self)
        self.seen = 0
        for name, value in kept.items():
            setattr(self, name, value)

    def loader(self, n):
        return DataLoader(TensorDataset(torch.arange(float(n))), batch_size=1)

    def train_dataloader(self):
        return self.loader(self.n)

    def rows(self):
        return ROWS

    def training_step(self, batch, batch_idx):
        output = self.net(torch.ones(self.rows(), WIDTH))
        loss = output.square().mean()
        if self.step is not None:
            self.step(output, loss, batch_idx)
        self.seen += 1
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def fit(model, *callbacks, monitor=None, **kwargs):
    """Fit under the watch and return what was logged; a warning is an error here."""
    recorder = Recorder()
    monitor = monitor or MemoryMonitor(verbose=False)
    gc.collect()  # the garbage of a test before would go in the middle
    make_trainer(*callbacks, monitor, logger=recorder, **kwargs).fit(model)
    return recorder


def watched(model, *callbacks, **kwargs):
    """Fit and return the text of the one warning, and what was logged."""
    with pytest.warns(MemoryGrowthWarning) as caught:
        recorder = fit(model, *callbacks, **kwargs)
    (warning,) = [one for one in caught if one.category is MemoryGrowthWarning]
    return str(warning.message), recorder


def rate_in(text):
    """Return the bytes per step that a warning tells."""
    return float(re.search(r"([-+]\d+\.\d\d) MiB per 100 steps", text)[1]) * MIB / 100


# Leaks


def keep_losses(self, output, loss, batch_idx):
    self.losses.append(loss)


def add_up(self, output, loss, batch_idx):
    self.total = self.total + loss


def keep_outputs(self, output, loss, batch_idx):
    self.kept.append(output.detach())


def keep_globally(self, output, loss, batch_idx):
    KEPT.append(output.detach())


def keep_by_key(self, output, loss, batch_idx):
    self.by_batch[batch_idx] = {"output": output.detach()}


def keep_seldom(self, output, loss, batch_idx):
    if batch_idx % 20 == 0:
        self.kept.append(torch.zeros(20 * ROWS, WIDTH))


def update_metric(self, output, loss, batch_idx):
    preds = output.detach().flatten().sigmoid()
    self.auroc.update(preds, torch.ones_like(preds, dtype=torch.int32))


def append_rows(self, output, loss, batch_idx):
    self.bank = torch.cat([self.bank, output.detach()])


class Keeper(pl.Callback):
    def __init__(self):
        self.outputs = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(torch.ones(ROWS, WIDTH))


class Idle(pl.Callback):
    pass


Idle.__name__ = "Keeper"


def keeping_closure():
    kept = []
    return LambdaCallback(on_train_batch_end=lambda *args: kept.append(torch.ones(ROWS, WIDTH)))


class Remembering(Dataset):
    """Keeps every sample that it has read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        self.read.append(torch.ones(ROWS, WIDTH))
        return torch.ones(1)


class Reading(Net):
    def train_dataloader(self):
        return {"a": DataLoader(self.loader(STEPS).dataset), "b": DataLoader(Remembering())}


LEAKS = {
    "losses with their graph": (
        lambda: [Net(keep_losses, depth=20, losses=[])],
        "`model.losses` (list of",
        ["with a graph", ".detach()", ".item()"],
        None,
    ),
    "a sum of losses": (
        lambda: [Net(add_up, depth=20, total=0.0)],
        "`model.total` (a graph of",
        [".detach()", ".item()"],
        None,
    ),
    "outputs": (
        lambda: [Net(keep_outputs, kept=[])],
        "`model.kept` (list of",
        ["maxlen"],
        OUTPUT,
    ),
    "a deque": (
        lambda: [Net(keep_outputs, kept=collections.deque())],
        "`model.kept` (deque of",
        ["maxlen"],
        OUTPUT,
    ),
    "a dict": (
        lambda: [Net(keep_by_key, by_batch={})],
        "`model.by_batch` (dict of",
        ["cache"],
        OUTPUT,
    ),
    "a callback": (
        lambda: [Net(), Keeper()],
        "callback `Keeper.outputs` (list of",
        ["maxlen"],
        OUTPUT,
    ),
    "a closure": (
        lambda: [Net(), keeping_closure()],
        "callback `LambdaCallback.on_train_batch_end.kept` (list of",
        ["maxlen"],
        OUTPUT,
    ),
    "a data set": (
        lambda: [Reading()],
        "`dataset[1].read` (list of",
        ["maxlen"],
        OUTPUT,
    ),
    "the second of two callbacks": (
        lambda: [Net(), Idle(), Keeper()],
        "callback `Keeper[1].outputs` (list of",
        ["maxlen"],
        OUTPUT,
    ),
    "a global": (
        lambda: [Net(keep_globally)],
        "global `KEPT` of test_leak_watch.py (list of",
        ["maxlen"],
        OUTPUT,
    ),
    "a metric that is not reset": (
        lambda: [Net(update_metric, auroc=BinaryAUROC())],
        "metric `model.auroc.preds` (list of",
        ["reset()", "metric `model.auroc.target`"],
        2 * OUTPUT,
    ),
    "once in twenty steps": (
        lambda: [Net(keep_seldom, kept=[])],
        "`model.kept` (list of",
        ["maxlen"],
        OUTPUT,
    ),
    "a tensor that becomes longer": (
        lambda: [Net(append_rows, bank=torch.ones(0, WIDTH))],
        "`model.bank` (a tensor of",
        ["size"],
        OUTPUT,
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_told_once_with_who_holds_it_and_how_fast(name):
    make, holder, advice, rate = LEAKS[name]
    try:
        text, recorder = watched(*make())
    finally:
        KEPT.clear()
    assert recorder.steps("memory/allocated_gib") == list(range(STEPS))
    assert holder in text
    assert all(word in text for word in advice)
    if rate is None:  # what nodes of a graph take, malloc knows
        curve = [value * GIB for value in recorder.values("memory/allocated_gib")]
        rate = (curve[70] - curve[40]) / 30
    assert rate_in(text) == pytest.approx(rate, rel=0.2)
    limit = re.search(r"would reach the limit of \d+\.\d\d \wiB around step ([\d,]+)", text)
    assert int(limit[1].replace(",", "")) > STEPS
    assert text.startswith("`MemoryMonitor`: ")
    assert "\n" not in text


def test_the_end_of_the_epoch_is_named_where_lists_are_emptied_then():
    text, _ = watched(Net(keep_outputs, n=10 * STEPS, kept=[]), max_steps=STEPS)
    assert f"when the epoch ends (step {10 * STEPS - 1})" in text


def test_an_unknown_limit_is_left_out(monkeypatch):
    monkeypatch.setattr(_leak_watch, "usable_bytes", lambda device: None)
    text, _ = watched(Net(keep_outputs, kept=[]))
    assert "limit" not in text
    assert "`model.kept`" in text


def test_the_interval_of_the_monitor_is_the_interval_of_the_watch():
    monitor = MemoryMonitor(every_n_steps=3, verbose=False)
    text, recorder = watched(Net(keep_outputs, kept=[]), monitor=monitor)
    assert recorder.steps("memory/allocated_gib") == list(range(0, STEPS, 3))
    assert "`model.kept`" in text
    assert rate_in(text) == pytest.approx(OUTPUT, rel=0.2)


def test_a_second_fit_is_watched_anew():
    monitor = MemoryMonitor(verbose=False)
    for _ in range(2):
        text, _ = watched(Net(keep_outputs, n=100, kept=[]), monitor=monitor)
        assert "`model.kept`" in text


class Hidden:
    """Keeps tensors where no attribute leads to: in the frame of a generator."""

    def __init__(self):
        def keep():
            kept = []
            while True:
                kept.append((yield))

        self._keep = keep()
        next(self._keep)

    def __call__(self, tensor):
        self._keep.send(tensor)


@pytest.mark.parametrize("has_graph", [True, False])
def test_what_no_attribute_holds_is_told_by_shape_and_number(has_graph):
    weight = nn.Parameter(torch.ones(ROWS, WIDTH)) if has_graph else torch.ones(ROWS, WIDTH)

    def keep(self, output, loss, batch_idx):
        self.hidden(weight * 2)

    text, _ = watched(Net(keep, hidden=Hidden()))
    assert f"tensors more, most of their bytes in float32 of shape {ROWS}x{WIDTH}" in text
    assert ("have a graph older than" in text) is has_graph
    assert rate_in(text) == pytest.approx(OUTPUT, rel=0.2)


def test_what_is_no_tensor_is_told_as_such():
    def keep(self, output, loss, batch_idx):
        self.blobs.append(bytes(OUTPUT))

    text, _ = watched(Net(keep, blobs=[]))
    assert "no tensor more" in text
    assert rate_in(text) == pytest.approx(OUTPUT, rel=0.2)


def _fit_rank(rank):
    kept = []
    step = keep_outputs if rank == 1 else None
    model = Net(step, n=100, kept=kept)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_rank_trainer(MemoryMonitor(verbose=False)).fit(model)
    return [str(x.message) for x in caught if issubclass(x.category, MemoryGrowthWarning)]


def test_the_rank_that_leaks_says_so(tmp_path):
    silent, told = run_two_ranks(_fit_rank, tmp_path)
    assert silent == []
    (text,) = told
    assert text.startswith("`MemoryMonitor` of rank 1: ")
    assert "`model.kept`" in text


# What is no leak


def remember(keys, seed=None):
    """Return a step with a cache of so many outputs, asked for in order or at random."""
    draw = random.Random(seed)

    def step(self, output, loss, batch_idx):
        key = min(batch_idx, keys - 1) if seed is None else draw.randrange(keys)
        if key not in self.cache:
            self.cache[key] = output.detach()

    return step


class Fluctuating(Net):
    """Has batches of any length, keeps the last output, and a buffer of any size."""

    def __init__(self, low, high, **kwargs):
        super().__init__(**kwargs)
        self.low, self.high = low, high
        self.draw = random.Random(0)
        self.register_buffer("scratch", torch.empty(0), persistent=False)

    def rows(self):
        return self.draw.randint(self.low, self.high)

    def training_step(self, batch, batch_idx):
        self.scratch = torch.empty(self.rows(), 10 * WIDTH)
        self.last = self.net(torch.ones(self.rows(), WIDTH))
        return self.last.square().mean()


class Lazy(Dataset):
    """A data set that is loaded when it is first asked for."""

    data = None

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if self.data is None:
            self.data = torch.ones(8 * MIB)
        return self.data[index : index + 1]


class Validating(Net):
    def val_dataloader(self):
        return DataLoader(Lazy())

    def validation_step(self, batch, batch_idx):
        self.net(torch.ones(ROWS, WIDTH))


class Resetting(Net):
    def on_train_epoch_end(self):
        self.auroc.reset()
        self.kept.clear()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.kept.append(torch.ones(ROWS, WIDTH))
        return loss


class Sorted(Net):
    """Has batches and outputs that become longer from step to step, as sorted data do."""

    def __init__(self, has_length, batch=0, output=0, **kwargs):
        super().__init__(**kwargs)
        self.has_length, self.batch, self.output = has_length, batch, output

    def train_dataloader(self):
        lengths = Ascending(self.batch)
        return DataLoader(lengths if self.has_length else Stream(lengths), batch_size=None)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "logits": torch.ones(ROWS + self.output * batch_idx, WIDTH)}


class Ascending(Dataset):
    def __init__(self, more):
        self.more = more

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return {"x": torch.ones(ROWS + self.more * index, WIDTH)}


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return (self.data[index] for index in range(STEPS))


def make_garbage(self, output, loss, batch_idx):
    ring = [output.detach()]
    ring.append(ring)


CLEAN = {
    "nothing kept": lambda: ([Net()], {}),
    "variable lengths": lambda: ([Fluctuating(1, 2 * ROWS)], {}),
    "batches in ascending length": lambda: ([Sorted(True, batch=40)], {}),
    "a stream in ascending length": lambda: ([Sorted(False, batch=40)], {}),
    "outputs in ascending length": lambda: ([Sorted(True, output=40)], {}),
    "both in ascending length": lambda: ([Sorted(False, batch=40, output=40)], {}),
    "a buffer of several MiB": lambda: ([Fluctuating(1, 2000)], {}),
    "a cache filled in order": lambda: ([Net(remember(30), cache={})], {}),
    "a cache filled at random": lambda: ([Net(remember(24, seed=1), cache={})], {}),
    "another cache filled at random": lambda: ([Net(remember(40, seed=2), cache={})], {}),
    "a validation set in the middle": lambda: (
        [Validating()],
        {"val_check_interval": 75, "num_sanity_val_steps": 0},
    ),
    "lists and metrics of an epoch": lambda: (
        [Resetting(update_metric, n=30, auroc=BinaryAUROC(), kept=[])],
        {"max_epochs": STEPS // 30},
    ),
    "accumulation": lambda: ([Net(n=2 * STEPS)], {"accumulate_grad_batches": 2}),
    "checkpointing": lambda: (
        [Net(depth=4), GradientCheckpointing(layers=["net.0", "net.1", "net.2"])],
        {},
    ),
    "a replay buffer": lambda: ([Net(keep_outputs, kept=collections.deque(maxlen=1000))], {}),
    "cycles": lambda: ([Net(make_garbage)], {}),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_loop_is_left_alone(name, monkeypatch):
    taken = []
    add = _leak_watch.LeakWatch.add
    monkeypatch.setattr(
        _leak_watch.LeakWatch, "add", lambda self, *args: (taken.append(args[1]), add(self, *args))
    )
    parts, kwargs = CLEAN[name]()
    fit(*parts, **kwargs)
    assert taken == list(range(STEPS))  # it was watched, and warnings are errors


@pytest.mark.parametrize("has_length", [True, False])
def test_a_leak_is_found_among_batches_in_ascending_length(has_length):
    text, _ = watched(Sorted(has_length, batch=8, output=8, step=keep_outputs, kept=[]))
    assert "`model.kept`" in text
    assert rate_in(text) == pytest.approx(OUTPUT, rel=0.2)


class Closed:
    """A loader of its own kind, without a length and without a data set to look into."""

    def __iter__(self):
        return iter(torch.ones(STEPS, 1))

    @property
    def dataset(self):
        raise RuntimeError("the data set is closed")


class Serving(Net):
    def train_dataloader(self):
        return Closed()


@pytest.mark.parametrize("make", [Serving, Net])
def test_what_can_not_be_read_hides_no_leak(make):
    text, _ = watched(make(keep_outputs, kept=[], unused=nn.UninitializedBuffer()))
    assert "`model.kept` (list of" in text


def test_a_large_data_set_hides_no_leak():
    data = Ascending(0)
    data.samples = [[object(), i] for i in range(300_000)]
    data.more_samples = [[Hidden, torch.Size] for _ in range(10)]
    model = Net(keep_globally)
    model.train_dataloader = lambda: DataLoader(data, batch_size=None)
    try:
        text, _ = watched(model)
    finally:
        KEPT.clear()
    assert "global `KEPT`" in text


def test_a_steady_run_is_never_looked_through(monkeypatch):
    looks = []
    monkeypatch.setattr(_leak_watch, "holders_of", lambda *args: looks.append(args) or {})
    fit(Net())
    assert looks == []
    watched(Net(keep_by_key, by_batch={}))  # not found by this one
    assert 2 <= len(looks) <= 5


def test_what_a_search_itself_keeps_is_no_growth(monkeypatch):
    kept = []
    holders_of = _leak_watch.holders_of

    def find_and_keep(*args):
        kept.append(torch.ones(MIB // 8))
        return holders_of(*args)

    monkeypatch.setattr(_leak_watch, "holders_of", find_and_keep)
    text, _ = watched(Net(keep_outputs, kept=[]))
    assert len(kept) == 2
    assert rate_in(text) == pytest.approx(OUTPUT, rel=0.1)


# The watch fails no run


def test_a_failure_within_the_watch_ends_it_and_not_the_training(monkeypatch):
    def fail(*args):
        raise LookupError("an odd object")

    monkeypatch.setattr(_leak_watch, "holders_of", fail)
    model = Net(keep_outputs, kept=[])
    with pytest.warns(UserWarning, match="leaks no more.*LookupError.*an odd object") as caught:
        fit(model)
    assert model.seen == STEPS
    assert sum("MemoryMonitor" in str(one.message) for one in caught) == 1
    assert not any(issubclass(one.category, MemoryGrowthWarning) for one in caught)


def test_a_filter_silences_it():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=MemoryGrowthWarning)
        model = Net(keep_outputs, kept=[])
        fit(model)
    assert len(model.kept) == STEPS


def test_a_filter_makes_it_an_error():
    model = Net(keep_outputs, kept=[])
    with pytest.raises(MemoryGrowthWarning, match=r"model\.kept"):
        fit(model)
    assert 50 <= model.seen < STEPS
