"""A process that has imported all, and forks one child for each hostile file.

In the child every reader of its kind gets the file; what came of it goes back as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_files
import numpy as np
from hostile_files import CANARY, SECRET, SECRET_BYTES, Hostile
from snapshots import make_snapshot

from keras_safe_ckpt import (
    CheckpointStore,
    SafeCheckpointError,
    merge_worker_files,
    repair_tfrecord,
    split_tfrecord,
    verify_tfrecord,
)
from keras_safe_ckpt.cli.main import main as command_line
from keras_safe_ckpt.datasets.unfinished import find_unfinished, rescue
from keras_safe_ckpt.storage.survey import Condition, find_checkpoints, look_at

#: Generous: nothing of this takes a second where nothing else runs.
SECONDS = 60
MOST_GROWTH_BYTES = 300 << 20
LONGEST_MESSAGE = 20_000

KINDS: dict[str, dict[str, Hostile]] = {
    "checkpoint": hostile_files.CHECKPOINTS,
    "hdf5": hostile_files.HDF5,
    "journal": hostile_files.JOURNALS,
    "record": hostile_files.RECORDS,
    "bundle": hostile_files.BUNDLES,
    "other": hostile_files.OTHERS,
}


class RefusedError(SafeCheckpointError):
    """It was named as damaged, or the command said no."""


def command(*arguments: object) -> Callable[[Path], None]:
    """A command, whose ``PATH`` and ``FOLDER`` are those of the file."""

    def run(path: Path) -> None:
        places = {"PATH": str(path), "FOLDER": str(path.parent), "OUT": str(path.parent / "out")}
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command_line([places.get(str(one), str(one)) for one in arguments])
        said = out.getvalue() + err.getvalue()
        assert "Traceback" not in said, said
        assert "\x1b" not in said, "it writes on the terminal as it likes"
        assert len(said) < 10 * LONGEST_MESSAGE
        if code:
            raise RefusedError(said)

    return run


def tiny_model() -> Any:
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="dense")])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def load_model(path: Path) -> None:
    format = {".keras": "keras", ".h5": "legacy_h5"}[path.suffix]
    CheckpointStore(path.parent, format=format).load(None, path.name)


def load_weights(path: Path) -> None:
    model = tiny_model()
    before = [np.array(value) for value in model.get_weights()]
    try:
        CheckpointStore(path.parent).load(model, path.name)
    finally:
        assert all(map(np.array_equal, before, model.get_weights())), "half of it was loaded"


def latest(path: Path) -> None:
    store = CheckpointStore(path.parent)
    skipped: list[str] = []
    store.checkpoints(lambda file, reason: skipped.append(reason))
    found = store.latest(lambda file, reason: skipped.append(reason))
    assert all(len(reason) < LONGEST_MESSAGE for reason in skipped)
    if found is None and skipped:
        raise RefusedError(skipped[0])


def look(path: Path) -> None:
    for one in find_checkpoints(path.parent):
        found = look_at(one, verify=True)
        if found.condition is not Condition.WHOLE:
            raise RefusedError(found.reason)


def train_on(path: Path) -> None:
    """What `SafeModelCheckpoint` does with a file that is there when training begins."""
    from keras_safe_ckpt import SafeModelCheckpoint

    model = tiny_model()
    callback = SafeModelCheckpoint(
        str(path), monitor="loss", save_best_only=True, verbose=0,
        save_weights_only=path.name.endswith(".weights.h5"),
    )  # fmt: skip
    x = np.zeros((2, 2), "float32")
    model.fit(x, x, epochs=1, verbose=0, callbacks=[callback])


def resume(path: Path) -> None:
    """What `PreemptionAwareCallback` does with the files of a run."""
    from keras_safe_ckpt import PreemptionAwareCallback

    state = path.parent / "state"
    state.mkdir()
    os.replace(path, state / "run-0000000005.weights.h5")
    model = tiny_model()
    x = np.zeros((2, 2), "float32")
    model.fit(x, x, epochs=1, verbose=0, callbacks=[PreemptionAwareCallback(str(state))])


def merge(**options: Any) -> Callable[[Path], None]:
    return lambda path: merge_worker_files([path], path.parent / "out.h5", **options) and None


def recover(path: Path) -> None:
    left = path
    if not path.name.startswith("."):
        left = path.with_name(f".{path.name}.interrupted")
        os.link(path, left)
    found = find_unfinished(path.parent)
    if left != path:
        left.unlink()
    for one in found:
        if one.damage:
            raise RefusedError(one.damage)


def locked_dataset(path: Path) -> None:
    import tensorflow as tf

    from keras_safe_ckpt import locked_tfrecord_dataset

    try:
        for number, _ in enumerate(locked_tfrecord_dataset([str(path)])):
            assert number < 100_000
    except tf.errors.OpError as error:
        raise RefusedError(str(error)) from error  # TensorFlow reads, and says it in its words.


def bundle_path(path: Path) -> str:
    return str(path.with_name("ckpt-1"))


READERS: dict[str, dict[str, Callable[[Path], None]]] = {
    "checkpoint": {
        "verify": lambda path: CheckpointStore(path.parent).verify(path.name) and None,
        "latest": latest,
        "look": look,
        "show": command("show", "PATH"),
        "ls": command("ls", "FOLDER"),
        "verify command": command("verify", "FOLDER"),
        "diff": command("diff", "PATH", "PATH"),
        "prune": command("prune", "FOLDER", "--max-to-keep", "1"),
    },
    "hdf5": {
        "merge": merge(),
        "merge virtual": merge(how="virtual"),
        "merge sorted": merge(sort_key="t"),
        "merge last axis": merge(axis=-1),
        "merge command": command("merge", "FOLDER", "-o", "OUT"),
        "recover": recover,
    },
    "journal": {
        "recover": recover,
        "rescue": lambda path: rescue(path, path.parent / "out.h5") and None,
        "recover command": command("recover", "FOLDER"),
    },
    "record": {
        "verify_tfrecord": lambda path: verify_tfrecord(path) and None,
        "repair": lambda path: repair_tfrecord(path, path.parent / "out") and None,
        "split": lambda path: split_tfrecord(path, path.parent / "part", 2) and None,
        "verify command": command("tfrecord", "verify", "PATH"),
        "repair command": command("tfrecord", "repair", "PATH", "--out", "OUT"),
    },
    "bundle": {
        "look": look,
        "verify bundle": lambda path: command("verify", bundle_path(path))(path),
        "show bundle": lambda path: command("show", bundle_path(path))(path),
        "diff bundle": lambda path: command("diff", bundle_path(path), bundle_path(path))(path),
        "ls": command("ls", "FOLDER"),
    },
    "other": {
        "ls": command("ls", "FOLDER"),
        "locks": command("locks", "FOLDER"),
        "report": command("report", "FOLDER", "-o", "OUT"),
        "latest": latest,
    },
}

#: These need TensorFlow.
READERS_WITH_KERAS: dict[str, dict[str, Callable[[Path], None]]] = {
    "checkpoint": {"load_model": load_model, "load_weights": load_weights},
    "record": {"locked dataset": locked_dataset},
    "training": {"train": train_on, "resume": resume},
}


#: The others use the same code in other ways: in the campaign.
FEW = (
    "verify", "look", "show", "load_model", "load_weights", "merge", "merge virtual",
    "merge sorted", "recover", "rescue", "verify_tfrecord", "repair", "split", "verify bundle",
    "show bundle", "locks", "report", "locked dataset", "train", "resume",
)  # fmt: skip


@functools.cache
def watch() -> list[str]:
    """What must not happen, by the events that Python tells of itself."""
    seen: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn"):
            seen.append(f"{event} {arguments!r:.200}")
        elif event == "open" and str(arguments[0]).endswith(f"/{SECRET}"):
            seen.append(f"read {arguments[0]}")

    sys.addaudithook(hook)
    load = np.load

    def careful(*arguments: Any, **options: Any) -> Any:
        if options.get("allow_pickle"):
            seen.append("np.load(allow_pickle=True)")
        return load(*arguments, **options)

    np.load = careful
    return seen


def attack(hostile: Hostile, readers: dict[str, Callable[[Path], None]], folder: Path) -> Any:
    """In the child: what each of the readers made of the file."""
    signal.alarm(SECONDS)
    (folder / SECRET).write_bytes(SECRET_BYTES)
    made = folder / "made"
    made.mkdir()
    hostile.make(made / hostile.name)
    seen = watch()
    outcomes = {}
    for number, (name, read) in enumerate(readers.items()):
        place = folder / f"run{number}"
        copied(made, place)
        path = place / hostile.name
        gc.collect()
        # From here on; the making of the file counts for nobody.
        Path("/proc/self/clear_refs").write_text("5")
        before, began = _peak(), time.monotonic()
        seen.clear()
        outcome: dict[str, Any] = {"refused": None, "wrong": []}
        try:
            read(path)
        except SafeCheckpointError as error:
            outcome["refused"] = type(error).__name__
            if len(str(error)) > LONGEST_MESSAGE:
                outcome["wrong"].append(f"a message of {len(str(error)):,} letters")
        except BaseException:  # noqa: BLE001  # Whatever it is, it is the finding.
            outcome["wrong"].append(traceback.format_exc()[-3000:])
        outcome["seconds"] = time.monotonic() - began
        outcome["growth"] = _peak() - before
        if outcome["growth"] > MOST_GROWTH_BYTES:
            outcome["wrong"].append(f"{outcome['growth']:,} bytes of memory")
        outcome["wrong"] += seen
        if (folder / CANARY).exists():
            outcome["wrong"].append("what is in the file was executed")
        for out in place.iterdir():
            if out.name.startswith("out") and out.is_file() and SECRET_BYTES in out.read_bytes():
                outcome["wrong"].append("a file of elsewhere was copied")
        outcomes[name] = outcome
    return outcomes


def copied(source: Path, target: Path) -> None:
    """As they are: pipes, links, and files of which little is on the disk."""
    command = ["cp", "-a", "--sparse=always", str(source), str(target)]
    pid = os.posix_spawnp("cp", command, os.environ)
    assert os.waitpid(pid, 0)[1] == 0


def _peak() -> int:
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
    ]
    return int(line.split()[1]) << 10


def forked(work: Callable[[], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What a child makes of it; how it ended if it did not come to its end."""
    out, last = folder / "out", folder / "last"
    pid = os.fork()
    if not pid:
        try:
            # Not more than the machine has, should a bound be missing.
            resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
            out.write_text(json.dumps(work()))
        except BaseException:  # noqa: BLE001  # Told by the parent.
            wrong = {"child": {"refused": None, "wrong": [traceback.format_exc()]}}
            out.write_text(json.dumps({last.read_text(): wrong}))
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        wrong = {"refused": None, "wrong": [f"it was ended by signal {-code}"]}
        return {last.read_text(): {"child": wrong}}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def run(asked: list[str], table: dict[str, Any], folder: Path, few: bool) -> dict[str, Any]:
    """The readers of the table that there are for each file."""
    results: dict[str, Any] = {}
    for number, one in enumerate(asked):
        kind, _, name = one.partition(":")
        hostile = KINDS["checkpoint" if kind == "training" else kind][name]
        readers = {
            reader: read
            for reader, read in table.get(kind, {}).items()
            if (reader in FEW or not few)
            and reader not in hostile.crashes
            # There is no model in weights, and to ask for one is the fault of who asks.
            and not (reader == "load_model" and hostile.name.endswith(".weights.h5"))
        }
        if readers:
            (folder / "last").write_text(one)
            place = folder / str(number)
            shutil.rmtree(place, ignore_errors=True)  # Of a child that was ended.
            place.mkdir()
            results[one] = attack(hostile, readers, place)
            shutil.rmtree(place)
    return results


def rehearse(folder: Path) -> None:
    """Have imported what the commands import on their way, for all children."""
    place = folder / "rehearsal"
    store = CheckpointStore(place)
    path = store.directory / "a.weights.h5"
    store.publish(make_snapshot(size=3), step=1, name=path.name)
    for name in ("look", "show", "ls", "verify command", "diff"):
        READERS["checkpoint"][name](path)
    for name in ("locks", "report"):
        READERS["other"][name](path)
    shutil.rmtree(place)


def main() -> None:
    folder, amount, *asked = Path(sys.argv[1]), *sys.argv[2:]
    rehearse(folder)
    gc.freeze()
    results: dict[str, dict[str, Any]] = {one: {} for one in asked}
    for one in asked:
        # A child each: without TensorFlow it is forked in no time.
        found = forked(lambda o=one: run([o], READERS, folder, amount == "few"), folder)
        for file, outcomes in found.items():
            results[file].update(outcomes)
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    # With it, one for all.
    gc.collect()
    gc.freeze()
    found = forked(lambda: run(asked, READERS_WITH_KERAS, folder, amount == "few"), folder)
    for file, outcomes in found.items():
        results[file].update(outcomes)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
