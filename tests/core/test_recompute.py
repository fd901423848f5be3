import copy
import gc
import inspect
import pickle
import random
import threading
import warnings
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_memopt.core.layers import select_layers
from lightning_memopt.core.recompute import checkpoint_layers
from lightning_memopt.core.recomputing import explain_mismatch, is_recomputing
from lightning_memopt.core.saved_tensors import record_saved_tensors

BATCH, WIDTH = 6, 8


class Counter(nn.Module):
    """Passes its input on and counts how often it did, and how often in a repetition."""

    def __init__(self):
        super().__init__()
        self.calls = self.repeated = 0

    def forward(self, x):
        self.calls += 1
        self.repeated += is_recomputing()
        return x


def block(*layers):
    """A block in which a repetition is seen, and which repeats all of `layers`."""
    return nn.Sequential(Counter(), nn.Linear(WIDTH, WIDTH), *layers, nn.Tanh())


def chain(*blocks):
    """Blocks behind a layer, so that their inputs need gradients."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)


def counts(model):
    return [(c.calls, c.repeated) for c in model.modules() if isinstance(c, Counter)]


def square_sum(model, x):
    model(x).square().sum().backward()


def state(model):
    """Return gradients and buffers."""
    grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return {k: None if v is None else v.clone() for k, v in {**grads, **model.state_dict()}.items()}


def assert_equal(found, expected, tolerance=0.0):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if value is None or expected[name] is None:
            assert value is expected[name], name
        else:
            torch.testing.assert_close(
                value, expected[name], rtol=tolerance, atol=tolerance, msg=name, equal_nan=True
            )


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def assert_as_eager(model, names, step=square_sum, steps=3, keep="nothing", inputs=None):
    """Run steps of a model and of a checkpointed copy from the same random states: all is equal."""
    eager = copy.deepcopy(model)
    undo = checkpoint_layers(model, names, keep)
    for number in range(steps):
        ends = []
        for each in (eager, model):
            seed(number)
            each.zero_grad()
            x = torch.randn(BATCH, WIDTH) if inputs is None else inputs()
            step(each, x)
            ends.append((state(each), torch.rand(1).item(), random.random(), numpy.random.rand()))
        assert_equal(ends[1][0], ends[0][0])
        assert ends[1][1:] == ends[0][1:]
    assert counts(model) == [(2 * calls, calls) for calls, _ in counts(eager)]
    assert sum(repeated for _, repeated in counts(model)) >= steps
    undo()
    assert not any("forward" in vars(module) for module in model.modules())
    assert not is_recomputing()
    return eager


# What stands in


def test_a_name_that_is_no_module_is_refused_and_nothing_stays_patched():
    model = chain(block())
    with pytest.raises(ValueError, match="`names` must be modules of the model, got 'nope'"):
        checkpoint_layers(model, ["1", "nope"])
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_unknown_word_to_keep_is_refused():
    with pytest.raises(ValueError, match=r"`keep` must be.*'all'"):
        checkpoint_layers(chain(block()), ["1"], "all")


def test_undoing_twice_is_harmless_and_ends_the_recomputation():
    model = chain(block())
    undo = checkpoint_layers(model, ["1"])
    square_sum(model, torch.ones(BATCH, WIDTH))
    assert counts(model) == [(2, 1)]
    undo()
    undo()
    square_sum(model, torch.ones(BATCH, WIDTH))
    assert counts(model) == [(3, 1)]


def test_undoing_between_forward_and_backward_leaves_the_gradients_right():
    model = chain(block(nn.BatchNorm1d(WIDTH), nn.Dropout()))
    eager = copy.deepcopy(model)
    undo = checkpoint_layers(model, ["1"])
    x = torch.randn(BATCH, WIDTH)
    seed(0)
    square_sum(eager, x)
    seed(0)
    loss = model(x).square().sum()
    undo()
    loss.backward()
    assert counts(model) == [(2, 1)]
    assert_equal(state(model), state(eager))


def test_a_module_under_two_names_is_patched_once_and_recomputed_at_both():
    shared = block()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), shared, nn.Tanh(), shared)
    assert_as_eager(model, ["1", "3"])
    assert counts(model) == [(12, 6)]  # twice a step


def test_names_types_and_state_dict_stay_and_a_copy_is_plain():
    model = chain(block(), block(nn.BatchNorm1d(WIDTH)))
    names = [name for name, _ in model.named_modules()], [n for n, _ in model.named_parameters()]
    keys, types = list(model.state_dict()), [type(module) for module in model.modules()]
    checkpoint_layers(model, ["1", "2"])
    assert names == (
        [name for name, _ in model.named_modules()],
        [name for name, _ in model.named_parameters()],
    )
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model.modules()] == types
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert twin(torch.ones(BATCH, WIDTH)).count_nonzero() == 0
        calls = counts(twin)
        square_sum(twin, torch.ones(BATCH, WIDTH))
        assert counts(twin) == [(calls + 1, repeated) for calls, repeated in calls]


def test_the_signature_of_the_forward_stays():
    layer = nn.MultiheadAttention(WIDTH, 2)
    signature = inspect.signature(layer.forward)
    checkpoint_layers(layer, [""])
    assert inspect.signature(layer.forward) == signature


def test_a_model_with_recomputations_behind_it_dies_with_its_last_reference():
    model = chain(block())
    checkpoint_layers(model, ["1"])
    square_sum(model, torch.ones(BATCH, WIDTH))
    gone = weakref.ref(model[1])
    del model
    gc.collect()
    assert gone() is None


# Gradients, buffers and random states


KINDS = {
    "plain": block,
    "BatchNorm": lambda: block(nn.BatchNorm1d(WIDTH)),
    "BatchNorm, momentum None": lambda: block(nn.BatchNorm1d(WIDTH, momentum=None)),
    "BatchNorm in eval": lambda: block(nn.BatchNorm1d(WIDTH).eval()),
    "BatchNorm last": lambda: nn.Sequential(
        Counter(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.BatchNorm1d(WIDTH)
    ),
    "own batch norm": lambda: block(OwnBatchNorm()),
    "InstanceNorm": lambda: block(nn.InstanceNorm1d(BATCH, track_running_stats=True)),
    "spectral norm by hook": lambda: block(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "spectral norm": lambda: block(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    ),
    "weight norm": lambda: block(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "moving average": lambda: block(MovingAverage()),
    "assigned moving average": lambda: block(MovingAverage(is_assigned=True)),
    "dropout": lambda: block(nn.Dropout(0.5)),
    "in eval": lambda: block(nn.Dropout(), nn.BatchNorm1d(WIDTH)).eval(),
    "in place": lambda: block(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
    "attention": lambda: Attention(),
    "nested blocks": lambda: block(block(nn.BatchNorm1d(WIDTH)), nn.Dropout()),
    "random branch": lambda: block(RandomBranch()),
    "numpy noise": lambda: block(NumpyNoise()),
    "checkpoint of its own": lambda: block(OwnCheckpoint()),
}


class MovingAverage(nn.Module):
    """Subtracts a moving average of what it has seen."""

    def __init__(self, is_assigned=False):
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.is_assigned = is_assigned

    def forward(self, x):
        mean = x.detach().mean(0)
        if self.is_assigned:
            self.average = 0.5 * self.average + mean
        else:
            self.average.mul_(0.5).add_(mean)
        return (x - self.average) * x


class OwnBatchNorm(nn.Module):
    """Normalizes by a kernel that changes its buffers behind the back of autograd."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.mean, self.variance, training=self.training)


