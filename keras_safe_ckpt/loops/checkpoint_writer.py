"""From a `tf.train.Checkpoint` to files in a directory: numbered, written and published."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_safe_ckpt.errors import CheckpointWriteError
from keras_safe_ckpt.loops.file_errors import file_errors
from keras_safe_ckpt.loops.save_counter import SaveCounter
from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.family import Family, Keep
from keras_safe_ckpt.storage.bundles.staging import StagedBundle, stage, taking_part
from keras_safe_ckpt.storage.room import ensure_room
from keras_safe_ckpt.storage.writer import BackgroundWriter

_log = logging.getLogger(__name__)

#: TensorFlow does not say that threads may write one checkpoint at the same time.
_turns: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_turns_made = threading.Lock()

_Callbacks = list[Callable[..., object]]


class CheckpointWriter:
    """Writes one checkpoint after the other; ``shown(bundle)`` is what the user calls one."""

    def __init__(
        self,
        checkpoint: Any,
        place: BundleDirectory,
        family: Family,
        keep: Keep,
        shown: Callable[[Bundle], str],
    ) -> None:
        self._checkpoint = checkpoint
        self._place = place
        self._family = family
        self._keep = keep
        self._shown = shown
        self._counter = SaveCounter(checkpoint)
        self._writer = BackgroundWriter()
        self._last_bytes = 0
        self._in_flight: StagedBundle | None = None
        self._error: Exception | None = None

    def turn(self) -> threading.RLock:
        """To be held while one writes the checkpoint, through whatever writer."""
        with _turns_made:
            return _turns.setdefault(self._checkpoint, threading.RLock())

    def take_part(self, options: Any) -> None:
        """What the workers do that are not the chief: nobody is to see what they write."""
        self._counter.set(self._counter.value() + 1)
        own, _ = _without_callbacks(options)
        with taking_part(self._place.path) as prefix, file_errors(prefix, str(self._place.path)):
            self._checkpoint.write(prefix, options=own)
            if _is_async(own):
                self._checkpoint.sync()  # The folder does not stay.

    def write(self, number: int | None, options: Any) -> str:
        """Under this number, or under the next that is free; returns what the user calls it."""
        self.finish()
        counted = self._counter.value() + 1
        ensure_room(self._place.path / self._family.base, self._last_bytes)
        exactly = None if number is None else f"{self._family.base}-{number}"
        own, callbacks = _without_callbacks(options)
        with contextlib.ExitStack() as cleaning:
            staged = cleaning.enter_context(
                stage(self._place, self._family, counted, exactly=exactly)
            )
            self._counter.set(counted if exactly else self._family.number(staged.name))
            target = Bundle(self._place.path, staged.name)
            if _is_async(own):
                # TensorFlow calls it on its thread, when it has written.
                own.experimental_write_callbacks = [
                    lambda: self._publish_in_background(staged, callbacks)
                ]
            with self._place.events.waiting(file=staged.name):
                with file_errors(staged.prefix, target.prefix):
                    self._checkpoint.write(staged.prefix, options=own)
                cleaning.pop_all()
                if _is_async(own):
                    self._in_flight = staged
                else:
                    # A Ctrl-C ends the wait for it, not what is half done.
                    self._writer.run(lambda: self._publish(staged, callbacks))
        return self._shown(target)

    def finish(self) -> None:
        """Wait for what TensorFlow writes in the background, and raise what became of it."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        self._checkpoint.sync()
        error, self._error = self._error, None
        if not in_flight.is_published:
            in_flight.discard()
            error = error or CheckpointWriteError(
                self._shown(Bundle(self._place.path, in_flight.name)),
                "TensorFlow has not written it, and says why at the next save",
            )
        if error is not None:
            raise error

    def _publish_in_background(self, staged: StagedBundle, callbacks: _Callbacks) -> None:
        try:
            self._publish(staged, callbacks)
        except Exception as error:  # noqa: BLE001  # raised by `finish`
            self._error = error
            _log.error("A save in the background failed: %s", error)

    def _publish(self, staged: StagedBundle, callbacks: _Callbacks) -> None:
        bundle = staged.publish(self._keep)
        self._last_bytes = sum(bundle.check().least_sizes())
        path = self._shown(bundle)
        for callback in callbacks:
            callback(path) if inspect.signature(callback).parameters else callback()


def _is_async(options: Any) -> bool:
    return bool(getattr(options, "enable_async", False)) and bool(tf.executing_eagerly())


def _without_callbacks(options: Any) -> tuple[Any, _Callbacks]:
    """The user's callbacks are to hear of the checkpoint where it will be, and when it is there."""
    if options is None:
        return None, []
    own = copy.copy(options)
    callbacks = list(own.experimental_write_callbacks or [])
    own.experimental_write_callbacks = None
    return own, callbacks
