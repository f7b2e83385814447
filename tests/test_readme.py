"""What the README shows works, and what it says is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import cli_ok
from processes import PROJECT, environment

README = (PROJECT / "README.md").read_text()


def test_links_lead_somewhere():
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (PROJECT / document).read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (PROJECT / target).exists(), f"{document}: {target}"


def test_named_files_are_there():
    folders = "benchmarks|docs|examples|keras_safe_ckpt|notebooks|tests"
    pages = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *(PROJECT / "docs").rglob("*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(
            rf"[`/ ]((?:{folders})/[\w./]+\.(?:py|md|yaml|json|png|svg|sbatch))", page.read_text()
        )
    }
    assert "examples/train.py" in named
    assert "benchmarks/peers.py" in named
    assert [name for name in named if not (PROJECT / name).exists()] == []


def test_the_first_screen_has_what_a_newcomer_needs():
    first = README.partition("## ")[0]
    assert len(first.splitlines()) < 60
    (code,) = re.findall(r"^```python\n(.*?)^```$", first, re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    assert "callbacks=[" in code
    picture = PROJECT / re.search(r"!\[.*?\]\((.*?)\)", first)[1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_all_commands_are_listed():
    listed = set(re.findall(r"^\| `(\w+)[ `]", README, re.MULTILINE))
    program = cli_ok("--help")
    commands = set(re.findall(r"^    (\w+) ", program, re.MULTILINE))
    assert len(commands) >= 13
    assert commands <= listed


def test_peers_and_limits_are_named():
    for peer in (
        "ModelCheckpoint", "BackupAndRestore", "OrbaxCheckpoint", "CheckpointManager",
        "PreemptionCheckpointHandler",
    ):  # fmt: skip
        assert peer in README.partition("## Compared with")[2].partition("\n## ")[0]
    limits = README.partition("**Not guaranteed.**")[2]
    for limit in ("NFS", "SMB", "Object stores", "GPUs", "Windows"):
        assert limit in limits


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
