"""Every file in `examples/` runs, and what it promises is there: figures, event files, tables."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGS = sorted(EXAMPLES.glob("configs/*.yaml"))
MEMORY_TAGS = {
    "memory/allocated_gib",
    "memory/reserved_gib",
    "memory/peak_allocated_gib",
    "memory_phase/forward_peak_gib",
    "memory_phase/backward_peak_gib",
    "memory_phase/optimizer_peak_gib",
}
# `comparison.py` is no program: quickstart and gpt run all of it. `cli.py` runs with each config.
RUN_HERE = {
    "quickstart.py",
    "gpt.py",
    "cli.py",
    "comparison.py",
    "benchmarks/monitor_cost.py",
    "benchmarks/checkpointing_cost.py",
}


def run(script: str, *args: str, cwd: Path) -> str:
    """Run an example the way a user does, and return what it printed."""
    result = subprocess.run(
        [sys.executable, EXAMPLES / script, *args],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def curves(root: Path) -> dict[str, list[float]]:
    """Return the scalars of the one run that is logged under a directory."""
    (events,) = root.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [point.value for point in accumulator.Scalars(tag)] for tag in tags}


def test_every_example_is_run_here() -> None:
    assert {str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*.py")} == RUN_HERE


@pytest.mark.parametrize("script", ["quickstart.py", "gpt.py"])
def test_a_training_example_prints_its_table_and_logs_memory(script: str, tmp_path: Path) -> None:
    printed = run(script, "--fast", "--logdir", "curves", cwd=tmp_path)
    for row in ("peak, MiB", "kept for backward, MiB", "time of a step"):
        suite, plain = _figures(printed, row)
        assert suite > 0
        assert plain > 0
    suite, plain = _figures(printed, "kept for backward, MiB")
    assert suite < 0.5 * plain
    score = "accuracy on held-out" if script == "quickstart.py" else "loss on held-out"
    assert _figures(printed, score)[0] > 0
    assert printed.rstrip().endswith("tensorboard --logdir curves")
    suite_curves = curves(tmp_path / "curves" / "with_suite")
    assert suite_curves.keys() >= MEMORY_TAGS
    assert len(suite_curves["memory/allocated_gib"]) == 6  # optimizer steps, of two batches each
    assert len(curves(tmp_path / "curves" / "without")["memory/allocated_gib"]) > 2


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_a_config_trains_through_the_command_line(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    cli = importlib.import_module("cli")
    ran = cli.main(
        [
            "fit",
            f"--config={config}",
            "--trainer.max_epochs=1",
            "--trainer.limit_train_batches=4",
            "--trainer.limit_val_batches=1",
            "--trainer.enable_progress_bar=false",
        ]
    )
    named = {callback.__class__.__name__ for callback in ran.trainer.callbacks}
    text = config.read_text()
    wanted = set(re.findall(r"lightning_memopt\.(\w+)", text))
    assert wanted
    assert wanted <= named
    logged = curves(tmp_path / "logs" / config.stem)
    assert logged.keys() >= MEMORY_TAGS
    assert len(logged["memory/allocated_gib"]) == ran.trainer.global_step
    assert ran.trainer.global_step == (2 if "GradientAccumulation" in wanted else 4)


def test_there_is_a_config_for_each_callback_and_one_for_all() -> None:
    assert {config.stem for config in CONFIGS} == {
        "memory_monitor",
        "gradient_checkpointing",
        "automatic_mixed_precision",
        "gradient_accumulation",
        "empty_cache",
        "all",
    }


def test_the_monitor_benchmark_compares_three_and_writes_its_figures(tmp_path: Path) -> None:
    args = ("--rounds", "1", "--steps", "10", "--large-steps", "2", "--json", "figures.json")
    printed = run("benchmarks/monitor_cost.py", *args, cwd=tmp_path)
    assert "One call of read_memory" in printed
    figures = json.loads((tmp_path / "figures.json").read_text())
    sizes = [value for value in figures.values() if isinstance(value, dict)]
    assert len(sizes) == 2
    for size in sizes:
        for name in ("none", "MemoryMonitor", "DeviceStatsMonitor"):
            assert name in printed
            assert size[name]["step_ms"] > 0
        none, ours = (size[name]["event_bytes_per_step"] for name in ("none", "MemoryMonitor"))
        assert ours > none


def test_the_checkpointing_benchmark_saves_as_much_as_plain_torch(tmp_path: Path) -> None:
    args = ("--rounds", "1", "--steps", "1", "--json", "figures.json")
    printed = run("benchmarks/checkpointing_cost.py", *args, cwd=tmp_path)
    models = json.loads((tmp_path / "figures.json").read_text())["models"]
    assert len(models) == 2
    for name, figures in models.items():
        assert name in printed
        rows = {(row["checkpointed"], row["by"]): row for row in figures["rows"]}
        assert len(rows) == 5
        for chosen in ("each block", "each 2nd"):
            suite = rows[chosen, "suite"]
            assert suite["peak_share"] < 0.9
            assert suite["peak_of_plain"] == pytest.approx(1, abs=0.01)


def _figures(printed: str, row: str) -> list[float]:
    """Return the numbers in the table's row that begins with a name."""
    (line,) = (line for line in printed.splitlines() if row in line)
    cells = [cell.strip().replace(",", "") for cell in re.split("[│|]", line)][2:]
    return [float(cell) for cell in cells if cell]