class RandomBranch(nn.Module):
    def forward(self, x):
        return x.sin() if random.random() < 0.5 else x.cos() * x


class NumpyNoise(nn.Module):
    def forward(self, x):
        return x * torch.from_numpy(numpy.random.rand(*x.shape)).to(x)


class OwnCheckpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.counter, self.qkv = Counter(), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.counter(self.qkv(x)).view(1, BATCH, 2, -1).transpose(1, 2).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.mlp(self.out(y.transpose(1, 2).reshape(BATCH, WIDTH)).tanh()).tanh()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_buffers_and_random_states_are_those_of_the_plain_model(kind):
    seed(0)
    eager = assert_as_eager(chain(KINDS[kind](), KINDS[kind]()), ["1", "2"], steps=5)
    assert all(p.grad.count_nonzero() for p in eager[0].parameters())


KEPT = [(kind, keep) for kind in KINDS for keep in ("attention", "matmul")]
KEPT.remove(("in place", "matmul"))  # the next test


@pytest.mark.parametrize(("kind", "keep"), KEPT)
def test_so_they_are_when_operators_are_kept(kind, keep):
    seed(0)
    assert_as_eager(chain(KINDS[kind](), KINDS[kind]()), ["1", "2"], keep=keep)


@pytest.mark.parametrize("times", [1, 2])
def test_what_torch_can_not_do_with_kept_operators_is_an_error_that_says_so(times):
    """It can't give back a result that was changed in place, nor the same result twice."""
    model = chain(KINDS["in place" if times == 1 else "plain"]())
    checkpoint_layers(model, ["1"], "matmul")
    loss = model(torch.ones(BATCH, WIDTH)).sum()
    if times == 2:
        loss.backward(retain_graph=True)
    with pytest.raises(CheckpointError, match=r'^`1` did not .*, set `keep="nothing"`, or'):
        loss.backward()


