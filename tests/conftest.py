"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forking import Forking, shared_forking
from processes import require_root

from keras_safe_ckpt.storage import temp_names

# TensorFlow's matrix kernels for bfloat16 would use AMX, which some virtual machines announce and
# then answer with an illegal instruction: a fault of nobody here. Before TensorFlow is imported,
# and for the processes of tests as well.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# The contract of the locks is not a test module: without this its assertions say nothing.
pytest.register_assert_rewrite("lock_contract", "lock_schedules")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """``-n auto``: one more than there are cores, for many tests wait for processes of theirs."""
    return 1 + (os.cpu_count() or 1)


#: What the suite leaves out, unless it is asked for by ``-m``.
_LEFT_OUT = ("campaign", "long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(name in (config.option.markexpr or "") for name in _LEFT_OUT):
        return
    chosen = [item for item in items if not any(map(item.get_closest_marker, _LEFT_OUT))]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the campaigns counted, also when they ran in other processes."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in getattr(report, "user_properties", []):
            if name == "campaign" and report.when == "call":
                terminalreporter.write_line(f"campaign: {value}")


@pytest.fixture(scope="session")
def forking() -> Forking:
    """Starts processes that have TensorFlow already."""
    return shared_forking()


@pytest.fixture
def alone_in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that belongs to no cluster, in an empty working directory."""
    for name in (
        "TF_CONFIG",
        "RANK",
        "WORLD_SIZE",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_STEP_NUM_TASKS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    # A `fit` that was stopped leaves its iterator behind, and TensorFlow was seen to take a minute
    # or two to throw old ones away, in the middle of some other test.
    gc.collect()
    # What is left stays for ever: TensorFlow keeps some ten thousand objects of each function that
    # it traced, and to look through all of them again took most of the time of a small test.
    gc.freeze()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a real file system with the given options, to fill it up or make it read-only."""
    require_root()
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where disks are made again after a power cut; the machine has been started anew since."""
    monkeypatch.setattr(temp_names, "_boot_id", lambda: "0badb007")
    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="power", dir=memory if memory.is_dir() else None)
    yield Path(folder)
    shutil.rmtree(folder)
