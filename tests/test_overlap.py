"""Blocks are written in order on another thread, and no error is lost."""

from __future__ import annotations

import threading

import pytest
from processes import run_ok, writing_threads

from keras_safe_ckpt.storage.overlap import OverlappedWriter


class Written:
    """A sink that remembers; the block that holds ``fails_at`` fails, and it waits for ``gate``."""

    def __init__(self, fails_at: int = -1) -> None:
        self.blocks: list[tuple[int, bytes]] = []
        self.closed = 0
        self.gate = threading.Event()
        self.gate.set()
        self._fails_at = fails_at

    def write(self, offset: int, block: memoryview) -> None:
        assert self.gate.wait(30)
        if block[0] == self._fails_at:
            raise OSError("disk full")
        self.blocks.append((offset, bytes(block)))

    def close(self) -> None:
        self.closed += 1


def write_numbers(writer: OverlappedWriter, count: int) -> None:
    for number in range(count):
        writer.write(10 * number, memoryview(bytes([number])))


def test_blocks_arrive_in_order():
    sink = Written()
    writer = OverlappedWriter(sink)
    write_numbers(writer, 100)
    writer.drain()
    assert sink.blocks == [(10 * number, bytes([number])) for number in range(100)]
    writer.close()
    assert sink.closed == 1
    assert writing_threads() == []


def test_caller_goes_on_while_a_block_is_written_and_has_the_one_before_back():
    sink = Written()
    sink.gate.clear()
    writer = OverlappedWriter(sink)
    writer.write(0, memoryview(b"a"))
    assert sink.blocks == []  # It returned all the same.
    threading.Timer(0.05, sink.gate.set).start()
    writer.write(1, memoryview(b"b"))
    assert sink.blocks[:1] == [(0, b"a")]
    writer.close()
    assert sink.blocks == [(0, b"a"), (1, b"b")]


def test_error_is_raised_by_the_next_call_and_nothing_follows():
    sink = Written(fails_at=3)
    writer = OverlappedWriter(sink)
    with pytest.raises(OSError, match="disk full"):
        write_numbers(writer, 100)
    with pytest.raises(OSError, match="disk full"):
        writer.write(0, memoryview(b"\x05"))
    with pytest.raises(OSError, match="disk full"):
        writer.drain()
    writer.close()
    assert [block[0] for _, block in sink.blocks] == [0, 1, 2]
    assert sink.closed == 1


def test_writer_that_nobody_ends_does_not_keep_the_program_alive():
    """As after a Ctrl-C at the wrong moment."""
    code = """
from keras_safe_ckpt.storage.overlap import OverlappedWriter
class Sink:
    def write(self, offset, block): pass
    def close(self): pass
OverlappedWriter(Sink()).write(0, memoryview(b"x"))
print("end")
"""
    assert run_ok(code, timeout=30) == "end\n"


def test_without_a_thread_it_writes_at_once(monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    sink = Written()
    writer = OverlappedWriter(sink)
    writer.write(7, memoryview(b"a"))
    assert sink.blocks == [(7, b"a")]
    writer.drain()
    writer.close()
    assert sink.closed == 1
