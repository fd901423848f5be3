from __future__ import annotations

import sys

import pytest

from lightning_memopt.core.anatomy import Anatomy, Part
from lightning_memopt.core.timeline_pictures import draw_pixels
from lightning_memopt.core.units import MIB

pytest.importorskip("matplotlib")

from lightning_memopt.core.anatomy_pictures import draw_anatomy


def anatomy(*sizes: int) -> Anatomy:
    parts = tuple(Part(f"kind {i}", "float32", size) for i, size in enumerate(sizes))
    return Anatomy(sum(sizes), "backward", parts, (), None, True)


def names(figure, side=0):
    return [label.get_text() for label in figure.axes[side].get_yticklabels()]


def test_a_bar_for_each_part_with_its_size_and_share():
    figure = draw_anatomy(anatomy(3 * MIB, MIB))
    axes = figure.axes[0]
    assert [bar.get_width() for bar in axes.patches] == [3 * MIB, MIB]
    assert names(figure) == ["kind 0 float32", "kind 1 float32"]
    assert names(figure, 1) == ["3.00 MiB  75 %", "1.00 MiB  25 %"]
    assert axes.get_title() == "peak 4.00 MiB, in backward"


def test_small_parts_are_summed():
    figure = draw_anatomy(anatomy(*range(20, 8, -1)))
    assert names(figure)[-1] == "5 others"
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert (len(widths), sum(widths)) == (8, sum(range(9, 21)))


def test_all_of_it_lies_within_the_picture():
    parts = (Part("libraries and others of a long name", "bfloat16", MIB),)
    figure = draw_anatomy(Anatomy(MIB, "optimizer", parts, (), None, True))
    pixels = draw_pixels(figure, 60)
    assert (pixels[:2] == 255).all()
    assert (pixels[:, :2] == 255).all()
    assert (pixels[:, -2:] == 255).all()
    assert (pixels != 255).any()


def test_no_global_state_of_matplotlib_is_touched():
    draw_pixels(draw_anatomy(anatomy(1, 1)))
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
