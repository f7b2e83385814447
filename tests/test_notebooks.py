"""The notebooks run from top to bottom, and what is stored in them is what they show."""

from __future__ import annotations

import base64
import re
import runpy
import shutil
import struct
from pathlib import Path
from typing import Any

import nbformat
import pytest
from processes import PROJECT, environment

FOLDER = PROJECT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

#: The text of a cell with this tag is the same each time, on every machine.
SAME_OUTPUT = "same-output"
#: Of the machine, or of something that went wrong.
NOT_TO_BE_SEEN = re.compile(r"/tmp/|/home|/root|Traceback|\bpid\b|" + re.escape(str(PROJECT)))
LARGEST_BYTES = 500_000
NARROWEST_PLOT = 800


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def plots(notebook: Any) -> list[bytes]:
    """The images, as PNG."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    data = [output.get("data", {}) for output in outputs]
    return [base64.b64decode(one["image/png"]) for one in data if "image/png" in one]


def text_of(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def same_each_time(notebook: Any) -> dict[str, str]:
    """The claims: by cell, what it says."""
    cells = [cell for cell in code_cells(notebook) if SAME_OUTPUT in cell.metadata.get("tags", [])]
    return {cell.id: text_of(cell) for cell in cells}


def kinds(notebook: Any) -> dict[str, list[str]]:
    """By cell, what kinds of outputs it has."""
    return {
        cell.id: [output.get("name", output.output_type) for output in cell.outputs]
        for cell in code_cells(notebook)
    }


def check_outputs(notebook: Any) -> None:
    """Executed in order, without errors or warnings, with plots, and without this machine."""
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert set(kinds(notebook)[cell.id]) <= {"stdout", "display_data"}, text_of(cell)
        for output in cell.outputs:
            shown = output.get("text", "") + output.get("data", {}).get("text/plain", "")
            assert not NOT_TO_BE_SEEN.search(shown), shown
    widths = [struct.unpack(">I", image[16:20])[0] for image in plots(notebook)]
    assert widths
    assert min(widths) >= NARROWEST_PLOT


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_there_are_four_and_both_lists_name_them():
    assert len(NOTEBOOKS) == 4
    for document in (PROJECT / "README.md", FOLDER / "README.md"):
        names = re.findall(r"\]\((?:notebooks/)?(\w+\.ipynb)\)", document.read_text())
        assert names == [path.name for path in NOTEBOOKS], document


@each_notebook
def test_what_is_stored_is_whole(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    check_outputs(notebook)
    assert path.stat().st_size <= LARGEST_BYTES
    claims = same_each_time(notebook)
    assert claims
    for cell in code_cells(notebook):
        # Nothing that would be another one each time: moments, versions.
        assert set(cell.metadata) <= {"tags"}
        if cell.id in claims:
            assert claims[cell.id]
            assert re.search(r"^ *assert ", cell.source, re.MULTILINE), cell.source
    assert notebook.metadata.language_info == {"name": "python"}


@each_notebook
def test_links_lead_to_other_notebooks(path):
    text = path.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (FOLDER / target).exists(), target


@pytest.mark.long
@each_notebook
def test_it_runs_and_shows_what_is_stored(path, tmp_path):
    folder, temporary = tmp_path / "notebooks", tmp_path / "temporary"
    folder.mkdir()
    temporary.mkdir()
    shutil.copy(path, folder)
    before = contents(folder)
    executed = runpy.run_path(str(FOLDER / "execute.py"))["executed"]
    variables = {
        **environment(),
        "TMPDIR": str(temporary),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    fresh = executed(folder / path.name, variables)
    stored = nbformat.read(path, as_version=4)
    check_outputs(fresh)
    assert len(plots(fresh)) == len(plots(stored))
    assert same_each_time(fresh) == same_each_time(stored)
    assert kinds(fresh) == kinds(stored)
    # It leaves nothing behind: neither beside itself nor where its temporary folder was.
    assert contents(folder) == before
    assert not list(temporary.iterdir())
