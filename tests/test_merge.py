"""One HDF5 file from those of all workers, or nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from killing import killed_at_each
from processes import ending, environment, run, run_ok, start, strace, wait_until

from keras_safe_ckpt import MergeConflictError, WorkerH5Writer, merge_worker_files
from keras_safe_ckpt.datasets import inspection, joining
from keras_safe_ckpt.errors import CheckpointNotFoundError, CheckpointWriteError, UnsafePathError

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


def write(folder: Path, worker: int, workers: int | None = None, **datasets: Any) -> Path:
    with WorkerH5Writer(folder, worker, workers=workers) as writer:
        for name, rows in datasets.items():
            writer.append(name, rows)
    return writer.path


def three(folder: Path) -> Path:
    for worker in range(3):
        rows = np.arange(worker + 1) + 10.0 * worker
        write(folder, worker, 3, x=rows, text=[f"{row:g}" for row in rows])
    return folder


def merged(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        return {
            name: (item.asstr() if h5py.check_string_dtype(item.dtype) else item)[()].tolist()
            for name, item in file.items()
        }


# What is made.


@pytest.mark.parametrize("how", ["concat", "virtual"])
def test_in_the_order_of_the_workers(tmp_path, how):
    out = merge_worker_files(three(tmp_path), tmp_path / "all.h5", how=how)
    assert out == tmp_path / "all.h5"
    rows = [0, 10, 11, 20, 21, 22]
    assert merged(out) == {"x": rows, "text": [str(row) for row in rows]}
    with h5py.File(out) as file:
        assert file["x"].is_virtual == (how == "virtual")
        assert "keras_safe_ckpt" not in file.attrs, "it is the file of no worker"
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".kscktmp")]


def test_the_virtual_one_is_small_and_moves_with_its_folder(tmp_path):
    folder = tmp_path / "run"
    for worker in range(2):
        write(folder, worker, 2, x=np.full((1000, 1000), worker))
    merge_worker_files(folder, folder / "all.h5", how="virtual")
    assert (folder / "all.h5").stat().st_size < 100_000
    folder.rename(tmp_path / "moved")
    os.chdir("/")
    found = merged(tmp_path / "moved/all.h5")["x"]
    assert [row[0] for row in found] == 1000 * [0] + 1000 * [1]


@pytest.mark.parametrize("how", ["concat", "virtual"])
def test_a_virtual_one_in_another_folder_finds_the_files(tmp_path, how):
    merge_worker_files(three(tmp_path / "run"), tmp_path / "else/where/all.h5", how=how)
    os.chdir("/")
    assert merged(tmp_path / "else/where/all.h5")["x"] == [0, 10, 11, 20, 21, 22]


@pytest.mark.parametrize("how", ["concat", "virtual"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_along_any_axis(tmp_path, axis, how):
    arrays = []
    for worker in range(3):
        shape = [4, 5, 6]
        shape[axis] = worker + 1
        arrays.append(np.random.default_rng(worker).random(shape))
        with WorkerH5Writer(tmp_path, worker, workers=3) as writer:
            writer.write("x", arrays[-1])
    merge_worker_files(tmp_path, tmp_path / "all.h5", axis=axis, how=how)
    with h5py.File(tmp_path / "all.h5") as file:
        assert np.array_equal(file["x"][:], np.concatenate(arrays, axis))


@pytest.mark.parametrize("kind", ["f4", "i8", "?", ">f8", "c8", "text", "S5", "compound"])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_in_blocks_of_any_size(tmp_path, monkeypatch, kind, compression):
    """More than a block of each, and chunks that do not fit into the blocks."""
    monkeypatch.setattr(joining, "_BLOCK_BYTES", 3000)
    rng, expected = np.random.default_rng(0), []
    for worker, count in enumerate([1111, 0, 57, 2000]):
        numbers = rng.integers(0, 100, count)
        if kind == "text":
            rows = np.array(["é" * number for number in numbers], object)
        elif kind == "compound":
            rows = np.zeros(count, [("a", "i4"), ("b", "f8", (2,))])
            rows["a"] = numbers
        elif kind == "S5":
            rows = np.array([b"%d" % number for number in numbers], "S5")
        else:
            rows = numbers.astype(kind)
        dtype = h5py.string_dtype() if kind == "text" else rows.dtype
        with h5py.File(tmp_path / f"{worker}.h5", "w") as file:
            file.create_dataset("x", data=rows, dtype=dtype, chunks=(37,), maxshape=(None,),
                                compression=compression)  # fmt: skip
        expected.append(rows)
    files = [tmp_path / f"{worker}.h5" for worker in range(4)]
    merge_worker_files(files, tmp_path / "all.h5")
    with h5py.File(tmp_path / "all.h5") as file:
        assert file["x"].compression == compression
        assert file["x"].dtype == dtype
        found = file["x"].asstr()[:] if kind == "text" else file["x"][:]
        assert np.array_equal(found, np.concatenate(expected))


def test_attributes_groups_and_single_values_are_taken_over(tmp_path):
    for worker in range(2):
        with WorkerH5Writer(tmp_path, worker, workers=2, attributes={"run": "a"}) as writer:
            writer.append("group/x", [worker], attributes={"unit": "m", "nan": np.nan})
            writer.write("threshold", 0.5)
    merge_worker_files(tmp_path, tmp_path / "all.h5")
    with h5py.File(tmp_path / "all.h5") as file:
        assert dict(file.attrs) == {"run": "a"}
        assert file["group/x"].attrs["unit"] == "m"
        assert file["group/x"][:].tolist() == [0, 1]
        assert file["threshold"][()] == 0.5


def test_a_worker_without_rows_has_none(tmp_path):
    write(tmp_path, 0, 3, x=[1.0])
    write(tmp_path, 1, 3)
    write(tmp_path, 2, 3, x=[2.0])
    merge_worker_files(tmp_path, tmp_path / "all.h5")
    assert merged(tmp_path / "all.h5") == {"x": [1, 2]}


def test_files_of_anybody_are_taken_as_given(tmp_path):
    for name in "cab":
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = [ord(name)]
    files = [tmp_path / f"{name}.h5" for name in "cab"]
    merge_worker_files(files, tmp_path / "all.h5")
    assert merged(tmp_path / "all.h5")["x"] == [ord(name) for name in "cab"]
    merge_worker_files(map(str, files), str(tmp_path / "all.h5"), sort_key=lambda path: path.name)
    assert merged(tmp_path / "all.h5")["x"] == [ord(name) for name in "abc"]


def test_files_of_workers_are_in_their_order_however_given(tmp_path):
    files = sorted(three(tmp_path).glob("worker-*"), reverse=True)
    merge_worker_files(files, tmp_path / "all.h5")
    assert merged(tmp_path / "all.h5")["x"] == [0, 10, 11, 20, 21, 22]


def test_the_old_file_is_replaced_when_the_new_one_is_whole(tmp_path):
    write(tmp_path, 0, 1, x=[1])
    merge_worker_files(tmp_path, tmp_path / "all.h5")
    write(tmp_path, 0, 1, x=[2])
    with h5py.File(tmp_path / "all.h5") as reader:
        merge_worker_files(tmp_path, tmp_path / "all.h5")
        assert reader["x"][:].tolist() == [1]
    assert merged(tmp_path / "all.h5")["x"] == [2]


# By a sort key.


@pytest.mark.parametrize("block", [200, 8 << 20])
def test_rows_in_the_order_of_a_key(tmp_path, monkeypatch, block):
    """As when the examples of a dataset were dealt out to the workers."""
    monkeypatch.setattr(joining, "_BLOCK_BYTES", block)
    numbers = np.random.default_rng(1).permutation(3000)
    for worker in range(3):
        own = numbers[worker::3] if worker else np.sort(numbers[worker::3])
        write(tmp_path, worker, 3, id=own, x=own[:, None] * np.ones(3), text=[f"{n}" for n in own])
    merge_worker_files(tmp_path, tmp_path / "all.h5", sort_key="id")
    found = merged(tmp_path / "all.h5")
    assert found["id"] == list(range(3000))
    assert [row[2] for row in found["x"]] == list(range(3000))
    assert found["text"] == [str(number) for number in range(3000)]


def test_equal_keys_stay_in_the_order_of_the_workers(tmp_path):
    write(tmp_path, 0, 2, id=[1, 0, 1], x=[1, 2, 3])
    write(tmp_path, 1, 2, id=[0, 1], x=[4, 5])
    merge_worker_files(tmp_path, tmp_path / "all.h5", sort_key="id")
    assert merged(tmp_path / "all.h5")["x"] == [2, 4, 1, 3, 5]


def test_text_may_be_the_key(tmp_path):
    write(tmp_path, 0, 2, id=["b", "d"], x=[2, 4])
    write(tmp_path, 1, 2, id=["c", "a"], x=[3, 1])
    merge_worker_files(tmp_path, tmp_path / "all.h5", sort_key="id")
    assert merged(tmp_path / "all.h5")["x"] == [1, 2, 3, 4]


def test_keys_that_cannot_be_are_named(tmp_path):
    write(tmp_path, 0, 1, id=[1, 2], x=[1], matrix=[[1], [2]])
    for key, message in [
        ("missing", "is not in them"),
        ("matrix", "expected one value a row"),
        ("id", r"it has \[1\] rows, and the sort key 'id' has \[2\]"),
    ]:
        with pytest.raises(MergeConflictError, match=message):
            merge_worker_files(tmp_path, tmp_path / "all.h5", sort_key=key)
    for options in ({"how": "virtual"}, {"axis": 1}):
        with pytest.raises(ValueError, match="sort_key: rows are sorted with"):
            merge_worker_files(tmp_path, tmp_path / "all.h5", sort_key="id", **options)
    with pytest.raises(TypeError, match="sort_key: expected"):
        merge_worker_files(tmp_path, tmp_path / "all.h5", sort_key=7)
    assert not (tmp_path / "all.h5").exists()


# Conflicts: each names the dataset and the files, and nothing is written.


def assert_refused(
    folder: Path, dataset: str, files: list[str], reason: str, given: Any = None, **options: Any
) -> None:
    out = folder / "all.h5"
    for how in ("concat", "virtual"):
        before = sorted(os.listdir(folder))
        with pytest.raises(MergeConflictError, match=reason) as caught:
            merge_worker_files(given or folder, out, how=how, **options)
        assert re.fullmatch(dataset, caught.value.dataset)
        assert [Path(file).name for file in caught.value.files] == files
        assert sorted(os.listdir(folder)) == before


def worker_files(*numbers: int) -> list[str]:
    return [f"worker-{number:05d}.h5" for number in numbers]


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ([[1.0, 2.0]], [[1.0]], r"the shapes are \(1, 2\) and \(1, 1\)"),
        ([[1.0, 2.0]], [1.0], r"the shapes are \(1, 2\) and \(1,\)"),
        ([1.0], [1], "the types are float64 and int64"),
        ([1.0], np.array([1], "f4"), "the types are float64 and float32"),
        ([1.0], ["text"], "the types are float64 and text"),
        ([1.0], np.array([1], ">f8"), "the types are"),
    ],
)
def test_shapes_and_types_that_disagree(tmp_path, one, other, reason):
    write(tmp_path, 0, 2, x=one)
    write(tmp_path, 1, 2, x=other)
    assert_refused(tmp_path, "x", worker_files(0, 1), reason)


@pytest.mark.parametrize("one", [{"unit": "m"}, {"unit": 1}, {"unit": [1.0, 2.0]}])
@pytest.mark.parametrize("other", [{}, {"unit": "km"}, {"unit": 2}, {"more": 1, "unit": "m"}])
def test_attributes_that_disagree(tmp_path, one, other):
    for worker, attributes in enumerate([one, other]):
        with WorkerH5Writer(tmp_path, worker, workers=2) as writer:
            writer.append("x", [1], attributes=attributes)
    assert_refused(tmp_path, "x", worker_files(0, 1), "attribute 'unit'|attribute 'more'")


def test_attributes_of_the_file_that_disagree(tmp_path):
    for worker in range(2):
        with WorkerH5Writer(tmp_path, worker, attributes={"run": worker}) as writer:
            writer.append("x", [1])
    assert_refused(tmp_path, "/", worker_files(0, 1), "attribute 'run' is 0 and 1|np.int64")


def test_a_dataset_that_only_one_has(tmp_path):
    write(tmp_path, 0, 2, x=[1])
    write(tmp_path, 1, 2, x=[1], y=[1])
    assert_refused(tmp_path, "y", worker_files(0, 1), "does not have it")


def test_single_values_that_disagree(tmp_path):
    for worker in range(2):
        with WorkerH5Writer(tmp_path, worker) as writer:
            writer.write("x", worker)
    assert_refused(tmp_path, "x", worker_files(0, 1), "a single value that is")


def test_an_axis_that_is_not_there(tmp_path):
    write(tmp_path, 0, 1, x=[1])
    assert_refused(tmp_path, "x", worker_files(0), "axis=1, and it has 1 dimensions", axis=1)


def test_a_worker_that_is_missing(tmp_path):
    three(tmp_path)
    (tmp_path / "worker-00001.h5").unlink()
    assert_refused(tmp_path, "/", worker_files(0, 2), "the file of worker 1 is missing")
    assert_refused(tmp_path, "/", worker_files(0, 2), "of worker 1, 3 is missing", workers=4)
    assert_refused(tmp_path, "/", worker_files(2), "expected the files of workers", workers=[0])
    merge_worker_files(tmp_path, tmp_path / "all.h5", workers=[0, 2])
    assert merged(tmp_path / "all.h5")["x"] == [0, 20, 21, 22]


def test_the_last_worker_that_is_missing_is_known_by_the_others(tmp_path):
    three(tmp_path)
    (tmp_path / "worker-00002.h5").unlink()
    assert_refused(tmp_path, "/", worker_files(0, 1), "the file of worker 2 is missing")


def test_a_gap_is_noticed_even_if_nobody_knows_how_many(tmp_path):
    write(tmp_path, 0, x=[1])
    write(tmp_path, 2, x=[1])
    assert_refused(tmp_path, "/", worker_files(0, 2), "the file of worker 1 is missing")


def test_runs_of_different_size(tmp_path):
    write(tmp_path, 0, 2, x=[1])
    write(tmp_path, 1, 3, x=[1])
    assert_refused(tmp_path, "/", worker_files(0, 1), "of runs with 2 workers and 3 workers")


def test_a_worker_that_is_there_twice(tmp_path):
    three(tmp_path)
    shutil.copy(tmp_path / "worker-00001.h5", tmp_path / "copy.h5")
    files = [*sorted(tmp_path.glob("worker-*")), tmp_path / "copy.h5"]
    names = ["worker-00001.h5", "copy.h5"]
    assert_refused(tmp_path, "/", names, "both were written by worker 1", files)
    assert_refused(tmp_path, "/", 2 * ["copy.h5"], "given twice", 2 * [tmp_path / "copy.h5"])
    shutil.copy(tmp_path / "worker-00001.h5", tmp_path / "worker-00003.h5")
    assert_refused(tmp_path, "/", worker_files(3), "written by worker 1, and its name says 3")


def test_files_of_workers_and_of_others(tmp_path):
    three(tmp_path)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = [1.0]
    files = [*sorted(tmp_path.glob("worker-*")), tmp_path / "other.h5"]
    assert_refused(tmp_path, "/", ["other.h5"], "does not say which worker", files)
    assert_refused(tmp_path, "/", ["other.h5"], "which worker", [tmp_path / "other.h5"], workers=1)


def test_a_worker_that_has_not_finished(tmp_path):
    three(tmp_path)
    (tmp_path / "worker-00001.h5").unlink()
    writer = WorkerH5Writer(tmp_path, 1)
    writer.append("x", [1.0])
    writer.abandon()
    name = ".worker-00001.h5.unfinished"
    assert_refused(tmp_path, "/", [name], "worker 1 has not finished.*keras-safe-ckpt recover")


@pytest.mark.parametrize("damage", ["empty", "text", "half", "header", "middle"])
def test_files_that_are_not_whole(tmp_path, damage):
    path = write(tmp_path, 0, 2, x=np.arange(100_000))
    write(tmp_path, 1, 2, x=np.arange(10))
    data = bytearray(path.read_bytes())
    if damage == "middle":
        data[600:3000] = bytes(2400)
    path.write_bytes(
        {
            "empty": b"",
            "text": b"hello",
            "half": data[: len(data) // 2],
            "header": bytes(8) + data[8:],
            "middle": data,
        }[damage]
    )
    assert_refused(tmp_path, "/", worker_files(0), "not a whole HDF5 file|is damaged")


def test_a_file_that_changes_meanwhile(tmp_path, monkeypatch):
    three(tmp_path)
    copy = joining.copy

    def change(*arguments: Any) -> None:
        write(tmp_path, 1, 3, x=[1.0], text=["1"])
        copy(*arguments)

    monkeypatch.setattr("keras_safe_ckpt.datasets.merge.copy", change)
    with pytest.raises(MergeConflictError, match="has changed meanwhile"):
        merge_worker_files(tmp_path, tmp_path / "all.h5")
    assert not (tmp_path / "all.h5").exists()


# Hostile files.


def external_link(file: h5py.File) -> None:
    file["link"] = h5py.ExternalLink("/etc/passwd", "/x")


def soft_link(file: h5py.File) -> None:
    file["link"] = h5py.SoftLink("/x")


def external_storage(file: h5py.File) -> None:
    file.create_dataset("link", (100,), "u1", external=[("/etc/passwd", 0, 100)])


def virtual_outside(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource("../secret.h5", "x", (3,))
    file.create_virtual_dataset("link", layout)


def virtual_of_root(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource("/elsewhere/secret.h5", "x", (3,))
    file.create_virtual_dataset("link", layout)


def huge(file: h5py.File) -> None:
    file.create_dataset("link", (1 << 40,), "f8", chunks=(1 << 20,))


def huge_beyond_numbers(file: h5py.File) -> None:
    file.create_dataset("link", (1 << 31, 1 << 31), "f8", chunks=(1024, 1024))


def reference(file: h5py.File) -> None:
    file.create_dataset("link", data=[file.ref], dtype=h5py.ref_dtype)


def ragged(file: h5py.File) -> None:
    file.create_dataset("link", (3,), h5py.vlen_dtype("f8"))


def stored_type(file: h5py.File) -> None:
    file["link"] = np.dtype("f8")


def without_shape(file: h5py.File) -> None:
    file["link"] = h5py.Empty("f8")


def loop(file: h5py.File) -> None:
    file["link"] = file["/"]


def virtual_of(file: h5py.File, source: str, name: str, length: int = 3) -> None:
    layout = h5py.VirtualLayout((length,), "f8")
    layout[:3] = h5py.VirtualSource(source, name, (3,))
    file.create_virtual_dataset("link", layout)


def beside(file: h5py.File) -> None:
    with h5py.File(Path(file.file.filename).with_name("beside.h5"), "w") as other:
        other["x"] = [1.0, 2.0, 3.0]


def virtual_missing(file: h5py.File) -> None:
    beside(file)
    virtual_of(file, "beside.h5", "nothing")


def virtual_link(file: h5py.File) -> None:
    path = Path(file.file.filename).with_name("link.h5")
    path.unlink(missing_ok=True)
    path.symlink_to("/etc/passwd")
    virtual_of(file, "link.h5", "x")


def virtual_huge(file: h5py.File) -> None:
    beside(file)
    virtual_of(file, "beside.h5", "x", 1 << 36)


def virtual_of_itself(file: h5py.File) -> None:
    virtual_of(file, ".", file.name.strip("/") + "/link")


def virtual_by_its_name(file: h5py.File) -> None:
    virtual_of(file, Path(file.file.filename).name, file.name.strip("/") + "/link")


def virtual_of_nothing_here(file: h5py.File) -> None:
    virtual_of(file, ".", "nothing")


def large_chunk(file: h5py.File) -> None:
    file.create_dataset("link", (10,), "f8", chunks=(1 << 28,), maxshape=(None,))


def many_huge(file: h5py.File) -> None:
    for number in range(100):
        file.create_dataset(f"a{number}", (60_000_000,), "u1", chunks=(1 << 20,))
    file.create_dataset("link", (60_000_000,), "u1", chunks=(1 << 20,))


HOSTILE: list[tuple[Callable[[h5py.File], None], str]] = [
    (external_link, "an external link, to '/etc/passwd'"),
    (soft_link, "a soft link, to '/x'"),
    (external_storage, "external storage, in b?'/etc/passwd'"),
    (virtual_outside, "a virtual source outside of its folder, '../secret.h5'"),
    (virtual_of_root, "a virtual source outside of its folder, '/elsewhere/secret.h5'"),
    (huge, "it claims 8,796,093,022,208 bytes"),
    (huge_beyond_numbers, "it claims 36,893,488,147,419,103,232 bytes"),
    (reference, "references to other objects"),
    (ragged, "rows of different lengths"),
    (stored_type, "a stored type"),
    (without_shape, "without a shape"),
    (loop, "contains itself"),
    (virtual_missing, "a virtual source that is not there, 'nothing' in 'beside.h5'"),
    (virtual_link, "a virtual source that is a symbolic link, 'link.h5'"),
    (virtual_huge, "it claims 549,755,813,888 bytes"),
    (many_huge, "it claims 60,000,000 bytes"),
    (virtual_of_itself, "virtual sources that lead on and on, in this file"),
    (virtual_by_its_name, "virtual sources that lead on and on, in this file"),
    (virtual_of_nothing_here, "a virtual source that is not there, 'nothing'"),
    (large_chunk, "a chunk of 2,147,483,648 bytes; at most 268,435,456 are taken"),
]


@pytest.mark.parametrize(
    ("make", "reason"), HOSTILE, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_leads_elsewhere_is_refused_by_name(tmp_path, make, reason):
    dataset = ".*" if make is many_huge else "link"
    with h5py.File(tmp_path / "worker-00000.h5", "w") as file:
        file["x"] = [1.0]
        make(file)
    assert_refused(tmp_path, dataset, worker_files(0), reason)
    with h5py.File(tmp_path / "worker-00000.h5", "w") as file:
        file["x"] = [1.0]
        make(file.create_group("below"))
    assert_refused(tmp_path, f"below/{dataset}", worker_files(0), reason)


def virtual(path: Path, name: str, source: str, of: str) -> None:
    with h5py.File(path, "a") as file:
        layout = h5py.VirtualLayout((3,), "f8")
        layout[:] = h5py.VirtualSource(source, of, (3,))
        file.create_virtual_dataset(name, layout)


def test_files_that_show_each_other_are_refused(tmp_path):
    virtual(tmp_path / "worker-00000.h5", "x", "beside.h5", "y")
    virtual(tmp_path / "beside.h5", "y", "worker-00000.h5", "x")
    reason = "virtual sources that lead on and on, to 'worker-00000.h5'"
    assert_refused(tmp_path, "y", ["beside.h5"], reason)


@pytest.mark.parametrize("files", [1, 100])
def test_virtual_sources_without_end_are_refused(tmp_path, files):
    """A hundred of them, one behind the other: HDF5 needs as many calls within each other."""
    names = [f"d{number}" for number in range(100)]
    paths = [f"{name}.h5" if files > 1 else "worker-00000.h5" for name in names]
    paths[-1] = "worker-00000.h5"
    with h5py.File(tmp_path / paths[0], "w") as file:
        file["d0"] = [1.0, 2.0, 3.0]
    for number in range(1, 100):
        source = paths[number - 1] if files > 1 else "."
        virtual(tmp_path / paths[number], names[number], source, names[number - 1])
    with pytest.raises(MergeConflictError, match="virtual sources that lead on and on"):
        merge_worker_files(tmp_path, tmp_path / "all.h5")
    assert not (tmp_path / "all.h5").exists()


@pytest.mark.parametrize("sort_key", [None, "id"])
def test_rows_that_all_show_the_same_text_are_refused(tmp_path, sort_key):
    """A file of half a megabyte that would become one of more than a gigabyte."""
    path, count = tmp_path / "worker-00000.h5", 20_000
    with h5py.File(path, "w") as file:
        file["id"] = np.arange(count)
        texts = file.create_dataset("x", (count,), h5py.string_dtype())
        texts[0] = "a" * 60_000
        offset = texts.id.get_offset()
    data = bytearray(path.read_bytes())
    data[offset : offset + 16 * count] = data[offset : offset + 16] * count
    path.write_bytes(data)
    with pytest.raises(MergeConflictError, match="its texts have more bytes than the file"):
        merge_worker_files([path], tmp_path / "all.h5", sort_key=sort_key)
    assert not (tmp_path / "all.h5").exists()


def test_the_only_copy_of_the_rows_is_not_replaced(tmp_path):
    """By something virtual that shows itself; there may be a link to it, or something shows it."""
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file["x"] = [1.0, 2.0, 3.0]
    (tmp_path / "link.h5").symlink_to(path)
    merge_worker_files([path], tmp_path / "virtual.h5", how="virtual")
    for source in ("link.h5", "virtual.h5"):
        with pytest.raises(MergeConflictError, match="the rows to be merged are in it"):
            merge_worker_files([tmp_path / source], path, how="virtual")
    assert merged(path) == {"x": [1, 2, 3]}


def test_a_virtual_source_in_the_same_folder_is_fine(tmp_path):
    """A merge of virtual merges; and a dataset whose source is in the very same file."""
    three(tmp_path)
    merge_worker_files(tmp_path, tmp_path / "virtual.h5", how="virtual")
    with h5py.File(tmp_path / "virtual.h5", "a") as file:
        layout = h5py.VirtualLayout((6,), "f8")
        layout[:] = h5py.VirtualSource(".", "x", (6,))
        file.create_virtual_dataset("again", layout)
    out = merge_worker_files([tmp_path / "virtual.h5"], tmp_path / "all.h5")
    rows = [0, 10, 11, 20, 21, 22]
    assert merged(out) == {"x": rows, "again": rows, "text": [str(row) for row in rows]}


def test_groups_in_groups_without_end_are_refused(tmp_path):
    with h5py.File(tmp_path / "worker-00000.h5", "w") as file:
        file["/".join(100 * ["d"])] = [1]
    assert_refused(tmp_path, "d/.*", worker_files(0), "more than 64 groups in each other")


def test_more_objects_than_anybody_means_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "_MOST_OBJECTS", 5)
    with h5py.File(tmp_path / "worker-00000.h5", "w") as file:
        for number in range(6):
            file[str(number)] = [1]
    assert_refused(tmp_path, "/", worker_files(0), "more than 5 objects")


def test_a_pipe_is_not_waited_for(tmp_path):
    write(tmp_path, 0, x=[1.0])
    os.mkfifo(tmp_path / "worker-00001.h5")
    assert_refused(tmp_path, "/", worker_files(1), "there is no such file")


@pytest.mark.parametrize("label", ["[" * 50_000, '{"worker": 0, "workers": -1}', "text", 7])
def test_a_label_that_is_none_is_none(tmp_path, label):
    with h5py.File(tmp_path / "worker-00000.h5", "w") as file:
        file["x"] = [1.0]
        file.attrs["keras_safe_ckpt"] = label
    assert_refused(tmp_path, "/", worker_files(0), "does not say which worker", workers=1)


def test_a_number_of_workers_that_nobody_has(tmp_path):
    path = write(tmp_path, 0, x=[1.0])
    assert_refused(tmp_path, "/", worker_files(0), "of worker 1, 2, .* is missing", workers=10**11)
    with h5py.File(path, "a") as file:
        file.attrs["keras_safe_ckpt"] = '{"version": 1, "worker": 0, "workers": 100000000000}'
    assert_refused(tmp_path, "/", worker_files(0), "of worker 1, 2, .* is missing")


def test_attributes_of_a_worker_without_rows_count(tmp_path):
    with WorkerH5Writer(tmp_path, 0, attributes={"run": "A"}) as writer:
        writer.append("x", [1.0])
    with WorkerH5Writer(tmp_path, 1, attributes={"run": "B"}):
        pass
    assert_refused(tmp_path, "/", worker_files(0, 1), "the attribute 'run' is 'A' and 'B'")


def test_attributes_of_groups_that_the_first_file_does_not_have_count(tmp_path):
    h5py.File(tmp_path / "a.h5", "w").close()
    for name, unit in (("b", 1), ("c", 2)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["g/x"] = [unit]
            file["g"].attrs["unit"] = unit
    files = [tmp_path / f"{name}.h5" for name in "abc"]
    assert_refused(tmp_path, "g", ["b.h5", "c.h5"], "the attribute 'unit'", files)


@pytest.mark.parametrize("how", ["concat", "virtual"])
def test_percent_signs_are_part_of_a_name(tmp_path, how):
    folder = tmp_path / "top 5%b"
    names = ["p%%x", "p%x", "100%", "%b"]
    for worker in range(2):
        write(folder, worker, 2, **{name: [1.0 + worker] for name in names})
    out = merge_worker_files(folder, folder / "all.h5", how=how)
    assert merged(out) == {name: [1.0, 2.0] for name in names}
    again = merge_worker_files([out], tmp_path / "again.h5")
    assert merged(again) == {name: [1.0, 2.0] for name in names}


def test_files_that_are_shorter_than_their_chunks(tmp_path):
    for worker in range(2):
        with WorkerH5Writer(tmp_path, worker, workers=2) as writer:
            writer.append("x", np.arange(10.0), compression="gzip")
    merge_worker_files(tmp_path, tmp_path / "all.h5")
    assert merged(tmp_path / "all.h5")["x"] == [*range(10), *range(10)]
    with h5py.File(tmp_path / "all.h5") as file:
        assert file["x"].compression == "gzip"


def test_texts_are_sorted_in_blocks_that_grow(tmp_path, monkeypatch):
    opens: list[Path] = []
    opened = joining.opened
    monkeypatch.setattr(joining, "opened", lambda path: opens.append(path) or opened(path))
    for worker in range(2):
        ids = np.arange(worker, 4000, 2)
        write(tmp_path, worker, 2, id=ids, text=[str(number) for number in ids])
    merge_worker_files(tmp_path, tmp_path / "all.h5", sort_key="id")
    assert merged(tmp_path / "all.h5")["text"] == [str(number) for number in range(4000)]
    assert len(opens) < 100


def test_enumerations_that_disagree(tmp_path):
    files = []
    for number, names in enumerate((["CAT", "DOG"], ["DOG", "CAT"])):
        files.append(tmp_path / f"{number}.h5")
        with h5py.File(files[-1], "w") as file:
            kind = h5py.enum_dtype({name: value for value, name in enumerate(names)})
            file.create_dataset("x", data=[0, 1], dtype=kind)
    assert_refused(tmp_path, "x", ["0.h5", "1.h5"], "the types are", files)


def test_one_file_under_two_names_is_one_file(tmp_path):
    first = write(tmp_path / "a", 0, x=[1.0])
    (tmp_path / "b.h5").symlink_to(first)
    os.link(first, tmp_path / "c.h5")
    for other in ("b.h5", "c.h5"):
        files = [first, tmp_path / other]
        assert_refused(
            tmp_path, "/", ["worker-00000.h5", other], "the same file is given twice", files
        )


def test_a_worker_that_writes_anew_is_not_merged_as_it_was(tmp_path):
    three(tmp_path)
    writer = WorkerH5Writer(tmp_path, 1, workers=3)
    writer.append("x", [1.0])
    writer.flush()
    assert_refused(tmp_path, "/", [".worker-00001.h5.unfinished"], "worker 1 has not finished")
    writer.abandon()


# Arguments.


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"how": "copy"}, ValueError, r"how: expected one of .* Received: 'copy'"),
        ({"axis": 0.5}, TypeError, r"axis: expected a whole number. Received: 0.5"),
        ({"axis": True}, TypeError, "axis: expected a whole number"),
        ({"sort_key": 3}, TypeError, "sort_key: expected None, the name of a dataset"),
        ({"sort_key": "x", "how": "virtual"}, ValueError, "sort_key: rows are sorted with"),
        ({"sort_key": "x", "axis": 1}, ValueError, "sort_key: rows are sorted with"),
        ({"workers": 0}, ValueError, "workers: expected how many there are"),
        ({"workers": []}, ValueError, "workers: expected how many there are"),
        ({"workers": [-1]}, ValueError, "workers: expected how many there are"),
        ({"workers": True}, ValueError, "workers: expected how many there are"),
        ({"workers": 3.0}, ValueError, r"workers: expected how many .*Received: 3\.0"),
        ({"workers": "012"}, ValueError, "workers: expected how many there are"),
        ({"workers": range(-1, 3)}, ValueError, "workers: expected how many there are"),
    ],
)
def test_arguments_that_cannot_be_are_named(tmp_path, options, kind, message):
    three(tmp_path)
    with pytest.raises(kind, match=message):
        merge_worker_files(tmp_path, tmp_path / "all.h5", **options)
    assert not (tmp_path / "all.h5").exists()


def test_places_that_cannot_be_are_named(tmp_path):
    three(tmp_path / "run")
    with pytest.raises(CheckpointNotFoundError, match="expected a directory of worker files"):
        merge_worker_files(tmp_path / "nothing", "all.h5")
    with pytest.raises(CheckpointNotFoundError, match=r"no files such as worker-00000\.h5 in it"):
        merge_worker_files(tmp_path, "all.h5")
    with pytest.raises(ValueError, match="expected at least one file"):
        merge_worker_files([], "all.h5")
    with pytest.raises(TypeError, match="expected a directory, or several files"):
        merge_worker_files(None, "all.h5")
    (tmp_path / "link.h5").symlink_to("elsewhere")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        merge_worker_files(tmp_path / "run", tmp_path / "link.h5")
    with pytest.raises(MergeConflictError, match="one of the files to be merged"):
        merge_worker_files(tmp_path / "run", tmp_path / "run/worker-00000.h5")


# Faults.

MERGE = """
from keras_safe_ckpt import merge_worker_files
merge_worker_files(sys.argv[1] + "/run", sys.argv[1] + "/all.h5")
"""


def prepare(folder: Path) -> None:
    three(folder / "run")
    (folder / "all.h5").write_bytes(b"old")


def check_merged(folder: Path) -> None:
    """Old or new; the next merge makes it, and leaves nothing."""
    if (folder / "all.h5").read_bytes() != b"old":
        assert merged(folder / "all.h5")["x"] == [0, 10, 11, 20, 21, 22]
    merge_worker_files(folder / "run", folder / "all.h5")
    assert merged(folder / "all.h5")["x"] == [0, 10, 11, 20, 21, 22]
    assert not list(folder.glob(".*kscktmp"))


def test_killed_at_some_system_calls(tmp_path):
    calls = [("fsync", 1), ("rename", 1), ("fsync", 2)]
    assert killed_at_each(MERGE, calls, tmp_path, check_merged, prepare).tried == len(calls)


@pytest.mark.campaign
def test_killed_at_every_system_call(tmp_path, record_property):
    kills = killed_at_each(MERGE, None, tmp_path, check_merged, prepare)
    record_property("campaign", f"merge: {kills}, old or new each time")


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(small_disk, tmp_path):
    for worker in range(2):
        write(tmp_path / "run", worker, 2, x=np.random.default_rng(0).random(100_000))
    folder = small_disk("size=1m")
    (folder / "all.h5").write_bytes(b"old")
    with pytest.raises(CheckpointWriteError, match=r"(?i)room|full"):
        merge_worker_files(tmp_path / "run", folder / "all.h5")
    assert os.listdir(folder) == ["all.h5"]
    assert (folder / "all.h5").read_bytes() == b"old"


@pytest.mark.parametrize("is_full", [True, False])
def test_who_cannot_be_read_and_what_cannot_be_written_are_told_apart(
    tmp_path, monkeypatch, is_full
):
    prepare(tmp_path)

    def fails(out: h5py.File, *_: object) -> None:
        if is_full:  # Then HDF5 finds what was not written any more.
            monkeypatch.setattr(os, "pwrite", full)
            out.create_group("group")
            out.flush()
        raise OSError(errno.EIO, "Can't read data (file read failed: errno = 5)")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("keras_safe_ckpt.datasets.merge.copy", fails)
    kind, reason = (
        (CheckpointWriteError, "disk is full")
        if is_full
        else (MergeConflictError, r"worker-00000\.h5.*HDF5 cannot copy them .*errno = 5")
    )
    with pytest.raises(kind, match=reason):
        merge_worker_files(tmp_path / "run", tmp_path / "all.h5")
    assert (tmp_path / "all.h5").read_bytes() == b"old"


def test_what_the_disk_says_of_an_early_sync_is_heard(tmp_path, monkeypatch):
    """The kernel tells each error once, and the sync in the end may not hear of it."""
    prepare(tmp_path)
    failed = OSError(errno.EIO, "Input/output error")

    def fails(descriptor: int) -> None:
        raise failed

    monkeypatch.setattr(os, "fdatasync", fails)
    monkeypatch.setattr("keras_safe_ckpt.storage.early_sync._STEP_BYTES", 1)
    with pytest.raises(CheckpointWriteError, match="EIO"):
        merge_worker_files(tmp_path / "run", tmp_path / "all.h5")
    assert (tmp_path / "all.h5").read_bytes() == b"old"


@pytest.mark.parametrize("how", ["all", "sorted"])
def test_a_disk_that_is_full_in_the_middle_of_texts_does_not_crash(small_disk, tmp_path, how):
    """As HDF5 does by itself. It is another process that fills the disk meanwhile."""
    folder = small_disk("size=6m")
    for worker in range(2):
        texts = [f"{number:08d}" * 2000 for number in range(300)]
        write(tmp_path / "run", worker, 2, id=np.arange(300), x=texts)
    code = """
