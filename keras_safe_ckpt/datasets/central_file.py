"""The file of a `CentralH5Writer`: what the feeders say is taken into it, each row once.

It works until the file ``closed`` is there, then it drains all streams and publishes; or until the
program is gone that wanted it, then it leaves what is in the streams to the next one.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_safe_ckpt.datasets.feed_folder import FeedFolder
from keras_safe_ckpt.datasets.frames import Message
from keras_safe_ckpt.datasets.growing_file import GrowingFile
from keras_safe_ckpt.datasets.rows import fitted, is_text
from keras_safe_ckpt.datasets.spool import SpoolReader, segment_name, segments_of, streams_in
from keras_safe_ckpt.errors import CheckpointWriteError, CorruptCheckpointError
from keras_safe_ckpt.storage.error_facts import as_facts
from keras_safe_ckpt.storage.temp_names import owner_of

_log = logging.getLogger(__name__)

#: A commit comes after so much of one stream, half of what its feeder may be ahead, or so long
#: after the first row that is not committed.
_COMMIT_BYTES = 32 << 20
_COMMIT_SECONDS = 1.0
#: How much of one stream is taken before the next one has its turn.
_TURN_BYTES = 4 << 20
_FIRST_PAUSE_SECONDS = 0.001
_LAST_PAUSE_SECONDS = 0.02
#: How long to wait at the end for a feeder in the middle of an append.
_LAST_WORDS_SECONDS = 5.0


@dataclass
class _Stream:
    """What is known of one feeder."""

    reader: SpoolReader
    reply: dict[str, Any] = field(default_factory=lambda: {"committed": 0, "asked": {}})
    is_changed: bool = False


class CentralFile:
    """The file, and the streams that are taken into it.

    Whoever makes one holds the exclusive lock on ``target``; ``has_left()`` says whether the
    program is gone for which this is done.
    """

    def __init__(self, target: Path, has_left: Callable[[], bool]) -> None:
        self._has_left = has_left
        self._folder = FeedFolder(target)
        self._file = GrowingFile(target, resume=True)
        self._streams: dict[str, _Stream] = {}
        self._uncommitted = 0
        self._since = 0.0
        self._is_urgent = False
        for name, (position, reply) in json.loads(self._file.note or b"{}").items():
            self._add(name, *position)
            # The one before may have been killed after the commit, before it said so.
            self._streams[name].reply = reply
            self._folder.answer(name, reply)
        self._folder.remove("trouble")

    def run(self) -> bool:
        """Work until it is closed (True), or the program is gone (False)."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            # In this order: what was appended before the end was said is found after it.
            is_closed = self._folder.has("closed")
            is_left = not is_closed and self._has_left()
            moved = self._turn()
            if self._is_due():
                self._commit()
            if is_left:
                self._commit()  # The rest is for the next one: its feeders may go on for ever.
                return False
            if moved:
                pause = _FIRST_PAUSE_SECONDS
                continue
            if is_closed:
                self._hear_last_words()
                self._commit()
                return True
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_SECONDS)

    def publish(self) -> None:
        self._folder.say_drained()
        self._file.publish()
        self._folder.clear()

    def close(self) -> None:
        """Let go of everything: rows that are not committed are in the streams."""
        self._file.give_up()
        for stream in self._streams.values():
            stream.reader.close()

    def _add(self, name: str, segment: int = 0, offset: int = 0, size: int = 0) -> None:
        self._streams[name] = _Stream(SpoolReader(self._folder.path, name, segment, offset, size))

    def _turn(self) -> bool:
        """Take what each stream has, up to a limit; whether there was anything."""
        for name in streams_in(self._folder.path) - set(self._streams):
            first = min(segments_of(self._folder.path, name), default=0)
            owner = owner_of(name)
            # Of before a restart of the machine it is read from its beginning, which a power cut
            # may have taken: then nothing of it was ever flushed, and the reader says so.
            if first and (owner is None or owner.is_on_this_machine()):
                raise CorruptCheckpointError(
                    self._folder.target,
                    f"the rows of a feeder go on in {segment_name(name, first)}, and the file that "
                    "has those before is gone",
                )
            self._add(name)
        moved = False
        for stream in self._streams.values():
            if not stream.reader.has_more():
                stream.reader.close()  # There may be thousands, and most have nothing to say.
                continue
            begin = stream.reader.size
            while stream.reader.size - begin < _TURN_BYTES:
                message = stream.reader.read()
                if message is None:
                    break
                self._apply(stream, message)
            if stream.reader.size > begin:
                moved = stream.is_changed = True
                if not self._uncommitted:
                    self._since = time.monotonic()
                ahead = stream.reader.size - stream.reply["committed"]
                self._uncommitted = max(self._uncommitted, ahead)
        return moved

    def _apply(self, stream: _Stream, message: Message) -> None:
        if not message.name:
            self._is_urgent = True
            return
        asked: dict[str, Any] = {"size": stream.reader.size, "error": None}
        refusal = None if message.asks else self._refusal(message)
        if refusal is not None:
            # Its feeder took it for certain that these rows fit: it is to hear that.
            _log.warning("%s: rows are left out: %s", self._folder.target, refusal)
            number, _ = stream.reply.get("rejected") or (0, None)
            stream.reply["rejected"] = (number + 1, as_facts(refusal))
            return
        try:
            self._file.append(
                message.name,
                message.rows,
                message.compression,
                message.attributes,
                has_type=message.has_type,
            )
            kind = self._file.tables.kind_of(message.name)
            if kind is not None:
                dtype, shape = kind
                asked |= {"dtype": "text" if is_text(dtype) else dtype.str, "shape": shape}
        except Exception as error:  # not swallowed: its feeder hears it
            if self._file.is_broken or isinstance(error, CheckpointWriteError):
                raise
            if not message.asks or isinstance(error, MemoryError):
                # No fault of the rows: they stay in their stream until there is memory, say.
                cause = f"{type(error).__name__}: {error}"
                raise CheckpointWriteError(self._folder.target, cause) from error
            # HDF5 has limits of its own. To try again would give the same, for ever.
            asked["error"] = as_facts(error)
        if message.asks:
            # The answer comes with the commit: until then another feeder may come before it,
            # should this process be killed.
            stream.reply["asked"] = asked
            self._is_urgent = True

    def _refusal(self, message: Message) -> Exception | None:
        """Why these rows do not fit, if they do not; what else can go wrong is another matter."""
        kind = self._file.tables.kind_of(message.name)
        try:
            if kind is not None:
                fitted(message.name, message.rows, *kind, has_type=message.has_type)
        except (ValueError, TypeError) as error:
            return error
        return None

    def _is_due(self) -> bool:
        return (
            self._is_urgent
            or self._file.is_heavy
            or (
                self._uncommitted > 0
                and (
                    self._uncommitted > _COMMIT_BYTES
                    or time.monotonic() - self._since > _COMMIT_SECONDS
                )
            )
        )

    def _commit(self) -> None:
        note = {}
        for name, stream in self._streams.items():
            stream.reply["committed"] = stream.reader.size
            note[name] = (stream.reader.position, stream.reply)
        self._file.flush(json.dumps(note).encode())
        self._uncommitted, self._is_urgent = 0, False
        for name, stream in self._streams.items():
            if stream.is_changed:
                stream.is_changed = False
                self._folder.answer(name, stream.reply)
                stream.reader.release(stream.reader.segment)
        self._forget_what_is_over()

    def _forget_what_is_over(self) -> None:
        """Of a feeder that has ended, and whose rows are all in the file, nothing is needed."""
        over = []
        for name, stream in self._streams.items():
            owner = owner_of(name)
            if owner is None or not owner.has_ended() or stream.reader.has_more():
                continue
            stream.reader.close()
            stream.reader.release(stream.reader.segment + 1)
            self._folder.remove(f"{name}.reply")
            over.append(name)
        if over:
            # Not before its segments are gone, also after a power cut: with its place forgotten
            # they would be read again.
            self._folder.sync()
        for name in over:
            del self._streams[name]

    def _hear_last_words(self) -> None:
        """Half a frame: if its feeder lives, it is about to be whole."""
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for name, stream in self._streams.items():
            owner = owner_of(name)
            while stream.reader.has_more():
                message = stream.reader.read()
                if message is not None:
                    self._apply(stream, message)
                    stream.is_changed = True
                elif owner is None or owner.has_ended() or time.monotonic() > deadline:
                    _log.warning("%s: its feeder was killed in the middle of an append", name)
                    break
                else:
                    time.sleep(_FIRST_PAUSE_SECONDS)
