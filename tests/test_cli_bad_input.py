"""Whatever a command is given: one clear line, the right exit code, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from command_line import cli, command, one_line_of, variables
from processes import ending, press_ctrl_c, require_root, start, wait_until
from record_files import write_plain
from snapshots import make_snapshot

from keras_safe_ckpt import CheckpointStore

#: Each command with what it needs beside the path that is wrong.
OF_A_DIRECTORY = {
    "ls": [],
    "locks": [],
    "doctor": [],
    "prune": ["--max-to-keep", "1"],
    "report": [],
}
OF_A_FILE = {"show": [], "verify": [], "diff": ["{same}"]}
OF_DATA = {"recover": [], "merge": ["-o", "{out}"], "tfrecord verify": []}


def arguments(name: str, path: object, tmp_path) -> list[str]:
    extra = {**OF_A_DIRECTORY, **OF_A_FILE, **OF_DATA}[name]
    known = {"same": path, "out": tmp_path / "out.h5"}
    return [*name.split(), str(path), *(text.format(**known) for text in extra)]


@pytest.mark.parametrize("name", [*OF_A_DIRECTORY, *OF_A_FILE, *OF_DATA])
def test_no_such_path(tmp_path, name):
    missing = tmp_path / "missing"
    done = cli(*arguments(name, missing, tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    line = one_line_of(done)
    assert "missing" in line
    assert "there is no such" in line
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", OF_A_DIRECTORY)
def test_a_file_where_a_directory_was_expected(tmp_path, name):
    path = tmp_path / "file"
    path.write_text("x")
    done = cli(*arguments(name, path, tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert "directory" in one_line_of(done)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", OF_A_FILE)
@pytest.mark.parametrize(
    ("file", "contents"),
    [
        ("notes.txt", b"hello"),
        ("empty.keras", b""),
        ("torn.weights.h5", b"\x89HDF\r\n\x1a\n" + bytes(100)),
        ("data.h5", bytes(1000)),
        ("ckpt-1.index", b"nonsense"),
    ],
)
def test_not_a_checkpoint(tmp_path, capsys, name, file, contents):
    from keras_safe_ckpt.cli.main import main

    path = tmp_path / file
    path.write_bytes(contents)
    code = main(arguments(name, path, tmp_path))
    shown = capsys.readouterr()
    if name == "verify" and file != "notes.txt":
        assert code == 1
        assert "0 whole, 1 damaged." in shown.out
        assert shown.err == ""
    else:
        assert code == 2
        assert shown.err.count("\n") == 1
        assert shown.err.startswith("keras-safe-ckpt: The checkpoint ")
        assert "cannot be used" in shown.err


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.keras")
    for name in OF_A_FILE:
        done = cli(*arguments(name, tmp_path / "pipe.keras", tmp_path), timeout=60)
        assert done.returncode == 2
        assert "not a regular file" in one_line_of(done)
    listed = cli("ls", tmp_path, timeout=60)
    assert listed.returncode == 1
    assert "NO: it is not a regular file" in listed.stdout


#: That user may not read this project, either: all that may be needed is imported before.
NOT_PERMITTED = """
import importlib, os, pkgutil, sys
import h5py, rich.console, rich.progress, rich.table
import keras_safe_ckpt.cli.main
for part in ("cli", "datasets", "reports", "storage", "training.backups", "training.keeping"):
    package = importlib.import_module(f"keras_safe_ckpt.{part}")
    for found in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
        importlib.import_module(found.name)
os.setgid(65534)
os.setuid(65534)
sys.exit(keras_safe_ckpt.cli.main.main(sys.argv[1:]))
"""


def as_another_user(tmp_path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The way to ``tmp_path`` is open to that user meanwhile."""
    closed = [path for path in (tmp_path, *tmp_path.parents) if not path.stat().st_mode & 0o001]
    modes = {path: path.stat().st_mode for path in closed}
    try:
        for path in closed:
            path.chmod(modes[path] | 0o011)
        return subprocess.run(
            [command()[0], "-c", NOT_PERMITTED, *map(str, arguments)],
            env=variables(),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=200,
        )
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


@pytest.mark.parametrize("name", [*OF_A_DIRECTORY, *OF_A_FILE, "recover", "tfrecord verify"])
def test_no_permission(tmp_path, name):
    require_root()
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o700)
    store = CheckpointStore(folder)
    checkpoint = store.publish(make_snapshot(), step=1)
    write_plain(folder / "a.tfrecord", [b"x"])
    target = {"tfrecord verify": folder / "a.tfrecord"}.get(name, folder)
    target = checkpoint.path if name in OF_A_FILE else target
    done = as_another_user(tmp_path, *arguments(name, target, tmp_path))
    assert done.returncode == 2, done.stderr + done.stdout
    assert "ermission denied" in one_line_of(done)