from keras_safe_ckpt import merge_worker_files
from keras_safe_ckpt.datasets import merge
merge.ensure_room = lambda *_: None
merge_worker_files(sys.argv[1], sys.argv[2], sort_key="id" if sys.argv[3] == "sorted" else None)
"""
    done = run(code, tmp_path / "run", folder / "all.h5", how)
    assert done.returncode == 1
    assert "CheckpointWriteError" in done.stderr
    assert "disk is full" in done.stderr
    assert os.listdir(folder) == []


@pytest.mark.parametrize("call", ["pwrite64", "fsync", "rename"])
@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EDQUOT"])
def test_errors_of_the_disk_leave_the_old_file(tmp_path, call, error):
    prepare(tmp_path)
    done = run(MERGE, tmp_path, prefix=strace(f"{call}:error={error}:when=1+"))
    assert "CheckpointWriteError" in done.stderr
    assert error in done.stderr
    assert (tmp_path / "all.h5").read_bytes() == b"old"
    check_merged(tmp_path)


def test_a_file_that_may_not_be_so_large_is_said(tmp_path):
    code = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
"""
    write(tmp_path / "run", 0, 1, x=np.arange(100_000))
    done = run(code + MERGE, tmp_path)
    assert "CheckpointWriteError" in done.stderr
    assert "EFBIG" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["run"]


