"""Every file in `examples/` runs, and what it promises is there: figures, event files, tables."""

from __future__ import annotations

import importlib
import json
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
    "out_of_memory.py",
    "benchmarks/monitor_cost.py",
    "benchmarks/checkpointing_cost.py",
    "benchmarks/accumulation_search.py",
    "benchmarks/estimate_accuracy.py",
    "benchmarks/model_zoo.py",
    "benchmarks/network_memory.py",
}

# Lightning and its command line warn of their own dependencies here; examples are no test of that.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _as_from_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")


def curves(root: Path) -> dict[str, list[float]]:
    """Return the scalars of the one run that is logged under a directory."""
    (events,) = root.rglob("events.out.tfevents.*")
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [point.value for point in accumulator.Scalars(tag)] for tag in tags}


def numbers(printed: str, row: str) -> list[float]:
    """Return the numbers in the table's row of a name."""
    (line,) = (line for line in printed.splitlines() if row in line)
    cells = (cell.strip().replace(",", "") for cell in line.split("│")[2:])
    return [float(cell) for cell in cells if cell]


def check_training(printed: str, logdir: Path, score: str) -> None:
    """Check what quickstart and gpt print and log."""
    for row in ("peak, MiB", "before the first step", "time of a step"):
        assert all(figure > 0 for figure in numbers(printed, row))
    suite, plain, ratio = numbers(printed, "kept for backward, MiB")
    assert 0 < suite < 0.5 * plain
    assert ratio == pytest.approx(suite / plain, abs=0.02)
    assert numbers(printed, score)[0] > 0
    assert printed.rstrip().endswith(f"tensorboard --logdir {logdir.name}")
    with_suite = curves(logdir / "with_suite")
    assert with_suite.keys() >= MEMORY_TAGS
    assert min(with_suite["memory/peak_allocated_gib"]) > 0
    # Of two batches each: the accumulation was on.
    assert len(with_suite["memory/allocated_gib"]) == 6
    assert curves(logdir / "without").keys() >= MEMORY_TAGS


