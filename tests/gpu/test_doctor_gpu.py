"""What is told of a real GPU, from inside a process that uses it and from others."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from rich.console import Console

from lightning_memopt.commands import doctor
from lightning_memopt.core.nvidia_devices import read_nvidia
from lightning_memopt.core.precision import choose_precision
from lightning_memopt.core.units import GIB, MIB

DEVICE = torch.device("cuda", 0)
IN_A_PROCESS = """
import argparse, sys, torch
from rich.console import Console
from lightning_memopt.commands import doctor
doctor.run(argparse.Namespace(json=True), Console())
print(torch.cuda.is_initialized(), file=sys.stderr)
"""


def documented() -> dict[str, Any]:
    out = io.StringIO()
    assert doctor.run(argparse.Namespace(json=True), Console(file=out)) == 0
    return json.loads(out.getvalue())


def in_a_process(**variables: str) -> tuple[dict[str, Any], str]:
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    found = subprocess.run(
        [sys.executable, "-c", IN_A_PROCESS],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(found.stdout), found.stderr


def test_name_total_and_capability_are_those_of_torch():
    device = documented()["devices"][0]
    properties = torch.cuda.get_device_properties(DEVICE)
    assert device["torch_name"] == "cuda:0"
    assert device["name"] == properties.name
    assert device["uuid"].endswith(str(properties.uuid))
    assert device["total_bytes"] == pytest.approx(properties.total_memory, rel=0.01)
    assert tuple(device["capability"]) == torch.cuda.get_device_capability(DEVICE)


def test_the_driver_tells_its_version_and_runs_the_cuda_of_torch():
    document = documented()
    assert document["driver"]["version"]
    assert document["driver"]["error"] is None
    assert document["driver"]["cuda"][0] >= int(torch.version.cuda.split(".")[0])
    assert document["why_no_cuda"] is None


def test_a_share_of_the_device_is_all_that_is_usable():
    torch.ones(1, device=DEVICE)
    whole = documented()["devices"][0]
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        device = documented()["devices"][0]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert whole["usable_bytes"] > 0.5 * whole["total_bytes"]
    assert 0 < device["usable_bytes"] <= 0.101 * device["total_bytes"]


def test_a_share_in_the_allocators_settings_is_all_that_is_usable():
    document, _ = in_a_process(PYTORCH_CUDA_ALLOC_CONF="per_process_memory_fraction:0.1")
    device = document["devices"][0]
    assert 0 < device["usable_bytes"] <= 0.101 * device["total_bytes"]


def test_what_this_process_holds_is_usable_and_not_that_of_others():
    before = documented()["devices"][0]
    block = torch.empty(2 * GIB, dtype=torch.uint8, device=DEVICE)
    during = documented()["devices"][0]
    assert during["usable_bytes"] == pytest.approx(before["usable_bytes"], abs=512 * MIB)
    assert during["others_bytes"] < before["others_bytes"] + GIB
    del block
    torch.cuda.empty_cache()


def test_what_another_process_holds_is_others_and_looking_makes_no_context():
    block = torch.empty(2 * GIB, dtype=torch.uint8, device=DEVICE)
    document, error = in_a_process()
    device = document["devices"][0]
    assert error.strip().endswith("False")
    assert device["others_bytes"] >= 2 * GIB
    assert device["usable_bytes"] <= device["total_bytes"] - 2 * GIB
    assert "EmptyCache()" in [each["callback"] for each in document["callbacks"]]
    del block
    torch.cuda.empty_cache()


def test_an_empty_list_of_visible_devices_hides_the_gpu_and_is_said():
    document, _ = in_a_process(CUDA_VISIBLE_DEVICES="")
    assert {device["hidden_by"] for device in document["devices"]} == {"CUDA_VISIBLE_DEVICES"}
    assert {device["torch_name"] for device in document["devices"]} == {None}
    assert document["why_no_cuda"] == 'CUDA_VISIBLE_DEVICES="" hides every GPU'


def test_the_beginning_of_its_uuid_shows_a_gpu():
    uuid = documented()["devices"][0]["uuid"]
    document, _ = in_a_process(CUDA_VISIBLE_DEVICES=uuid[:12])
    assert [each["uuid"] for each in document["devices"] if each["torch_name"]] == [uuid]


def test_the_precision_is_the_one_that_the_callback_chooses():
    reasons = {each["callback"]: each["reason"] for each in documented()["callbacks"]}
    chosen = choose_precision(DEVICE).precision
    assert reasons["AutomaticMixedPrecision()"].startswith(chosen)


def test_growing_segments_are_advised_until_they_are_set():
    line = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    document, _ = in_a_process()
    assert line in [each["line"] for each in document["findings"]]
    document, _ = in_a_process(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert line not in [each["line"] for each in document["findings"]]


def test_slow_switches_are_named():
    document, _ = in_a_process(CUDA_LAUNCH_BLOCKING="1", PYTORCH_NO_CUDA_MEMORY_CACHING="0")
    lines = [each["line"] for each in document["findings"]]
    assert {"unset CUDA_LAUNCH_BLOCKING", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"} <= set(lines)


def test_every_card_that_the_driver_shows_is_listed():
    _, cards = read_nvidia()
    assert sorted(each["uuid"] for each in documented()["devices"]) == sorted(
        card.uuid for card in cards
    )
