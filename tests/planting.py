"""Plant a symbolic link at each path that an operation writes, and look whether it is followed.

What an operation writes is seen by strace in a run that nobody disturbs. Names of temporary files
are the same in each run (`planted_names`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import planted_names
from crash_scenes import Scene
from file_calls import Call, read_log
from warm import Trial, warm_process
from written_scenes import WRITTEN

#: Those by which a name comes to be, or by which what is behind it can change.
_NAMING = ("open", "openat", "creat", "mkdir", "mkdirat", "rename", "renameat", "renameat2")
_NAMING += ("link", "linkat", "symlink", "symlinkat", "mknod", "mknodat", "truncate")
#: Of a mode.
_MODES = ("chmod", "fchmod", "fchmodat", "umask")
TRACED = ("-xx", "-s", "4096", "-e", "signal=none", "-e", f"trace={','.join(_NAMING + _MODES)}")
_WRITING = re.compile(r"O_(WRONLY|RDWR|CREAT|TRUNC)")

SETUP = """
import planting
planting.make_ready(int(sys.argv[3], 8))
scene, folder = planting.WRITTEN[sys.argv[2]], planting.Path(sys.argv[1])
"""
TELL = "planting.tell(scene, folder)"

#: A process is traced some microseconds after strace says so, and a short operation may be over.
_MOST_ATTEMPTS = 10

Prepare = Callable[[Path], object]


# In the process of the trial.


def make_ready(umask: int) -> None:
    os.umask(umask)
    planted_names.count_names()
    # Interpreters that are started from here find their `sitecustomize` there.
    sys.path.insert(0, str(Path(__file__).parent / "counted_names"))


def tell(scene: Scene, folder: Path) -> None:
    """Do all of it, and print what came of it."""
    error = None
    os.close(os.open(os.devnull, os.O_RDONLY))  # Seen in the log: so all that follows is.
    try:
        context = scene.ready(folder)
        scene.act(context)
        scene.finish(context)
    except BaseException as raised:  # noqa: BLE001  # Of whatever kind: the test judges.
        error = {"kinds": [kind.__name__ for kind in type(raised).__mro__], "text": str(raised)}
    print(json.dumps({"error": error}), flush=True)


# On the side of a test.


def rehearse(name: str, folder: Path, prepare: Prepare) -> None:
    """Undisturbed, for what is imported on the way."""
    folder.mkdir(parents=True)
    prepare(folder)
    done = warm_process().rehearse(TELL, folder, name, "022", setup=SETUP)
    assert (done.code, _error(done)) == (0, None), done.err


def watch(name: str, folder: Path, prepare: Prepare, umask: str = "022") -> list[Call]:
    """Undisturbed: the calls that make names, or change modes, in the folder."""
    if not warm_process().knows(TELL, SETUP):
        rehearse(name, folder.with_name(f"{folder.name}-rehearsal"), prepare)
    place, log = folder / "place", folder / "log"
    inside = os.path.realpath(place)
    for _ in range(_MOST_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        place.mkdir(parents=True)
        prepare(place)
        done = warm_process().run(TELL, place, name, umask, setup=SETUP, watched=TRACED)
        assert (done.code, _error(done)) == (0, None), done.err
        log.write_text(done.log)
        calls = list(read_log(log))
        # It is of the whole process: what other threads make meanwhile would be open to all.
        assert not any(call.name == "umask" for call in calls)
        if any(os.devnull in _named(call) for call in calls):
            return [call for call in calls if any(_is_in(p, inside) for p in _named(call))]
    raise AssertionError("strace never saw the beginning")


class Written(NamedTuple):
    """A path below the folder of an operation, and whether it is a directory."""

    path: Path
    is_directory: bool


def written_in(calls: list[Call], folder: Path) -> tuple[list[Written], int]:
    """All that is written; and how many more there are in folders that nobody else has.

    Those are made by a `mkdir` that fails if there is anything, and only their owner can write into
    them: nobody can plant anything there before.
    """
    inside = os.path.realpath(folder)
    found: dict[Written, None] = {}
    for call in calls:
        if call.name in ("open", "openat") and not _WRITING.search(call.arguments):
            continue
        if call.name not in _NAMING or not _is_in(path := _named(call)[-1], inside):
            continue
        is_directory = "mkdir" in call.name or ("rename" in call.name and Path(path).is_dir())
        found[Written(Path(os.path.relpath(path, inside)), is_directory)] = None
    outer = [one for one in found if not planted_names.is_below_one(one.path)]
    return outer, len(found) - len(outer)


def _named(call: Call) -> list[str]:
    if call.name == "fchmod":
        return [path for _, path in call.files()]
    return call.paths()


def _is_in(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")


class Outside:
    """What no link may lead to: a file, a directory with one, and a name that is free."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "directory").mkdir(parents=True)
        for path in (folder / "victim", folder / "directory" / "victim"):
            path.write_bytes(b"precious")
            path.chmod(0o640)
        self._before = self._state()

    def goals(self, is_directory: bool) -> dict[str, Path]:
        """Where links lead, by kind."""
        kinds = {"file": self.folder / "victim", "nothing": self.folder / "free"}
        return {**kinds, "directory": self.folder / "directory"} if is_directory else kinds

    def changes(self) -> list[str]:
        after = self._state()
        both = {*self._before, *after}
        return sorted(name for name in both if self._before.get(name) != after.get(name))

    def _state(self) -> dict[str, tuple[object, ...]]:
        state: dict[str, tuple[object, ...]] = {}
        for path in [self.folder, *self.folder.rglob("*")]:
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            name = str(path.relative_to(self.folder))
            state[name] = (status.st_mode, status.st_mtime_ns, status.st_uid, content)
        return state


