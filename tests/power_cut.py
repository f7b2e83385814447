"""A model of a disk that forgets what was not synced, and every state that it may be found in.

It is fed with the system calls of a real process, and takes POSIX by the word:

- What was written to a file since its last fsync has arrived or not, sector by sector, and so has
  its size. Where nothing arrived there are zeros, or what was in that place of the disk before.
- A change of names (made, renamed, linked, removed) is durable when its directory is synced; a
  rename, which is one change, when one of its two directories is. Until then any of the changes
  may have arrived without the others, but for their order for one name. To sync a file does not
  sync its name, and nothing is there without the directory that it is in.

A file system with a journal allows some of these states only; none allows others.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from file_calls import Call, record

from keras_safe_ckpt.storage import atomic, temp_names

#: Where the disk may tear what is written: old disks and new ones.
SECTORS = (512, 4096)


@dataclass(frozen=True)
class Write:
    """``data`` None: the size alone is set (to ``offset``)."""

    offset: int
    data: bytes | None
    begin: int
    end: int


@dataclass
class File:
    """What is on the disk, what is on the way there, and what a process sees."""

    durable: bytes = b""
    live: bytearray = field(default_factory=bytearray)
    pending: list[Write] = field(default_factory=list)
    #: Set by somebody: on the disk, and as a process sees it.
    times: tuple[float | None, float | None] = (None, None)

    def change(self, write: Write) -> None:
        _apply(self.live, write)
        self.pending.append(write)

    def sync(self, begin: int) -> None:
        """Whatever had ended when the sync began."""
        durable = bytearray(self.durable)
        for write in self.pending:
            if write.end < begin:
                _apply(durable, write)
        self.pending = [write for write in self.pending if write.end >= begin]
        self.durable = bytes(durable)
        self.times = (self.times[1], self.times[1])

    def variants(self, rng: random.Random, most: int) -> list[bytes]:
        """What of it may be on the disk, the telling ones first."""
        if not self.pending:
            return [self.durable]
        sizes = self._sizes()
        last, number = len(self.live), len(self.pending)
        everything = [1.0] * number
        found = [self.durable, bytes(self.live)]
        nothing = [0.0] * number
        found += [self._found(nothing, last, rng, fill) for fill in (b"\0", b"")]
        found += [self._found(everything, size, rng) for size in sizes]
        for sector in SECTORS:
            torn = [self._found([0.5] * number, last, rng, fill, sector) for fill in (b"\0", b"")]
            found += torn
        for one in _ends(number):
            found.append(self._found([float(i == one) for i in range(number)], last, rng))
            found.append(self._found([float(i != one) for i in range(number)], last, rng))
        found = list(dict.fromkeys(found))
        while len(found) < most and rng.random() < 0.99:
            arrived = [rng.choice((0.0, 0.3, 0.7, 1.0)) for _ in range(number)]
            fill, sector = rng.choice((b"\0", b"")), rng.choice(SECTORS)
            found.append(self._found(arrived, rng.choice(sizes), rng, fill, sector))
        return list(dict.fromkeys(found))[:most]

    def _sizes(self) -> list[int]:
        sizes, content = [len(self.durable)], len(self.durable)
        for write in self.pending:
            content = (
                write.offset if write.data is None else max(content, write.offset + len(write.data))
            )
            sizes.append(content)
        return list(dict.fromkeys(sizes))

    def _found(
        self,
        arrived: Sequence[float],
        size: int,
        rng: random.Random,
        fill: bytes = b"\0",
        sector: int = 512,
    ) -> bytes:
        """With so much of each write; ``fill`` empty: with what was on the disk before."""
        end = max(self._sizes())
        rest = (
            (fill or b"?") * (end - len(self.durable))
            if fill
            else rng.randbytes(end - len(self.durable))
        )
        content = bytearray(self.durable + rest)
        for write, share in zip(self.pending, arrived, strict=True):
            if write.data is None:
                if share >= 0.5 and write.offset < len(content):
                    content[write.offset :] = bytes(len(content) - write.offset)
                continue
            start = write.offset
            while start < write.offset + len(write.data):
                stop = min((start // sector + 1) * sector, write.offset + len(write.data))
                if share == 1 or rng.random() < share:
                    content[start:stop] = write.data[start - write.offset : stop - write.offset]
                start = stop
        return bytes(content[:size]).ljust(size, b"\0")


@dataclass(frozen=True)
class Naming:
    """One change of names: directory, name, and what it stands for from now on (None: nothing)."""

    entries: tuple[tuple[int, str, int | None], ...]
    begin: int
    end: int
    #: The directory that is gone with it: none with something in it is ever removed.
    removes: int | None = None

    @property
    def keys(self) -> set[tuple[int, str]]:
        return {(directory, name) for directory, name, _ in self.entries}


#: Each path, with the content of a file and its time, or None for a directory.
State = dict[str, tuple[bytes, float | None] | None]


class Disk:
    """Directories and files by their numbers; 0 is the folder that was recorded."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._files: dict[int, File] = {}
        self._live: dict[int, dict[str, int]] = {0: {}}
        self._durable: dict[int, dict[str, int]] = {0: {}}
        self._pending: list[Naming] = []
        #: Where the next `write` of a descriptor goes; None: to the end of the file.
        self._places: dict[tuple[int, int], int | None] = {}
        self._numbers = itertools.count(1)

    def settle(self) -> None:
        """As if all was synced long ago."""
        for file in self._files.values():
            file.durable, file.pending = bytes(file.live), []
            file.times = (file.times[1], file.times[1])
        self._pending = []
        self._durable = {number: dict(names) for number, names in self._live.items()}

    # What a process does.

    def apply(self, call: Call) -> bool:
        """Whether there is something from now on that a cut may lose."""
        return bool(getattr(self, f"_{_KINDS.get(call.name, call.name)}")(call))

    def _open(self, call: Call) -> bool:
        path = call.path
        if not self._is_inside(path) or path == self._root:
            return False
        flags = set(re.findall(r"O_\w+", call.arguments))
        if call.name == "creat":
            flags = {"O_CREAT", "O_TRUNC"}
        parent, name = self._parent(path)
        is_new = name not in self._live[parent]
        if is_new:
            assert "O_CREAT" in flags, f"{path} came from nowhere"
            number = next(self._numbers)
            self._files[number] = File()
            self._rename(((parent, name, number),), call)
        number = self._number(path)
        if number in self._live:
            return False
        self._places[number, int(call.result)] = None if "O_APPEND" in flags else 0
        if "O_TRUNC" in flags and self._files[number].live:
            self._files[number].change(Write(0, None, call.begin, call.end))
            return True
        return is_new

    def _write(self, call: Call) -> bool:
        descriptor, path = call.files()[0]
        assert path, f"written after it was deleted: {call.name}"
        data = b"".join(call.texts())[: int(call.result)]
        number = self._number(path)
        file = self._files[number]
        if call.name.startswith("pwrite"):
            offset = call.numbers()[-2 if call.name == "pwritev2" else -1]
        else:
            offset = self._place(number, descriptor, len(data))
        if data:
            file.change(Write(offset, data, call.begin, call.end))
        return bool(data)

    def _copy(self, call: Call) -> bool:
        """From one descriptor to another, within the kernel."""
        files = call.files()
        (target, path), (_, source) = files if call.name == "sendfile" else reversed(files)
        if not self._is_inside(path):
            return False
        whole = (
            self._files[self._number(source)].live
            if self._is_inside(source)
            else Path(source).read_bytes()
        )
        size, number = int(call.result), self._number(path)
        offset = self._place(number, target, size)
        # From where it is read: the first number of the list, else as far as it has come here.
        given = re.search(r"\[(\d+)\]", call.arguments)
        start = int(given[1]) if given else offset
        data = bytes(whole[start : start + size])
        assert len(data) == size, f"{source} has changed meanwhile"
        if size:
            self._files[number].change(Write(offset, data, call.begin, call.end))
        return bool(size)

    def _place(self, number: int, descriptor: int, size: int) -> int:
        offset = self._places[number, descriptor]
        if offset is None:
            return len(self._files[number].live)
        self._places[number, descriptor] = offset + size
        return offset

    def _lseek(self, call: Call) -> bool:
        descriptor, path = call.files()[0]
        if path and self._is_inside(path):
            number = self._number(path)
            if self._places.get((number, descriptor)) is not None:
                self._places[number, descriptor] = int(call.result)
        return False

    def _truncate(self, call: Call) -> bool:
        path = call.paths()[0] if call.name == "truncate" else call.files()[0][1]
        file, size = self._files[self._number(path)], call.numbers()[-1]
        if size == len(file.live):
            return False
        file.change(Write(size, None, call.begin, call.end))
        return True

    def _utimensat(self, call: Call) -> bool:
        path = call.paths()[0] if call.texts() else call.files()[0][1]
        number = self._number(path)
        if number in self._files:
            seconds, fraction = re.findall(r"tv_sec=(\d+), tv_nsec=(\d+)", call.arguments)[-1]
            file = self._files[number]
            file.times = (file.times[0], int(seconds) + int(fraction) / 1e9)
        return True

    def _mkdir(self, call: Call) -> bool:
        parent, name = self._parent(call.paths()[0])
        number = next(self._numbers)
        self._live[number], self._durable[number] = {}, {}
        self._rename(((parent, name, number),), call)
        return True

    def _move(self, call: Call) -> bool:
        source, target = call.paths()
        assert "EXCHANGE" not in call.arguments
        assert self._is_inside(source), f"{source} comes from outside"
        assert self._is_inside(target), f"{target} goes outside"
        (one, old), (other, new) = self._parent(source), self._parent(target)
        number = self._live[one][old]
        self._rename(((one, old, None), (other, new, number)), call)
        return True

    def _link(self, call: Call) -> bool:
        source, target = call.paths()
        parent, name = self._parent(target)
        self._rename(((parent, name, self._number(source)),), call)
        return True

    def _unlink(self, call: Call) -> bool:
        path = call.paths()[0]
        parent, name = self._parent(path)
        gone = self._live[parent][name]
        removes = gone if call.name == "rmdir" or "AT_REMOVEDIR" in call.arguments else None
        self._rename(((parent, name, None),), call, removes)
        return True

    def _fsync(self, call: Call) -> bool:
        path = call.files()[0][1]
        if not path:  # Of a file that is deleted: it may come back, but nobody may count on it.
            return False
        number = self._number(path)
        if number in self._files:
            self._files[number].sync(call.begin)
            return False
        durable = {
            change
            for change in self._pending
            if change.end < call.begin and any(entry[0] == number for entry in change.entries)
        }
        # What came before under the same names is past.
        for change in reversed(self._pending):
            later = [c for c in durable if c.begin > change.begin]
            if any(change.keys & other.keys for other in later):
                durable.add(change)
        for change in self._pending:
            if change in durable:
                _enter(self._durable, change)
        self._pending = [change for change in self._pending if change not in durable]
        return False

    def _rename(
        self,
        entries: tuple[tuple[int, str, int | None], ...],
        call: Call,
        removes: int | None = None,
    ) -> None:
        change = Naming(entries, call.begin, call.end, removes)
        _enter(self._live, change)
        self._pending.append(change)

    def _is_inside(self, path: str) -> bool:
        return path == self._root or path.startswith(f"{self._root}/")

    def _number(self, path: str) -> int:
        number = 0
        for name in Path(path).relative_to(self._root).parts:
            number = self._live[number][name]
        return number

    def _parent(self, path: str) -> tuple[int, str]:
        return self._number(os.path.dirname(path)), os.path.basename(path)

    # What is found after a cut.

    def states(self, rng: random.Random, most: int) -> Iterator[State]:
        """At most so many of the states in which the disk may be, the telling ones first.

        One of each way in which the names may have arrived, then the next one of each: what is in
        a file has more variants than anybody can look at, and must not keep the others away.
        """
        variants = {number: file.variants(rng, most) for number, file in self._files.items()}
        ways = []
        for arrived in self._arrived(rng, most):
            tree: dict[str, int] = {}
            self._walk(self._with(arrived), 0, "", tree)
            ways.append(self._contents(tree, variants, rng, most))
        yield from itertools.islice(_in_turn(ways), most)

    def _arrived(self, rng: random.Random, most: int) -> Iterator[list[Naming]]:
        number = len(self._pending)
        if number <= 4:
            choices = list(itertools.product((False, True), repeat=number))
            choices.sort(key=lambda one: sum(one) not in (0, number))
        else:
            choices = [(False,) * number, (True,) * number]
            for one in _ends(number):
                choices.append(tuple(i == one for i in range(number)))
                choices.append(tuple(i != one for i in range(number)))
                choices.append(tuple(i < one for i in range(number)))  # As a journal does it.
            choices += [
                tuple(rng.random() < 0.5 for _ in range(number)) for _ in range(min(most, 64))
            ]
        # Turn by turn, so that a small sample has some of each.
        if len(choices) > 2:
            rest = choices[2:]
            rng.shuffle(rest)
            choices = choices[:2] + rest
        for chosen in dict.fromkeys(choices):
            yield [change for change, here in zip(self._pending, chosen, strict=True) if here]

    def _with(self, arrived: list[Naming]) -> dict[int, dict[str, int]]:
        removed = {change.removes for change in arrived} - {None}
        names = {number: dict(entries) for number, entries in self._durable.items()}
        for change in self._pending:
            within = any(entry[0] in removed for entry in change.entries)
            if within or change in arrived:
                _enter(names, change)
        return names

    def _walk(
        self, names: dict[int, dict[str, int]], number: int, path: str, tree: dict[str, int]
    ) -> None:
        for name, entry in sorted(names[number].items()):
            tree[f"{path}{name}"] = entry
            if entry in names:
                self._walk(names, entry, f"{path}{name}/", tree)

    def _contents(
        self, tree: dict[str, int], found: dict[int, list[bytes]], rng: random.Random, most: int
    ) -> Iterator[State]:
        numbers = sorted({n for n in tree.values() if n in self._files})
        open_ones = [n for n in numbers if len(found[n]) > 1]
        # None and all of what is on its way; then each file by itself; then whatever comes.
        chosen: list[dict[int, int]] = [{}, dict.fromkeys(open_ones, 1)]
        for n in open_ones:
            for variant in range(len(found[n])):
                chosen.append({**dict.fromkeys(open_ones, 1), n: variant})
                chosen.append({n: variant})
        if len(open_ones) > 1:
            for _ in range(min(most, 64)):
                chosen.append({n: rng.randrange(len(found[n])) for n in open_ones})
        first, rest = chosen[:2], chosen[2:]
        rng.shuffle(rest)
        timed = [n for n in numbers if self._files[n].times[0] != self._files[n].times[1]]
        for one in (*first, *rest):
            late = bool(timed) and rng.random() < 0.5
            yield {
                path: (
                    (found[n][one.get(n, 0)], self._files[n].times[0 if late else 1])
                    if n in self._files
                    else None
                )
                for path, n in tree.items()
            }


