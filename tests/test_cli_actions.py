"""The commands that do something: prune, locks, doctor, merge, tfrecord, launch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from bundle_files import names_in, write_value
from command_line import cli, cli_json, cli_ok, one_line_of, variables
from processes import ending, start, wait_until
from record_files import flip, records_of, write_plain
from snapshots import make_snapshot

from keras_safe_ckpt import CheckpointStore, LockManager, WorkerH5Writer
from keras_safe_ckpt.cli.main import main
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.storage.file_system import Mount, mount_of
from keras_safe_ckpt.training.backups import SERIES


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith((".h5", ".keras")))


@pytest.fixture
def six(tmp_path):
    """Six epochs; the second one is the best."""
    store = CheckpointStore(tmp_path)
    for step, loss in enumerate([3.0, 0.5, 2.0, 1.5, 1.0, 0.9], 1):
        store.publish(
            make_snapshot(step),
            step=step,
            epoch=step,
            metrics={"loss": loss},
            monitor="loss",
            mode="min",
            name=f"{step}.weights.h5",
            series="{epoch}.weights.h5",
        )
    return tmp_path


# prune


def test_prune_only_shows_what_it_would_do(six):
    before = sorted(os.listdir(six))
    shown = cli_ok("prune", six, "--max-to-keep", 2)
    assert sorted(os.listdir(six)) == before
    assert "Would delete 3 of 6 checkpoints: --yes does it." in shown
    fates = {line.split()[0]: line.split()[-1] for line in shown.splitlines()[1:7]}
    kept = [name for name, fate in fates.items() if fate == "keep"]
    assert kept == ["2.weights.h5", "5.weights.h5", "6.weights.h5"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--max-to-keep", "2"], "256"),
        (["--keep-best", "2"], "26"),
        (["--keep-best", "3"], "256"),
        (["--keep-every", "3"], "236"),
        (["--keep-best", "1", "--monitor", "loss", "--mode", "max"], "126"),
        (["--keep-every", "12h"], "26"),
        (["--max-to-keep", "9"], "123456"),
    ],
)
def test_prune_keeps_what_was_asked_for_the_best_and_the_newest(six, options, left):
    planned = cli_json("prune", six, *options)
    assert planned["deleted"] is None
    assert [int(name[0]) for name in sorted(planned["staying"])] == list(map(int, left))
    done = cli_json("prune", six, *options, "--yes")
    assert sorted(done["deleted"]) == sorted(planned["doomed"])
    assert names(six) == [f"{number}.weights.h5" for number in left]


def test_prune_leaves_files_of_others_alone(six):
    copy = six / "mine.weights.h5"
    copy.write_bytes((six / "1.weights.h5").read_bytes())
    (six / "foreign.weights.h5").write_bytes(b"not ours")
    cli_ok("prune", six, "--max-to-keep", 1, "--yes")
    assert names(six) == ["2.weights.h5", "6.weights.h5", "foreign.weights.h5", "mine.weights.h5"]


def test_prune_deletes_nothing_unless_one_that_stays_is_whole(six):
    for number in (2, 6):
        path = six / f"{number}.weights.h5"
        flip(path, path.stat().st_size // 2)
    shown = cli_ok("prune", six, "--max-to-keep", 1, "--yes")
    assert len(names(six)) == 6
    assert "Deleted 0 of 6" in shown
    assert "none that would stay was whole" in shown


def test_parts_of_a_run_of_several_workers_are_not_pruned(tmp_path, capsys):
    store = CheckpointStore(tmp_path, worker="worker-1")
    for step in (1, 2, 3):
        store.publish(make_snapshot(step), step=step, series=SERIES, name=f"run-{step}.weights.h5")
    assert main(["prune", str(tmp_path), "--max-to-keep", "1", "--yes"]) == 0
    assert len(names(tmp_path)) == 3


def test_prune_of_checkpoints_of_tensorflow(tmp_path):
    from keras_setup import tf

    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(v=tf.Variable(1.0)), str(tmp_path), max_to_keep=None
    )
    for _ in range(4):
        manager.save()
    write_value(tmp_path / "mine-1", 5.0)
    planned = cli_json("prune", tmp_path, "--max-to-keep", 2)
    assert planned["doomed"] == ["ckpt-1", "ckpt-2"]
    assert planned["unlisted"] == ["mine-1"]
    assert len(names_in(tmp_path)) == 5
    assert "left alone: mine-1" in cli_ok("prune", tmp_path, "--max-to-keep", 2, "--yes")
    assert names_in(tmp_path) == ["ckpt-3", "ckpt-4", "mine-1"]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-4")
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert [os.path.basename(p) for p in state.all_model_checkpoint_paths] == ["ckpt-3", "ckpt-4"]


def test_prune_deletes_no_checkpoint_of_tensorflow_unless_one_that_stays_is_whole(tmp_path):
    from keras_setup import tf

    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(v=tf.Variable([1.0] * 100)), str(tmp_path), max_to_keep=None
    )
    for _ in range(3):
        manager.save()
    flip(tmp_path / "ckpt-3.data-00000-of-00001", 50)
    assert main(["prune", str(tmp_path), "--max-to-keep", "1", "--yes"]) == 0
    assert names_in(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3"]


def saved_by_tensorflow(tmp_path, base: str, count: int, **options):
    from keras_setup import tf

    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(v=tf.Variable([1.0] * 100)),
        str(tmp_path),
        max_to_keep=None,
        checkpoint_name=base,
        **options,
    )
    for _ in range(count):
        manager.save()
    return manager


def test_prune_judges_each_family_of_tensorflow_by_itself(tmp_path):
    """That one of another family is whole is no reason to delete the last whole one of this."""
    from keras_safe_ckpt.storage.bundles.state_file import State, read_state, write_state

    saved_by_tensorflow(tmp_path, "a", 3)
    listed = read_state(tmp_path).listed
    saved_by_tensorflow(tmp_path, "b", 3)
    listed = {**listed, **read_state(tmp_path).listed}
    write_state(tmp_path, State(listed, preserved=min(listed.values()) - 1), "b-3")
    flip(tmp_path / "b-3.data-00000-of-00001", 50)
    assert main(["prune", str(tmp_path), "--max-to-keep", "1", "--yes"]) == 0
    assert names_in(tmp_path) == ["a-3", "b-1", "b-2", "b-3"]
    assert set(read_state(tmp_path).listed) == {"a-3", "b-1", "b-2", "b-3"}


def test_prune_keeps_what_tensorflow_keeps_for_ever(tmp_path):
    from keras_safe_ckpt.storage.bundles.state_file import State, read_state, write_state

    saved_by_tensorflow(tmp_path, "ckpt", 4)
    listed = read_state(tmp_path).listed
    # The first two are preserved, by keep_checkpoint_every_n_hours say; the last is to stay.
    times = list(listed.values())
    write_state(tmp_path, State(listed, preserved=times[1], newest_stays=True), "ckpt-4")
    assert main(["prune", str(tmp_path), "--max-to-keep", "1", "--yes"]) == 0
    assert names_in(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-3", "ckpt-4"]
    write_state(tmp_path, State(listed, preserved=times[0], newest_stays=True), "ckpt-4")
    assert main(["prune", str(tmp_path), "--max-to-keep", "1", "--yes"]) == 0
    assert names_in(tmp_path) == ["ckpt-1", "ckpt-3", "ckpt-4"]
    assert read_state(tmp_path).newest_stays
    assert read_state(tmp_path).preserved == times[0]


def test_prune_waits_for_those_who_read(tmp_path):
    from keras_safe_ckpt import LockTimeoutError
    from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
    from keras_safe_ckpt.storage.bundles.trimming import trim

    saved_by_tensorflow(tmp_path, "ckpt", 3)
    with BundleDirectory(tmp_path).reading(), pytest.raises(LockTimeoutError):
        trim(BundleDirectory(tmp_path, locks=LockManager(timeout=0.1)), 1)
    assert len(names_in(tmp_path)) == 3
    assert trim(BundleDirectory(tmp_path), 1) == ["ckpt-1", "ckpt-2"]
    events = [event for event in EventLog(tmp_path).read() if event["event"] == "prune"]
    assert [event["files"] for event in events] == [["ckpt-1", "ckpt-2"]]


def test_prune_does_not_delete_what_took_the_place_of_an_old_one(six):
    """A training with other locks may save under a name that is about to go."""
    from keras_safe_ckpt.storage.catalog import Catalog
    from keras_safe_ckpt.storage.pruning import Pruner
    from keras_safe_ckpt.storage.retention import KeepNewest

    catalog = Catalog(six)
    pruner = Pruner(catalog, EventLog(six))
    new = (six / "6.weights.h5").read_bytes()

    class Meanwhile:
        def ensure_held(self):
            (six / "1.weights.h5").unlink()
            (six / "1.weights.h5").write_bytes(new)

    deleted = pruner.prune_each_series(KeepNewest(1), Meanwhile())
    assert [path.name for path in deleted] == [f"{n}.weights.h5" for n in (2, 3, 4, 5)]
    assert names(six) == ["1.weights.h5", "6.weights.h5"]


def test_every_so_many_epochs_of_files_that_know_no_epoch(tmp_path, capsys):
    store = CheckpointStore(tmp_path)
    for step in range(3):
        store.publish(make_snapshot(step), step=step)
    assert main(["prune", str(tmp_path), "--keep-every", "10", "--yes"]) == 2
    assert "does not say its epoch: expected a time" in capsys.readouterr().err
    assert len(names(tmp_path)) == 3


def test_another_monitor_does_not_cost_the_best_by_the_first_one(six, capsys):
    command = ["prune", str(six), "--max-to-keep", "1", "--mode", "max", "--monitor"]
    assert main([*command, "los"]) == 2
    assert "no checkpoint has 'los'; they have: loss" in capsys.readouterr().err
    assert main([*command, "loss", "--yes"]) == 0
    assert names(six) == ["1.weights.h5", "2.weights.h5", "6.weights.h5"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected --max-to-keep, --keep-best or --keep-every"),
        (["--max-to-keep", "0"], "max_to_keep=0"),
        (["--keep-best", "1", "--mode", "min"], "--monitor and --mode: expected both"),
    ],
)
def test_prune_says_what_it_expects(six, options, message):
    done = cli("prune", six, *options)
    assert done.returncode == 2
    assert message in one_line_of(done)


def test_prune_without_knowing_what_is_best(tmp_path, capsys):
    CheckpointStore(tmp_path).publish(make_snapshot(), step=1)
    assert main(["prune", str(tmp_path), "--keep-best", "1"]) == 2
    assert "expected --monitor and --mode" in capsys.readouterr().err


def test_a_time_that_is_none_is_wrong_usage(six):
    done = cli("prune", six, "--keep-every", "2 weeks")
    assert done.returncode == 2
    assert "30m, 12h or 7d" in done.stderr


# locks


def test_locks_tells_who_holds_them(tmp_path):
    holder = start(
        """
