from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lightning_memopt.core import timeline_pictures
from lightning_memopt.core.step_timeline import Mark, StepTimeline, build_timeline
from lightning_memopt.core.timeline_pictures import (
    BOARD_DPI,
    draw_blocks,
    draw_categories,
    draw_pixels,
    save_pixels,
)
from lightning_memopt.core.trace_events import MemoryEvent
from lightning_memopt.core.units import GIB, MIB

PLAIN = (255, 255, 255)
DRAWN = pytest.mark.parametrize("draw", [draw_categories, draw_blocks])


def timeline(unit: int = MIB, has_totals: bool = False, blocks: int = 4) -> StepTimeline:
    """A step in which activations come one by one and go in reverse order."""
    total, events = 2 * unit, []

    def add(time: float, address: int, size: int) -> None:
        known = (total, 2 * total) if has_totals else (None, 0)
        events.append(MemoryEvent(time, address, size, *known))

    for i in range(blocks):
        total += unit
        add(1000 * (i + 1), 10**9 + i, unit)
    middle = 1000 * (blocks + 1)
    for i in reversed(range(blocks)):
        total -= unit
        add(middle + 1000 * (blocks - i), 10**9 + i, -unit)
    labels = {10**9 + i: "activations" for i in range(blocks)}
    marks = [Mark(0, "forward"), Mark(middle, "backward", labels), Mark(2 * middle, "")]
    start = 2 * unit if has_totals else None
    return build_timeline(events, marks, {5: (2 * unit, "parameters")}, start)


def texts(figure: Any) -> list[str]:
    (axes,) = figure.axes
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    return [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), *legend] + [
        text.get_text() for text in axes.texts
    ]


@DRAWN
@pytest.mark.parametrize(("unit", "name"), [(1024, "KiB"), (MIB, "MiB"), (GIB, "GiB"), (7, "KiB")])
def test_a_picture_has_its_title_units_phases_and_legend(draw: Any, unit: int, name: str):
    found = texts(draw(timeline(unit), "Step 5"))
    assert found[:3] == ["Step 5", "time on the host, ms", f"allocated memory, {name}"]
    assert {"forward", "backward", "activations", "parameters"} <= set(found)


@pytest.mark.parametrize("has_totals", [False, True])
def test_the_peak_is_marked_with_its_size(has_totals: bool):
    figure = draw_categories(timeline(has_totals=has_totals), "Step 5")
    assert "peak 6.00 MiB" in texts(figure)
    (axes,) = figure.axes
    dashed, dot = axes.lines[-2:]
    assert list(dashed.get_ydata()) == [6, 6]
    assert (list(dot.get_xdata()), list(dot.get_ydata())) == ([4.0], [6.0])
    assert axes.get_ylim()[1] > 6


def test_the_stack_has_each_category_at_its_height():
    figure = draw_categories(timeline(), "Step 5")
    (axes,) = figure.axes
    heights = [area.get_paths()[0].get_extents().y1 for area in axes.collections]
    assert max(heights) == pytest.approx(6)
    assert heights[0] == pytest.approx(2)  # parameters are the lowest


def test_blocks_are_stacked_and_fall_when_one_below_them_is_freed():
    events = [MemoryEvent(1000, 100, 10), MemoryEvent(2000, 200, 20), MemoryEvent(3000, 100, -10)]
    made = build_timeline(events, [Mark(0, "forward"), Mark(4000, "")], {5: (5, "parameters")})
    outlines = [set(each) for each in timeline_pictures._outlines(made.blocks)]
    assert outlines[0] == {(0, 0), (4, 0), (0, 5), (4, 5)}
    assert outlines[1] == {(1, 5), (3, 5), (1, 15), (3, 15)}
    assert outlines[2] == {(2, 15), (3, 15), (3, 5), (4, 5), (2, 35), (3, 35), (3, 25), (4, 25)}