def test_a_closed_pipe_is_no_error(tmp_path):
    CheckpointStore(tmp_path).publish(make_snapshot(), step=1)
    for name in ("ls", "locks", "verify", "doctor"):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            command(name, tmp_path),
            env=variables(),
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
        )
        os.close(writer)
        assert done.stderr == ""
        assert done.returncode == 141


def test_a_real_head_sees_the_beginning(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in range(30):
        store.publish(make_snapshot(), step=step)
    words = " ".join(command("ls", tmp_path))
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} | head -n 1"],
        env=variables(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.startswith("file ")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # It may have written all before it is told.


def test_output_that_cannot_be_written_is_said(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("ls", tmp_path),
            env=variables(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=200,
        )
    assert done.returncode == 2
    assert "No space left on device" in one_line_of(done)


def test_without_any_output_it_still_has_its_exit_code(tmp_path):
    words = " ".join(command("ls", tmp_path))
    done = subprocess.run(["bash", "-c", f"{words} >&- 2>&-"], env=variables(), timeout=200)
    assert done.returncode == 0


def test_a_terminal_that_knows_few_letters(tmp_path):
    store = CheckpointStore(tmp_path)
    store.publish(make_snapshot(), step=1, name="größe.weights.h5")
    done = cli("ls", tmp_path, env=variables(PYTHONIOENCODING="ascii"))
    assert done.returncode == 0
    assert "gr??e.weights.h5" in done.stdout


#: A shell lets its background jobs ignore Ctrl-C, and that is handed down.
HEARS_CTRL_C = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from keras_safe_ckpt.cli.main import main
sys.exit(main())
"""


def test_ctrl_c_ends_it_with_one_line(tmp_path):
    path = write_plain(tmp_path / "a.tfrecord", [b"x"])
    holder = start(
        """
from keras_safe_ckpt import LockManager
with LockManager().exclusive(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
""",
        path,
        stdin=subprocess.PIPE,
    )
    with ending(holder):
        assert holder.stdout.readline() == "held\n"
        waiting = subprocess.Popen(
            [sys.executable, "-c", HEARS_CTRL_C, "tfrecord", "verify", path],
            env=variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with ending(waiting):
            gate = path.parent / ".a.tfrecord.gate"
            wait_until(lambda: is_open_in(waiting.pid, gate), "it waits for the lock")
            press_ctrl_c(waiting)
            out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert err == "keras-safe-ckpt: interrupted\n"
    assert out == ""


def is_open_in(pid: int, path) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{folder}/{n}") == str(path) for n in os.listdir(folder))
    except FileNotFoundError:
        return False


def test_a_folder_that_cannot_be_looked_into_is_no_reason_to_call_all_whole(tmp_path):
    require_root()
    top = tmp_path / "open"
    CheckpointStore(top).publish(make_snapshot(), step=1)
    CheckpointStore(top / "closed").publish(make_snapshot(), step=2)
    (top / "closed").chmod(0o700)
    done = as_another_user(tmp_path, "verify", top)
    assert done.returncode == 2, done.stderr
    assert "1 whole, 0 damaged, 1 cannot be judged." in done.stdout
    assert "it cannot be looked into (Permission denied)" in done.stdout
    done = as_another_user(tmp_path, "ls", "--recursive", top)
    assert done.returncode == 0, done.stderr
    assert f"Not looked into: {top / 'closed'}." in done.stdout
    done = as_another_user(tmp_path, "ls", top)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before", [True, False], ids=["before the command", "after it"])
def test_debug_shows_the_traceback(tmp_path, before):
    words = ["--debug", "ls"] if before else ["ls", "--debug"]
    done = cli(*words, tmp_path / "missing")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "CheckpointNotFoundError" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.campaign)])
def test_a_folder_with_very_many_files(tmp_path, count, record_property):
    CheckpointStore(tmp_path).publish(make_snapshot(), step=1)
    folder = os.open(tmp_path, os.O_RDONLY)
    for number in range(count):
        os.close(os.open(f"{number}.jpg", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    os.close(folder)
    for name in OF_A_DIRECTORY:
        if name != "report":
            assert cli(*arguments(name, tmp_path, tmp_path)).returncode == 0, name
    assert "1 whole" in cli("verify", tmp_path).stdout
    record_property("campaign", f"all commands on a folder with {count:,} files")