from keras_safe_ckpt import LockManager
with LockManager(worker="3").exclusive(sys.argv[1] + "/model.keras"):
    print("held", flush=True)
    sys.stdin.read()
""",
        tmp_path,
        stdin=subprocess.PIPE,
    )
    with ending(holder), LockManager().shared(tmp_path / "other.keras"):
        assert holder.stdout.readline() == "held\n"
        model, other = cli_json("locks", tmp_path)["locks"]
        assert (model["target"], model["held"], model["alive"]) == ("model.keras", True, True)
        assert (model["owner"]["pid"], model["owner"]["worker"]) == (holder.pid, "3")
        assert (other["target"], other["held"], other["pids"]) == (
            "other.keras",
            True,
            [os.getpid()],
        )
        shown = cli_ok("locks", tmp_path).splitlines()[1]
        assert "HELD" in shown
        assert f"worker 3, pid {holder.pid} on" in shown
        assert model["owner"]["since"] in shown
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)
        killed = cli_json("locks", tmp_path)["locks"][0]
        assert (killed["held"], killed["alive"]) == (False, False)
        assert "last: worker 3" in cli_ok("locks", tmp_path)


def test_locks_takes_none_and_makes_none(tmp_path):
    with LockManager().exclusive(tmp_path / "a"):
        before = sorted(os.listdir(tmp_path))
        cli_ok("locks", tmp_path)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_lock_that_names_no_process_is_of_nobody(tmp_path, capsys):
    owner = {"host": os.uname().nodename, "pid": -1, "worker": None, "since": "x", "mode": "y"}
    (tmp_path / ".a.lock").write_text(json.dumps(owner))
    assert main(["locks", str(tmp_path), "--json"]) == 0
    (lock,) = json.loads(capsys.readouterr().out)["locks"]
    assert (lock["held"], lock["alive"]) == (False, False)


# doctor


def test_doctor_of_a_good_place(tmp_path):
    CheckpointStore(tmp_path).publish(make_snapshot(), step=1)
    before = sorted(os.listdir(tmp_path))
    found = cli_json("doctor", tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    verdicts = {one["subject"]: one["verdict"] for one in found["findings"]}
    assert found["healthy"]
    for subject in ("locks", "rename", "write and sync", "room", "contents", "packages"):
        assert verdicts[subject] in ("good", "note"), subject
    details = {one["subject"]: one["detail"] for one in found["findings"]}
    assert "/s; a small durable file takes" in details["write and sync"]
    assert "times the largest checkpoint here" in details["room"]
    assert details["contents"].startswith("1 checkpoints")
    assert "keras 3." in details["packages"]
    assert details["notices"].startswith("SIGTERM")
    assert "tensorflow" in details["packages"]


def test_doctor_of_a_directory_in_memory_says_what_to_change(small_disk):
    folder = small_disk("size=20m")
    shown = cli_ok("doctor", folder)
    assert "tmpfs" in shown
    assert "What to change:" in shown
    assert "file system: it is in memory" in shown
    assert "room: little is left" in shown


def test_doctor_finds_what_is_damaged(tmp_path, capsys):
    (tmp_path / "torn.weights.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    (contents,) = [one for one in findings if one["subject"] == "contents"]
    assert contents["verdict"] == "bad"
    assert "torn.weights.h5" in contents["detail"]


def test_doctor_of_a_read_only_place(small_disk):
    folder = small_disk("size=20m")
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    shown = cli_ok("doctor", folder, code=1)
    assert "BAD" in shown
    assert "Read-only file system" in shown
    assert "make the directory writable" in shown


def fill(folder: Path, but: int = 0) -> None:
    """Leave no room on its disk but so many bytes."""
    with suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert os.statvfs(folder).f_bavail == 0
    os.truncate(folder / "filler", os.path.getsize(folder / "filler") - but)


def test_doctor_of_a_full_disk(small_disk):
    folder = small_disk("size=2m")
    fill(folder)
    before = sorted(os.listdir(folder))
    found = cli_json("doctor", folder, code=1)
    assert sorted(os.listdir(folder)) == before
    findings = {one["subject"]: one for one in found["findings"]}
    assert findings["write and sync"]["verdict"] == "bad"
    assert "No space left" in findings["write and sync"]["detail"]
    assert "make room" in findings["write and sync"]["advice"]
    assert findings["room"]["verdict"] != "good"


def test_doctor_of_a_disk_with_room_for_small_files_only(small_disk):
    """Enough for what is tried, too little to measure how fast it is."""
    folder = small_disk("size=2m")
    fill(folder, but=4096 * 12)
    (line,) = [one for one in cli_ok("doctor", folder).splitlines() if "small durable" in one]
    assert "/s;" not in line
    assert "no room" in line


def doctor_with(tmp_path: Path, change: str) -> str:
    """What it says of locks, if ``change`` is run by each Python process before anything else."""
    (tmp_path / "sitecustomize.py").write_text(change)
    (tmp_path / "run").mkdir()
    env = variables()
    env["PYTHONPATH"] = os.pathsep.join((str(tmp_path), env["PYTHONPATH"]))
    shown = cli_ok("doctor", tmp_path / "run", code=1, env=env)
    (line,) = [line for line in shown.splitlines() if line.startswith("locks")]
    assert "BAD" in line
    assert "locks=RedisLocks(...)" in shown
    return shown


def test_doctor_notices_locks_that_lock_nobody_out(tmp_path):
    """By a library in between that grants every lock, as some file systems do."""
    doctor_with(tmp_path, "import fcntl\nfcntl.flock = lambda *arguments: None\n")


def test_doctor_does_not_wait_for_a_lock_that_hangs(tmp_path):
    """As over a network whose server is gone: the process that tries it does not come back."""
    shown = doctor_with(
        tmp_path,
        """