def test_every_example_is_run_here() -> None:
    assert {str(file.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("*.py")} == RUN_HERE


def test_there_is_a_config_for_each_callback_and_one_for_all() -> None:
    assert {config.stem for config in CONFIGS} == {
        "memory_monitor",
        "memory_profiler",
        "gradient_checkpointing",
        "automatic_mixed_precision",
        "auto_accumulation",
        "gradient_accumulation",
        "empty_cache",
        "oom_report",
        "all",
    }


def test_the_quickstart_prints_its_table_and_logs_memory(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "quickstart.py", "--fast", "--logdir=curves"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    check_training(result.stdout, tmp_path / "curves", "accuracy on held-out images")


def test_the_gpt_prints_its_table_and_logs_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("gpt").main(["--fast", "--logdir=curves"])
    printed = capsys.readouterr().out
    assert "\ndef " in printed
    check_training(printed, tmp_path / "curves", "loss on held-out files")


def test_memory_runs_out_on_purpose_and_the_report_is_printed(tmp_path: Path) -> None:
    # A process of its own: the limit on its address space stays.
    command = [sys.executable, EXAMPLES / "out_of_memory.py", "--logdir=curves"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for part in ("phase        forward", "gpt.py:", "module       blocks.", "What to do"):
        assert part in result.stdout
    (report,) = tmp_path.rglob("oom-rank0-step0.txt")
    assert report.read_text() in result.stdout


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.stem)
def test_a_config_trains_through_the_command_line(config: Path, tmp_path: Path) -> None:
    ran = importlib.import_module("cli").main(
        [
            "fit",
            f"--config={config}",
            "--trainer.max_epochs=1",
            "--trainer.limit_train_batches=4",
            "--trainer.limit_val_batches=1",
            "--trainer.enable_progress_bar=false",
        ]
    )
    wanted = set(re.findall(r"lightning_memopt\.(\w+)", config.read_text()))
    assert "MemoryMonitor" in wanted
    assert wanted <= {type(callback).__name__ for callback in ran.trainer.callbacks}
    assert ran.trainer.global_step == (2 if "GradientAccumulation" in wanted else 4)
    logged = curves(tmp_path / "logs" / config.stem)
    assert logged.keys() >= MEMORY_TAGS
    assert len(logged["memory/allocated_gib"]) == ran.trainer.global_step


def test_the_monitor_benchmark_compares_three_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("monitor_cost").main(
        ["--rounds=1", "--steps=10", "--large-steps=2", "--json=figures.json"]
    )
    printed = capsys.readouterr().out
    assert "One call of read_memory" in printed
    figures = json.loads((tmp_path / "figures.json").read_text())
    sizes = [value for value in figures.values() if isinstance(value, dict)]
    assert len(sizes) == 2
    for size in sizes:
        for name in ("none", "MemoryMonitor", "OOMReport", "DeviceStatsMonitor"):
            assert name in printed
            assert size[name]["step_ms"] > 0
        assert size["MemoryMonitor"]["event_bytes_per_step"] > size["none"]["event_bytes_per_step"]


def test_the_checkpointing_benchmark_keeps_as_little_as_plain_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("checkpointing_cost").main(
        ["--rounds=1", "--steps=1", "--json=figures.json"]
    )
    printed = capsys.readouterr().out
    models = json.loads((tmp_path / "figures.json").read_text())["models"]
    assert len(models) == 2
    for name, figures in models.items():
        assert name in printed
        rows = {(row["checkpointed"], row["by"]): row for row in figures["rows"]}
        assert len(rows) == 5
        for chosen in ("each block", "each 2nd"):
            assert rows[chosen, "suite"]["peak_share"] < 0.9
            assert rows[chosen, "suite"]["peak_of_plain"] == pytest.approx(1, abs=0.01)


def test_the_search_benchmark_compares_four_ways_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("accumulation_search").main(
        ["--cpu", "--models=gpt", "--gib=0.03", "--steps=2", "--out=figures.json"]
    )
    printed = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = {row["method"]: row for row in figures["results"]}
    assert len(rows) == len(figures["results"]) == 5
    for method, row in rows.items():
        assert method.replace("BatchSizeFinder", "Finder") in printed
        assert "error" not in row
        assert 1 < row["trials"] <= row["passes"]
        assert row["largest"] >= 1
        assert row["seconds"] > 0
    auto = rows["AutoAccumulation"]
    assert auto["used"] <= auto["largest"] < 32
    for method in ("AutoAccumulation", "BatchSizeFinder power", "BatchSizeFinder binsearch"):
        assert rows[method]["fit"] == "ok"
        assert rows[method]["steps"] >= 2
    assert rows["by hand, within 90 %"]["largest"] <= rows["by hand, whole card"]["largest"]


def test_the_search_benchmark_times_steps_that_are_not_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("accumulation_search").main(
        ["--cpu", "--overhead", "--models=gpt", "--rounds=1", "--steps=4", "--out=figures.json"]
    )
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert len(rows) == 3
    for name, row in rows.items():
        assert name in printed
        assert row["step_ms"] > 0


def test_the_accuracy_benchmark_predicts_without_a_gpu_and_shows_measured_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = importlib.import_module("estimate_accuracy")
    options = ["--models", "gru", "--sizes=1", "--workers=1", "--out=figures.jsonl"]
    benchmark.main(["--predict-only", *options])
    capsys.readouterr()
    rows = [json.loads(line) for line in Path("figures.jsonl").read_text().splitlines()]
    assert [(row["model"], row["precision"]) for row in rows] == [
        ("gru", "32-true"),
        ("gru", "bf16-mixed"),
    ]
    assert all(row["predicted"] > 400 * 2**20 and not row["reason"] for row in rows)
    for row, off in zip(rows, (1.02, 0.9), strict=True):
        row["measured"] = row["predicted"] / off
    Path("figures.jsonl").write_text("\n".join(map(json.dumps, rows)))
    benchmark.main(["--table=figures.jsonl"])
    printed = capsys.readouterr().out
    assert "+2.0%" in printed
    assert "-10.0%" in printed
    assert "1 of 2 cases within 5%, 0 of 1 models in all their cases" in printed
    assert "largest 10.0%" in printed


def test_the_zoo_has_models_of_all_families_that_can_be_made() -> None:
    zoo = importlib.import_module("model_zoo").ZOO
    assert len(zoo) >= 25
    assert {entry.family for entry in zoo.values()} == {
        *("torchvision", "segmentation", "detection", "timm", "transformers", "own")
    }
    for name in ("unet", "lstm", "gpt"):
        assert zoo[name].make()
        assert zoo[name].batch(2)[0].shape[0] == 2


def test_the_network_benchmark_shows_that_parameters_decide_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("network_memory").main(
        ["--batch=2", "--pixels=64", "--json=figures.json"]
    )
    rows = json.loads((tmp_path / "figures.json").read_text())
    assert len(rows) == 8
    resnet, efficient = rows[0], rows[1]
    assert resnet["parameters"] == 25_557_032
    assert resnet["weights_bytes"] == 4 * resnet["parameters"]
    parameters, kept = (efficient[key] / resnet[key] for key in ("parameters", "kept_bytes"))
    assert parameters < 0.25 < kept
    assert "25.56 M" in capsys.readouterr().out