def _in_turn(ways: list[Iterator[State]]) -> Iterator[State]:
    """One of each, then the next of each, until all are at their end."""
    while ways:
        for way in list(ways):
            state = next(way, None)
            if state is None:
                ways.remove(way)
            else:
                yield state


_KINDS = {
    **dict.fromkeys(("open", "openat", "creat"), "open"),
    **dict.fromkeys(("write", "writev", "pwrite64", "pwritev", "pwritev2"), "write"),
    **dict.fromkeys(("sendfile", "copy_file_range"), "copy"),
    **dict.fromkeys(("ftruncate", "truncate"), "truncate"),
    **dict.fromkeys(("rename", "renameat", "renameat2"), "move"),
    **dict.fromkeys(("link", "linkat"), "link"),
    **dict.fromkeys(("unlink", "unlinkat", "rmdir"), "unlink"),
    **dict.fromkeys(("mkdir", "mkdirat"), "mkdir"),
    **dict.fromkeys(("fsync", "fdatasync"), "fsync"),
}


@dataclass
class Tried:
    """How often the power was cut, and how many different states of the disk came of it."""

    cuts: int = 0
    states: int = 0

    def __str__(self) -> str:
        return f"{self.cuts} cuts, {self.states} states of the disk tried, all survived"


def cut_everywhere(
    code: str,
    folder: Path,
    check: Callable[[Path, list[str]], object],
    *arguments: object,
    most: int,
    place: Path,
    seed: int = 0,
) -> Tried:
    """Record ``code``; cut the power after each of its calls from ``mark("begin")`` on.

    ``check`` gets a folder in ``place`` as the disk may be found then, and the marks until then:
    once for each different state. At most so many states of each cut are looked at.
    """
    root, marks, calls = record(code, folder, *arguments)
    disk, tried = Disk(root), Tried()
    done: list[str] | None = None
    seen: set[tuple[int, bytes]] = set()
    for number, call in enumerate(calls):
        files = call.files()
        if files and files[0][1] == str(marks):
            text = b"".join(call.texts()).decode()
            if text == "begin":
                disk.settle()
                done = []
                continue
            if done is not None:
                done.append(text)
        elif call.path == str(marks) or (not disk.apply(call) and done is not None):
            continue
        if done is None:
            continue
        tried.cuts += 1
        for state in disk.states(random.Random(f"{seed}-{number}"), most):
            key = (len(done), _digest(state))
            if key in seen:
                continue
            seen.add(key)
            found = place / f"{tried.cuts}-{tried.states}"
            _make(state, found)
            tried.states += 1
            try:
                check(found, done)
            except BaseException as error:
                error.add_note(
                    f"cut {tried.cuts} (after {call.name} of {_shown(call, root)}), with {done} "
                    f"done; the disk was: {_listed(state)}"
                )
                raise
            shutil.rmtree(found)
    assert done, "nothing was recorded"
    return tried