# Memory and many at once.


@pytest.mark.parametrize("sort_key", [None, "id"])
def test_a_merge_larger_than_the_memory_it_may_use(tmp_path, sort_key):
    """400 MB with 150 MB of address space more than the program itself has."""
    rows = np.zeros((100_000, 125))
    for worker in range(4):
        with WorkerH5Writer(tmp_path, worker, workers=4) as writer:
            rows[:, 0] = worker
            writer.append("x", rows)
            writer.append("id", np.arange(len(rows)) * 4 + worker)
    code = """
import resource
import h5py
from keras_safe_ckpt import merge_worker_files
key = None if sys.argv[3] == "None" else sys.argv[3]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 150_000_000,) * 2)
try:
    np.zeros(400_000_000, "u1")
    sys.exit("there is no limit")
except MemoryError:
    merge_worker_files(sys.argv[1], sys.argv[2], sort_key=key)
"""
    run_ok(code, tmp_path, tmp_path / "all.h5", sort_key)
    with h5py.File(tmp_path / "all.h5") as file:
        assert file["x"].shape == (400_000, 125)
        ids = file["id"][:]
        assert np.array_equal(file["x"][:, 0], ids % 4)
        if sort_key:
            assert np.array_equal(ids, np.arange(400_000))


@pytest.mark.parametrize("sort_key", [None, "id"])
def test_long_texts_are_merged_a_few_at_a_time(tmp_path, monkeypatch, sort_key):
    """As many as fit if all were as long as the longest heap of the file; also within a row."""
    monkeypatch.setattr(joining, "_TEXT_BYTES", 1 << 20)
    texts = [*200 * ["x" * 5000], *1000 * ["y"]]
    with h5py.File(tmp_path / "worker-00000.h5", "w") as file:
        file["id"] = np.arange(3)
        file["text"] = np.array(texts, object).reshape(3, 400)
    blocks: list[int] = []
    text_bytes = joining.text_bytes
    monkeypatch.setattr(
        joining, "text_bytes", lambda block: blocks.append(block.size) or text_bytes(block)
    )
    merge_worker_files(tmp_path, tmp_path / "all.h5", sort_key=sort_key)
    with h5py.File(tmp_path / "all.h5") as file:
        assert file["text"].asstr()[:].reshape(-1).tolist() == texts
    read = [size for size in blocks if size not in (3, 400)]
    assert len(read) >= 1200 // 26, "too many at once"
    assert max(read) <= (1 << 20) // 40_000


