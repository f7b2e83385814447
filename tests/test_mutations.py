"""Without the line that gives a guarantee the test that is named beside it fails.

The lines are in `mutations.py`. The quick test compares them with the code as it is; the campaign
takes each of them out of a copy of the project, and runs the test that has to notice.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation, table
from processes import PROJECT

#: Of pytest: some tests failed. Anything else is not what was asked for.
TESTS_FAILED = 1


def source_of(mutation: Mutation, project: Path = PROJECT) -> Path:
    return project / "keras_safe_ckpt" / mutation.module


def functions_of(source: Path) -> set[str]:
    tree = ast.parse(source.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.guarantee)
def test_the_line_and_its_test_are_there(mutation):
    assert source_of(mutation).read_text().count(mutation.line) == 1
    file, _, name = mutation.test.partition("::")
    # Or inherited by a class of it.
    functions = functions_of(PROJECT / file) | functions_of(PROJECT / "tests/lock_contract.py")
    assert name.rpartition("::")[2].partition("[")[0] in functions


def test_the_page_has_the_table():
    assert table() in (PROJECT / "docs" / "reliability.md").read_text(), (
        "`python tests/mutations.py` prints it"
    )


def run_in(project: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    # Without a bound somebody waits for ever, and that is a failure like any other.
    command += ["--timeout=60", "--timeout-method=signal"]
    return subprocess.run(
        [*command, f"--basetemp={project.parent / 'temporary'}", *tests],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy, whose tests find the copy of the library."""
    copy = tmp_path / "project"
    names = ["keras_safe_ckpt", "tests", "docs", "benchmarks", "examples", "notebooks"]
    for name in names:
        shutil.copytree(PROJECT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "README.md"):
        shutil.copy(PROJECT / name, copy)
    return copy


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_every_mutation_is_noticed(project, record_property):
    tests = sorted({mutation.test for mutation in MUTATIONS})
    whole = run_in(project, *tests)
    assert whole.returncode == 0, whole.stdout[-4000:]
    noticed, missed = 0, []
    for mutation in MUTATIONS:
        source = source_of(mutation, project)
        text = source.read_text()
        source.write_text(text.replace(mutation.line, mutation.instead))
        done = run_in(project, mutation.test)
        source.write_text(text)
        if done.returncode == TESTS_FAILED and " failed" in done.stdout:
            noticed += 1
        else:
            missed.append(f"{mutation.guarantee}\n{done.stdout[-1500:]}")
    record_property("campaign", f"mutations: {len(MUTATIONS)} tried, {noticed} noticed")
    assert missed == []
