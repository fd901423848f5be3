from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_memopt import checkpoint_layers
from lightning_memopt.core.kept_tensors import can_read_kept
from lightning_memopt.core.module_hooks import hookable_modules
from lightning_memopt.core.module_memory import ModuleMemory
from lightning_memopt.core.module_rows import ForwardMemory
from lightning_memopt.core.patching import PatchedMethod
from lightning_memopt.core.profile_files import modules_table
from lightning_memopt.core.saved_tensors import record_saved_tensors
from tests.models import Block, Blocks

pytestmark = pytest.mark.skipif(
    not can_read_kept(), reason="This PyTorch doesn't tell what a graph keeps."
)
CPU = torch.device("cpu")
WIDTH = 8


def watched(model: nn.Module, *batches: Tensor, **kwargs: Any) -> ForwardMemory:
    """Run forward and backward, and return what was seen of the forward that kept most."""
    memory = ModuleMemory(model, CPU, **kwargs)
    for batch in batches:
        memory.note_inputs([batch])
        with memory.watching():
            loss = model(batch).square().mean()
        memory.end_forward(loss)
        loss.backward()
        del loss
    assert memory.largest is not None
    return memory.largest


def kept(forward: ForwardMemory) -> dict[str, tuple[int, int]]:
    """Return what modules keep by name: themselves, and with their children."""
    return {row.name: (row.own_kept_bytes, row.kept_bytes) for row in forward.rows}


def calls(forward: ForwardMemory) -> dict[str, int]:
    return {row.name: row.calls for row in forward.rows}


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    checkpointed = nn.Sequential(*(Block() for _ in range(3)))
    checkpoint_layers(checkpointed, ["0", "2"])
    return {
        "blocks": (Blocks(), torch.randn(4, 4)),
        "convolutions": (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            torch.randn(2, 3, 8, 8),
        ),
        "attention": (nn.TransformerEncoder(encoder, 2), torch.randn(2, 5, WIDTH)),
        "checkpointed": (checkpointed, torch.randn(4, WIDTH)),
    }


@pytest.mark.parametrize("name", models())
def test_modules_keep_together_what_autograd_saves(name: str):
    model, batch = models()[name]
    forward = watched(model, batch)
    with record_saved_tensors(model) as saved:
        output = model(batch)
        saved.total_bytes  # noqa: B018 - before the square of the loss
        output.square().mean()
    assert forward.kept_bytes == saved.total_bytes > 0
    assert sum(row.own_kept_bytes for row in forward.rows) == forward.kept_bytes
    assert forward.rows[0].kept_bytes == forward.kept_bytes
    assert forward.kept_before_bytes in (0, batch.untyped_storage().nbytes())


def test_what_is_kept_counts_for_the_innermost_module_that_saved_it_first():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 2)))
    forward = watched(model, torch.randn(4, WIDTH))
    full, out = 4 * 4 * WIDTH, 4 * 4 * 2
    assert kept(forward) == {
        "": (out, 2 * full + out),  # the square of the loss keeps the output
        "0": (full, full),  # its input, the batch
        "1": (0, full),
        "1.0": (full, full),  # its output, which is the next one's input too
        "1.1": (0, 0),
    }
    assert forward.kept_before_bytes == full
    assert calls(forward) == dict.fromkeys(kept(forward), 1)


def test_a_shared_module_has_one_row_under_its_first_name():
    layer = nn.Tanh()
    model = nn.Sequential(layer, nn.ModuleDict({"again": layer})["again"], nn.Linear(WIDTH, 1))
    forward = watched(model, torch.randn(4, WIDTH, requires_grad=True))
    assert calls(forward) == {"": 1, "0": 2, "2": 1}
    assert kept(forward)["0"] == (2 * 4 * 4 * WIDTH,) * 2


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        x = (x * self.scale).sigmoid()
        return self(x, depth - 1) if depth else x


def test_a_module_that_calls_itself_counts_each_storage_once():
    model = nn.Sequential(Recursive())
    forward = watched(model, torch.randn(4, WIDTH))
    own, whole = kept(forward)["0"]
    # The batch, and in each of four calls the sigmoid's output, which is the next one's input.
    assert own == whole == 5 * 4 * 4 * WIDTH
    assert calls(forward)["0"] == 4


def test_what_is_freed_before_backward_is_not_kept():
    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)
            self.probe = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.probe(x * 2).tanh()
            return self.layer(x)

    forward = watched(Wasteful(), torch.randn(4, WIDTH))
    assert kept(forward)["probe"] == (0, 0)
    assert kept(forward)["layer"] == (4 * 4 * WIDTH,) * 2


