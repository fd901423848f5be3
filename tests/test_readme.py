"""The README is run: its Python, its YAML, its commands; what it points at exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from tests.models import Blocks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = [
    (README[: match.start()].count("\n") + 1, match[1], match[2])
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
]
# Not the tail of an address, and not a pattern.
PATH = re.compile(r"(?<![\w./:*<{-])((?:[\w.-]+/)+[\w.-]+\.(?:py|ya?ml|png|svg|md))\b(?:::(\w+))?")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*\ssrc=\"([^\"]+)\"")
TOP_LEVEL = (".ci/", ".github/", "examples/", "lightning_memopt/", "tests/")


def blocks(language: str) -> list[object]:
    return [
        pytest.param(code, id=f"line {line}") for line, word, code in BLOCKS if word == language
    ]


def commands(text: str) -> list[str]:
    lines = (line.strip() for line in text.replace("\\\n", " ").splitlines())
    return [re.sub(r"\s+", " ", line) for line in lines if line and not line.startswith("#")]


def missing_paths(text: str, root: Path) -> list[str]:
    """Return the files, and the tests in files, that a text names and `root` doesn't have."""
    missing = []
    for path, test in PATH.findall(text):
        if not (root / path).is_file():
            missing.append(path)
        elif test and not re.search(rf"^(def|class) {test}\b", (root / path).read_text(), re.M):
            missing.append(f"{path}::{test}")
    for name in re.findall(r"`([^`\s]+)`", text):
        if name.startswith(TOP_LEVEL) and not list(root.glob(name.split("::")[0].rstrip("/"))):
            missing.append(name)
    return missing


def missing_targets(text: str, root: Path) -> list[str]:
    """Return the targets of links and images that are neither addresses, anchors nor files."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {
        re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in headings
    }
    missing = []
    for groups in LINK.findall(text):
        target = "".join(groups)
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        if (path and not (root / path).exists()) or (not path and anchor not in anchors):
            missing.append(target)
    return missing


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs_as_it_is(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("code", blocks("yaml"))
def test_yaml_runs_through_the_cli(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "trainer" in yaml.safe_load(code), "a YAML block is a config of LightningCLI"
    (tmp_path / "config.yaml").write_text(code)
    monkeypatch.chdir(tmp_path)
    limits = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1"]
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config", "config.yaml", *limits])
    cli = LightningCLI(Blocks, seed_everything_default=False)
    assert cli.trainer.state.finished
    assert cli.trainer.global_step > 0
    named = {c["class_path"] for c in yaml.safe_load(code)["trainer"].get("callbacks", [])}
    built = {f"lightning_memopt.{type(callback).__name__}" for callback in cli.trainer.callbacks}
    assert {name for name in named if name.startswith("lightning_memopt.")} <= built


def test_there_is_python_and_yaml_to_run() -> None:
    assert blocks("python")
    assert blocks("yaml")


def test_ci_runs_the_two_commands() -> None:
    run = [
        line
        for line in commands((ROOT / ".ci/run").read_text())
        if re.match(r"pip install -e \S+ && ", line)
    ]
    shown = [line for _, word, code in BLOCKS if word == "bash" for line in commands(code)]
    installs = [line for line in shown if "pip install -e" in line]
    assert len(run) == 2
    assert run[0].endswith("quickstart.py")
    assert run[1].endswith("pytest")
    assert len(installs) >= 2
    assert all(line.endswith(own) for line, own in zip(installs, run, strict=False))


def test_files_and_tests_that_are_named_exist() -> None:
    assert PATH.search(README)
    assert missing_paths(README, ROOT) == []


def test_links_and_images_lead_somewhere() -> None:
    assert LINK.search(README)
    assert missing_targets(README, ROOT) == []


def test_a_missing_file_or_test_is_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_a.py").write_text("def test_b(): ...")
    text = (
        "`tests/test_a.py` tests/test_a.py::test_b `tests/*.py` https://host/x/y.png\n"
        "tests/test_a.py::test_c `tests/no.yaml` python examples/no.py `tests/gpu`"
    )
    assert missing_paths(text, tmp_path) == [
        "tests/test_a.py::test_c",
        "tests/no.yaml",
        "examples/no.py",
        "tests/no.yaml",
        "tests/gpu",
    ]


def test_a_link_to_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").touch()
    text = '# The `one` title\n[a](#the-one-title) [b](#no) ![c](no.png) [d](LICENSE) <img src="x">'
    assert missing_targets(text, tmp_path) == ["#no", "no.png", "x"]
