"""The launcher, with workers that need no TensorFlow."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from clusters import LAUNCHER
from clusters import launch as launch_with
from processes import environment, wait_until

from keras_safe_ckpt.cli.main import main
from keras_safe_ckpt.cluster import launch as launch_module
from keras_safe_ckpt.cluster.launch import launch as run_group
from keras_safe_ckpt.cluster.launch import worker_environment
from keras_safe_ckpt.cluster.launch_plan import Plan, describe_code
from keras_safe_ckpt.cluster.worker_output import Printer, wants_colour

#: Counts its lives in a file; what it does in each is the argument, split by commas.
WORKER = """
import json, os, signal, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
index, ports = config["task"]["index"], config["cluster"]["worker"]
folder, script = sys.argv[1], sys.argv[2:]
mine = f"{folder}/lives-{index}"
with open(mine, "a") as file:
    file.write(json.dumps(ports) + "\\n")
life = len(open(mine).readlines()) - 1
def wait():
    while True:
        time.sleep(0.01)
def on_signal(number, frame):
    print(f"got {signal.Signals(number).name}", flush=True)
    sys.exit(int(os.environ.get("EXIT", "0")))
for step in script[index].split("/")[life].split(","):
    if step == "wait":
        wait()
    elif step == "catch":
        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
    elif step == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif step == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        open(f"{folder}/child", "w").write(str(child.pid))
    elif step == "listen":
        import socket
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("0.0.0.0", int(ports[index].split(":")[1])))
        server.listen()
    elif step == "others":
        while any(not os.path.exists(f"{folder}/ready-{other}")
                  for other in range(len(ports)) if other != index):
            time.sleep(0.01)
    elif step == "ready":
        open(f"{folder}/ready-{index}", "w").close()
    elif step == "print":
        print("hello")
        print("oops \\u00fc", file=sys.stderr)
        sys.stdout.write("a bar\\rgoes on\\rno end")
    else:
        sys.exit(int(step))