@pytest.mark.parametrize("kind", ["dropout", "random branch", "numpy noise"])
def test_what_is_random_is_equal_in_many_repeats(kind):
    seed(0)
    assert_as_eager(chain(KINDS[kind]()), ["1"], steps=12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_without_backward_leaves_the_buffers_right(kind):
    def step(model, x):
        with torch.no_grad():
            model(x)
        model(x + 1)
        square_sum(model, x)

    model, eager = chain(KINDS[kind]()), None
    eager = copy.deepcopy(model)
    checkpoint_layers(model, ["1"])
    for number in range(3):
        for each in (eager, model):
            seed(number)
            each.zero_grad()
            step(each, torch.randn(BATCH, WIDTH))
        assert_equal(state(model), state(eager))
    for found, plain in zip(counts(model), counts(eager), strict=True):
        assert plain == (9, 0)
        assert found == (12, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_two_forwards_before_one_backward_are_right(kind):
    def step(model, x):
        (model(x).square().sum() + model(x * 2).square().sum()).backward()

    assert_as_eager(chain(KINDS[kind]()), ["1"], step)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_that_is_kept_gives_its_gradients_twice(kind):
    model = chain(KINDS[kind]())
    eager = copy.deepcopy(model)
    checkpoint_layers(model, ["1"])
    for each in (eager, model):
        seed(0)
        loss = each(torch.randn(BATCH, WIDTH)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_equal(state(model), state(eager))
    assert counts(model) == [(3, 2)] * len(counts(model))


@pytest.mark.parametrize(
    "kind", ["plain", "BatchNorm", "dropout", "nested blocks", "spectral norm"]
)
def test_double_backward_is_right(kind):
    def step(model, x):
        x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()

    model = chain(KINDS[kind]())
    eager = copy.deepcopy(model)
    checkpoint_layers(model, ["1"])
    for each in (eager, model):
        seed(0)
        step(each, torch.randn(BATCH, WIDTH))
    assert_equal(state(model), state(eager))
    assert all(repeated == 2 for _, repeated in counts(model))


def test_gradients_asked_for_by_name_are_right():
    def step(model, x):
        parameters = list(model.parameters())
        for parameter, grad in zip(
            parameters, torch.autograd.grad(model(x).square().sum(), parameters), strict=True
        ):
            parameter.grad = grad

    assert_as_eager(chain(block(nn.Dropout())), ["1"], step)


def test_nested_blocks_that_are_both_chosen_are_right():
    model = chain(block(block(nn.BatchNorm1d(WIDTH), nn.Dropout()), MovingAverage()))
    eager = copy.deepcopy(model)
    checkpoint_layers(model, ["1", "1.2"])
    for number in range(3):
        for each in (eager, model):
            seed(number)
            each.zero_grad()
            square_sum(each, torch.randn(BATCH, WIDTH))
        assert_equal(state(model), state(eager))
    assert counts(model) == [(6, 3), (9, 6)]  # the inner one in the outer's second run too


@pytest.mark.parametrize("is_open_in_backward", [False, True])
@pytest.mark.parametrize("keep", ["nothing", "attention", "matmul"])
def test_autocast_is_that_of_the_forward(is_open_in_backward, keep):
    def step(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            assert y.dtype == torch.bfloat16
            loss = y.float().square().sum()
            if is_open_in_backward:
                loss.backward()
        if not is_open_in_backward:
            loss.backward()

    assert_as_eager(
        chain(block(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)), Attention()),
        ["1", "2"],
        step,
        keep=keep,
    )


def test_a_change_of_mode_later_on_is_followed():
    """A buffer that did not change while the block was in eval mode changes in training."""
    model = chain(KINDS["spectral norm"](), KINDS["moving average"](), block(nn.BatchNorm1d(WIDTH)))

    eager = copy.deepcopy(model)
    checkpoint_layers(model, ["1", "2", "3"])
    for number in range(6):
        for each in (eager, model):
            seed(number)
            each.train(number not in (0, 1, 4))
            each.zero_grad()
            square_sum(each, torch.randn(BATCH, WIDTH))
        assert_equal(state(model), state(eager))
    assert counts(model) == [(12, 6)] * 3


# Inputs and outputs


class Nested(nn.Module):
    """Has arguments and outputs of many kinds."""

    def __init__(self):
        super().__init__()
        self.counter = Counter()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout()

    def forward(
        self,
        x=None,
        *,
        debug=None,
        early_stop=1.0,
        use_reentrant=None,
        function="tanh",
        context_fn=None,
        determinism_check=None,
        preserve_rng_state=True,
    ):
        x = debug["x"][0] if x is None else x
        y = self.dropout(getattr(self.linear(self.counter(x)), function)())
        return {"y": (y * early_stop, [y.cos(), preserve_rng_state]), "function": function}


ARGUMENTS = {
    "positional": lambda x: ((x,), {}),
    "keyword": lambda x: ((), {"x": x}),
    "nested": lambda x: ((), {"debug": {"x": (x, 1)}}),
    "names of checkpoint's own": lambda x: (
        (x,),
        {
            "debug": True,
            "early_stop": 3.0,
            "use_reentrant": True,
            "function": "sin",
            "context_fn": print,
            "determinism_check": "unknown",
            "preserve_rng_state": False,
        },
    ),
    "tensor among others": lambda x: ((x,), {"early_stop": x.detach().sum(), "debug": [x]}),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_and_outputs_of_any_kind_pass(kind, needs_grad):
    def step(model, x):
        args, kwargs = ARGUMENTS[kind](model[0](x) if needs_grad else x)
        output = model[1](*args, **kwargs)
        assert output["function"] == kwargs.get("function", "tanh")
        assert output["y"][1][1] is kwargs.get("preserve_rng_state", True)
        (output["y"][0].square().sum() + output["y"][1][0].sum()).backward()

    seed(0)
    assert_as_eager(chain(Nested()), ["1"], step)


def test_a_block_without_any_argument_is_recomputed():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.counter, self.w = Counter(), nn.Parameter(torch.ones(WIDTH))

        def forward(self):
            return nn.functional.dropout(self.counter(self.w.exp()).sin())

    assert_as_eager(nn.Sequential(Constant()), ["0"], lambda model, x: model[0]().sum().backward())


def test_outputs_that_are_views_of_the_input_are_right():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.counter, self.linear = Counter(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x.view(-1), self.linear(self.counter(x)).tanh()

    def step(model, x):
        a, b = model(x)
        (a.square().sum() + b.square().sum()).backward()

    assert_as_eager(chain(Split()), ["1"], step)


def test_a_list_that_the_caller_appends_to_is_seen_as_it_was():
    """As the dense blocks of torchvision call their layers."""

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(i) for i in (1, 2, 3)])

        def forward(self, x):
            seen = [x]
            for layer in self.layers:
                seen.append(layer(seen))
            return torch.cat(seen, 1)

    class Layer(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.counter, self.linear = Counter(), nn.Linear(count * WIDTH, WIDTH)

        def forward(self, seen):
            return self.linear(self.counter(torch.cat(seen, 1))).tanh()

    assert_as_eager(chain(Dense()), ["1.layers.0", "1.layers.1", "1.layers.2"])


def test_a_list_that_the_block_appends_to_grows_once():
    class Collecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.counter, self.linear = Counter(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, seen):
            seen["all"].append(self.linear(self.counter(x)).tanh())
            return torch.stack(seen["all"]).sum(0).tanh()

    def step(model, x):
        seen = {"all": []}
        y = model[2](model[1](model[0](x), seen), seen)
        assert len(seen["all"]) == 2
        (y.square().sum() + seen["all"][0].sum()).backward()

    assert_as_eager(chain(Collecting(), Collecting()), ["1", "2"], step)


@pytest.mark.parametrize("kind", ["positional", "keyword", "nested"])
def test_an_input_that_the_block_changes_is_an_error_at_once_with_its_name(kind):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x=None, debug=None):
            x = debug["x"][0] if x is None else x
            return self.linear(x.relu_()).tanh()

    model = chain(InPlace())
    checkpoint_layers(model, ["1"])
    args, kwargs = ARGUMENTS[kind](model[0](torch.ones(BATCH, WIDTH)))
    with pytest.raises(RuntimeError, match=r"`1` changes its input in place.*leave it out of"):
        model[1](*args, **kwargs)
    assert not is_recomputing()


@pytest.mark.parametrize("kind", ["positional", "keyword", "nested"])
def test_an_input_that_is_changed_before_backward_gives_no_wrong_gradient(kind):
    model = chain(Nested())
    checkpoint_layers(model, ["1"])
    hidden = model[0](torch.ones(BATCH, WIDTH))
    args, kwargs = ARGUMENTS[kind](hidden)
    loss = model[1](*args, **kwargs)["y"][0].sum()
    hidden.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Where there is nothing to recompute


def test_without_gradients_a_block_runs_once_and_nothing_is_kept():
    model = chain(block(nn.BatchNorm1d(WIDTH)))
    checkpoint_layers(model, ["1"])
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert model(torch.ones(BATCH, WIDTH)).grad_fn is None
    assert counts(model) == [(2, 0)]


def test_a_frozen_block_is_recomputed_only_if_its_input_needs_gradients():
    model = chain(block())
    eager = copy.deepcopy(model)
    checkpoint_layers(model, ["1"])
    for each in (model, eager):
        each[1].requires_grad_(False)
        square_sum(each, torch.ones(BATCH, WIDTH))
    assert counts(model) == [(2, 1)]
    assert_equal(state(model), state(eager))
    model[0].requires_grad_(False)
    assert not model(torch.ones(BATCH, WIDTH)).requires_grad
    assert counts(model) == [(3, 1)]


@pytest.mark.parametrize("kind", ["nested", "tensor among others"])
def test_a_frozen_block_is_recomputed_for_an_input_in_a_container(kind):
    model = chain(Nested())
    model[1].requires_grad_(False)
    checkpoint_layers(model, ["1"])
    args, kwargs = ARGUMENTS[kind](model[0](torch.ones(BATCH, WIDTH)))
    model[1](*args, **kwargs)["y"][0].sum().backward()
    assert counts(model) == [(2, 1)]


def test_a_trainable_block_behind_a_frozen_stem_and_an_input_without_gradients_is_recomputed():
    model = chain(block(nn.Dropout()))
    model[0].requires_grad_(False)
    eager = assert_as_eager(model, ["1"])
    assert eager[0].weight.grad is None
    assert eager[1][1].weight.grad.count_nonzero()


# A key-value cache, as a block of transformers gets it


class Cache:
    def __init__(self, length=0):
        self.length = length

    def get_seq_length(self):
        return self.length

    def update(self):
        self.length += 1


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.counter, self.linear = Counter(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache=None):
        if cache is not None:
            cache.update()
        return self.linear(self.counter(x)).tanh()


@pytest.mark.parametrize("by", [lambda c: ((c,), {}), lambda c: ((), {"cache": c})])
def test_an_empty_cache_is_not_filled_twice(by):
    def step(model, x):
        cache = Cache()
        args, kwargs = by(cache)
        model[1](model[0](x), *args, **kwargs).square().sum().backward()
        assert cache.length < 2

    assert_as_eager(chain(Cached()), ["1"], step)


def test_blocks_with_a_filled_cache_run_as_usual_with_one_warning():
    model = chain(Cached(), Cached())
    checkpoint_layers(model, ["1", "2"])
    cache = Cache(1)

    def step():
        hidden = model[0](torch.ones(BATCH, WIDTH))
        for layer in model[1:]:
            hidden = layer(hidden, cache=cache)
        hidden.sum().backward()

    with pytest.warns(UserWarning, match=r"`1` is not checkpointed.*key-value cache") as caught:
        step()
    assert len(caught) == 1
    step()  # a warning would be an error now
    assert cache.length == 5
    assert counts(model) == [(2, 0), (2, 0)]


# What does not repeat itself


class Changing(nn.Module):
    """Does something else when it is run again: `what` by name."""

    def __init__(self, what):
        super().__init__()
        self.linear, self.calls, self.what = nn.Linear(WIDTH, WIDTH), 0, what

    def forward(self, x):
        self.calls += 1
        if self.calls == 1:
            return self.linear(x).tanh()
        if isinstance(self.what, BaseException):
            raise self.what
        if self.what == "shape":
            return self.linear(x)[:1].tanh()
        if self.what == "fewer":
            return self.linear(x)
        return self.linear(x).double().tanh()


NAMES = ["block", "tensor", "checkpoint", "a", "net.blocks.11"]


def named(name, module):
    """Return a model in which the module has a name."""
    *path, last = name.split(".")
    module = nn.ModuleDict({last: module})
    for part in reversed(path):
        module = nn.ModuleDict({part: module})
    return module


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["shape", "fewer", "dtype"])
def test_another_result_is_one_error_with_the_name_of_the_block_and_what_to_do(what, name):
    layer = Changing(what)
    checkpoint_layers(named(name, layer), [name])
    with pytest.raises(CheckpointError, match=r"torch\.utils\.checkpoint") as caught:
        layer(torch.ones(BATCH, WIDTH)).sum().backward()
    for _ in range(2):  # the second time there is nothing to add
        explain_mismatch(caught.value)
        text = str(caught.value)
        assert text.startswith(f"`{name}` did not repeat itself")
        assert "leave it out of `layers`" in text
        assert text.count("did not repeat itself") == 1
        assert "\n" not in text
    assert layer.calls == 2
    assert not is_recomputing()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("on purpose"),
        ValueError("on purpose"),
        KeyError("on purpose"),
        AttributeError("on purpose"),
        AssertionError("on purpose"),
        ZeroDivisionError("on purpose"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_in_the_repetition_names_the_block_and_keeps_its_cause(error):
    layer = Changing(error)
    checkpoint_layers(named("net.block", layer), ["net.block"])
    with pytest.raises(CheckpointError, match=r"^`net\.block` did not .*on purpose") as caught:
        layer(torch.ones(BATCH, WIDTH)).sum().backward()
    text = str(caught.value)
    explain_mismatch(caught.value)
    assert str(caught.value) == text
    assert caught.value.__cause__ is error
    assert not is_recomputing()


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA out of memory."), torch.OutOfMemoryError("any"), MemoryError("any")],
)
def test_out_of_memory_in_the_repetition_passes_as_it_is(error):
    layer = Changing(error)
    checkpoint_layers(named("block", layer), ["block"])
    with pytest.raises(type(error), match=str(error)) as caught:
        layer(torch.ones(BATCH, WIDTH)).sum().backward()
    explain_mismatch(caught.value)
    assert caught.value is error
    assert caught.value.args == type(error)(str(error)).args
    assert not is_recomputing()


def test_ctrl_c_in_the_repetition_passes_as_it_is():
    layer = Changing(KeyboardInterrupt("on purpose"))
    checkpoint_layers(named("block", layer), ["block"])
    with pytest.raises(KeyboardInterrupt, match="on purpose"):
        layer(torch.ones(BATCH, WIDTH)).sum().backward()
    assert not is_recomputing()


def test_an_error_of_the_first_run_passes_as_it_is():
    layer = Changing(ValueError("on purpose"))
    layer.calls = 1
    checkpoint_layers(named("block", layer), ["block"])
    with pytest.raises(ValueError, match=r"^on purpose$") as caught:
        layer(torch.ones(BATCH, WIDTH))
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("error", [ValueError("other"), RuntimeError("other")])
def test_other_errors_are_not_explained(error):
    explain_mismatch(error)
    assert error.args == ("other",)


def test_the_block_that_failed_is_named_not_one_within_it_or_before_it():
    model = nn.Sequential(nn.Sequential(block(), Changing("shape")), block())
    checkpoint_layers(model, ["0", "0.0", "1"])
    with pytest.raises(CheckpointError, match="different metadata") as caught:
        square_sum(model, torch.ones(BATCH, WIDTH))
    explain_mismatch(caught.value)
    assert str(caught.value).startswith("`0` did not repeat itself")


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(WIDTH)])
def test_a_mode_that_changes_between_forward_and_backward_is_an_error(layer):
    model = chain(block(layer))
    checkpoint_layers(model, ["1"])
    loss = model(torch.randn(BATCH, WIDTH)).sum()
    model.eval()
    with pytest.raises(CheckpointError, match=r"torch\.utils\.checkpoint") as caught:
        loss.backward()
    explain_mismatch(caught.value)
    assert str(caught.value).startswith("`1` did not repeat itself")