def test_what_is_recomputed_in_backward_does_not_count():
    model = nn.Sequential(Block(), Block())
    checkpoint_layers(model, ["0", "1"])
    batch = torch.randn(4, WIDTH, requires_grad=True)
    memory = ModuleMemory(model, CPU)
    with memory.watching():  # backward within, as in manual optimization
        loss = model(batch).square().mean()
        memory.end_forward(loss)
        loss.backward()
    (forward,) = memory.forwards
    assert calls(forward)["0"] == calls(forward)["0.linear"] == 1
    size = 4 * 4 * WIDTH
    # Each keeps its input; the second one's is the first one's output.
    assert [kept(forward)[name] for name in ("0", "1")] == [(size, size)] * 2


def test_what_the_users_own_checkpoint_recomputes_does_not_count():
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    memory = ModuleMemory(Own(), CPU)
    with memory.watching():
        loss = memory._model(torch.randn(4, WIDTH)).mean()
        memory.end_forward(loss)
        loss.backward()
    assert [calls(forward)["inner"] for forward in memory.forwards] == [1]


def test_of_several_forwards_the_one_that_keeps_most_is_shown():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    memory = ModuleMemory(model, CPU)
    for samples in (2, 8, 4):
        with memory.watching():
            loss = model(torch.randn(samples, WIDTH)).sum()
        memory.end_forward(loss)
        loss.backward()
    assert [forward.kept_bytes for forward in memory.forwards] == [
        samples * 4 * WIDTH * 2 for samples in (2, 8, 4)
    ]
    assert memory.largest is memory.forwards[1]
    assert "in forward 2 of 3" in modules_table(memory)


def test_two_forwards_in_one_call_are_two():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    memory = ModuleMemory(model, CPU)
    with memory.watching():
        for samples in (2, 8):
            loss = model(torch.randn(samples, WIDTH)).sum()
            memory.end_forward(loss)
            loss.backward()
    assert [calls(forward)["0"] for forward in memory.forwards] == [1, 1]
    assert [f.kept_bytes for f in memory.forwards] == [2 * 4 * WIDTH * 2, 8 * 4 * WIDTH * 2]


class Allocating(nn.Module):
    """Takes what it is told, by a counter that stands for the device's."""

    counter = 0

    def __init__(self, takes: int, *children: nn.Module) -> None:
        super().__init__()
        self.takes, self.within = takes, nn.Sequential(*children)

    def forward(self, x: Tensor) -> Tensor:
        Allocating.counter += self.takes
        return self.within(x).tanh()


def test_growth_in_forward_is_that_of_the_device_with_and_without_children(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ModuleMemory, "_allocated", lambda _: Allocating.counter)
    model = Allocating(100, Allocating(10, Allocating(1)), Allocating(-20))
    forward = watched(model, torch.randn(2, WIDTH, requires_grad=True))
    rows = {row.name: (row.forward_bytes, row.own_forward_bytes) for row in forward.rows}
    assert rows["within.0"] == (11, 10)
    assert rows["within.0.within.0"] == (1, 1)
    assert rows["within.1"] == (-20, -20)
    assert rows["within"] == (-9, 0)
    assert rows[""] == (91, 100)
    assert forward.grown_bytes == 91


def test_on_a_host_it_is_not_told_what_a_forward_takes():
    memory = ModuleMemory(model := nn.Sequential(nn.Linear(2, 2)), CPU)
    with memory.watching():
        loss = model(torch.randn(1, 2)).sum()
    memory.end_forward(loss)
    text = modules_table(memory)
    assert "forward" not in text.splitlines()[5]
    assert "grew" not in text
    memory.has_growth = True
    text = modules_table(memory)
    assert "grew" in text
    assert "below zero" in text


# What is left as it was


def hooks_of(model: nn.Module) -> list[Any]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    return [dict(getattr(module, name)) for module in model.modules() for name in names]


def test_no_hook_is_left_after_a_forward_that_raised():
    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    model = nn.Sequential(nn.Tanh(), nn.Sequential(Raising()))
    before = hooks_of(model)
    memory = ModuleMemory(model, CPU)
    during: list[Any] = []

    def run() -> None:
        with memory.watching():
            during.append(hooks_of(model))
            model(torch.randn(2, WIDTH, requires_grad=True))

    with pytest.raises(KeyError, match="mine"):
        run()
    assert during != [before]
    assert hooks_of(model) == before
    memory.end_forward()
    assert memory.forwards == []


