"""What the README shows works, and what it says is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PROJECT, environment

README = (PROJECT / "README.md").read_text()


def test_links_lead_somewhere():
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (PROJECT / document).read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (PROJECT / target).exists(), f"{document}: {target}"


def test_named_files_are_there():
    folders = "benchmarks|examples|keras_safe_ckpt|tests"
    names = re.findall(rf"`((?:{folders})/[\w./]+\.\w+)", README)
    assert "examples/train.py" in names
    for name in names:
        assert (PROJECT / name).exists(), name


def test_benchmark_table_was_filled_in():
    assert "BENCHMARK_" not in README
    assert "verified load" in README


def test_ci_finds_both_commands():
    """`.ci/run` takes the commands from the README: each must be one line."""
    assert len(re.findall(r"^python3 -m venv .*pytest -n auto$", README, re.MULTILINE)) == 1
    assert len(re.findall(r"^python3 -m venv .*keras_safe_ckpt demo$", README, re.MULTILINE)) == 1


def cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keras_safe_ckpt", *arguments],
        cwd=cwd,
        env={**environment(), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["nonsense"], 2)])
def test_usage(arguments, code, tmp_path):
    done = cli(*arguments, cwd=tmp_path)
    assert done.returncode == code
    assert "usage: keras-safe-ckpt" in done.stdout + done.stderr


def test_version_is_the_package_version(tmp_path):
    import keras_safe_ckpt

    assert cli("--version", cwd=tmp_path).stdout.split()[-1] == keras_safe_ckpt.__version__
