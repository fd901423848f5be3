"""Checkpointing of modules in place: what they keep for backward is computed again there.

Source of the method: Chen et al., "Training Deep Nets with Sublinear Memory Cost",
https://arxiv.org/abs/1604.06174; PyTorch's non-re-entrant checkpoint does the work.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_memopt.core.checks import check_word
from lightning_memopt.core.patching import PatchedMethod
from lightning_memopt.core.recomputing import recomputing
from lightning_memopt.core.replay import (
    Anew,
    Known,
    Replay,
    copy_containers,
    is_key_value_cache,
    tensors_in,
    versions_of,
)

Keep = Literal["nothing", "attention", "matmul"]

_KEPT_OPERATORS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
    ),
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "convolution"),
}


def checkpoint_layers(
    model: nn.Module, names: Iterable[str], keep: Keep = "nothing"
) -> Callable[[], None]:
    """Make modules of a model recompute their activations in backward.

    Names, types, `state_dict` keys, `deepcopy` and `pickle` of the model stay as they are: a copy
    is the plain model. Outputs, gradients, buffers (BatchNorm's too) and random states are those
    of the plain model. Without gradients, as in validation, nothing is recomputed.

    Args:
        model: Any module.
        names: Qualified names as in `model.named_modules()`; see `select_layers`.
        keep: Operators whose results are kept while all else is recomputed: `"nothing"`,
            `"attention"` (fused attention) or `"matmul"` (that, and matrix products and
            convolutions). Keeping costs memory and time on the host for each operator.

    Returns:
        A function that undoes it; calling it twice is harmless.

    Raises:
        ValueError: `keep` is none of the words, or a name is no module of the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        >>> undo = checkpoint_layers(model, ["1"])
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> undo()
    """
    check_word("keep", keep, _KEPT_OPERATORS)
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[nn.Module, str] = {}
    for name in names:
        if name not in modules:
            raise ValueError(f"`names` must be modules of the model, got {name!r}.")
        chosen.setdefault(modules[name], name)
    undo = ExitStack()
    warned: set[str] = set()
    for module, name in chosen.items():
        undo.callback(_CheckpointedForward(module, name, keep, warned).restore)
    return undo.close


class _CheckpointedForward(PatchedMethod):
    """Stands in for the `forward` of one module."""

    def __init__(self, module: nn.Module, name: str, keep: Keep, warned: set[str]) -> None:
        super().__init__(module, "forward")
        self.qualified_name = name
        self._warned = warned  # one for all blocks of a model
        self._operators = _operators(keep)
        self._known: Known = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        if not torch.is_grad_enabled() or not self._needs_backward(args, kwargs):
            return self.original(*args, **kwargs)
        caches = [value for value in (*args, *kwargs.values()) if is_key_value_cache(value)]
        if caches:
            if any(cache.get_seq_length() for cache in caches):
                self._warn_of_cache()
                return self.original(*args, **kwargs)
            # An empty one would be filled twice. Nothing reads it in training: what the block
            # attends to is in its input.
            args = tuple(None if is_key_value_cache(value) else value for value in args)
            kwargs = {k: None if is_key_value_cache(v) else v for k, v in kwargs.items()}
        names, count = tuple(kwargs), len(args)
        as_given = [(args, kwargs)]

        def run(*inputs: Any) -> Any:
            if as_given:
                args, kwargs = as_given.pop()
                return self.original(*args, **kwargs)
            inputs = copy_containers(inputs)
            named = dict(zip(names, inputs[count : count + len(names)], strict=True))
            return self.original(*inputs[:count], **named)

        # Keyword arguments go in by position: only of those does PyTorch find the device whose
        # random state must come back, and they can't collide with the names of `checkpoint`. So do
        # tensors in containers: of only these does it notice that somebody has changed them since.
        inputs = copy_containers((*args, *kwargs.values()))
        nested = [t for value in inputs if not isinstance(value, Tensor) for t in tensors_in(value)]
        inputs = (*inputs, *nested)
        if not any(isinstance(value, Tensor) for value in inputs):
            inputs = (*inputs, *(p.new_empty(0) for p in [*self.owner.parameters()][:1]))
        before = versions_of(inputs)
        output = checkpoint(run, *inputs, use_reentrant=False, context_fn=self._contexts)
        if versions_of(inputs) != before:
            raise RuntimeError(
                f"`{self.qualified_name}` changes its input in place, so it can't be recomputed "
                "in backward; leave it out of `layers`, or let it begin with an operation that is "
                "not in place (`inplace=False`)."
            )
        return output

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        # The compiler functionalizes buffers and random numbers, and knows these contexts only.
        if not self._operators:
            return checkpoint(self.original, *args, use_reentrant=False, **kwargs)
        select = create_selective_checkpoint_contexts
        contexts = functools.partial(select, self._operators)
        return checkpoint(self.original, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def _needs_backward(self, args: Any, kwargs: Any) -> bool:
        tensors = itertools.chain(self.owner.parameters(), tensors_in((args, kwargs)))
        return any(tensor.requires_grad for tensor in tensors)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        replay = Replay(self.owner, self._known)
        if not self._operators:
            return replay.first(), Anew(lambda: self._again(replay))
        save, load = create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
            self._operators
        )
        save.respect_saved_tensors_hooks = True  # before torch 2.14 it never does
        return _both(replay.first(), save), Anew(lambda: _both(self._again(replay), load))

    @contextmanager
    def _again(self, replay: Replay) -> Iterator[None]:
        with recomputing(self.qualified_name, bool(self._operators)), replay.again():
            yield

    def _warn_of_cache(self) -> None:
        if "cache" not in self._warned:
            self._warned.add("cache")
            warnings.warn(
                f"`{self.qualified_name}` is not checkpointed, nor any layer like it: it is given "
                "a key-value cache with entries in it, and running it twice would add to them "
                "twice.",
                stacklevel=2,
            )


def _operators(keep: Keep) -> list[Any]:
    names = _KEPT_OPERATORS[keep]
    if keep == "matmul":
        names += _KEPT_OPERATORS["attention"]
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return [packet.default for packet in packets if packet is not None]


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