@pytest.mark.long
def test_eight_writers_and_four_readers(tmp_path):
    """Whoever merges sees whole files only, and all of them when all are done."""
    writing = """
from keras_safe_ckpt import WorkerH5Writer
folder, me = sys.argv[1], int(sys.argv[2])
for turn in range(6):
    with WorkerH5Writer(folder, me, workers=8) as writer:
        for index in range(5):
            writer.append("x", np.full((100, 50), me))
            writer.flush()
"""
    reading = """
import h5py
from keras_safe_ckpt import MergeConflictError, merge_worker_files
from keras_safe_ckpt.errors import CheckpointNotFoundError
folder, me, merges, conflicts = sys.argv[1], sys.argv[2], 0, 0
while not os.path.exists(folder + "/over"):
    for name in os.listdir(folder):
        if name.startswith("worker-") and name.endswith(".h5"):
            with h5py.File(f"{folder}/{name}") as file:
                assert (file["x"][:] == int(name[7:12])).all() and len(file["x"]) == 500
    try:
        merge_worker_files(folder, f"{folder}/all-{me}.h5")
        merges += 1
    except (MergeConflictError, CheckpointNotFoundError):
        conflicts += 1
        continue
    with h5py.File(f"{folder}/all-{me}.h5") as file:
        assert (file["x"][:, 0] == np.repeat(np.arange(8), 500)).all()
print(merges, conflicts)
"""
    readers = [start(reading, tmp_path, me) for me in range(4)]
    writers = [start(writing, tmp_path, me) for me in range(8)]
    with ending(*readers, *writers):
        for process in writers:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
        wait_until(lambda: (tmp_path / "all-0.h5").exists(), "somebody has merged all")
        (tmp_path / "over").touch()
        for process in readers:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert sum(map(int, out.split())) > 0
    merge_worker_files(tmp_path, tmp_path / "all.h5", workers=8)
    assert [row[0] for row in merged(tmp_path / "all.h5")["x"]] == np.repeat(
        np.arange(8), 500
    ).tolist()


def test_long_work_shows_a_bar_on_a_terminal(tmp_path):
    code = """
from keras_safe_ckpt.datasets import progress, joining
progress._PATIENCE_SECONDS, joining._BLOCK_BYTES = 0, 100_000
from keras_safe_ckpt import merge_worker_files
merge_worker_files(sys.argv[1], sys.argv[1] + "/all.h5")
"""
    write(tmp_path, 0, 1, x=np.arange(1_000_000))
    parent, child = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys\n" + code, tmp_path],
        env={**environment(), "TERM": "xterm"}, stderr=child, stdout=subprocess.PIPE,
    )  # fmt: skip
    os.close(child)
    shown = b""
    with contextlib.suppress(OSError):  # The terminal is gone with the process.
        while data := os.read(parent, 65536):
            shown += data
    os.close(parent)
    assert process.wait(60) == 0
    assert b"Merging 1 files" in shown
    assert process.stdout is not None
    assert process.stdout.read() == b""
    assert run_ok(code, tmp_path) == "", "a bar where nobody sees it"
