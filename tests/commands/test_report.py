from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image

from lightning_memopt import MemoryMonitor
from lightning_memopt.core.event_file import frame_record
from lightning_memopt.core.units import GIB, MIB
from tests.commands.runs import START_S, memory_points, report, report_json, write_run
from tests.models import Blocks, make_trainer

STEPS = 6  # 24 samples in batches of 4


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    logs = tmp_path / "logs"
    write_run(logs / "version_2", memory_points([4, 8, 6]), "lr: 0.1\ndepth: 2\n")
    write_run(logs / "version_10", memory_points([2, 4, 6], step_s=1), "lr: 0.1\ndepth: 4\n")
    return logs


# Real runs and a real process


def test_a_real_run_has_the_figures_that_the_monitor_had(tmp_path):
    monitor = MemoryMonitor(verbose=False)
    logger = TensorBoardLogger(tmp_path / "logs", name="digits")
    trainer = make_trainer(monitor, logger=logger, log_every_n_steps=1)
    trainer.fit(Blocks())
    done = subprocess.run(
        [sys.executable, "-m", "lightning_memopt", "report", "logs", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["name"], run["first_step"], run["last_step"]) == ("digits/version_0", 0, STEPS - 1)
    summary, figures = monitor.summary(), run["figures"]
    for phase in ("forward", "backward", "optimizer"):
        exact = summary["phases"][phase]
        assert figures[f"{phase}_peak_bytes"] == pytest.approx(exact["peak_bytes"], rel=1e-6)
    assert figures["validation_peak_bytes"] == pytest.approx(
        summary["phases"]["val"]["peak_bytes"], rel=1e-6
    )
    assert figures["peak_allocated_bytes"] == max(
        figures[f"{phase}_peak_bytes"] for phase in ("forward", "backward", "optimizer")
    )
    assert figures["steps_per_second"] > 0
    assert "val_loss" in run["losses"]
    with Image.open("memory-report.png") as picture:
        assert min(picture.size) > 500


def test_a_mistake_is_one_line_on_stderr_and_status_2(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "lightning_memopt", "report", "nowhere"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"lightning-memopt: there is no directory `{tmp_path / 'nowhere'}`\n"


# One run


def test_every_figure_is_exact_with_its_place(tmp_path, capsys):
    points = memory_points([4, 8, 6])
    points.append(({"memory_phase/forward_peak_gib": 7.5}, 1, START_S))
    points += [({"memory_val/peak_allocated_gib": 3.0 - batch}, batch, START_S) for batch in (0, 1)]
    for step, most, rank in ((9, 5.0, 3.0), (19, 4.0, 1.0)):
        ranks = {"min": most / 2, "mean": most - 1, "max": most}
        values = {f"memory_ranks/peak_{name}_gib": value for name, value in ranks.items()}
        points.append((values | {"memory_ranks/peak_max_rank": rank}, step, START_S))
    own = {"accumulation/micro_batch_size": 16.0, "accumulation/recoveries": 1.0}
    points += [(own, 0, START_S), ({"accumulation/recoveries": 2.0}, 2, START_S)]
    points += [({"amp/scale": 2.0**16, "amp/skipped_steps": 3.0}, 2, START_S)]
    points += [({"cache/freed_gib": 0.25, "cache/empty_ms": 1.5}, step, START_S) for step in (0, 1)]
    points += [({"train/loss": 0.5**step, "accuracy": 1.0}, step, START_S) for step in (0, 1)]
    write_run(tmp_path / "logs", points)
    (run,) = report_json(capsys, "logs", "--no-png")["runs"]
    assert run == {
        "name": "logs",
        "directory": str(tmp_path / "logs"),
        "has_memory": True,
        "first_step": 0,
        "last_step": 2,
        "points": 3,
        "figures": {
            "peak_allocated_bytes": 8 * GIB,
            "peak_allocated_step": 1,
            "peak_reserved_bytes": 16 * GIB,
            "peak_reserved_step": 1,
            "end_allocated_bytes": GIB + 2 * MIB,
            "end_allocated_step": 2,
            "forward_peak_bytes": 7 * GIB + GIB // 2,
            "forward_peak_step": 1,
            "validation_peak_bytes": 3 * GIB,
            "validation_peak_batch": 0,
            "ranks_peak_max_bytes": 5 * GIB,
            "ranks_peak_max_step": 9,
            "ranks_peak_min_bytes": 5 * GIB // 2,
            "ranks_peak_min_step": 9,
            "ranks_peak_max_rank": 3,
            "steps_per_second": 2.0,
            "micro_batch_size": 16,
            "recoveries": 2,
            "amp_scale": 65536,
            "amp_skipped_steps": 3,
            "cache_freed_bytes": GIB // 2,
            "cache_empty_ms": 3.0,
        },
        "losses": {"train/loss": {"value": 0.5, "step": 1}},
    }


def test_the_printed_table_has_the_figures_for_people(tmp_path, capsys):
    write_run(tmp_path / "logs", memory_points([4, 8, 6]))
    status, out, err = report(capsys, "logs")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert "logs steps 0 to 2" in lines
    assert "peak allocated 8.00 GiB step 1" in lines
    assert "allocated at the end 1.00 GiB step 2" in lines
    assert "steps per second 2" in lines
    assert lines[-1] == "curves: memory-report.png"


def test_a_run_without_memory_says_how_to_get_it_and_has_its_speed_and_loss(tmp_path, capsys):
    points = [({"loss": 1 / step, "epoch": 0.0}, step, START_S + step / 4) for step in (1, 11, 21)]
    points += [({"epoch": 1.0}, 21, START_S + 100)] * 9
    write_run(tmp_path / "logs", points)
    status, out, _ = report(capsys, "logs")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert status == 0
    assert "logs: add `MemoryMonitor()` to the Trainer's callbacks to have its memory here" in lines
    assert "logs steps 1 to 21, 3 points" in lines
    assert "steps per second 4" in lines
    assert "loss 0.04762 step 21" in lines
    assert not Path("memory-report.png").exists()


def test_a_loss_that_is_no_number_is_shown_and_null_in_json(tmp_path, capsys):
    write_run(tmp_path / "logs", [({"loss": float("nan")}, 0, START_S)])
    (run,) = report_json(capsys, "logs")["runs"]
    assert run["losses"] == {"loss": {"value": None, "step": 0}}
    assert "nan" in report(capsys, "logs")[1]


def test_a_run_without_points_is_listed(tmp_path, capsys):
    write_run(tmp_path / "logs", [])
    status, out, _ = report(capsys, "logs")
    assert status == 0
    assert "no points" in out


def test_a_long_value_is_cut_without_a_letter_that_terminals_may_lack(tmp_path, capsys):
    write_run(tmp_path / "logs" / "a", memory_points([4]), f"a: {'x' * 200}\n")
    write_run(tmp_path / "logs" / "b", memory_points([4]), f"a: {'y' * 200}\n")
    _, out, _ = report(capsys, "logs", "--no-png")
    assert "..." in out
    assert "\u2026" not in out


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal_whatever_the_names(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ("[bold]first", "second"):
        points = [*memory_points([4, 8]), ({f"{'very_' * 30}long_loss": 1.0}, 0, START_S)]
        write_run(tmp_path / "logs" / f"{name}{'_run' * 40}", points, f"a: {name * 40}\n")
    _, out, _ = report(capsys, "logs", "--no-png")
    assert "[bold]first_run" in out  # no markup
    assert max(map(len, out.splitlines())) <= width


# Several runs


def test_two_runs_are_compared_figure_by_figure(two_runs, capsys):
    (changes,) = report_json(capsys, two_runs, "--no-png")["changes"]
    assert (changes["first"], changes["second"]) == ("version_2", "version_10")
    assert changes["figures"]["peak_allocated_bytes"] == {
        "first": 8 * GIB,
        "second": 6 * GIB,
        "change": -2 * GIB,
        "change_share": -0.25,
    }
    assert changes["figures"]["steps_per_second"]["change_share"] == -0.5
    assert changes["hyperparameters"] == {"depth": {"first": 2, "second": 4}}


def test_the_printed_comparison_has_both_and_the_change(two_runs, capsys):
    _, out, _ = report(capsys, two_runs, "--no-png")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "what changed from version_2 to version_10" in lines
    assert "peak allocated 8.00 GiB 6.00 GiB -2.00 GiB -25.0" in lines
    assert "allocated at the end 1.00 GiB 1.00 GiB same" in lines
    assert "steps per second 2 1 -1 -50.0" in lines
    assert "depth 2 4" in lines
    assert not any(line.startswith("lr ") for line in lines)


def test_each_of_several_runs_is_compared_with_the_first_in_the_order_given(two_runs, capsys):
    write_run(two_runs.parent / "other", [({"loss": 2.0}, 0, START_S)])
    document = report_json(capsys, "other", two_runs, two_runs / "version_2", "--no-png")
    names = ["other", "logs/version_2", "logs/version_10"]
    assert [run["name"] for run in document["runs"]] == names
    pairs = [(change["first"], change["second"]) for change in document["changes"]]
    assert pairs == [("other", "logs/version_2"), ("other", "logs/version_10")]
    figures = document["changes"][0]["figures"]
    assert figures["peak_allocated_bytes"] == {
        "first": None,
        "second": 8 * GIB,
        "change": None,
        "change_share": None,
    }
    assert document["changes"][0]["losses"]["loss"]["first"] == 2.0


# What can't be read


def test_a_damaged_file_is_a_warning_and_the_others_are_read(two_runs, capsys):
    (file,) = (two_runs / "version_2").glob("events*")
    file.write_bytes(b"no events at all")
    document = report_json(capsys, two_runs, "--no-png")
    assert [run["name"] for run in document["runs"]] == ["version_10"]
    (warning,) = document["warnings"]
    assert warning.startswith(f"{file} is damaged at byte 0")
    status, _, err = report(capsys, two_runs, "--no-png")
    assert (status, err) == (0, f"warning: {warning}\n")


def test_a_file_that_is_cut_off_counts_up_to_there(two_runs, capsys):
    (file,) = (two_runs / "version_2").glob("events*")
    file.write_bytes(file.read_bytes()[:-10])
    document = report_json(capsys, two_runs, "--no-png")
    assert [run["points"] for run in document["runs"]] == [2, 3]
    assert "ends in the middle of a record" in document["warnings"][0]


def test_a_file_that_cannot_be_opened_is_a_warning(two_runs, capsys):
    gone = two_runs / "version_2" / "events.out.tfevents.9.gone"
    gone.symlink_to(two_runs / "nowhere")
    document = report_json(capsys, two_runs, "--no-png")
    assert [run["points"] for run in document["runs"]] == [3, 3]
    assert document["warnings"] == [
        f"{gone} can't be read: No such file or directory; it is left out"
    ]


def test_records_of_something_else_are_a_warning(two_runs, capsys):
    (file,) = (two_runs / "version_2").glob("events*")
    file.write_bytes(file.read_bytes() + frame_record(b"\xff" * 9))
    document = report_json(capsys, two_runs, "--no-png")
    assert [run["points"] for run in document["runs"]] == [3, 3]
    assert "holds something else than events" in document["warnings"][0]


def test_nothing_that_can_be_read_is_a_mistake(tmp_path, capsys):
    write_run(tmp_path / "logs", []).write_bytes(b"no events at all")
    status, out, err = report(capsys, "logs")
    assert (status, out) == (2, "")
    assert err.endswith("lightning-memopt: no event file there can be read\n")


def test_hyperparameters_that_are_no_yaml_are_a_warning(two_runs, capsys):
    (two_runs / "version_2" / "hparams.yaml").write_text("a: [")
    document = report_json(capsys, two_runs, "--no-png")
    assert document["warnings"] == [
        f"{two_runs / 'version_2' / 'hparams.yaml'} can't be read as YAML; it is left out"
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["empty"], "no TensorBoard event file (events.out.tfevents.*) under `{}/empty`"),
        (["logs", "nowhere"], "there is no directory `{}/nowhere`"),
        (["text"], "`{}/text` is a file; give the directory that it is in"),
        (["logs", "--png", "none/x.png"], "there is no directory `none` for the picture"),
        (["logs", "--png", "logs"], "`logs` is a directory; give another `--png`"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(two_runs, tmp_path, capsys, arguments, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("")
    status, out, err = report(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"lightning-memopt: {said.format(tmp_path)}")
    assert err.count("\n") == 1


# Pictures


def test_the_picture_goes_where_it_is_asked_for_over_an_older_one(two_runs, capsys):
    Path("curves.png").write_text("older")
    document = report_json(capsys, two_runs, "--png", "curves.png")
    assert document["png"] == "curves.png"
    with Image.open("curves.png") as picture:
        assert picture.format == "PNG"
    assert not Path("memory-report.png").exists()


def test_no_picture_is_drawn_where_none_is_wanted(two_runs, capsys):
    assert report_json(capsys, two_runs, "--no-png")["png"] is None
    assert not Path("memory-report.png").exists()


def test_without_matplotlib_it_says_how_to_get_it(two_runs, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, _ = report(capsys, two_runs)
    line = 'no picture: `pip install "lightning-memopt[profiler]"` brings matplotlib'
    assert (status, out.splitlines()[-1]) == (0, line)
    assert not Path("memory-report.png").exists()
    assert report_json(capsys, two_runs)["png"] is None


def test_json_is_one_document_without_colour_whatever_the_terminal(two_runs, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "20")
    assert "\x1b[" in report(capsys, two_runs, "--no-png")[1]
    assert len(report_json(capsys, two_runs, "--no-png")["runs"]) == 2
