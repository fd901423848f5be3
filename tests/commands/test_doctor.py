"""The command in processes of its own on this machine, with the environments that users have."""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import subprocess
import sys
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from lightning_memopt.commands import doctor
from lightning_memopt.core.units import GIB

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are Linux's")
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
PROGRAM = """
import argparse, sys
{before}
from rich.console import Console
from lightning_memopt.commands import doctor
parser = argparse.ArgumentParser()
doctor.add_arguments(parser)
sys.exit(doctor.run(parser.parse_args(), Console()))
"""
MINE = (
    "CUDA_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def print_of(*arguments: str, before: str = "", **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in MINE}
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM.format(before=before), *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@functools.cache
def document_of(**keywords: str) -> dict[str, Any]:
    return json.loads(print_of("--json", **keywords))


def page(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    assert doctor.run(argparse.Namespace(json=False), console) == 0
    return console.file.getvalue()


def test_the_document_has_this_machines_figures():
    document = document_of()
    host = document["host"]
    assert host["total_bytes"] == psutil.virtual_memory().total
    assert 0 < host["usable_bytes"] <= host["total_bytes"]
    assert host["usable_cores"] <= host["cores"] == os.cpu_count()
    assert document["torch"]["version"] == torch.__version__
    versions = {each["name"]: each["version"] for each in document["packages"]}
    assert versions["python"] == sys.version.split()[0]
    assert versions["torch"] == torch.__version__.split("+")[0]
    assert "OOMReport()" in [each["callback"] for each in document["callbacks"]]


def test_sizes_are_whole_bytes_under_names_that_end_so():
    def sizes(value: Any) -> list[Any]:
        if isinstance(value, list):
            return [found for item in value for found in sizes(item)]
        if isinstance(value, dict):
            own = [item for name, item in value.items() if name.endswith("_bytes")]
            return own + [found for item in value.values() for found in sizes(item)]
        return []

    found = sizes(document_of())
    assert len(found) >= 5
    assert {type(size) for size in found} <= {int, type(None)}


@no_cuda
def test_why_there_is_no_cuda_is_told_with_what_hides_it():
    assert "CUDA_VISIBLE_DEVICES" not in document_of()["why_no_cuda"]
    document = document_of(CUDA_VISIBLE_DEVICES="")
    assert document["devices"] == []
    assert document["variables"]["CUDA_VISIBLE_DEVICES"] == ""
    if torch.version.cuda is not None:
        assert document["why_no_cuda"].endswith('CUDA_VISIBLE_DEVICES="" hides every GPU')


def test_odd_allocator_settings_are_parsed_and_flagged_not_fatal():
    text = "max_split_size_mb:10,garbage:1,expandable_segments:True,backend:cudaMallocAsync"
    document = document_of(PYTORCH_CUDA_ALLOC_CONF=text)
    assert document["allocator"]["variable"] == "PYTORCH_CUDA_ALLOC_CONF"
    assert document["allocator"]["values"] == {
        "max_split_size_mb": "10",
        "garbage": "1",
        "expandable_segments": "True",
        "backend": "cudaMallocAsync",
    }
    texts = [each["text"] for each in document["findings"] if each["subject"] == "allocator"]
    assert texts == document["allocator"]["faults"]
    assert len(texts) == 4


LIMITED = """
import resource, torch
size = int(open("/proc/self/status").read().split("VmSize:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, resource.RLIM_INFINITY))
print(size + 2**30, file=sys.stderr)
"""


@linux
def test_a_limit_on_the_address_space_is_what_is_usable():
    host = document_of(before=LIMITED)["host"]
    free = document_of()["host"]
    assert free["address_space_limit_bytes"] is None
    assert host["address_space_limit_bytes"] > GIB
    # One GiB beyond what was mapped, and what is resident already.
    assert 0.5 * GIB < host["usable_bytes"] < 2 * GIB < free["usable_bytes"]
    assert host["usable_bytes"] < host["address_space_limit_bytes"]


@linux
def test_cores_are_those_of_this_process():
    only_one = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    document = document_of(before=only_one, OMP_NUM_THREADS="7")
    assert document["host"]["usable_cores"] == 1
    assert "export OMP_NUM_THREADS=1" in [each["line"] for each in document["findings"]]


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_keeps_to_its_width_and_has_every_section(width):
    lines = page(width).splitlines()
    assert max(map(len, lines)) <= width
    for title in ("Devices", "CPU", "Versions", "Callbacks for this machine"):
        assert title in [line.strip() for line in lines]


def test_the_page_is_printed_by_a_process_with_nothing_else():
    printed = print_of(PYTORCH_CUDA_ALLOC_CONF="roundup_power2_divisions:[256:1,>:3]")
    assert printed.startswith("Devices")
    # Brackets are text, not rich's markup.
    assert "roundup_power2_divisions:[256:1,>:3]" in printed.replace("\n", "")
    assert "`roundup_power2_divisions` must be powers of 2" in printed
