"""What in a model would notice that a block runs twice."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

_SWITCHES = ("gradient_checkpointing", "grad_checkpointing")  # of transformers, of timm


def counting_twice(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Name the modules inside blocks that have forward hooks, and the metrics.

    Hooks of a block itself run once. Hooks that PyTorch installs, such as those of spectral norm,
    are left out: they work on parameters and buffers, which are put back.

    Args:
        model: The module that `names` belong to.
        names: Qualified names of the blocks that are recomputed.

    Returns:
        Qualified names, in registration order.
    """
    found = []
    for name in names:
        for inner, module in model.get_submodule(name).named_modules():
            if inner and (isinstance(module, Metric) or _has_foreign_hooks(module)):
                found.append(f"{name}.{inner}")
    return found


def own_checkpointing(model: nn.Module) -> dict[str, bool]:
    """Find models whose own checkpointing switch is on, as transformers and timm have.

    Args:
        model: Any module.

    Returns:
        Qualified name of each outermost such module, and whether it is in training mode: in eval
        mode such a switch does nothing.
    """
    found: dict[str, bool] = {}
    for name, module in model.named_modules():
        is_on = any(getattr(module, switch, False) is True for switch in _SWITCHES)
        if is_on and not any(name == outer or name.startswith(f"{outer}.") for outer in found):
            found[name] = module.training
    return found


def is_frozen_stem(model: nn.Module, name: str) -> bool:
    """Return whether a block and all that is registered before it have no trainable parameter.

    Nothing is kept for backward there, so there is nothing to save.
    """
    block = model.get_submodule(name)
    for module in model.modules():
        if module is block:
            return not any(parameter.requires_grad for parameter in block.parameters())
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
            return False
    return False


def normalising_over_batch(model: nn.Module) -> list[str]:
    """Name the modules whose output for a sample depends on the other samples of its batch.

    These are the batch norms that train; those in eval mode use what they have learnt.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)
    ]


def _has_foreign_hooks(module: nn.Module) -> bool:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not _module_of(hook).startswith("torch.nn.utils") for hook in hooks)


def _module_of(hook: object) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__
