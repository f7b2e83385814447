"""The background writer alone: one at a time, no error lost, nothing left behind."""

from __future__ import annotations

import copy
import threading

import pytest

from keras_safe_ckpt.storage.writer import BackgroundWriter


def boom() -> None:
    raise OSError("disk full")


def test_error_is_raised_once():
    writer = BackgroundWriter()
    writer.submit(boom)
    with pytest.raises(OSError, match="disk full"):
        writer.wait()
    writer.wait()


def test_error_can_be_asked_for_without_waiting():
    writer, go = BackgroundWriter(), threading.Event()
    writer.submit(lambda: go.wait(60))
    assert writer.busy
    writer.raise_error()
    go.set()
    writer.wait()
    assert not writer.busy
    writer.submit(boom)
    while writer.busy:
        threading.Event().wait(0.001)
    with pytest.raises(OSError, match="disk full"):
        writer.raise_error()


def test_no_idle_thread_is_kept():
    before = threading.active_count()
    writers = [BackgroundWriter() for _ in range(20)]
    for writer in writers:
        writer.submit(lambda: None)
    for writer in writers:
        writer.wait()
    assert threading.active_count() == before


def test_what_was_saved_is_released():
    import weakref

    class Big:
        pass

    big = Big()
    watcher = weakref.ref(big)
    writer = BackgroundWriter()
    writer.submit(lambda big=big: None)
    del big
    writer.wait()
    assert watcher() is None


def test_thread_that_cannot_start_is_reported_at_once(monkeypatch):
    writer = BackgroundWriter()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            writer.submit(boom)
    writer.wait()
    done: list[int] = []
    writer.submit(lambda: done.append(1))
    writer.wait()
    assert done == [1]


def test_copy_has_nothing_pending():
    writer, go = BackgroundWriter(), threading.Event()
    writer.submit(lambda: go.wait(60))
    twin = copy.deepcopy(writer)
    assert not twin.busy
    twin.wait()
    go.set()
    writer.wait()


@pytest.mark.parametrize("started", [True, False])
def test_interrupt_while_a_save_is_started_leaves_nobody_waiting(monkeypatch, started):
    """Whether it ran or not is decided when `wait` returns, and does not change later."""
    real = threading.Thread.start

    def interrupted(thread):
        if started:
            real(thread)
        raise KeyboardInterrupt

    for _ in range(20):
        writer, ran = BackgroundWriter(), []
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.submit(lambda ran=ran: ran.append(1))
        writer.wait()
        then = len(ran)
        for thread in threading.enumerate():
            if thread.name.startswith("keras_safe_ckpt"):
                thread.join()
        assert len(ran) == then
        assert started or not ran
