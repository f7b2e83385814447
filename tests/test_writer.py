"""The background writer alone: one at a time, no error lost, nothing left behind."""

from __future__ import annotations

import copy
import threading

import pytest
from processes import run_ok

from keras_safe_ckpt import CheckpointStore
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


def test_thread_is_waited_for_at_exit_whoever_began_the_save():
    """What a daemon starts is a daemon unless it is told otherwise."""
    writer, kinds = BackgroundWriter(), []
    thread = threading.Thread(
        target=lambda: writer.submit(lambda: kinds.append(threading.current_thread().daemon)),
        daemon=True,
    )
    thread.start()
    thread.join()
    writer.wait()
    assert kinds == [False]


def test_save_begun_by_a_daemon_is_there_when_the_program_has_ended(tmp_path):
    code = """
import threading
store = CheckpointStore(sys.argv[1])
save = lambda: store.publish(snapshot(1, 3_000_000), step=1, background=True)
thread = threading.Thread(target=save, daemon=True)
thread.start()
thread.join()
"""
    run_ok(code, tmp_path)
    assert CheckpointStore(tmp_path).latest().manifest.step == 1


def test_save_begun_while_the_program_ends_is_finished(tmp_path):
    """The interpreter has waited for its threads before it calls what `atexit` knows."""
    code = """
import atexit
store = CheckpointStore(sys.argv[1])
atexit.register(lambda: store.publish(snapshot(1, 3_000_000), step=1, background=True))
"""
    run_ok(code, tmp_path)
    assert CheckpointStore(tmp_path).latest().manifest.step == 1


def test_run_returns_and_raises_what_the_save_does(caplog):
    writer = BackgroundWriter()
    assert writer.run(lambda: 42) == 42
    with pytest.raises(OSError, match="disk full"):
        writer.run(boom)
    writer.wait()  # Raised once.
    assert caplog.records == []  # Whoever gets an exception needs no message.


def test_run_raises_the_error_of_the_save_before_first():
    writer, ran = BackgroundWriter(), []
    writer.submit(boom)
    with pytest.raises(OSError, match="disk full"):
        writer.run(lambda: ran.append(1))
    assert ran == []


@pytest.mark.parametrize("on_main_thread", [True, False])
def test_run_waits_for_the_save_before(on_main_thread):
    writer, order, go = BackgroundWriter(), [], threading.Event()
    writer.submit(lambda: (go.wait(60), order.append("background")))
    threading.Timer(0.05, go.set).start()

    def run() -> None:
        writer.run(lambda: order.append("run"))

    if on_main_thread:
        run()
    else:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert order == ["background", "run"]


def test_run_keeps_the_save_out_of_the_thread_that_signals_interrupt():
    writer = BackgroundWriter()
    assert threading.current_thread() is threading.main_thread()
    assert writer.run(threading.current_thread) is not threading.main_thread()
    # Elsewhere nothing interrupts it, and no thread is needed.
    where: list[bool] = []
    thread = threading.Thread(
        target=lambda: where.append(
            writer.run(threading.current_thread) is threading.current_thread()
        )
    )
    thread.start()
    thread.join()
    assert where == [True]


INTERRUPTED = """
import signal, threading
from keras_safe_ckpt.storage.writer import BackgroundWriter
writer, go = BackgroundWriter(), threading.Event()
def save():
    os.kill(os.getpid(), signal.SIGINT)
    assert go.wait(30)
    if sys.argv[1] == "fails":
        raise OSError("disk full")
    print("saved", flush=True)
try:
    writer.run(save)
except KeyboardInterrupt:
    print("interrupted", flush=True)
go.set()
try:
    writer.wait()
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize(("how", "then"), [("works", "saved"), ("fails", "disk full")])
def test_ctrl_c_ends_the_wait_of_run_and_not_the_save(how, then):
    assert run_ok(INTERRUPTED, how).split("\n") == ["interrupted", then, ""]


def test_error_of_a_run_that_is_interrupted_too_late_is_raised_by_the_next_call():
    class InterruptedAtTheEnd(threading.Event):
        waits = 0

        def wait(self, timeout=None):
            self.waits += 1
            super().wait(30)
            if self.waits == 2:  # The first is for the save before.
                raise KeyboardInterrupt

    writer = BackgroundWriter()
    writer._idle = InterruptedAtTheEnd()
    writer._idle.set()
    with pytest.raises(KeyboardInterrupt):
        writer.run(boom)
    with pytest.raises(OSError, match="disk full"):
        writer.wait()
