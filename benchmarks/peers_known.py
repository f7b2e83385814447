"""Who is compared: ours, Keras's, TensorFlow's and Orbax's, and how each saves and restores."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Peer:
    """``against`` is the one of ours that it is compared with; None for ours."""

    name: str
    kind: str  # "callback", "manager" or "guard"
    against: str | None = None

    @property
    def ours(self) -> bool:
        return self.against is None


SAFE, AWARE = "SafeModelCheckpoint", "PreemptionAwareCallback"
SAFE_MANAGER, GUARD = "SafeCheckpointManager", "PreemptionGuard"
KERAS, ORBAX = "ModelCheckpoint", "OrbaxCheckpoint"
BACKUP, DOUBLE = "BackupAndRestore", "BackupAndRestore(double_checkpoint=True)"
MANAGER, HANDLER = "CheckpointManager", "PreemptionCheckpointHandler"

PEERS = (
    Peer(SAFE, "callback"),
    Peer(KERAS, "callback", SAFE),
    Peer(ORBAX, "callback", SAFE),
    Peer(AWARE, "callback"),
    Peer(BACKUP, "callback", AWARE),
    Peer(DOUBLE, "callback", AWARE),
    Peer(SAFE_MANAGER, "manager"),
    Peer(MANAGER, "manager", SAFE_MANAGER),
    Peer(GUARD, "guard"),
    Peer(HANDLER, "guard", GUARD),
)
#: These restore by themselves, when `fit` begins.
RESUMING = (AWARE, BACKUP, DOUBLE)


def left_out() -> dict[str, str]:
    """Who cannot be compared here, and why."""
    try:
        found = importlib.util.find_spec("orbax.checkpoint")
    except ModuleNotFoundError:
        found = None
    reason = 'orbax-checkpoint is not installed (pip install "keras_safe_ckpt[benchmark]")'
    return {} if found else {ORBAX: reason}


def kind_of(name: str) -> str:
    return next(peer.kind for peer in PEERS if peer.name == name)


def of_kind(names: Iterable[str], *kinds: str) -> list[str]:
    """Those of them that are of one of these kinds, in the order of the tables."""
    wanted = set(names)
    return [peer.name for peer in PEERS if peer.name in wanted and peer.kind in kinds]


def make_callback(name: str, folder: Path, file: str = "m.weights.h5") -> Any:
    """It writes weights and optimizer to ``folder``, which is its own, after each epoch."""
    import keras

    from keras_safe_ckpt import PreemptionAwareCallback, SafeModelCheckpoint

    theirs = keras.callbacks
    makers: dict[str, Callable[[], Any]] = {
        SAFE: lambda: SafeModelCheckpoint(folder / file, save_weights_only=True),
        AWARE: lambda: PreemptionAwareCallback(folder, verbose=0),
        KERAS: lambda: theirs.ModelCheckpoint(folder / file, save_weights_only=True),
        # Its save_weights_only would leave the optimizer out, which the others save.
        ORBAX: lambda: theirs.OrbaxCheckpoint(os.fspath(folder)),
        BACKUP: lambda: theirs.BackupAndRestore(os.fspath(folder)),
        DOUBLE: lambda: theirs.BackupAndRestore(os.fspath(folder), double_checkpoint=True),
    }
    return makers[name]()


def make_manager(name: str, checkpoint: Any, folder: Path) -> Any:
    import tensorflow as tf

    from keras_safe_ckpt import SafeCheckpointManager

    kind = SafeCheckpointManager if name in (SAFE_MANAGER, GUARD) else tf.train.CheckpointManager
    return kind(checkpoint, os.fspath(folder), max_to_keep=1)


def load_by_hand(name: str, model: Any, folder: Path, file: str = "m.weights.h5") -> None:
    """What a program does that wants to go on from what a callback has saved."""
    from keras_safe_ckpt import SafeModelCheckpoint

    if name == SAFE:
        SafeModelCheckpoint.load_latest(folder / file, model)
    else:
        model.load_weights(folder if name == ORBAX else folder / file)


def saves_logged(folder: Path) -> int:
    """How many saves of ours are durable: each is logged when it is."""
    from keras_safe_ckpt.storage.events import EventLog

    return sum(event["event"] == "save" for event in EventLog(folder).read())


def finish(name: str, callback: Any, folder: Path, logged: int) -> None:
    """Wait for what a callback has left to the background; ``logged`` saves were before."""
    if name == ORBAX:
        callback.wait_until_finished()
    elif name in (SAFE, AWARE):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while saves_logged(folder) == logged:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} has not saved within {PATIENCE_SECONDS:g} s")
            time.sleep(2e-4)


def sync_what_it_left(name: str, folder: Path) -> None:
    """The fsync of files and directories that the others leave out, or a part of it."""
    if name in (SAFE, AWARE, SAFE_MANAGER):
        return
    for parent, _, files in os.walk(folder, topdown=False):
        for path in [*(Path(parent, file) for file in files), Path(parent)]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


class StoppedError(Exception):
    """Raised in a hook, so that a `fit` ends as if the program had crashed."""


@contextmanager
def hooks_wrapped(**wrappers: Callable[..., Any]) -> Iterator[None]:
    """Keras calls ``wrapper(hook, *arguments)`` in place of a hook of its list of callbacks.

    The list, not a callback: one of ours stands at its head and at its end. A `StoppedError` of
    a wrapper ends the `fit`, and the block.
    """
    import keras

    kind = keras.callbacks.CallbackList
    before = {name: getattr(kind, name) for name in wrappers}

    def replaced(hook: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: Any, *arguments: Any) -> Any:
            return wrapper(lambda: hook(self, *arguments), *arguments)

        return called

    for name, wrapper in wrappers.items():
        setattr(kind, name, replaced(before[name], wrapper))
    try:
        yield
    except StoppedError:
        pass
    finally:
        for name, hook in before.items():
            setattr(kind, name, hook)
