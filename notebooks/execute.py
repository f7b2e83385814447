"""Execute the notebooks of this folder with the Python that runs this, and keep their outputs.

python notebooks/execute.py                           # all of them
python notebooks/execute.py notebooks/3_two*.ipynb    # or some
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

#: So long may one cell take, on a machine that is busy.
CELL_SECONDS = 240


def executed(path: Path, env: Mapping[str, str] | None = None) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new kernel, which works in its folder."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as sockets:
        kernels = AsyncKernelManager(
            # No folders with kernels: what is left is the Python that runs this, registered or not.
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            # Ports that are free now may be somebody else's a moment later.
            transport="ipc",
            connection_file=str(Path(sockets) / "kernel.json"),
        )
        client = NotebookClient(
            notebook,
            km=kernels,
            kernel_name="python3",
            timeout=CELL_SECONDS,
            startup_timeout=CELL_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(path.parent)}},
        )
        variables = dict(os.environ if env is None else env)
        variables.pop("MPLBACKEND", None)  # Plots belong into the notebook.
        client.execute(cleanup_kc=True, env=variables)
    # Its version of Python would change the file each time.
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main(names: list[str]) -> None:
    here = Path(__file__).resolve().parent
    for path in [Path(name) for name in names] or sorted(here.glob("*.ipynb")):
        began = time.monotonic()
        notebook = executed(path)
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.monotonic() - began:.0f} s, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
