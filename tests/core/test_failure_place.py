import functools
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_memopt.core.failure_place import Line, failure_place, local_variable

ME = str(Path(__file__))


class Refusing(nn.Module):
    def forward(self, x):
        raise RuntimeError("no memory")


class Passing(nn.Module):
    """Fails in backward."""

    def forward(self, x):
        return _Fail.apply(x)


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no memory")


class FailingStep(torch.optim.SGD):
    def step(self, closure=None):
        if closure is not None:
            closure()
        raise RuntimeError("no memory")


class Model(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), inner)

    def training_step(self, batch):
        return self.net(batch).sum()

    def validation_step(self, batch):
        return self.net(batch)


def failed(action):
    with pytest.raises(RuntimeError) as caught:
        action()
    return caught.value


def forward(model, batch=None):
    return model.training_step(torch.ones(2) if batch is None else batch)


def line_of(function, offset):
    return function.__code__.co_firstlineno + offset


def test_a_forward_is_told_by_line_and_module():
    model = Model(Refusing())
    place = failure_place(failed(functools.partial(forward, model)), model)
    assert place.phase == "forward"
    assert place.module == "net.1"
    assert place.own == place.line == Line(ME, line_of(Refusing.forward, 1), "forward")
    assert str(place.own).endswith('in forward: raise RuntimeError("no memory")')


def test_a_path_is_shown_from_the_working_directory_or_the_package(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert str(Line(str(tmp_path / "a" / "train.py"), 7, "f")) == "a/train.py:7 in f"
    assert str(Line("/v/lib/site-packages/timm/mlp.py", 7, "f")) == "timm/mlp.py:7 in f"
    assert str(Line("/elsewhere/train.py", 7, "f")) == "/elsewhere/train.py:7 in f"


def test_a_backward_is_told_from_the_forward_before_it():
    model = Model(Passing())
    place = failure_place(failed(lambda: forward(model).backward()), model)
    assert place.phase == "backward"
    assert place.own == Line(ME, line_of(_Fail.backward, 2), "backward")


def test_an_optimizers_step_is_told_from_the_closure_within():
    model = Model(nn.Identity())
    optimizer = FailingStep(model.parameters(), lr=0.1)
    place = failure_place(failed(optimizer.step), model)
    assert place.phase == "optimizer step"
    # PyTorch wraps the method of an optimizer.
    assert place.own == Line(ME, line_of(FailingStep.step.__wrapped__, 3), "step")
    inner = Model(Refusing())
    error = failed(lambda: optimizer.step(lambda: forward(inner)))
    assert failure_place(error, inner).phase == "forward"


def test_a_validation_is_told_by_the_name_of_its_method():
    model = Model(Refusing())
    error = failed(lambda: model.validation_step(torch.ones(2)))
    assert failure_place(error, model).phase == "validation"


def test_what_a_step_calls_for_itself_has_no_say():
    class Calling(Model):
        def training_step(self, batch):
            def backward():
                return self.validation_step(batch)

            return backward()

    model = Calling(Refusing())
    assert failure_place(failed(functools.partial(forward, model)), model).phase == "forward"


def test_a_checkpoint_that_is_loaded_is_told():
    model = Model(nn.Identity())
    error = failed(lambda: model.load_state_dict({"unknown": torch.ones(1)}))
    assert failure_place(error, model).phase == "loading a checkpoint"


def test_causes_in_a_circle_are_gone_through_once():
    model = Model(Refusing())
    error = failed(functools.partial(forward, model))
    error.__cause__ = RuntimeError("other")
    error.__cause__.__cause__ = error
    assert failure_place(error, model).phase == "forward"


def test_an_error_that_was_raised_again_is_found_where_it_was_first():
    model = Model(Refusing())

    def again():
        try:
            forward(model)
        except RuntimeError as error:
            raise RuntimeError("wrapped") from error

    place = failure_place(failed(again), model)
    assert (place.phase, place.module) == ("forward", "net.1")
    assert place.own == Line(ME, line_of(Refusing.forward, 1), "forward")


def test_a_library_of_models_is_named_beside_the_users_line(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "models"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def run(f):\n    return f()\n")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "models", raising=False)
    import models  # a file of this test

    def allocate():
        return models.run(lambda: torch.empty(2**62, dtype=torch.int8))

    def allocate_within():
        return models.run(functools.partial(torch.empty, 2**62, dtype=torch.int8))

    model = Model(nn.Identity())
    assert failure_place(failed(allocate), model).line.file == ME
    place = failure_place(failed(allocate_within), model)
    assert place.own == Line(ME, line_of(allocate_within, 1), "allocate_within")
    assert place.line == Line(str(package / "__init__.py"), 2, "run")


@pytest.mark.parametrize(
    ("file", "is_own", "is_plumbing"),
    [
        ("/home/me/train.py", True, False),
        ("<stdin>", True, False),
        ("<string>", False, True),
        (functools.__file__, False, True),
        (str(Path(torch.__file__).parent / "nn/functional.py"), False, True),
        (sys.modules["lightning_memopt"].__file__, False, True),
        ("/v/lib/python3.12/site-packages/lightning/pytorch/trainer/trainer.py", False, True),
        ("/v/lib/python3.12/site-packages/timm/layers/mlp.py", False, False),
        ("/usr/lib/python3/dist-packages/timm/layers/mlp.py", False, False),
    ],
)
def test_the_users_files_are_told_from_plumbing(file, is_own, is_plumbing):
    line = Line(file, 1, "f")
    assert (line.is_own, line.is_plumbing) == (is_own, is_plumbing)


def test_a_local_variable_is_the_innermost_of_its_name():
    batch = torch.ones(2)
    error = failed(lambda: forward(Model(Refusing()), batch))
    assert local_variable(error, "batch", torch.is_tensor) is batch
    assert local_variable(error, "batch", lambda value: isinstance(value, str)) is None
    assert local_variable(error, "not_there", torch.is_tensor) is None


def test_nothing_is_told_of_an_error_that_was_never_raised():
    place = failure_place(RuntimeError("x"), Model(nn.Identity()))
    assert (place.phase, place.own, place.line, place.module) == (None, None, None, None)