def test_an_error_that_the_model_catches_leaves_the_rows_right():
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing, self.layer = nn.Sequential(Failing()), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.failing(x)
            except ValueError:
                return self.layer(x)

    forward = watched(Catching(), torch.randn(4, WIDTH, requires_grad=True))
    assert calls(forward) == {"": 1, "failing": 1, "failing.0": 1, "layer": 1}
    assert kept(forward)["layer"] == (4 * 4 * WIDTH,) * 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_made_in_a_forward_is_not_watched(copied: Any):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    memory = ModuleMemory(model, CPU)
    with memory.watching():
        twin = copied(model)
        loss = model(torch.randn(4, WIDTH)).sum()
        twin(torch.randn(4, WIDTH)).sum()
        assert any(hooks_of(model))
        assert not any(hooks_of(twin))
    memory.end_forward(loss)
    (forward,) = memory.forwards
    assert calls(forward) == {"": 1, "0": 1, "1": 1}


def test_outputs_and_gradients_are_bit_equal_while_watched():
    torch.manual_seed(0)
    model = Blocks()
    twin, batch = copy.deepcopy(model), torch.randn(4, 4)
    for each, is_watched in ((model, False), (twin, True)):
        torch.manual_seed(1)
        if is_watched:
            watched(each, batch)
        else:
            each(batch).square().mean().backward()
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(a, b) and torch.equal(a.grad, b.grad) for a, b in pairs)


def test_modules_that_run_are_told_of_in_order():
    told: list[str] = []
    model = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(WIDTH, 1)))
    watched(
        model,
        torch.randn(2, WIDTH),
        entered=lambda name: told.append(f"+{name}"),
        left=lambda name: told.append(f"-{name}"),
    )
    assert told == ["+0", "-0", "+1", "+1.0", "-1.0", "-1"]


def test_sparse_tensors_that_autograd_saves_are_passed_over():
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(x.to_sparse(), self.weight)

    assert watched(Sparse(), torch.randn(4, WIDTH)).kept_bytes >= 0


# What the user does with autograd is as ever


def test_functions_of_torch_func_run_while_watched():
    model = nn.Sequential(nn.Linear(WIDTH, 1))
    parameters, batch = dict(model.named_parameters()), torch.randn(4, WIDTH)

    def penalty(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (batch,)).square().mean()

    memory = ModuleMemory(model, CPU)
    with memory.watching():
        gradients = torch.func.grad(penalty)(parameters)
        loss = penalty(parameters) + sum(x.square().sum() for x in gradients.values())
        with torch.autograd.graph.disable_saved_tensors_hooks("none of these"):
            loss = loss + model(batch).tanh().sum()
    memory.end_forward(loss)
    assert memory.forwards[0].kept_bytes > batch.untyped_storage().nbytes()


