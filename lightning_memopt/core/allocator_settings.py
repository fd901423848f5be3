"""The settings of PyTorch's CUDA allocator in the environment: which are read, what is wrong.

The keys and their limits are those of PyTorch 2.14, whose own parser agrees
(`tests/core/test_allocator_settings.py`); see
[its notes](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

CUDA_NAME = "PYTORCH_CUDA_ALLOC_CONF"
NAME = "PYTORCH_ALLOC_CONF"
EXPANDABLE = "expandable_segments"
_SINCE = (2, 9)  # the first that reads `NAME`
# Before this parts of PyTorch read the two names in different orders, and growing
# segments set under `NAME` may be left off on CUDA: pytorch/pytorch#183387.
_SETTLED = (2, 11)
_NATIVE_ONLY = (
    EXPANDABLE,
    "garbage_collection_threshold",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "roundup_power2_divisions",
)


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings as the installed PyTorch reads them.

    Attributes:
        variable: The variable that is read, `None` if none is set.
        text: What it is set to.
        values: Its keys and values.
        faults: What is wrong, a sentence each.
    """

    variable: str | None
    text: str
    values: Mapping[str, str]
    faults: tuple[str, ...]


def read_settings(
    variables: Mapping[str, str], torch_version: tuple[int, int], platform: str
) -> AllocatorSettings:
    """Return what the installed PyTorch reads of the environment, and what is wrong with it.

    Args:
        variables: The environment.
        torch_version: The first two numbers of PyTorch's version.
        platform: As in `Machine`.
    """
    faults = list(_faults_of_names(variables, torch_version))
    names = [CUDA_NAME] if torch_version < _SINCE else [CUDA_NAME, NAME]
    variable = next((name for name in names if name in variables), None)
    text = variables[variable].strip() if variable else ""
    values = _split(text)
    faults += [fault for key, value in values.items() if (fault := _fault_of(key, value))]
    faults += _contradictions(values, platform)
    return AllocatorSettings(variable, text, values, tuple(faults))


def line_with_expandable_segments(settings: AllocatorSettings) -> str:
    """Return the line for the shell that adds growing segments to what is set already.

    It sets `PYTORCH_CUDA_ALLOC_CONF`, the name that every PyTorch reads for CUDA.
    """
    kept = [f"{key}:{value}" for key, value in settings.values.items() if key != EXPANDABLE]
    value = ",".join([*kept, f"{EXPANDABLE}:True"])
    return f"export {CUDA_NAME}={_quoted(value)}"


def _quoted(value: str) -> str:
    return f"'{value}'" if re.search(r"[^\w:,.]", value) else value


def _split(text: str) -> dict[str, str]:
    # A comma within brackets separates the parts of one value.
    parts = re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text))
    pairs = [part.partition(":") for part in parts if part]
    return {key: value for key, _, value in pairs}


def _faults_of_names(variables: Mapping[str, str], torch_version: tuple[int, int]) -> Iterator[str]:
    new, old = variables.get(NAME), variables.get(CUDA_NAME)
    if new is None or new == old:
        return
    if torch_version < _SINCE:
        yield f"`{NAME}` is not read by this PyTorch: set `{CUDA_NAME}`"
    elif old is not None and torch_version < _SETTLED:
        yield (
            f"`{NAME}` and `{CUDA_NAME}` differ, and this PyTorch reads some settings from each: "
            f"unset `{NAME}`"
        )
    elif old is not None:
        yield f"`{NAME}` is not read as `{CUDA_NAME}` is set, too: unset one of them"
    elif torch_version < _SETTLED:
        yield (
            f"this PyTorch may ignore `{NAME}` on CUDA (pytorch/pytorch#183387): set `{CUDA_NAME}`"
        )


