from __future__ import annotations

from pathlib import Path

import pytest

from lightning_memopt.commands._run_pictures import can_draw, draw_runs
from lightning_memopt.commands._runs import Curve, Run

CURVES = ("memory/allocated_gib", "memory/reserved_gib", "memory/peak_allocated_gib")
PHASES = tuple(f"memory_phase/{name}_peak_gib" for name in ("forward", "backward", "optimizer"))


def make_run(name: str, values: list[float], tags: tuple[str, ...] = (*CURVES, *PHASES)) -> Run:
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, value, float(step))
    return Run(name, Path(), dict.fromkeys(tags, curve))


def test_each_figure_has_a_panel_with_a_line_for_each_run_and_phases_share_one():
    figure = draw_runs([make_run("first", [1, 2]), make_run("second", [3, 4])])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "allocated at the end of the step",
        "reserved at the end of the step",
        "peak of the step",
        "peak of each phase",
    ]
    assert [len(axes.lines) for axes in figure.axes] == [2, 2, 2, 6]
    assert list(figure.axes[2].lines[1].get_ydata()) == [3, 4]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["first", "second"]


def test_there_is_no_panel_of_phases_without_phases():
    figure = draw_runs([make_run("first", [1, 2], CURVES)])
    assert len(figure.axes) == 3


def test_runs_without_memory_are_left_out():
    runs = [make_run("plain", [1], ("loss",)), make_run("first", [1, 2])]
    assert not can_draw(runs[:1])
    assert [text.get_text() for text in draw_runs(runs).legends[0].get_texts()] == ["first"]


def test_a_peak_is_drawn_among_many_points():
    values = [1.0] * 100_000
    values[77_777] = 5.0
    line = draw_runs([make_run("long", values)]).axes[2].lines[0]
    steps, drawn = list(line.get_xdata()), list(line.get_ydata())
    assert len(drawn) <= 1000
    assert drawn[steps.index(77_777)] == max(drawn) == 5.0


@pytest.mark.parametrize(("gib", "unit", "shown"), [(2.0, "GiB", 2), (0.5, "MiB", 512)])
def test_a_panel_has_the_unit_of_its_highest_value(gib, unit, shown):
    axes = draw_runs([make_run("small", [gib])]).axes[0]
    assert axes.get_ylabel() == unit
    assert list(axes.lines[0].get_ydata()) == [shown]
    assert axes.lines[0].get_marker() == "o"  # a line of one point is none


def test_many_runs_have_colours_and_names_of_their_own():
    figure = draw_runs([make_run(f"_run${i}$", [i]) for i in range(12)])
    assert len({tuple(line.get_color()) for line in figure.axes[0].lines}) == 12
    assert len(figure.legends[0].get_texts()) == 12