def test_only_the_largest_blocks_are_drawn_and_the_picture_says_so(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(timeline_pictures, "_MAX_BLOCKS", 3)
    figure = draw_blocks(timeline(), "Step 5")
    assert "time on the host, ms; the 3 largest of 5 blocks" in texts(figure)
    monkeypatch.undo()
    assert not [text for text in texts(draw_blocks(timeline(), "Step 5")) if "largest" in text]


def test_many_thin_blocks_leave_no_white_between_them():
    pixels = draw_pixels(draw_blocks(timeline(blocks=399), "Step 5"))[..., :3]
    # A column in the middle, from the top of the stack to the axis: nothing in it is white.
    column = pixels[:, pixels.shape[1] // 2]
    is_orange = (abs(column.astype(int) - (0xEE, 0x88, 0x66)) < 40).all(axis=1)
    rows = is_orange.nonzero()[0]
    assert len(rows) > 200
    within = column[rows[0] : rows[-1]]
    assert not (within > 240).all(axis=1).any()
    thick = draw_blocks(timeline(blocks=4), "Step 5").axes[0].collections[0]
    assert (thick.get_edgecolor()[:, :3] == 1).all()


def test_what_the_device_reserves_is_drawn_where_it_is_known():
    assert "reserved" in texts(draw_blocks(timeline(has_totals=True), "Step 5"))
    assert "reserved" not in texts(draw_blocks(timeline(), "Step 5"))


def test_of_many_points_the_highest_are_drawn(monkeypatch: pytest.MonkeyPatch):
    long = timeline(blocks=500)
    assert len(timeline_pictures._thinned(long)) == len(long.times_ms)
    monkeypatch.setattr(timeline_pictures, "_MAX_POINTS", 50)
    shown = timeline_pictures._thinned(long)
    assert 40 < len(shown) <= 51
    assert shown == sorted(shown)
    assert max(long.total[i] for i in shown) == max(long.total)


def test_a_smaller_picture_has_the_same_layout():
    figure = draw_categories(timeline(), "Step 5")
    assert draw_pixels(figure, BOARD_DPI).shape == (525, 700, 4)
    assert draw_pixels(figure).shape == (840, 1120, 4)


@DRAWN
def test_the_pixels_are_those_of_the_file(draw: Any, tmp_path: Path):
    pixels = draw_pixels(draw(timeline(), "Step 5"))
    assert pixels.shape == (840, 1120, 4)
    assert pixels.dtype == "uint8"
    save_pixels(pixels, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.format == "PNG"
        colours = {colour for _, colour in picture.convert("RGB").getcolors(10**6)}
    assert {PLAIN, (0x44, 0x77, 0xAA), (0xEE, 0x88, 0x66)} <= colours


def names_at(*lengths: float, names: str = "forward backward optimizer") -> list[str]:
    """Return the names of phases that are shown, from left to right."""
    ends = [sum(lengths[: i + 1]) * 1000 for i in range(len(lengths))]
    all_names = names.split() * len(lengths)
    marks = [Mark(begin, all_names[i]) for i, begin in enumerate([0, *ends[:-1]])]
    figure = draw_categories(build_timeline([], [*marks, Mark(ends[-1], "")], {}), "Step 5")
    (axes,) = figure.axes
    shown = sorted((x.get_position()[0], x.get_text()) for x in axes.texts)
    return [text for _, text in shown if "peak" not in text]


@pytest.mark.parametrize(
    ("lengths", "names"),
    [
        ((50, 40, 10), ["forward", "backward", "optimizer"]),
        ((60, 39, 1), ["forward", "backward", "optimizer"]),
        ((80, 10, 10), ["forward", "backward"]),
        ((1, 1, 98), ["forward", "optimizer"]),
    ],
)
def test_names_of_phases_don_t_overlap(lengths: tuple[float, ...], names: list[str]):
    assert names_at(*lengths) == names


def test_of_many_phases_some_have_names():
    found = names_at(*[1.0] * 64, names="forward backward")
    assert 3 < len(found) < 10


@DRAWN
def test_nothing_is_cut_off_at_the_borders(draw: Any):
    pixels = draw_pixels(
        draw(timeline(has_totals=True), "Step 5 on cuda:0, rank 0: what it is for")
    )
    border = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    assert all((edge[:, :3] == 255).all() for edge in border)
    assert (pixels[..., :3] != 255).any()


@DRAWN
def test_a_step_without_events_can_be_drawn(draw: Any):
    empty = build_timeline([], [Mark(0, "forward"), Mark(0, "")], {})
    assert draw_pixels(draw(empty, "Step 5")).shape == (840, 1120, 4)
