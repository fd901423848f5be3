import pytest
import torch
from torch import nn

from lightning_memopt.core import oom_findings
from lightning_memopt.core.allocator_state import AllocatorState, Block
from lightning_memopt.core.memory_history import Snapshot
from lightning_memopt.core.oom_findings import Findings, find_out
from lightning_memopt.core.oom_text import report_text
from lightning_memopt.core.recent_steps import RecentSteps
from lightning_memopt.core.tensor_holders import Holding
from lightning_memopt.core.units import MIB

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two repeated blocks; what they keep is known to the byte."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64)) for _ in range(4)]
        )

    def forward_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch):
        x = self.forward_blocks(batch)  # what has no name is gone when the error arrives
        return x.sum() * torch.empty(2**62, dtype=torch.int8).sum()


def look(model, recent=None, snapshot: Snapshot | None = None, **settings) -> Findings:
    with pytest.raises(RuntimeError, match=r"allocate memory|not enough memory") as caught:
        model.training_step(torch.ones(32, 64))
    recent = recent or RecentSteps(50)
    holders = {
        "model.few": Holding("list", 2, 30, 0, 0),
        "model.one": Holding("Tensor", 1, 10**9, 0, 0),
        "model.losses": Holding("list", 60, 20, 60, 600),
    }
    return find_out(caught.value, CPU, model, [], recent, snapshot, lambda: holders, **settings)


def test_what_is_kept_in_blocks_is_counted_apart():
    failure = look(Net()).failure
    unit = 32 * 64 * 4
    # Of each block its input and the sigmoid's result; the first one's input is the batch.
    assert failure.in_blocks == (4 * 2 - 1) * unit
    assert failure.activations >= failure.in_blocks  # other graphs may be alive in this process
    assert failure.largest_block == 2 * unit
    assert failure.in_blocks <= failure.float32_activations <= failure.activations
    assert failure.parameters == 4 * 2 * (64 * 64 + 64) * 4


def test_a_model_without_blocks_has_nothing_in_them():
    class Plain(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Sigmoid()])

    failure = look(Plain()).failure
    assert failure.in_blocks == failure.largest_block == 0
    assert failure.activations > 0


def test_what_an_evaluation_uses_is_what_training_does_not():
    recent = RecentSteps(50)
    recent.end_step(0, allocated=3 * MIB, peak=4 * MIB)
    findings = look(Net(), recent)
    assert findings.failure.evaluated == findings.failure.allocated - 3 * MIB


def test_the_kinds_add_up_to_what_is_in_use():
    findings = look(Net())
    assert sum(findings.held.values()) == findings.failure.allocated


def test_the_line_of_a_backward_is_that_of_its_inputs_in_forward(monkeypatch):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.empty(2**62, dtype=torch.int8)

    class Backward(Net):
        def training_step(self, batch):
            self.kept = super().forward_blocks(batch)
            Failing.apply(self.kept).square().sum().backward()

    model = Backward()
    stack = [{"filename": "/home/me/model.py", "line": 7, "name": "forward"}]

    def state(*_):
        # A CPU has no record: this one is made of what the test knows.
        block = Block(model.kept.untyped_storage().data_ptr(), 32 * 64 * 4, stack)
        return AllocatorState([block], 0, None, None)

    monkeypatch.setattr(oom_findings, "allocator_state", state)
    findings = look(model, snapshot={})
    assert findings.backward == (
        "FailingBackward of `blocks.3.2`, whose inputs were made in /home/me/model.py:7 in forward"
    )
    assert findings.largest == [
        (32 * 64 * 4, "1, activations, from /home/me/model.py:7 in forward")
    ]


def test_a_part_that_fails_leaves_the_others(monkeypatch):
    def broken(*_):
        raise LookupError("no\nidea")

    for part in ("failure_place", "RunMemory", "processes_on", "allocator_state", "largest_rows"):
        monkeypatch.setattr(oom_findings, part, broken)
    findings = look(Net(), snapshot={})
    assert findings.missing == [
        f"{part}: LookupError: no"
        for part in ("place", "allocator", "what holds memory", "largest allocations", "processes")
    ]
    text = report_text(findings, "", "", [])
    assert "asked for    4194304.00 TiB" in text
    assert "Not found out, what holds memory: LookupError: no\n" in text


def test_a_deep_model_of_many_blocks_is_looked_through_in_a_moment():
    class Deep(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)) for _ in range(300)]
            )

        def training_step(self, batch):
            return super().training_step(batch[:, :4])

    failure = look(Deep()).failure
    assert failure.in_blocks >= 300 * 32 * 4 * 4
    assert failure.largest_block < 4 * 32 * 4 * 4


def test_settings_are_those_of_the_failure():
    assert look(Net(), is_half=True, in_use=frozenset({"A"})).failure.in_use == {"A"}


def test_the_page_has_every_part_and_fits_on_a_page():
    recent = RecentSteps(50)
    for step in range(60):
        recent.begin_batch([torch.ones(32, 64)], "train")
        recent.end_step(step, step * MIB, 2 * step * MIB)
    text = report_text(look(Net(), recent), "at step 60", "cpu, torch", ["a file"])
    for part in (
        "Out of memory at step 60\ncpu, torch\n",
        "asked for    4194304.00 TiB",
        "phase        forward",
        "likely kind  single request larger than the device",
        "The device, ",
        "What holds the ",
        "56.00 KiB  activations\n",
        "16.00 KiB  blocks.1.0\n",
        "The largest live allocations\n",
        "last 50 steps, 10 to 59\n  ▁",
        "█  20.00 MiB to 118.00 MiB\n  in use between steps: 10.00 MiB at first, 59.00 MiB at last",
        "This batch: [32, 64] float32\nUsual ones: [32, 64] float32",
        "What to do, cheapest first\n  1. `AutomaticMixedPrecision()`",
        "2. `AutoAccumulation()`",
        "3. `GradientCheckpointing()`\n     saves up to 40.00 KiB, costs up to a third",
        "a file\n",
    ):
        assert part in text
    assert len(text.splitlines()) <= 66


def test_who_holds_many_tensors_is_told_if_memory_grew():
    recent = RecentSteps(50)
    for step in range(50):
        recent.end_step(step, allocated=step * MIB, peak=step * MIB)
    findings = look(Net(), recent)
    assert findings.failure.grown == 48 * MIB  # since the second step: the first one is warm-up
    assert findings.failure.growth_rate == MIB
    assert findings.collections == [
        (20, "in `model.losses`, list of 60, 60 with a graph"),
        (30, "in `model.few`, list of 2, 0 with a graph"),
    ]
    assert "Memory grew; attributes" in report_text(findings, "", "", [])
    assert look(Net()).collections == []


def test_a_flat_curve_is_drawn_flat():
    recent = RecentSteps(50)
    for step in range(3):
        recent.end_step(step, MIB, MIB)
    assert "  ▁▁▁  1.00 MiB to 1.00 MiB" in report_text(look(Net(), recent), "", "", [])