class Outcome(NamedTuple):
    failed: bool
    wrong: list[str]


def plant(name: str, written: Written, kind: str, folder: Path, prepare: Prepare) -> Outcome:
    """The operation with a link in its way."""
    outside = Outside(folder / "outside")
    place = folder / "place"
    place.mkdir()
    prepare(place)
    link = place / written.path
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    link.symlink_to(outside.goals(written.is_directory)[kind])
    done = warm_process().run(TELL, place, name, "022", setup=SETUP)
    wrong = [f"{changed} outside was changed" for changed in outside.changes()]
    if done.code != 0:
        return Outcome(True, [*wrong, f"ended with {done.code}: {done.err[-2000:]}"])
    error = _error(done)
    if error is None:
        seen, scene = WRITTEN[name].look(place), WRITTEN[name]
        if seen not in (scene.new, scene.new_again, *scene.as_good):
            wrong.append(f"no error, and there is {seen!r}")
    elif "SafeCheckpointError" not in error["kinds"]:
        wrong.append(f"not of the tree: {error['kinds'][0]}: {error['text']}")
    elif not any(text in error["text"] for text in _names_of(link)):
        wrong.append(f"does not name it: {error['text']}")
    return Outcome(error is not None, wrong)


def _names_of(link: Path) -> list[str]:
    """What may be said for it: of a temporary name, which nobody chooses, what it is made for."""
    if ".kscktmp" not in link.name:
        return [str(link)]
    folder = link.parent
    if folder.name.endswith(".feeds"):
        return [str(folder.with_name(folder.name[1:].removesuffix(".feeds")))]
    target = link.name[1:].rpartition(".kscktmp")[0].rpartition(".")[0]
    if target == "probe":
        return [str(folder)]
    if target == "checkpoint":  # TensorFlow's list of what is there, renewed for a new one.
        return [str(folder / "ckpt")]
    for side in (".unfinished.journal", ".records"):
        if target.endswith(side):
            target = target[1:].removesuffix(side)
    return [repr(str(folder / target))]


def _error(done: Trial) -> dict[str, Any] | None:
    assert done.out, done.err
    error: dict[str, Any] | None = json.loads(done.out.splitlines()[-1])["error"]
    return error


class Tally(NamedTuple):
    """How many paths and links there were, how many were refused, how many nobody can plant."""

    paths: int
    links: int
    refused: int
    closed: int

    def __str__(self) -> str:
        return (
            f"{self.links} links at {self.paths} paths, none followed: {self.refused} refused, "
            f"{self.links - self.refused} in nobody's way ({self.closed} more paths are in "
            "folders that nobody else can have)"
        )


def check_links(
    name: str, folder: Path, *, prepare: Prepare | None = None, kinds: int | None = None
) -> Tally:
    """Links at all paths, of all kinds; or of so many ``kinds`` at each, in turn."""
    prepare = prepare or WRITTEN[name].prepare
    watched = folder / "watched"
    paths, closed = written_in(watch(name, watched, prepare), watched / "place")
    links, refused, wrong = 0, 0, []
    for number, written in enumerate(paths):
        every = [*(["directory"] if written.is_directory else []), "file", "nothing"]
        first = 0 if written.is_directory else number % len(every)
        for kind in (every[first:] + every[:first])[:kinds]:
            outcome = plant(name, written, kind, folder / f"{number}-{kind}", prepare)
            links += 1
            refused += outcome.failed
            wrong += [f"{written.path}, a link to a {kind}: {text}" for text in outcome.wrong]
    assert not wrong, f"{len(wrong)} of {links}:\n" + "\n".join(wrong)
    return Tally(len(paths), links, refused, closed)
