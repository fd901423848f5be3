"""Choosing layers of a model: by name, by class, or the blocks that it repeats."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

_COMPILED = "_orig_mod"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CONTAINER_FORWARDS = {container.forward for container in _CONTAINERS}

# Sizes are in layers that own parameters. A convolution and its norm are two, a block has more;
# an expert or an attention head, which is deep in a block and repeated too, has three.
_BLOCK_SIZE = 3
_DEEP_BLOCK_SIZE = 4
# Backbones have four or five stages: so few siblings may hold the blocks instead of being them.
_MAX_STAGES = 5
_SMALL_SHARE = 0.1
_MAX_NAMES = 12


def select_layers(model: nn.Module, layers: str | list[str] = "auto") -> list[str]:
    """Choose layers of a model by dotted name, by class name, or automatically.

    In a name, `*`, `?` and `[..]` stay within one dotted part: `encoder.layers.*` matches
    `encoder.layers.3` but not `encoder.layers.3.mlp`. A class name (`Bottleneck`) matches the
    modules of exactly that class. Of a layer and one inside it the outer is returned, as nested
    checkpoints recompute twice. The `_orig_mod` of `torch.compile` may be left out of a pattern.

    `"auto"` finds the blocks that a model repeats, such as the bottlenecks of a ResNet or the
    layers of a transformer: large groups of siblings of one class. Groups that are stages or whole
    networks are opened for the blocks in them; small groups beside large ones, such as patch
    merging, are left out. A model that is written without blocks (VGG, a plain MLP) or that calls
    one block in a loop (ALBERT) needs names.

    Args:
        model: The model, compiled or not, or a LightningModule that holds it.
        layers: `"auto"`, a pattern, or a list of patterns whose matches are put together.

    Returns:
        The names in the order of registration, each module once and by its first name.

    Raises:
        TypeError: `layers` is neither a `str` nor a list of them.
        ValueError: `layers` is empty, a pattern matches nothing, or `"auto"` finds no blocks.

    Example:
        >>> model = nn.Transformer(8, 2, num_encoder_layers=2, batch_first=True)
        >>> select_layers(model)[:3]
        ['encoder.layers.0', 'encoder.layers.1', 'decoder.layers.0']
        >>> select_layers(model, ["TransformerEncoderLayer", "*.norm"])
        ['encoder.layers.0', 'encoder.layers.1', 'encoder.norm', 'decoder.norm']
    """
    patterns = [layers] if isinstance(layers, str) else layers
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        raise TypeError(f"`layers` must be a `str` or a list of `str`, got {layers!r}.")
    if not patterns or not all(patterns):
        raise ValueError(f'`layers` must be "auto", names or class names, got {layers!r}.')
    chosen: set[int] = set()
    for pattern in patterns:
        chosen |= _find_repeated(model) if pattern == "auto" else _find_matches(model, pattern)
    outer = [module for module in model.modules() if id(module) in chosen]
    chosen -= {id(part) for module in outer for part in module.modules() if part is not module}
    return [name for name, module in model.named_modules() if id(module) in chosen]


def _find_matches(model: nn.Module, pattern: str) -> set[int]:
    """Return the ids of the modules that one pattern matches."""
    parts = pattern.split(".")
    found: set[int] = set()
    reached: list[list[nn.Module]] = [[model], *([] for _ in parts)]
    for name, module in model.named_modules(remove_duplicate=False):
        path = name.split(".") if name else []
        if _COMPILED not in parts:
            path = [part for part in path if part != _COMPILED]
        if path and _class_of(module).__name__ == pattern:
            found.add(id(module))
        if 0 < len(path) <= len(parts) and all(map(fnmatchcase, path, parts)):
            reached[len(path)].append(module)
    found.update(map(id, reached[-1]))
    if not found:
        depth = max(depth for depth, modules in enumerate(reached) if modules)
        where = ".".join(parts[:depth]) or _class_of(model).__name__
        raise ValueError(
            f"`layers` must name layers or a class of the model, got {pattern!r}, which matches "
            f"nothing: {where} has {_list_children(reached[depth])}."
        )
    return found


def _find_repeated(model: nn.Module) -> set[int]:
    """Return the ids of the blocks that a model repeats."""
    blocks = _find_blocks([model])
    if 2 * _size(*blocks) < _size(model):
        # Side branches were found at most: the blocks may be small or plain `nn.Sequential`.
        wider = _find_blocks([model], small=True)
        blocks = wider if 2 * _size(*wider) >= _size(model) else blocks
    if not blocks:
        raise ValueError(
            f'`layers` "auto" found no repeated blocks in {_class_of(model).__name__}: pass names '
            f"or class names of layers; it has {_list_children([model])}."
        )
    sizes: Counter[type] = Counter()
    for block in blocks:
        sizes[_class_of(block)] += _size(block)
    kinds = {kind for kind, size in sizes.items() if size >= _SMALL_SHARE * sizes.total()}
    # Few but in the midst of others, as the attention layers of a hybrid model are.
    ids = set(map(id, blocks))
    for entries in _list_containers(model):
        if len(entries & ids) > 1:
            kinds |= {_class_of(block) for block in blocks if id(block) in entries}
    ids = {id(block) for block in blocks if _class_of(block) in kinds}
    # One of the same class without siblings, as the bottom of a U-Net is.
    alone = (module for module in model.modules() if _class_of(module) in kinds - {nn.Sequential})
    return ids | {id(lone) for lone in alone if not any(id(part) in ids for part in lone.modules())}


def _find_blocks(parents: Iterable[nn.Module], small: bool = False) -> list[nn.Module]:
    """Return groups of one class among the children of modules, or further down."""
    groups: defaultdict[type, list[nn.Module]] = defaultdict(list)
    for parent in parents:
        for child in _iterate_children(parent, small):
            if _size(*child.children()):
                groups[_class_of(child)].append(child)
    blocks: list[nn.Module] = []
    for group in groups.values():
        if len(group) > 1 and (small or max(map(_size, group)) >= _BLOCK_SIZE):
            blocks += _open_stages(group, small) or group
        else:
            blocks += [block for module in group for block in _find_blocks([module], small)]
    return blocks


def _open_stages(group: list[nn.Module], small: bool) -> list[nn.Module]:
    """Return the blocks inside a group of stages or of whole networks, nothing for other groups."""
    if len(group) > _MAX_STAGES:
        return []
    blocks = _find_blocks(group, small)
    held = total = 0
    for stage in group:
        inside = set(map(id, stage.modules()))
        own = [block for block in blocks if id(block) in inside]
        counts = Counter(map(_class_of, own))
        children = set(map(id, _iterate_children(stage, small)))
        entries = set[int]().union(*_list_containers(stage))
        for block in own:
            is_deep = id(block) not in children
            if counts[_class_of(block)] > 1 and (not is_deep or _size(block) >= _DEEP_BLOCK_SIZE):
                total += _size(block)
                held += _size(block) * (id(block) in entries)
    # Attributes must be nearly all, as two attentions are most of a decoder layer.
    return blocks if held > 0.5 * _size(*group) or total > 0.8 * _size(*group) else []


def _iterate_children(module: nn.Module, small: bool, held: bool = False) -> Iterator[nn.Module]:
    """Yield the children of a module, for a container its entries; held ones when `small`."""
    module = _unwrap(module)
    is_container = isinstance(module, _CONTAINERS)
    held = held or is_container
    # A container may run one block many times; a second attribute is but another name.
    for child in module._modules.values() if is_container else module.children():
        if child is None:
            continue
        is_plain = isinstance(child, _CONTAINERS) and type(child).forward in _CONTAINER_FORWARDS
        if is_plain and not (small and held and isinstance(child, nn.Sequential)):
            yield from _iterate_children(child, small, held=True)
        else:
            yield child


def _list_containers(module: nn.Module) -> list[set[int]]:
    """Return the ids of the entries of each container."""
    containers = (part for part in module.modules() if isinstance(part, _CONTAINERS))
    return [set(map(id, container.children())) for container in containers]


def _size(*modules: nn.Module) -> int:
    """Count the layers that own parameters.

    The parameters themselves would not do: early convolutions have few, and most activations.
    """
    layers = (part for module in modules for part in module.modules())
    return sum(any(p is not None for p in layer._parameters.values()) for layer in layers)


def _list_children(modules: list[nn.Module]) -> str:
    """Write the names of the direct children of modules, for an error."""
    children = (name for module in modules for name, _ in _unwrap(module).named_children())
    names = list(dict.fromkeys(children))
    if not names:
        return "no children"
    return f"the children {', '.join(names[:_MAX_NAMES])}{', ...' * (len(names) > _MAX_NAMES)}"


def _class_of(module: nn.Module) -> type[nn.Module]:
    return type(_unwrap(module))


def _unwrap(module: nn.Module) -> nn.Module:
    """Return what `torch.compile` has wrapped, or the module itself."""
    inner = module._modules.get(_COMPILED)
    return module if inner is None else inner