def test_a_backward_after_a_failed_one_is_right():
    model = chain(block(nn.BatchNorm1d(WIDTH)))
    eager = copy.deepcopy(model)
    model.append(Changing("shape"))
    checkpoint_layers(model, ["1", "2"])
    x = torch.randn(BATCH, WIDTH)
    with pytest.raises(CheckpointError, match="different metadata"):
        square_sum(model, x)
    model.pop(2)
    model.zero_grad()
    eager(x)
    for each in (eager, model):
        square_sum(each, x)
    assert_equal(state(model), state(eager))


# Whether this is a repetition


def test_a_hook_that_asks_counts_once():
    seen = []
    model = chain(block())
    model[1][1].register_forward_hook(lambda *_: None if is_recomputing() else seen.append(1))
    checkpoint_layers(model, ["1"])
    square_sum(model, torch.ones(BATCH, WIDTH))
    assert counts(model) == [(2, 1)]
    assert seen == [1]


def test_another_thread_is_not_told_of_a_repetition_here():
    seen = []

    class Asking(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=lambda: seen.append(is_recomputing()))
            thread.start()
            thread.join()
            seen.append(is_recomputing())
            return x

    model = chain(block(Asking()))
    checkpoint_layers(model, ["1"])
    square_sum(model, torch.ones(BATCH, WIDTH))
    assert seen == [False, False, False, True]


