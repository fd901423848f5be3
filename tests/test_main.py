from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_memopt import __version__
from lightning_memopt.__main__ import main
from lightning_memopt.commands import report
from tests.commands.runs import memory_points, write_run


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"lightning-memopt {__version__}\n"


def test_help_lists_each_command_with_its_first_line(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"report {report.__doc__.partition(chr(10))[0]}" in shown


def test_no_command_is_a_mistake(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "required: command" in capsys.readouterr().err


def test_ctrl_c_ends_quietly(monkeypatch, capsys):
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "run", interrupt)
    assert main(["report", "."]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_ends_it_quietly(tmp_path):
    write_run(tmp_path, memory_points([1.0]) + [({f"loss{i}": 1.0}, 0, 0.0) for i in range(5000)])
    command = [sys.executable, "-m", "lightning_memopt", "report", str(tmp_path), "--no-png"]
    with subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
