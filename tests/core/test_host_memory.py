from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lightning_memopt.core import host_memory
from lightning_memopt.core.units import GIB, MIB

SIZE = 256 * MIB
# The kernel counts resident pages in per-processor batches, and other threads live here too.
SLACK = 16 * MIB

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and glibc")


def fill(size: int = SIZE) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8).fill_(1)


def make_blocks(count: int) -> list[bytes]:
    return [bytes([1]) * 1000 for _ in range(count)]


@linux
def test_allocated_and_resident_rise_by_what_is_allocated_and_fall_by_what_is_freed():
    before = host_memory.allocated_bytes(), host_memory.resident_bytes()
    block = fill()
    during = host_memory.allocated_bytes(), host_memory.resident_bytes()
    del block
    after = host_memory.allocated_bytes(), host_memory.resident_bytes()
    assert [b - a for a, b in zip(before, during, strict=True)] == pytest.approx(
        [SIZE, SIZE], abs=SLACK
    )
    assert after == pytest.approx(before, abs=SLACK)


@linux
def test_memory_that_nobody_touched_is_allocated_but_not_resident():
    before = host_memory.allocated_bytes(), host_memory.resident_bytes()
    block = torch.empty(SIZE, dtype=torch.uint8)
    assert host_memory.allocated_bytes() - before[0] == pytest.approx(SIZE, abs=SLACK)
    assert host_memory.resident_bytes() - before[1] < SLACK
    assert block.numel() == SIZE


@linux
def test_small_blocks_count_as_allocated():
    before = host_memory.allocated_bytes()
    blocks = make_blocks(50_000)
    assert host_memory.allocated_bytes() - before >= 1000 * len(blocks)


@linux
def test_the_resident_peak_survives_freeing_and_falls_after_a_reset():
    assert host_memory.reset_peak_resident() is True
    start = host_memory.resident_bytes()
    assert host_memory.peak_resident_bytes() == pytest.approx(start, abs=SLACK)
    block = fill()
    del block
    assert host_memory.resident_bytes() < start + SLACK
    assert host_memory.peak_resident_bytes() == pytest.approx(start + SIZE, abs=SLACK)
    assert host_memory.reset_peak_resident() is True
    assert host_memory.peak_resident_bytes() < start + SLACK


@linux
def test_what_malloc_holds_free_after_many_small_frees_is_given_back():
    host_memory.release_free_memory()
    pins, blocks = [], []
    for _ in range(200):
        blocks += make_blocks(500)
        pins += make_blocks(1)  # keep the top of the heap in use: nothing is trimmed by itself
    full = host_memory.resident_bytes()
    del blocks
    held = host_memory.resident_bytes()
    host_memory.release_free_memory()
    assert held > full - 20 * MIB
    assert host_memory.resident_bytes() < held - 70 * MIB
    assert len(pins) == 200


def test_the_machine_uses_a_part_of_what_it_has():
    used, total = host_memory.system_used_and_total()
    assert 0 < used < total == psutil.virtual_memory().total


# Where there is no glibc or no /proc


def test_without_glibc_allocated_is_unknown_and_nothing_is_released(monkeypatch):
    monkeypatch.setattr(host_memory, "_glibc", lambda: None)
    assert host_memory.allocated_bytes() is None
    host_memory.release_free_memory()


def test_a_libc_without_the_calls_is_no_glibc(monkeypatch):
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: SimpleNamespace())
    monkeypatch.setattr(host_memory.sys, "platform", "linux")
    assert host_memory._glibc.__wrapped__() is None


def test_another_system_has_no_glibc(monkeypatch):
    monkeypatch.setattr(host_memory.sys, "platform", "darwin")
    assert host_memory._glibc.__wrapped__() is None


def test_without_proc_resident_is_that_of_psutil_and_the_peak_is_unknown(monkeypatch, tmp_path):
    for name in ("_STATM", "_STATUS", "_CLEAR_REFS"):
        monkeypatch.setattr(host_memory, name, tmp_path / "missing" / name)
    resident = psutil.Process().memory_info().rss
    assert host_memory.resident_bytes() == pytest.approx(resident, abs=SLACK)
    assert host_memory.peak_resident_bytes() is None
    assert host_memory.reset_peak_resident() is False