# What it saves and what it costs


class Mlp(nn.Module):
    """Linear, attention-free: two products, of which the last needs not be computed again."""

    def __init__(self, ends_in_tanh):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.ends_in_tanh = ends_in_tanh

    def forward(self, x):
        y = self.down(self.up(x).relu())
        return y.tanh() if self.ends_in_tanh else y


FORWARD = 2 * BATCH * WIDTH * 4 * WIDTH  # of one of the two products


def flops(model):
    with FlopCounterMode(display=False) as counter:
        square_sum(model, torch.ones(BATCH, WIDTH))
    return counter.get_total_flops()


@pytest.mark.parametrize(("ends_in_tanh", "repeated"), [(True, 2), (False, 1)])
def test_the_extra_work_is_that_of_the_blocks_up_to_the_last_thing_they_keep(
    ends_in_tanh, repeated
):
    model = chain(*[Mlp(ends_in_tanh) for _ in range(3)])
    plain = flops(model)
    # Forward, and the gradients of weights and inputs; the first layer's input needs none.
    first_layer = 2 * BATCH * WIDTH * WIDTH
    assert plain == 2 * first_layer + 3 * 3 * 2 * FORWARD
    for names in (["1"], ["1", "3"], ["1", "2", "3"]):
        undo = checkpoint_layers(model, names)
        assert flops(model) == plain + len(names) * repeated * FORWARD
        undo()
    assert flops(model) == plain