import subprocess, sys
run = subprocess.run
def hanging(command, **options):
    if command[0] == sys.executable:
        command = [sys.executable, "-S", "-E", "-c", "import signal; signal.pause()"]
        options["timeout"] = min(1, options["timeout"])
    return run(command, **options)
subprocess.run = hanging
""",
    )
    assert "another process that tries it hangs" in shown


def test_the_file_system_is_the_innermost_one(tmp_path):
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    table = tmp_path / "mountinfo"
    table.write_text(
        f"36 35 {number} / / rw,noatime - ext4 /dev/a rw\n"
        f"37 36 {number} / {tmp_path} ro - nfs4 server:/x rw,vers=4.2\n"
        f"38 36 {number} / /elsewhere rw - xfs /dev/a rw\n"
        "39 36 9:9 / /other rw - tmpfs none rw\n"
    )
    mount = mount_of(tmp_path, str(table))
    assert mount == Mount("nfs4", str(tmp_path), "server:/x", "ro,rw,vers=4.2")
    assert mount_of(tmp_path, str(tmp_path / "missing")) is None


# merge


def test_merge(tmp_path):
    import h5py

    for worker in range(2):
        with WorkerH5Writer(tmp_path / "parts", worker, workers=2) as writer:
            writer.append("id", [1 - worker, 3 - worker])
    out = tmp_path / "all.h5"
    done = cli_json("merge", tmp_path / "parts", "-o", out, "--sort-key", "id", "--workers", 2)
    assert done == {"path": str(out), "bytes": out.stat().st_size}
    with h5py.File(out) as file:
        assert list(file["id"]) == [0, 1, 2, 3]
    files = sorted((tmp_path / "parts").glob("worker-*.h5"))
    assert "Wrote " in cli_ok("merge", *files, "-o", tmp_path / "again.h5")
    failed = cli("merge", files[0], "-o", tmp_path / "half.h5", "--workers", 2)
    assert failed.returncode == 2
    assert not (tmp_path / "half.h5").exists()
    assert "Traceback" not in failed.stderr


# tfrecord


def test_tfrecord_verify_split_and_repair(tmp_path):
    path = write_plain(tmp_path / "a.tfrecord", [b"record %d" % n for n in range(10)])
    (facts,) = cli_json("tfrecord", "verify", path)["files"]
    assert (facts["records"], facts["damage"], facts["counted"]) == (10, None, False)
    shards = cli_ok("tfrecord", "split", path, tmp_path / "part", "--shards", 2).split()
    assert [records_of(tmp_path / os.path.basename(shard))[0] for shard in shards] == [
        b"record 0",
        b"record 1",
    ]
    flip(path, 30)
    shown = cli_ok("tfrecord", "verify", path, tmp_path / "part-00000-of-00002.tfrecord", code=1)
    assert "DAMAGED, record 1 at byte 24" in shown
    assert "as it was written" in shown
    done = cli_json("tfrecord", "repair", path, "-o", tmp_path / "good.tfrecord", code=1)
    assert done["records"] == 9
    assert done["left_out"] == [[24, 48]]
    assert "Left out: bytes 24 to 48." in cli_ok(
        "tfrecord", "repair", path, "-o", tmp_path / "again.tfrecord", code=1
    )
    assert len(records_of(tmp_path / "good.tfrecord")) == 9


# launch


def test_launch_for_programs(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import sys, pathlib\nprint('hello')\n"
                      "first = pathlib.Path(sys.argv[1])\n"
                      "try:\n    first.touch(exist_ok=False)\n"
                      "except FileExistsError:\n    sys.exit(0)\nsys.exit(42)\n")  # fmt: skip
    done = cli("launch", "--json", "--workers", 1, script, tmp_path / "mark")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["verdict"] == "all workers finished"
    assert [life["codes"] for life in document["lives"]] == [{"0": 42}, {"0": 0}]
    assert "hello" in done.stderr


def test_recover_for_programs(tmp_path):
    assert cli_json("recover", tmp_path) == {"unfinished": []}


# The whole program.


def test_the_help_names_every_command_and_the_exit_codes():
    shown = cli_ok("--help")
    for name in (
        "demo", "ls", "show", "verify", "diff", "prune", "locks", "merge", "tfrecord", "launch",
        "doctor", "report", "recover",
    ):  # fmt: skip
        assert f"\n    {name} " in shown, name
        help_text = cli_ok(name, "--help")
        assert "usage: keras-safe-ckpt" in help_text
        if name != "tfrecord":
            assert "--json" in help_text
            assert "--debug" in help_text
    assert "exit codes:" in shown


def test_the_installed_program_is_the_same():
    program = os.path.join(os.path.dirname(sys.executable), "keras-safe-ckpt")
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == cli_ok("--version")


def test_the_output_on_a_terminal_fits_it(six):
    import pty

    ours, theirs = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    from command_line import command, variables

    process = subprocess.Popen(
        command("ls", six), stdout=theirs, stderr=theirs, env=variables(TERM="xterm", LINES="24")
    )
    os.close(theirs)
    shown = b""
    with ending(process):
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # The other end is closed.
                break
            if not data:
                break
            shown += data
        wait_until(lambda: process.poll() is not None, "it ends")
    os.close(ours)
    import re

    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.decode().splitlines()]
    assert max(map(len, lines)) <= 60
    assert b"\x1b[" in shown, "colours"
