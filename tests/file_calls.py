"""Every system call of a real process that changes files, recorded by strace and read back.

Nothing is passed over: a call that changes files and is not understood here is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from processes import run, strace

_UNDERSTOOD = (
    *("open", "openat", "creat", "write", "writev", "pwrite64", "pwritev", "pwritev2", "lseek"),
    *("ftruncate", "truncate", "sendfile", "copy_file_range", "utimensat", "mmap"),
    *("rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat"),
    *("mkdir", "mkdirat", "rmdir", "fsync", "fdatasync", "sync_file_range"),
)
#: Recorded to be refused where they concern the folder.
_REFUSED = (
    *("fallocate", "symlink", "symlinkat", "mknod", "mknodat", "openat2", "splice", "msync"),
    *("sync", "syncfs", "io_submit", "io_uring_enter", "io_uring_setup"),
)
#: More than any write in a test.
_LONGEST = 64 << 20

_LINE = re.compile(
    r"(?P<pid>\d+) +(?:<\.\.\. (?P<resumed>\w+) resumed>(?P<rest>.*)|(?P<call>\w+)\((?P<text>.*))"
)
_RESULT = re.compile(r"(?P<arguments>.*)\) += (?P<result>-?\w+)(?:<(?P<path>[^>]*)>)?.*", re.DOTALL)
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_FILE = re.compile(r"(-?\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>(\(deleted\))?")

#: Goes before what is recorded: its folder, and how it says what was promised by now.
RECORDED = """
ROOT, _marks = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.path.insert(0, sys.argv[3])

def mark(text):
    os.write(_marks, str(text).encode())
"""


@dataclass(frozen=True)
class Call:
    """One that has succeeded. It began and ended at these places of the log."""

    name: str
    arguments: str
    result: str
    path: str  # Of the descriptor that it has returned.
    begin: int
    end: int

    def texts(self) -> list[bytes]:
        found = _TEXT.findall(self.arguments)
        assert not any(more for _, more in found), f"cut off: {self.name}"
        return [_plain(text) for text, _ in found]

    def files(self) -> list[tuple[int, str]]:
        """The descriptors among its arguments, and where they lead; "" for one that is deleted."""
        return [
            (-1 if number == "AT_FDCWD" else int(number), "" if gone else _path(text))
            for number, text, gone in _FILE.findall(self.arguments)
        ]

    def paths(self) -> list[str]:
        """Those that are given as text, from where they are meant."""
        places = self.files()
        if self.name.endswith("at") or self.name == "renameat2":
            bases = [path for _, path in places]
        else:
            bases = [os.getcwd()] * 2
        named = [text.decode(errors="surrogateescape") for text in self.texts()]
        return [
            os.path.normpath(os.path.join(base, name))
            for base, name in zip(bases, named, strict=False)
        ]

    def numbers(self) -> list[int]:
        """Plain numbers among its arguments, in their order."""
        rest = _FILE.sub("", _TEXT.sub("", self.arguments))
        return [int(number) for number in re.findall(r"(?<![\w.])-?\d+\b", rest)]


def record(code: str, folder: Path, *arguments: object) -> tuple[Path, Path, list[Call]]:
    """Run ``code``: its folder (empty at first), the file of its marks, and its calls."""
    root, marks, log = folder / "disk", folder / "marks", folder / "calls"
    root.mkdir()
    strace()  # Skips where it is missing.
    traced = ",".join((*_UNDERSTOOD, *_REFUSED))
    prefix = ("strace", "-f", "-qq", "-y", "-xx", "-s", str(_LONGEST), "--seccomp-bpf")
    prefix += ("-e", "signal=none", "-e", f"trace={traced}", "-o", str(log))
    done = run(RECORDED + code, root, marks, Path(__file__).parent, *arguments, prefix=prefix)
    assert done.returncode == 0, done.stderr
    inside = os.path.realpath(root)
    calls = [call for call in read_log(log) if _concerns(call, inside, os.path.realpath(marks))]
    log.unlink()
    return Path(inside), marks, calls


def read_log(log: Path) -> Iterator[Call]:
    """Those that succeeded, in the order in which they began."""
    begun: dict[str, tuple[int, str, str]] = {}
    found: list[Call] = []
    with open(log) as lines:
        for number, line in enumerate(lines):
            match = _LINE.fullmatch(line.rstrip("\n"))
            assert match is not None, f"not understood: {line[:200]}"
            begin, name, text = number, match["call"], match["text"]
            if match["resumed"]:
                begin, name, text = begun.pop(match["pid"])
                text += match["rest"]
            elif text.endswith("<unfinished ...>"):
                begun[match["pid"]] = (number, name, text.removesuffix("<unfinished ...>"))
                continue
            result = _RESULT.fullmatch(text)
            assert result is not None, f"not understood: {name}({text[:200]}"
            if not result["result"].startswith("-"):
                path = _path(result["path"] or "")
                call = Call(name, result["arguments"], result["result"], path, begin, number)
                found.append(call)
    assert not begun, f"did not end: {begun}"
    return iter(sorted(found, key=lambda call: call.begin))


def _concerns(call: Call, root: str, marks: str) -> bool:
    named = [path for _, path in call.files()] + [call.path]
    if call.name not in ("write", "writev", "pwrite64", "pwritev", "pwritev2"):
        named += call.paths()
    if not any(path in (marks, root) or path.startswith(f"{root}/") for path in named):
        return False
    assert call.name not in _REFUSED, f"the model does not know {call.name}({call.arguments[:200]})"
    if call.name == "mmap":
        shared = "MAP_SHARED" in call.arguments and "PROT_WRITE" in call.arguments
        assert not shared, f"the model does not know what is written so: {call.arguments[:300]}"
        return False
    return call.name != "sync_file_range"  # Which promises nothing.


def _plain(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _path(text: str) -> str:
    return _plain(text).decode(errors="surrogateescape") if text.startswith("\\x") else text