def test_kept_products_are_not_computed_again():
    model = chain(*[Mlp(ends_in_tanh=True) for _ in range(3)])
    plain = flops(model)
    undo = checkpoint_layers(model, ["1", "2", "3"], "matmul")
    assert flops(model) == plain
    undo()
    checkpoint_layers(model, ["1", "2", "3"], "attention")
    assert flops(model) == plain + 3 * 2 * FORWARD


def test_kept_convolutions_are_not_computed_again():
    def step():
        with FlopCounterMode(display=False) as counter:
            model(torch.ones(2, 3, 8, 8)).sum().backward()
        return counter.get_total_flops()

    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh())
    )
    plain = step()
    undo = checkpoint_layers(model, ["0"])
    assert step() > plain
    undo()
    checkpoint_layers(model, ["0"], "matmul")
    assert step() == plain


class Operators(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of operators whose name has a word."""

    def __init__(self, word):
        super().__init__()
        self.word, self.calls = word, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += self.word in func.name() and "backward" not in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("keep", "calls"), [("nothing", 2), ("attention", 1), ("matmul", 1)])
def test_kept_attention_runs_once(keep, calls):
    model = chain(Attention())
    checkpoint_layers(model, ["1"], keep)
    with Operators("scaled_dot_product") as attention:
        square_sum(model, torch.ones(BATCH, WIDTH))
    assert attention.calls == calls
    assert counts(model) == [(2, 1)]


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters,
    reason="this torch hides what it keeps of operators",
)
def test_what_is_kept_lies_between_nothing_and_everything():
    found = {}
    for keep in ("nothing", "attention", "matmul", None):
        model = chain(*[Mlp(ends_in_tanh=True) for _ in range(3)])
        checkpoint_layers(model, [] if keep is None else ["1", "2", "3"], keep or "nothing")
        with record_saved_tensors(model) as saved:
            model(torch.ones(BATCH, WIDTH))
        found[keep] = saved.total_bytes
    unit = 4 * BATCH * WIDTH
    inputs = 1 + 3  # of the first layer and of the blocks
    assert found["nothing"] == inputs * unit
    assert found["attention"] == inputs * unit  # there is none
    assert found["matmul"] == (inputs + 3 * (4 + 1)) * unit
    # Instead of the products' results what comes of them: of the relu and of the tanh, of which all
    # but the last one are the inputs.
    assert found[None] == (inputs + 3 * 4 + 1) * unit


@pytest.mark.parametrize("keep", ["attention", "matmul"])
def test_hooks_on_saved_tensors_raise_no_warning(keep):
    model = chain(Attention())
    checkpoint_layers(model, ["1"], keep)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autograd.graph.save_on_cpu():
            loss = model(torch.ones(BATCH, WIDTH)).square().sum()
        loss.backward()
    assert counts(model) == [(2, 1)]


# Compiled

# What dynamo looks at, with its own filter that an error gets through.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


BACKEND = "aot_eager_decomp_partition"  # decides what to keep as the default backend does


def compile_whole(model):
    return torch.compile(model, backend=BACKEND)


def compile_part(model):
    model[0] = torch.compile(model[0], backend=BACKEND)
    return model


def compile_in_place(model):
    model[0][1].compile(backend=BACKEND)
    return model


@pytest.mark.parametrize(
    ("compiled", "name", "keep"),
    [
        (compile_whole, "_orig_mod.0.1", "nothing"),
        (compile_whole, "_orig_mod.0.1", "matmul"),
        (compile_part, "0._orig_mod.1", "nothing"),
        (compile_part, "0", "nothing"),
        (compile_in_place, "0.1", "nothing"),
    ],
    ids=["whole", "whole, products kept", "submodule", "block", "block in place"],
)
def test_a_compiled_model_is_right_and_keeps_less(compiled, name, keep):
    torch.compiler.reset()  # what other tests compiled counts towards a limit
    seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Tanh()]
    plain = nn.Sequential(chain(nn.Sequential(*layers)))
    model, without = compiled(copy.deepcopy(plain)), compiled(copy.deepcopy(plain))
    undo = checkpoint_layers(model, [name], keep)
    for number in range(3):
        kept = []
        for each in (without, model):
            seed(number)
            each.zero_grad()
            x = torch.randn(512, WIDTH)  # more than the random state, which it keeps too
            with record_saved_tensors(each) as saved:
                loss = each(x).square().sum()
            loss.backward()
            kept.append(saved.total_bytes)
        assert_equal(state(model), state(without))
        # The compiler alone keeps as few products as it can.
        assert kept[1] < kept[0] if keep == "nothing" else kept[1] > kept[0]
    undo()
    assert not any("forward" in vars(module) for module in plain_modules(model))


def plain_modules(model):
    return [module for module in model.modules() if not hasattr(module, "_orig_mod")]


# Models of the libraries


@pytest.fixture
def quiet():
    """The libraries' own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def resnet():
    from torchvision.models import resnet18

    return resnet18()


def vit():
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 2, 16, 32, dropout=0.1)