def test_hooks_of_the_user_on_saved_tensors_run_as_ever():
    model, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.randn(4, WIDTH)

    def half(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.bfloat16()

    gradients = []
    for is_watched in (False, True):
        packed: list[Tensor] = []
        memory = ModuleMemory(model, CPU)
        model.zero_grad()
        with (
            torch.autograd.graph.saved_tensors_hooks(half, lambda x: x.float()),
            memory.watching() if is_watched else nullcontext(),
        ):
            loss = model(batch).sum()
        memory.end_forward(loss if is_watched else None)
        loss.backward()
        gradients.append(model[0].weight.grad.clone())
        assert len(packed) >= 2
    assert torch.equal(*gradients)
    # What the user's hooks have made of the input of one and the output of the other.
    size = 4 * 2 * WIDTH
    assert [row.own_kept_bytes for row in memory.forwards[0].rows][1:] == [size, size]


def test_a_change_in_place_of_what_is_saved_is_still_an_error():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    memory = ModuleMemory(model, CPU)
    with memory.watching():
        y = model(torch.randn(4, WIDTH)).exp()
        loss = y.sum()
        y.add_(1)
    memory.end_forward(loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert ctx.saved_tensors[0] is ctx.x
        return gradient * 2


def test_saved_tensors_are_the_same_objects():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    memory = ModuleMemory(model, CPU)
    with memory.watching():
        loss = Identity.apply(model(torch.randn(4, WIDTH))).sum()
    memory.end_forward(loss)
    loss.backward()
    assert kept(memory.forwards[0])[""][0] == 4 * 4 * WIDTH


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_script_has_no_row_and_runs():
    script = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    forward = watched(nn.Sequential(script, nn.Tanh()), torch.randn(4, WIDTH))
    assert set(calls(forward)) == {"", "1"}
    assert forward.kept_bytes > 0


def test_layers_that_evaluate_in_another_way_with_hooks_get_none():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 1)
    model = nn.Sequential(encoder, nn.Tanh())
    assert len(list(hookable_modules(model))) > 5
    encoder.eval()
    assert [name for name, _ in hookable_modules(model)] == ["1"]


@pytest.mark.parametrize("where", ["_set_hooks", "_do_enter", "_do_leave", "_close"])
def test_a_failure_in_watching_never_reaches_the_model(where: str, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise OSError("ours")

    monkeypatch.setattr(ModuleMemory, where, fail)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    memory = ModuleMemory(model, CPU)
    with memory.watching():
        loss = model(torch.randn(4, WIDTH)).sum()
    with pytest.raises(OSError, match="ours"):
        memory.end_forward(loss)
    assert not any(hooks_of(model))


def test_a_second_loss_of_a_forward_adds_what_it_needs():
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    batches = torch.randn(2, WIDTH), torch.randn(3, WIDTH)
    memory = ModuleMemory(model, CPU)
    with memory.watching():
        losses = [layer(batch).sum() for layer, batch in zip(model, batches, strict=True)]
        for loss in losses:
            memory.end_forward(loss)
            loss.backward()
    (forward,) = memory.forwards
    assert forward.kept_bytes == 5 * 4 * WIDTH
    assert [row.kept_bytes for row in forward.rows] == [5 * 4 * WIDTH, 2 * 4 * WIDTH, 3 * 4 * WIDTH]


def test_a_backward_that_was_not_seen_is_told_of():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    memory = ModuleMemory(model, CPU)
    with memory.watching():
        model(torch.randn(4, WIDTH)).sum().backward()
    memory.end_forward()
    assert [forward.has_backward for forward in memory.forwards] == [False]
    assert "no backward was seen" in modules_table(memory)


def test_a_forward_that_failed_is_not_shown():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    memory = ModuleMemory(model, CPU)

    def run(samples: int) -> Tensor:
        with memory.watching():
            loss = model(torch.randn(samples, WIDTH)).sum()
            if samples > 4:
                raise MemoryError
        return loss

    with pytest.raises(MemoryError):
        run(8)
    memory.end_forward(run(4))
    assert [forward.kept_bytes for forward in memory.forwards] == [2 * 4 * 4 * WIDTH]


# Compiled modules


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler itself
@pytest.mark.parametrize("how", ["child", "in place", "function"])
def test_a_compiled_module_has_one_graph_and_no_row_within(how: str):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh()))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    run: Any = model
    if how == "child":
        model[1] = torch.compile(model[1], backend=backend, fullgraph=True)
    elif how == "in place":
        model[1].compile(backend=backend, fullgraph=True)
    else:
        run = torch.compile(lambda x: model(x), backend=backend, fullgraph=True)
    batch = torch.randn(4, WIDTH)
    memory = ModuleMemory(model, CPU)
    if how == "function":
        run(batch)  # it isn't known as compiled: watched at first, it would be compiled again
    for _ in range(2):
        with memory.watching():
            loss = run(batch).square().mean()
        memory.end_forward(loss)
        loss.backward()
    run(batch)
    assert len(graphs) == 1
    forward = memory.forwards[-1]
    assert [row.name for row in forward.rows if row.name.startswith("1.")] == []
    assert forward.kept_bytes == memory.forwards[0].kept_bytes >= 2 * 4 * 4 * 4
    torch._dynamo.reset()


@pytest.mark.parametrize("is_patched", [False, True])
def test_modules_of_a_compiled_method_get_no_hooks(is_patched: bool):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
    assert [name for name, _ in hookable_modules(model)] == ["0", "1", "1.0"]
    model[1].forward = torch.compile(model[1].forward)
    if is_patched:
        PatchedMethod(model[1], "forward")
    assert [name for name, _ in hookable_modules(model)] == ["0", "1"]


def test_the_table_is_sorted_and_ends_in_its_sums():
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, 1))
    memory = ModuleMemory(model, CPU)
    batch = torch.randn(4, WIDTH)
    memory.note_inputs([batch])
    with memory.watching():
        loss = model(batch).sum()
    memory.end_forward(loss)
    text = modules_table(memory)
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("module  "))
    assert [line.split()[0] for line in lines[first + 1 : first + 5]] == [
        "1",
        "0",
        "(training_step)",
        "2",
    ]
    assert "sum up to" not in text
    assert f"({5 * 4 * 4 * WIDTH} bytes)" in next(x for x in lines if x.startswith("distinct"))
    memory.forwards[0].rows[0].own_kept_bytes -= 1
    assert f"({5 * 4 * 4 * WIDTH - 1} bytes): some are missing" in modules_table(memory)
    memory.forwards[0].rows[0].own_kept_bytes += 1
    short = modules_table(memory, 2)
    assert "... and 2 more" in short
    assert len(short.splitlines()) == len(lines) - 1
    assert modules_table(ModuleMemory(model, CPU)) == "No module ran."