def test_a_status_without_a_peak_leaves_it_unknown(monkeypatch, tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t12 kB\n")
    monkeypatch.setattr(host_memory, "_STATUS", status)
    assert host_memory.peak_resident_bytes() is None


def test_a_status_gives_the_peak_in_bytes(monkeypatch, tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t   99 kB\nVmHWM:\t     12 kB\nVmRSS:\t   3 kB\n")
    monkeypatch.setattr(host_memory, "_STATUS", status)
    assert host_memory.peak_resident_bytes() == 12 * 1024


def test_a_refused_reset_is_told(monkeypatch):
    monkeypatch.setattr(host_memory, "_RESET_PEAK", b"nonsense")
    assert host_memory.reset_peak_resident() is False


# What this process may use


@pytest.fixture
def roomy(monkeypatch, tmp_path):
    """A machine with 100 GiB available, 1 GiB resident, and no control groups."""
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: GIB)
    available = SimpleNamespace(available=100 * GIB, total=200 * GIB)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(host_memory, "_CGROUPS_OF_PROCESS", tmp_path / "cgroup")
    for name in ("_CGROUP_1", "_CGROUP_2"):
        _, *files = getattr(host_memory, name)
        monkeypatch.setattr(host_memory, name, (tmp_path / name, *files))
    return tmp_path


def make_group(root: Path, version: int, path: str, limit: int | str, used: int, cached: int = 0):
    group = root / f"_CGROUP_{version}" / path
    group.mkdir(parents=True, exist_ok=True)
    _, limit_file, usage_file, cached_key = getattr(host_memory, f"_CGROUP_{version}")
    (group / limit_file).write_text(f"{limit}\n")
    (group / usage_file).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\n{cached_key} {cached}\n")


MINE = {2: "0::/{}\n", 1: "5:devices:/x\n4:memory:/{}\n1:name=systemd:/y\n"}
both_versions = pytest.mark.parametrize("version", [1, 2])


def test_without_a_limit_the_machine_decides(roomy):
    assert host_memory.usable_bytes() == 101 * GIB
    assert host_memory.limit_bytes() == 200 * GIB


@both_versions
@pytest.mark.parametrize("path", ["", "job", "slurm/job/step"])
def test_a_control_group_leaves_its_limit_less_what_it_uses(roomy, version, path):
    (roomy / "cgroup").write_text(MINE[version].format(path))
    make_group(roomy, version, path, 8 * GIB, 3 * GIB)
    assert host_memory.usable_bytes() == host_memory.limit_bytes() == 6 * GIB


@both_versions
def test_the_tightest_group_on_the_way_up_decides(roomy, version):
    (roomy / "cgroup").write_text(MINE[version].format("slurm/job/step"))
    make_group(roomy, version, "slurm/job/step", "max" if version == 2 else 2**63 - 4096, 3 * GIB)
    make_group(roomy, version, "slurm/job", 8 * GIB, 6 * GIB)
    make_group(roomy, version, "slurm", 64 * GIB, 10 * GIB)
    make_group(roomy, version, "other", 1, 0)
    assert host_memory.usable_bytes() == 3 * GIB


@both_versions
def test_a_container_that_sees_only_its_own_group_is_bound_by_it(roomy, version):
    (roomy / "cgroup").write_text(MINE[version].format("docker/0123"))
    make_group(roomy, version, "", 8 * GIB, 3 * GIB)
    assert host_memory.usable_bytes() == 6 * GIB


@both_versions
def test_cached_files_count_as_room(roomy, version):
    (roomy / "cgroup").write_text(MINE[version].format("job"))
    make_group(roomy, version, "job", 8 * GIB, 8 * GIB, cached=5 * GIB)
    assert host_memory.usable_bytes() == 6 * GIB


@both_versions
def test_a_group_over_its_limit_leaves_what_is_resident(roomy, version):
    (roomy / "cgroup").write_text(MINE[version].format("job"))
    make_group(roomy, version, "job", 8 * GIB, 9 * GIB)
    assert host_memory.usable_bytes() == GIB


def test_a_group_without_a_limit_leaves_it_to_the_machine(roomy):
    (roomy / "cgroup").write_text(MINE[2].format("job"))
    make_group(roomy, 2, "job", "max", 3 * GIB)
    assert host_memory.usable_bytes() == 101 * GIB


@linux
def test_this_process_may_use_more_than_it_does_and_less_than_the_machine_has():
    usable = host_memory.usable_bytes()
    assert host_memory.resident_bytes() < usable < psutil.virtual_memory().total


UNDER_A_LIMIT = """
import resource, runpy, sys
host = runpy.run_path(sys.argv[1])
free = host["usable_bytes"]() - host["resident_bytes"]()
size = host["_status_bytes"](b"VmSize:")
resource.setrlimit(resource.RLIMIT_AS, (size + 200 * 2**20, resource.RLIM_INFINITY))
room = host["usable_bytes"]() - host["resident_bytes"]()
block = bytearray(room - 16 * 2**20)
del block
try:
    bytearray(room + 16 * 2**20)
except MemoryError:
    print(free, room)
"""


@linux
def test_a_limit_on_the_address_space_is_the_room_that_is_really_left():
    command = [sys.executable, "-c", UNDER_A_LIMIT, host_memory.__file__]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    free, room = map(int, printed.split())
    assert room == pytest.approx(200 * MIB, abs=8 * MIB)
    assert free > 2 * room