def swin():
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 8, [2, 2], [2, 2], [2, 2], stochastic_depth_prob=0.5)


def densenet():
    from torchvision.models import DenseNet

    return DenseNet(4, (2, 3), 8, drop_rate=0.1)


def mobilenet():
    import timm

    return timm.create_model("mobilenetv3_small_050", drop_path_rate=0.5)


IMAGES = [resnet, vit, swin, densenet, mobilenet]
TEXTS = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "LlamaForCausalLM": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    "T5ForConditionalGeneration": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    },
    "BertForMaskedLM": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
}


def make_text_model(name):
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class(
        vocab_size=50, bos_token_id=0, eos_token_id=0, pad_token_id=0, **TEXTS[name]
    )
    return cls(config).train()


def count_runs(model, names):
    """Count how often the first thing in each block runs."""
    runs = dict.fromkeys(names, 0)

    def count(name):
        def hook(*_):
            runs[name] += 1

        return hook

    for name in names:
        first = next(m for m in model.get_submodule(name).modules() if not list(m.children()))
        first.register_forward_pre_hook(count(name))
    return runs


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("make", IMAGES)
def test_a_model_for_images_is_right_to_the_bit(make):
    seed(0)
    model = make()
    eager = copy.deepcopy(model)
    names = select_layers(model)
    runs = count_runs(model, names)
    checkpoint_layers(model, names)
    for number in range(2):
        for each in (eager, model):
            seed(number)
            each.zero_grad()
            square_sum(each, torch.randn(2, 3, 32, 32))
        assert_equal(state(model), state(eager))
    assert len(names) >= 2
    assert set(runs.values()) == {4}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", TEXTS)
