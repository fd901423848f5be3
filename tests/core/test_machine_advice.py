"""What is advised, from plain figures of machines that aren't here: exact lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_memopt.core.allocator_settings import CUDA_NAME, read_settings
from lightning_memopt.core.environment_advice import findings_on_environment
from lightning_memopt.core.machine_advice import (
    Finding,
    Suggestion,
    findings_on,
    suggestions_for,
    why_no_cuda,
)
from lightning_memopt.core.machine_facts import (
    Device,
    DeviceProcess,
    Driver,
    Host,
    Machine,
    Package,
    Torch,
)
from lightning_memopt.core.units import GIB

HOST = Host(64 * GIB, 60 * GIB, 60 * GIB, None, None, 16, 16, None, False)
CARD = Device(
    "H200",
    uuid="GPU-a",
    torch_name="cuda:0",
    capability=(9, 0),
    total=140 * GIB,
    free=140 * GIB,
    usable=140 * GIB,
    is_bf16=True,
)
GPU = Machine("linux", Driver("580.1", (13, 0)), Torch("2.14", "13.0", None, True), (CARD,), HOST)
CPU = Machine("linux", Driver(error="no library"), Torch("2.14", "13.0"), (), HOST)
BF16 = {"cuda:0": ("bf16-mixed", "cuda computes in bf16")}


def findings(machine):
    settings = read_settings(machine.variables, (2, 14), machine.platform)
    return findings_on(machine, settings)


# Why there is no CUDA


HIDDEN = replace(CARD, torch_name=None, hidden_by="CUDA_VISIBLE_DEVICES")
OFF = Torch("2.14", "13.0", error="RuntimeError: odd")


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (GPU, None),
        (replace(CPU, torch=Torch("2.14+cpu")), "torch 2.14+cpu is built without CUDA"),
        (CPU, "no NVIDIA driver answers: no library"),
        (
            replace(CPU, variables={"CUDA_VISIBLE_DEVICES": ""}),
            'no NVIDIA driver answers: no library; and CUDA_VISIBLE_DEVICES="" hides every GPU',
        ),
        (
            replace(GPU, torch=OFF, devices=(HIDDEN,), variables={"CUDA_VISIBLE_DEVICES": "7"}),
            'CUDA_VISIBLE_DEVICES="7" hides every GPU',
        ),
        (
            replace(GPU, torch=OFF, driver=Driver("535.1", (12, 2))),
            "driver 535.1 is too old: it runs CUDA 12.2, torch 2.14 needs CUDA 13.0",
        ),
        (replace(GPU, torch=OFF, devices=()), "driver 580.1 shows no GPU to this process"),
        (replace(GPU, torch=OFF), "RuntimeError: odd"),
    ],
)
def test_why_there_is_no_cuda_is_told_as_far_as_it_is_known(machine, reason):
    assert why_no_cuda(machine) == reason


def test_a_driver_of_an_older_minor_version_is_not_blamed():
    machine = replace(GPU, torch=replace(OFF, cuda="12.8"), driver=Driver("535.1", (12, 2)))
    assert why_no_cuda(machine) == "RuntimeError: odd"


# What to do


def test_growing_segments_are_the_only_advice_on_an_idle_gpu():
    assert findings(GPU) == [
        Finding(
            CUDA_NAME,
            "segments of cuda:0 can't grow: where batch shapes vary, or `memory/fragmentation` is "
            "high, let them, before Python starts",
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )
    ]


@pytest.mark.parametrize(
    "machine",
    [
        CPU,
        replace(GPU, platform="wsl"),
        replace(GPU, platform="win32"),
        replace(GPU, variables={CUDA_NAME: "expandable_segments:True"}),
        replace(GPU, variables={CUDA_NAME: "backend:cudaMallocAsync"}),
    ],
)
def test_nothing_is_advised_where_segments_grow_or_can_not(machine):
    assert findings(machine) == []


def test_a_package_below_what_is_promised_is_named_with_the_line_that_helps():
    packages = (
        Package("torch", "2.5.1", ">=2.6", is_too_old=True),
        Package("tensorboard", None, ">=2.16"),
        Package("matplotlib", None, ">=3.8", "profiler", is_optional=True),
        Package("python", "3.9.1", ">=3.10", is_too_old=True),
    )
    assert findings(replace(CPU, packages=packages)) == [
        Finding(
            "versions",
            "torch 2.5.1 is installed, torch>=2.6 is promised to work",
            'pip install "torch>=2.6"',
        ),
        Finding(
            "versions",
            "tensorboard is not installed, but needed",
            'pip install "tensorboard>=2.16"',
        ),
        Finding("versions", "python 3.9.1 is installed, python>=3.10 is promised to work"),
    ]


def test_numbers_of_unlike_cards_are_not_trusted_without_an_order():
    machine = replace(
        GPU,
        devices=(CARD, replace(HIDDEN, name="A2")),
        variables={"CUDA_VISIBLE_DEVICES": "0", CUDA_NAME: "expandable_segments:True"},
    )
    (finding,) = findings(machine)
    assert finding.line == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert "may be other GPUs than listed" in finding.text
    ordered = {**machine.variables, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert findings(replace(machine, variables=ordered)) == []


# Which callbacks


def test_a_large_idle_gpu_gets_no_callback_that_saves():
    assert suggestions_for(GPU, BF16) == [
        Suggestion(
            "OOMReport()", "cuda:0 has 140.00 GiB for this process: if it runs out, it says why"
        ),
        Suggestion("AutomaticMixedPrecision()", "bf16-mixed: cuda computes in bf16"),
    ]


def test_a_mig_instance_is_weighed_by_what_it_has():
    card = replace(CARD, name="H200 MIG 1g.18gb", mig_card="GPU-a", total=16 * GIB, free=16 * GIB)
    machine = replace(GPU, devices=(replace(card, usable=16 * GIB),))
    assert suggestions_for(machine, BF16)[2:] == [
        Suggestion(
            'AutoAccumulation(memory="90%")',
            "16.00 GiB of cuda:0 are left: it finds the micro-batch that fits",
        ),
        Suggestion("GradientCheckpointing()", "keeps fewer activations in the 16.00 GiB of cuda:0"),
    ]


def test_neighbours_are_named_and_left_what_is_cached():
    processes = (DeviceProcess(12, "python", 30 * GIB), DeviceProcess(13, "X", GIB))
    card = replace(CARD, free=100 * GIB, usable=100 * GIB, processes=processes)
    found = suggestions_for(replace(GPU, devices=(card,)), BF16)
    assert found[2:] == [
        Suggestion(
            'AutoAccumulation(memory="90%")',
            "100.00 GiB of cuda:0 are left: it finds the micro-batch that fits",
        ),
        Suggestion(
            "EmptyCache()",
            "python (12) and 1 more hold 40.00 GiB of cuda:0: it leaves them what is only cached",
        ),
    ]


def test_without_bf16_or_fp16_no_precision_is_suggested():
    found = suggestions_for(CPU, {"cpu": ("32-true", "this CPU has none")})
    assert [each.callback for each in found] == ["OOMReport()"]


def test_the_profiler_is_suggested_with_what_it_draws_with():
    packages = (Package("matplotlib", "3.9"), Package("pytorch_memlab", "0.3"))
    reasons = {
        machine.has_cuda: suggestions_for(replace(machine, packages=packages), {})[-1].reason
        for machine in (CPU, GPU)
    }
    assert reasons == {
        False: "matplotlib 3.9 draws its pictures",
        True: "matplotlib 3.9 draws its pictures, pytorch_memlab 0.3 weighs lines",
    }


# Environment variables


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "unset CUDA_LAUNCH_BLOCKING"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0", "unset PYTORCH_NO_CUDA_MEMORY_CACHING"),
        ("CUDA_MODULE_LOADING", "EAGER", "unset CUDA_MODULE_LOADING"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:64", "export CUBLAS_WORKSPACE_CONFIG=:4096:8"),
    ],
)
def test_a_costly_variable_is_named_where_there_is_cuda_only(name, value, line):
    variables = {name: value}
    (finding,) = findings_on_environment(replace(GPU, variables=variables))
    assert (finding.subject, finding.line) == (name, line)
    assert findings_on_environment(replace(CPU, variables=variables)) == []


@pytest.mark.parametrize(
    "variables",
    [
        {"CUDA_LAUNCH_BLOCKING": "0", "CUDA_MODULE_LOADING": "LAZY"},
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        {"OMP_NUM_THREADS": "16", "MALLOC_ARENA_MAX": "2"},
        {},
    ],
)
def test_nothing_is_said_where_there_is_nothing_to_do(variables):
    assert findings_on_environment(replace(GPU, variables=variables)) == []


@pytest.mark.parametrize(
    ("host", "threads", "line"),
    [
        ({"usable_cores": 4}, "8", "export OMP_NUM_THREADS=4"),
        ({"quota": 2.5}, "8", "export OMP_NUM_THREADS=2"),
        ({"quota": 2.5}, None, "export OMP_NUM_THREADS=2"),
        ({"quota": 0.5}, None, "export OMP_NUM_THREADS=1"),
    ],
)
def test_no_more_threads_than_cores_are_advised(host, threads, line):
    variables = {} if threads is None else {"OMP_NUM_THREADS": threads}
    machine = replace(CPU, host=replace(HOST, **host), variables=variables)
    assert [each.line for each in findings_on_environment(machine)] == [line]


def test_another_malloc_is_told_on_a_cpu():
    variables = {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}
    (finding,) = findings_on_environment(replace(CPU, variables=variables))
    assert "jemalloc (libjemalloc.so.2)" in finding.text
    assert findings_on_environment(replace(GPU, variables=variables)) == []
