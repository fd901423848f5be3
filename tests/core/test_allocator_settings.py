"""Our reading of the allocator's settings is held to the installed PyTorch's own parser."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from lightning_memopt.core.allocator_settings import (
    CUDA_NAME,
    NAME,
    line_with_expandable_segments,
    read_settings,
)

NOW = (2, 14)
RIGHT = [
    "max_split_size_mb:20",
    "garbage_collection_threshold:0.8",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[256:1,512:2,>:8]",
    "max_non_split_rounding_mb:30",
    "large_segment_size_mb:30",
    "per_process_memory_fraction:0.5",
    "pinned_num_register_threads:8",
    "pinned_use_cuda_host_register:True",
    "pinned_use_background_threads:True",
    "expandable_segments:True, max_split_size_mb:100",
    "throw_on_cudamalloc_oom:True",
    "backend:native",
]
WRONG = [
    "garbage:1",
    "backend:foo",
    "max_split_size_mb:10",
    "max_split_size_mb:19",
    "max_split_size_mb:abc",
    "max_split_size_mb",
    "expandable_segments:true",
    "expandable_segments:1",
    "expandable_segments=True",
    "expandable_segments:True;max_split_size_mb:100",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[256:1,512:3]",
    "max_non_split_rounding_mb:10",
    "large_segment_size_mb:10",
    "large_segment_size_mb:50,max_split_size_mb:40",
    "per_process_memory_fraction:1.5",
    "pinned_num_register_threads:3",
]
ASKS_TORCH = """
import json, sys, torch
refused = []
for text in json.loads(sys.argv[1]):
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except Exception:
        refused.append(text)
print(json.dumps(refused))
"""


def settings_of(text: str, platform: str = "linux", **others: str):
    return read_settings({CUDA_NAME: text, **others}, NOW, platform)


@pytest.mark.parametrize("text", RIGHT)
def test_what_pytorch_takes_has_no_fault(text):
    assert settings_of(text).faults == ()


@pytest.mark.parametrize("text", WRONG)
def test_what_pytorch_refuses_has_one_fault_that_names_the_key(text):
    (fault,) = settings_of(text).faults
    assert text.partition(":")[0].partition("=")[0] in fault or "max_split" in fault


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"), reason="an older PyTorch"
)
def test_the_installed_pytorch_takes_and_refuses_the_same():
    command = [sys.executable, "-c", ASKS_TORCH, json.dumps(RIGHT + WRONG)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(printed.stdout) == WRONG


def test_settings_are_parsed_with_lists_and_spaces():
    found = settings_of("roundup_power2_divisions:[256:1,>:8], backend:native,")
    assert found.values == {"roundup_power2_divisions": "[256:1,>:8]", "backend": "native"}


def test_what_only_the_native_allocator_knows_contradicts_the_other_backend():
    found = settings_of("expandable_segments:True,backend:cudaMallocAsync,max_split_size_mb:64")
    assert found.faults == (
        "`expandable_segments` has no effect with `backend:cudaMallocAsync`: drop one of them",
        "`max_split_size_mb` has no effect with `backend:cudaMallocAsync`: drop one of them",
    )
    assert settings_of("expandable_segments:False,backend:cudaMallocAsync").faults == ()


def test_growing_segments_are_not_collected():
    found = settings_of("expandable_segments:True,garbage_collection_threshold:0.8")
    assert found.faults == (
        "`garbage_collection_threshold` frees no segment of `expandable_segments:True`: "
        "drop one of them",
    )


@pytest.mark.parametrize(("platform", "word"), [("win32", "Windows"), ("wsl", "WSL")])
def test_growing_segments_are_refused_where_they_are_not_supported(platform, word):
    (fault,) = settings_of("expandable_segments:True", platform).faults
    assert word in fault


@pytest.mark.parametrize(
    ("version", "names", "read", "words"),
    [
        ((2, 6), {NAME: "a"}, None, "is not read by this PyTorch: set `PYTORCH_CUDA_ALLOC_CONF`"),
        ((2, 10), {NAME: "a"}, NAME, "may ignore `PYTORCH_ALLOC_CONF` on CUDA"),
        ((2, 10), {NAME: "a", CUDA_NAME: "b"}, CUDA_NAME, "reads some settings from each"),
        ((2, 11), {NAME: "a", CUDA_NAME: "b"}, CUDA_NAME, "is not read as"),
    ],
)
def test_of_two_names_the_one_that_is_read_is_told(version, names, read, words):
    values = {"a": "max_split_size_mb:30", "b": "max_split_size_mb:40"}
    found = read_settings({name: values[key] for name, key in names.items()}, version, "linux")
    assert found.variable == read
    assert [words in fault for fault in found.faults] == [True]


@pytest.mark.parametrize("names", [{}, {NAME: "backend:native"}, {CUDA_NAME: "backend:native"}])
def test_one_name_that_is_read_is_no_fault(names):
    assert read_settings(names, NOW, "linux").faults == ()


def test_the_installed_pytorch_reads_the_name_that_we_say():
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("an older PyTorch")
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    values = {NAME: "max_split_size_mb:100", CUDA_NAME: "max_split_size_mb:200"}
    command = ["env", *(f"{key}={value}" for key, value in values.items())]
    printed = subprocess.run(
        [*command, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version >= (2, 11):
        assert printed.stdout.strip() == read_settings(values, version, "linux").text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        (
            "expandable_segments:False,max_split_size_mb:64",
            "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:True",
        ),
        (
            "roundup_power2_divisions:[256:1,>:8]",
            "export PYTORCH_CUDA_ALLOC_CONF="
            "'roundup_power2_divisions:[256:1,>:8],expandable_segments:True'",
        ),
    ],
)
def test_growing_segments_are_added_to_what_is_set(text, line):
    assert line_with_expandable_segments(settings_of(text)) == line