def test_a_model_for_text_is_right_with_its_cache_on(name):
    def step(model, number):
        seed(number)
        model.zero_grad()
        tokens = torch.randint(1, 50, (2, 8))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.item()

    seed(0)
    model = make_text_model(name)
    eager = copy.deepcopy(model)
    names = select_layers(model)
    runs = count_runs(model, names)
    checkpoint_layers(model, names)
    for number in range(2):
        assert step(model, number) == pytest.approx(step(eager, number), rel=1e-5)
        assert_equal(state(model), state(eager), tolerance=1e-5)
    assert len(names) == (4 if name.startswith("T5") else 2)
    assert set(runs.values()) == {4}


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_a_model_for_text_that_is_given_a_prefix_runs_as_usual_with_one_warning():
    from transformers import DynamicCache

    def step(model):
        model.zero_grad()
        seed(0)
        tokens = torch.randint(1, 50, (2, 8))
        prefix = DynamicCache()
        for layer in range(2):
            prefix.update(torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8), layer)
        model(input_ids=tokens, labels=tokens, past_key_values=prefix).loss.backward()
        assert prefix.get_seq_length() == 3 + 8

    model = make_text_model("LlamaForCausalLM")
    eager = copy.deepcopy(model)
    names = select_layers(model)
    runs = count_runs(model, names)
    checkpoint_layers(model, names)
    step(eager)
    with pytest.warns(UserWarning, match=r"is not checkpointed.*key-value cache") as caught:
        step(model)
    step(model)
    ours = [w for w in caught if "is not checkpointed" in str(w.message)]
    assert len(ours) == 1
    assert set(runs.values()) == {2}
    assert_equal(state(model), state(eager))


def test_a_buffer_that_two_modules_share_is_one_in_the_repetition():
    class Part(nn.Module):
        def __init__(self, average):
            super().__init__()
            self.register_buffer("average", average)

        def forward(self, x):
            self.average.mul_(0.5).add_(x.detach().mean() + 1)
            return x * self.average.clone()

    def run(is_checkpointed):
        torch.manual_seed(0)
        average = torch.ones(())
        model = nn.Sequential(block(Part(average), Part(average)))
        if is_checkpointed:
            checkpoint_layers(model, ["0"])
        x = torch.arange(float(BATCH * WIDTH)).reshape(BATCH, WIDTH).requires_grad_()
        (model(x) + 1).square().sum().backward()
        return x.grad, average, model[0][0].repeated

    (plain, average, _), (again, same, repeated) = run(False), run(True)
    assert repeated == 1
    assert torch.equal(plain, again)
    assert torch.equal(average, same)


def test_parameters_that_changed_since_the_forward_are_an_error_with_the_name():
    model = nn.Sequential(block())
    checkpoint_layers(model, ["0"])
    loss = model(torch.ones(BATCH, WIDTH)).sum()
    with torch.no_grad():
        model[0][1].weight.add_(1)
    with pytest.raises(CheckpointError, match=r"`0`.*its parameters were changed in place"):
        loss.backward()
