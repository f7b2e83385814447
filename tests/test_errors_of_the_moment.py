"""What cannot be read now may be whole: nothing takes its place, and it is no misfit."""

from __future__ import annotations

import contextlib
import errno
import os

import h5py
import numpy as np
import pytest
from keras_setup import keras
from preempted_fit import DATA, At, Bell, build, callback, events
from snapshots import make_snapshot

from keras_safe_ckpt import CheckpointStore, WorkerH5Writer
from keras_safe_ckpt.callbacks.run_saver import RunSaver
from keras_safe_ckpt.errors import CheckpointWriteError, UnreadableCheckpointError
from keras_safe_ckpt.storage.foreign import is_plain_keras


def test_a_descriptor_is_closed_once(tmp_path, monkeypatch):
    """In between, another thread may have been given its number: of a lock, or of a save."""
    path = tmp_path / "x.keras"
    path.write_bytes(b"no archive at all")
    stranger = []
    close = os.close

    def close_and_reopen(descriptor):
        close(descriptor)
        if not stranger:
            stranger.append(os.open(tmp_path, os.O_RDONLY))
            assert stranger == [descriptor]

    monkeypatch.setattr(os, "close", close_and_reopen)
    assert not is_plain_keras(path)
    monkeypatch.undo()
    os.fstat(stranger[0])
    close(stranger[0])


def _leave(folder, count):
    writer = WorkerH5Writer(folder)
    writer.append("x", np.arange(count))
    writer.abandon()


def test_what_cannot_be_read_now_is_not_replaced_by_fewer_rows(tmp_path, monkeypatch):
    aside = tmp_path / ".worker-00000.h5.interrupted"
    _leave(tmp_path, 100)
    _leave(tmp_path, 3)  # Sets the one before aside.
    with h5py.File(aside) as file:
        assert len(file["x"]) == 100
    real = h5py.File

    def stumbles(name, *arguments, **options):
        if str(name) == str(aside):
            raise OSError(errno.EIO, "Unable to open file (errno = 5, Input/output error)")
        return real(name, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(h5py, "File", stumbles)
        with pytest.raises(CheckpointWriteError, match="Input/output error"):
            WorkerH5Writer(tmp_path)
    with h5py.File(aside) as file:
        assert len(file["x"]) == 100
    _leave(tmp_path, 1)
    with h5py.File(aside) as file:
        assert len(file["x"]) == 100


@pytest.mark.parametrize("path", ["newest", None])
def test_a_disk_that_stumbles_while_keras_loads_is_no_misfit(tmp_path, monkeypatch, path):
    store = CheckpointStore(tmp_path, format="keras")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    for step in (1, 2):
        newest = store.publish(model, step=step)
    load = keras.models.load_model

    def stumbles(where, **options):
        if str(where) == str(newest.path):
            raise OSError(errno.EIO, "Input/output error", str(where))
        return load(where, **options)

    monkeypatch.setattr(keras.models, "load_model", stumbles)
    if path is None:
        assert store.load()[1].step == 1
    else:
        with pytest.raises(UnreadableCheckpointError, match="Input/output error"):
            store.load(path=newest.path)


@pytest.mark.parametrize("free", [1, 2])
def test_a_disk_without_inodes_is_not_one_without_locks(small_disk, free):
    """The lock files need some as well."""
    disk = small_disk("size=1m,nr_inodes=20")
    store = CheckpointStore(disk / "run")
    with contextlib.suppress(OSError):
        for number in range(20):
            (disk / str(number)).touch()
    for number in range(free):
        (disk / str(number)).unlink()
    with pytest.raises(CheckpointWriteError, match="inodes"):
        store.publish(make_snapshot(), step=1)
    for number in range(free, 10):
        (disk / str(number)).unlink()
    assert store.publish(make_snapshot(), step=1).manifest.step == 1


def test_a_notice_before_the_first_backup_says_what_stands(tmp_path, monkeypatch):
    bell = Bell()

    def ring():
        monkeypatch.setattr(RunSaver, "save", fail)
        bell.ring()

    def fail(*_, **__):
        raise CheckpointWriteError("state", OSError(errno.EIO, "Input/output error"))

    monkeypatch.chdir(tmp_path)
    mine = callback(bell, save_freq=None)
    build().fit(epochs=2, callbacks=[mine, At("batch", 0, 2, ring)], **DATA)
    (stop,) = events("preempted")
    assert stop["outcome"].startswith("not saved: ")
    assert stop["outcome"].endswith("is unchanged; there is no backup, and a restart begins anew")