"""


#: With less time for the others after one worker has failed: what comes then is what is tested.
SOON = """
import sys
from keras_safe_ckpt.cli.main import main
from keras_safe_ckpt.cluster import launch
launch._SETTLE_SECONDS = 0.5
sys.exit(main(["launch", *sys.argv[1:]]))
"""
IMPATIENT = [sys.executable, "-c", SOON]


def launch(folder, code, *script, launcher=LAUNCHER, **options):
    """As users do, by a new interpreter for each worker."""
    return launch_with(folder, code, *script, launcher=launcher, **options)


def ports_of(folder, index):
    return [json.loads(line) for line in (folder / f"lives-{index}").read_text().splitlines()]


def start(folder, *script, options=(), **variables):
    (folder / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "keras_safe_ckpt", "launch", "--workers", str(len(script))]
    return subprocess.Popen(
        [*command, *options, folder / "worker.py", folder, *script],
        env={**environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def all_ready(folder, workers):
    wait_until(
        lambda: all((folder / f"ready-{index}").exists() for index in range(workers)), "ready"
    )


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_workers_get_a_cluster_of_their_own_and_their_output_has_names(tmp_path):
    done = launch(tmp_path, WORKER, "print,listen,0", "print,listen,0")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name in ("[worker 0]", "[worker 1]"):
        mine = [line for line in lines if line.startswith(name)]
        assert mine == [f"{name} {text}" for text in ("hello", "a bar", "goes on", "no end")]
        assert f"{name} oops ü" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("[launch] all workers finished (0 restarts, ")
    assert ports_of(tmp_path, 0) == ports_of(tmp_path, 1)
    addresses = ports_of(tmp_path, 0)[0]
    assert len(set(addresses)) == 2
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_a_restart_code_starts_all_again_on_new_ports(tmp_path):
    # Each waits until the other has counted its life, and would catch a signal.
    script = ("others,42/catch,ready,wait/0", "catch,ready,wait/others,143/0")
    done = launch(tmp_path, WORKER, *script, launcher=IMPATIENT)
    assert done.returncode == 0, done.stderr
    lives = ports_of(tmp_path, 0)
    assert len(lives) == len(ports_of(tmp_path, 1)) == 3
    assert len({address for life in lives for address in life}) == 6
    notes = [
        line
        for line in done.stderr.splitlines()
        if line.startswith("[launch]") and "the others get SIGTERM" not in line
    ]
    assert "worker 0 ended with code 42: all start again in 0.5 s (restart 1 of 10)" in notes[0]
    assert "worker 1 ended with code 143 (SIGTERM): all start again in 1 s (restart 2" in notes[1]
    assert "start " in notes[2]
    assert "worker 0: code 42, worker 1: code 0" in notes[2]
    assert notes[-1].startswith("[launch] all workers finished (2 restarts, ")


def test_the_limit_of_restarts_ends_it_with_the_code(tmp_path):
    done = launch(tmp_path, WORKER, "42/42/42", options=("--max-restarts", "1"), workers=1)
    assert done.returncode == 42
    assert len(ports_of(tmp_path, 0)) == 2
    assert "the limit of 1 restarts is reached (1 restart, " in done.stderr


def test_other_codes_can_be_chosen(tmp_path):
    options = ("--restart-codes", "7,137")
    done = launch(tmp_path, WORKER, "7/42", options=options, workers=1)
    assert done.returncode == 42
    assert "worker 0 failed with code 42" in done.stderr


def test_any_other_failure_ends_the_group_and_names_the_worker(tmp_path):
    began = time.monotonic()
    script = ("catch,ready,wait", "others,7", "catch,ready,wait")
    done = launch(tmp_path, WORKER, *script, workers=3, launcher=IMPATIENT)
    assert done.returncode == 7
    assert "[launch] worker 1 failed with code 7 (0 restarts, " in done.stderr
    assert done.stdout.count("got SIGTERM") == 2
    assert time.monotonic() - began < 60


def test_a_worker_that_does_not_heed_the_end_is_killed_with_its_children(tmp_path):
    options = ("--grace-seconds", "0.5")
    script = ("others,7", "ignore,child,ready,wait")
    done = launch(tmp_path, WORKER, *script, options=options, launcher=IMPATIENT)
    assert done.returncode == 7
    assert "still running 0.5 s after the signal: the workers are killed" in done.stderr
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child), "the child of the worker is gone")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_reach_all_workers_and_end_the_restarts(tmp_path, number, code):
    process = start(tmp_path, "catch,ready,wait", "catch,ready,wait", EXIT="3")
    all_ready(tmp_path, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out.count(f"got {number.name}") == 2
    assert f"[launch] stopped by {number.name} (0 restarts" in err


def test_a_group_that_is_stopped_and_wants_to_go_on_says_so(tmp_path):
    """To whoever started the launcher: it does not restart what it was told to end."""
    process = start(tmp_path, "catch,ready,wait", "catch,ready,wait", EXIT="42")
    all_ready(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 42, err
    assert len(ports_of(tmp_path, 0)) == 1


def test_a_signal_between_two_lives_ends_it(tmp_path):
    process = start(tmp_path, "42/42/42/42/42/42/0")
    wait_until(lambda: (tmp_path / "lives-0").exists() and len(ports_of(tmp_path, 0)) == 4, "4")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (42, 143), err
    assert "stopped by SIGTERM" in err
    assert len(ports_of(tmp_path, 0)) < 7


def test_a_signal_while_workers_are_started_ends_it(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text("import time; time.sleep(1000)")
    real = launch_module.worker_environment

    def told_meanwhile(variables, ports, worker):
        if worker == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(variables, ports, worker)

    monkeypatch.setattr(launch_module, "worker_environment", told_meanwhile)
    plan = Plan([sys.executable, str(script)], 3, grace_seconds=20)
    outcome = run_group(plan, Printer(3, colour=False, notes=io.StringIO()))
    assert (outcome.code, outcome.verdict) == (143, "stopped by SIGTERM")
    assert outcome.attempts[0].seconds < 20


def test_a_worker_has_ended_though_its_child_holds_its_output(tmp_path):
    """As one that loads data may; the child goes with the group."""
    began = time.monotonic()
    options = ("--grace-seconds", "5")
    script = ("child,others,7", "catch,ready,wait")
    done = launch(tmp_path, WORKER, *script, options=options, launcher=IMPATIENT)
    assert done.returncode == 7
    assert time.monotonic() - began < 40
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child), "the child of the worker is gone")


def test_a_full_disk_for_the_log_does_not_stop_the_workers(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("print('hello\\n' * 100_000, flush=True); raise SystemExit(7)")
    command = [sys.executable, "-m", "keras_safe_ckpt", "launch", "--workers", "1", script]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment(), stdout=full, stderr=full, timeout=60)
    assert done.returncode == 7


def test_a_signal_is_passed_on_though_nothing_can_be_printed(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "keras_safe_ckpt", "launch", "--workers", "1"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [*command, tmp_path / "worker.py", tmp_path, "catch,ready,wait"],
            env={**environment(), "EXIT": "42"},
            stdout=full,
            stderr=full,
        )
    all_ready(tmp_path, 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 42


def test_a_failure_before_the_signal_is_not_taken_for_a_preemption(tmp_path):
    """143 would tell whoever started the launcher to start the failing program again."""
    process = start(tmp_path, "3", "catch,ready,wait")
    wait_until((tmp_path / "ready-1").exists, "ready")
    line = process.stderr.readline()
    assert (
        "worker 0 ended with code 3; the others get SIGTERM if they have not ended in 20 s" in line
    )
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert "[launch] worker 0 failed with code 3" in err
    assert "got SIGTERM" in out


def test_a_second_signal_kills(tmp_path):
    process = start(tmp_path, "ignore,ready,wait")
    all_ready(tmp_path, 1)
    process.send_signal(signal.SIGTERM)
    line = process.stderr.readline()
    assert "SIGTERM goes to all workers (again: they are killed)" in line
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


def test_workers_of_a_killed_launcher_are_killed(tmp_path):
    process = start(tmp_path, "ignore,ready,wait", "child,ready,wait")
    all_ready(tmp_path, 2)
    workers = [child.pid for child in psutil.Process(process.pid).children()]
    assert len(workers) == 2
    process.kill()
    process.communicate()
    for pid in workers:
        wait_until(lambda pid=pid: not alive(pid), "the worker is gone")
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_ports_are_kept_for_the_workers(tmp_path):
    """As long as the workers live nobody else gets their ports, used or not."""
    process = start(tmp_path, "catch,ready,wait")
    all_ready(tmp_path, 1)
    port = int(ports_of(tmp_path, 0)[0][0].split(":")[1])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_a_module_can_be_launched(tmp_path):
    (tmp_path / "job.py").write_text("import sys; print('module', sys.argv[1:])")
    done = subprocess.run(
        [sys.executable, "-m", "keras_safe_ckpt", "launch", "--workers", "1", "-m", "job", "--x"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "[worker 0] module ['--x']" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "2", "no-such-file.py"], "there is no script 'no-such-file.py'"),
        (["--workers", "0", "x.py"], "expected at least 1, received 0"),
        (["--workers", "two", "x.py"], "invalid whole_number value: 'two'"),
        (["x.py"], "--workers"),
        (["--workers", "2"], "script"),
        (["--workers", "2", "--restart-codes", "0", "x.py"], "from 1 to 255.*received '0'"),
        (["--workers", "2", "--restart-codes", "a", "x.py"], "from 1 to 255.*received 'a'"),
        (["--workers", "2", "--max-restarts", "-1", "x.py"], "expected at least 0, received -1"),
        (["--workers", "2", "--grace-seconds", "-1", "x.py"], "number of seconds, received -1"),
        (["--workers", "2", "--grace-seconds", "nan", "x.py"], "number of seconds, received nan"),
    ],
)
def test_wrong_usage_is_explained(capsys, arguments, message):
    code = None
    try:
        code = main(["launch", *arguments])
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    assert re.search(message, capsys.readouterr().err)


def test_launch_needs_no_tensorflow():
    code = (
        "import sys; from keras_safe_ckpt.cli.main import main\n"
        "main(['launch', '--workers', '1', 'nothing.py'])\n"
        "print(sorted({'tensorflow', 'keras'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def pumped(*chunks, colour=False, worker=1, workers=2):
    target = io.StringIO()

    async def feed():
        reader = asyncio.StreamReader()
        pump = asyncio.create_task(Printer(workers, colour=colour).pump(worker, reader, target))
        for chunk in chunks:
            reader.feed_data(chunk)
            await asyncio.sleep(0)
        reader.feed_eof()
        await pump

    asyncio.run(feed())
    return target.getvalue()


def test_lines_are_whole_whatever_the_chunks_are():
    assert pumped(b"on", b"e\ntwo\r", b"\nthr\xc3", b"\xbc") == (
        "[worker 1] one\n[worker 1] two\n[worker 1] thrü\n"
    )
    assert pumped(b"bad \xff\n") == "[worker 1] bad \ufffd\n"
    assert pumped(b"x\n", workers=20) == "[worker  1] x\n"
    long = pumped(b"a" * 200_000)
    assert [len(line) for line in long.splitlines()] == [11 + 65536] * 3 + [11 + 3392]


def test_colours_where_they_are_wanted():
    assert pumped(b"x\n", colour=True) == "\x1b[33m[worker 1]\x1b[0m x\n"
    screen = io.StringIO()
    screen.isatty = lambda: True
    assert wants_colour(screen, {})
    assert not wants_colour(screen, {"NO_COLOR": "1"})
    assert not wants_colour(io.StringIO(), {})
    assert wants_colour(io.StringIO(), {"FORCE_COLOR": "1"})


def test_a_reader_that_is_gone_does_not_stop_the_workers(tmp_path):
    script = tmp_path / "worker.py"
    # More than a pipe holds: somebody must go on reading it.
    script.write_text("print('hello\\n' * 100_000, flush=True); open('done', 'w').close()")
    command = f"{sys.executable} -m keras_safe_ckpt launch --workers 2 worker.py | true"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment(), timeout=60)
    assert (tmp_path / "done").exists()


def test_pauses_grow_unless_the_group_lived_long(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit(42)")

    def pauses():
        notes = io.StringIO()
        plan = Plan([sys.executable, str(script)], 1, max_restarts=3, first_pause_seconds=0.01)
        outcome = run_group(plan, Printer(1, colour=False, notes=notes))
        assert (outcome.code, len(outcome.attempts)) == (42, 4)
        return re.findall(r"again in ([\d.]+) s", notes.getvalue())

    assert pauses() == ["0.01", "0.02", "0.04"]
    monkeypatch.setattr(launch_module, "_LONGEST_PAUSE_SECONDS", 0.02)
    assert pauses() == ["0.01", "0.02", "0.02"]
    monkeypatch.setattr(launch_module, "_LIVED_LONG_SECONDS", 0.0)
    assert pauses() == ["0.01", "0.01", "0.01"]


def test_the_pause_can_be_chosen(tmp_path):
    done = launch(tmp_path, WORKER, "42/143/0", workers=1, options=("--pause-seconds=0.01",))
    assert done.returncode == 0, done.stderr
    assert re.findall(r"again in ([\d.]+) s", done.stderr) == ["0.01", "0.02"]


def test_output_is_not_held_back():
    variables = worker_environment({"A": "b"}, [1, 2], 1)
    assert variables["PYTHONUNBUFFERED"] == "1"
    assert variables["A"] == "b"


def test_codes_are_told_as_people_say_them():
    assert describe_code(7) == "code 7"
    assert describe_code(137) == "code 137 (SIGKILL)"
    assert describe_code(200) == "code 200"
