"""Chunks are written in order on another thread, and no error is lost."""

from __future__ import annotations

import threading

import pytest
from processes import run_ok

from keras_safe_ckpt.storage.overlap import OverlappedWriter


def test_chunks_arrive_in_order():
    written: list[bytes] = []
    with OverlappedWriter(lambda chunk: written.append(bytes(chunk))) as writer:
        for number in range(100):
            writer.write(memoryview(bytes([number])))
        writer.drain()
        assert written == [bytes([number]) for number in range(100)]


def test_error_is_raised_by_a_later_call_and_nothing_follows():
    written: list[int] = []

    def write(chunk: memoryview) -> None:
        if chunk[0] == 3:
            raise OSError("disk full")
        written.append(chunk[0])

    def write_all(writer: OverlappedWriter) -> None:
        for number in range(100):
            writer.write(memoryview(bytes([number])))

    with OverlappedWriter(write) as writer:
        with pytest.raises(OSError, match="disk full"):
            write_all(writer)
        with pytest.raises(OSError, match="disk full"):
            writer.drain()
    assert written == [0, 1, 2]


def test_drain_after_the_block_returns():
    with OverlappedWriter(lambda chunk: None) as writer:
        writer.write(memoryview(b"a"))
    writer.drain()
    assert not any(thread.name == "keras_safe_ckpt-write" for thread in threading.enumerate())


def test_writer_that_nobody_ends_does_not_keep_the_program_alive():
    """As after a Ctrl-C between its start and the block."""
    code = """
from keras_safe_ckpt.storage.overlap import OverlappedWriter
OverlappedWriter(lambda chunk: None).__enter__()
print("end")
"""
    assert run_ok(code, timeout=30) == "end\n"


def test_thread_ends_with_the_block():
    with pytest.raises(KeyError), OverlappedWriter(lambda chunk: None):
        raise KeyError
    assert not any(thread.name == "keras_safe_ckpt-write" for thread in threading.enumerate())


def test_without_a_thread_it_writes_at_once(monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    written: list[bytes] = []
    with OverlappedWriter(lambda chunk: written.append(bytes(chunk))) as writer:
        writer.write(memoryview(b"a"))
        assert written == [b"a"]
        writer.drain()