def _contradictions(values: Mapping[str, str], platform: str) -> Iterator[str]:
    if values.get("backend") == "cudaMallocAsync":
        for key in _NATIVE_ONLY:
            if values.get(key, "False") != "False":
                yield f"`{key}` has no effect with `backend:cudaMallocAsync`: drop one of them"
    split, segment = (
        _number(values.get(f"{k}_mb")) for k in ("max_split_size", "large_segment_size")
    )
    if split is not None and segment is not None and 20 <= split < segment:
        yield (
            f"`max_split_size_mb:{split:g}` is less than `large_segment_size_mb:{segment:g}`: "
            "PyTorch refuses that"
        )
    if values.get(EXPANDABLE) == "True":
        if platform in {"win32", "wsl"}:
            where = "Windows" if platform == "win32" else "WSL, where allocations may fail"
            yield f"`{EXPANDABLE}:True` is not supported on {where}: drop it"
        elif "garbage_collection_threshold" in values:
            yield (
                f"`garbage_collection_threshold` frees no segment of `{EXPANDABLE}:True`: "
                "drop one of them"
            )


def _fault_of(key: str, value: str) -> str | None:
    if key not in _RULES:
        return f"`{key}` is no setting of PyTorch's allocator: correct or drop it"
    is_right, expected = _RULES[key]
    return None if is_right(value) else f"`{key}` must be {expected}, got `{value}`"


def _number(value: str | None) -> float | None:
    try:
        return float(value or "")
    except ValueError:
        return None


def _within(low: float, high: float, is_open: bool = False) -> Callable[[str], bool]:
    def check(value: str) -> bool:
        number = _number(value)
        if number is None:
            return False
        return low < number < high if is_open else low <= number <= high

    return check


def _whole(least: int) -> Callable[[str], bool]:
    return lambda value: value.isdecimal() and int(value) >= least


def _is_power_of_2(value: str) -> bool:
    return value.isdecimal() and int(value) > 0 and int(value) & (int(value) - 1) == 0


def _is_divisions(value: str) -> bool:
    if not value.startswith("["):
        return value == "0" or _is_power_of_2(value)
    pairs = [part.partition(":") for part in value.strip("[]").split(",")]
    return value.endswith("]") and all(
        (size == ">" or _is_power_of_2(size)) and (count == "0" or _is_power_of_2(count))
        for size, _, count in pairs
    )


_BOOL = (lambda value: value in {"True", "False"}, "`True` or `False`")
_SIZE = (_whole(20), "a whole number of MiB from 20 on")
_ANY_SIZE = (_whole(0), "a whole number of MiB")
_RULES: dict[str, tuple[Callable[[str], bool], str]] = {
    "backend": (lambda value: value in {"native", "cudaMallocAsync"}, "native or cudaMallocAsync"),
    EXPANDABLE: _BOOL,
    "garbage_collection_threshold": (_within(0, 1, is_open=True), "above 0 and below 1"),
    "graph_capture_record_stream_reuse": _BOOL,
    "large_segment_size_mb": (_whole(11), "a whole number of MiB above 10"),
    "max_non_split_rounding_mb": _SIZE,
    "max_split_size_mb": _SIZE,
    "per_process_memory_fraction": (_within(0, 1), "from 0 to 1"),
    "pinned_free_catch_all": _BOOL,
    "pinned_max_cached_size_mb": _ANY_SIZE,
    "pinned_max_round_threshold_mb": _ANY_SIZE,
    "pinned_num_register_threads": (_is_power_of_2, "a power of 2"),
    "pinned_reserve_segment_size_mb": _ANY_SIZE,
    "pinned_use_background_threads": _BOOL,
    "pinned_use_cuda_host_register": _BOOL,
    "pinned_use_hip_host_register": _BOOL,
    "release_lock_on_cudamalloc": _BOOL,
    "release_lock_on_hipmalloc": _BOOL,
    "roundup_power2_divisions": (_is_divisions, "powers of 2"),
    "throw_on_cudamalloc_oom": _BOOL,
}