def swept_an_hour_later(folder: Path) -> bool:
    """Whether temporary files of before the cut go then; until then somebody may have them."""
    with pytest.MonkeyPatch.context() as later:
        later.setattr(atomic, "FOREIGN_ORPHAN_SECONDS", -1.0)
        atomic.sweep_orphans(folder)
    return not any(temp_names.owner_of(path.name) for path in folder.iterdir())


def _make(state: State, folder: Path) -> None:
    folder.mkdir()
    for path, entry in state.items():
        if entry is None:
            (folder / path).mkdir()
            continue
        content, time = entry
        (folder / path).write_bytes(content)
        if time is not None:
            os.utime(folder / path, (time, time))


def _digest(state: State) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for path, entry in sorted(state.items()):
        found.update(path.encode(errors="surrogateescape") + b"\0")
        if entry is not None:
            found.update(f"{len(entry[0])} {entry[1]}".encode())
            found.update(entry[0])
    return found.digest()


def _shown(call: Call, root: Path) -> str:
    paths = [call.path] if call.path else call.paths() or [path for _, path in call.files()]
    if call.name in ("write", "writev", "pwrite64"):
        paths = [path for _, path in call.files()]
    return ", ".join(os.path.relpath(path, root) for path in paths if path)


def _listed(state: State) -> str:
    return ", ".join(
        f"{path}/" if entry is None else f"{path} ({len(entry[0])})"
        for path, entry in sorted(state.items())
    )


def _apply(content: bytearray, write: Write) -> None:
    if write.data is None:
        del content[write.offset :]
        content.extend(bytes(write.offset - len(content)))
        return
    content.extend(bytes(max(0, write.offset - len(content))))
    content[write.offset : write.offset + len(write.data)] = write.data


def _enter(names: dict[int, dict[str, int]], change: Naming) -> None:
    for directory, name, number in change.entries:
        if number is None:
            names[directory].pop(name, None)
        else:
            names[directory][name] = number


def _ends(number: int, most: int = 3) -> list[int]:
    """The first ones and the last ones: what lies between is like them."""
    return sorted({*range(min(most, number)), *range(max(0, number - most), number)})
