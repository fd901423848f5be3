from __future__ import annotations

import io

from rich.console import Console

from lightning_memopt.core.anatomy import Anatomy, KeptPart, Part
from lightning_memopt.core.anatomy_tables import anatomy_tables
from lightning_memopt.core.units import MIB


def text_of(found: Anatomy, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(anatomy_tables(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def found(parts: tuple[Part, ...], kept: tuple[KeptPart, ...] = (), **kwargs) -> Anatomy:
    peak = sum(part.size for part in parts)
    is_measured = kwargs.pop("is_measured", True)
    return Anatomy(peak, "backward", parts, kept, None, is_measured)


def test_each_part_has_a_row_with_its_size_and_share():
    text = text_of(found((Part("parameters", "float32", 3 * MIB), Part("batch", "int64", MIB))))
    assert "peak 4.00 MiB  measured, in backward" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["parameters", "float32", "3.00", "MiB", "75.0", "%"] in rows
    assert ["batch", "int64", "1.00", "MiB", "25.0", "%"] in rows
    assert "kept for backward" not in text


def test_a_computed_peak_says_so():
    assert "computed, in backward" in text_of(found((Part("batch", "", MIB),), is_measured=False))


def test_what_is_tiny_is_summed():
    tiny = tuple(Part(f"tiny {i}", "", 100) for i in range(3))
    text = text_of(found((Part("parameters", "float32", 100 * MIB), *tiny)))
    assert "3 smaller" in text
    assert "tiny" not in text


def test_what_is_kept_is_told_by_module_operator_and_type():
    kept = tuple(KeptPart(f"layer.{i}", "addmm", "float32", (9 - i) * MIB) for i in range(9))
    text = text_of(found((Part("activations", "float32", 45 * MIB),), kept))
    assert "kept for backward 45.00 MiB  at the end of forward" in text
    assert "layer.5" in text
    assert "layer.6" not in text
    assert "3 others" in text
    assert text.count("addmm") == 1


def test_names_with_brackets_are_printed_as_they_are():
    kept = (KeptPart("blocks[red]", "", "float32", MIB),)
    text = text_of(found((Part("[bold]", "", MIB),), kept))
    assert "[bold]" in text
    assert "blocks[red]" in text
    assert "(outside of modules)" in text_of(
        found((Part("a", "", MIB),), (KeptPart("", "mul", "float32", MIB),))
    )


def test_no_byte_at_all_is_no_error():
    assert "peak 0 B" in text_of(Anatomy(0, "forward", (), (), None, False))


def test_a_narrow_terminal_cuts_no_figure():
    text = text_of(found((Part("a use of a very long name", "float32", 3 * MIB),)), width=40)
    assert "3.00 MiB" in text
    assert "100.0 %" in text
