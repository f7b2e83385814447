"""The comparison with the peers: its figures are measured, and the README has no others."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from processes import PROJECT, environment

SCRIPT = PROJECT / "benchmarks" / "peers.py"
STORED = PROJECT / "benchmarks" / "results" / "peers.json"
#: As the script's own process, but in an environment without Orbax.
WITHOUT_ORBAX = """
import runpy, sys
sys.modules["orbax"] = None
sys.path[0] = sys.argv[1].rpartition("/")[0]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def peers(*arguments: object, program: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, SCRIPT, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )


def cells_of(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def parsed(cell: str) -> float:
    """``76.2 ms (21.1 x ours)`` in seconds."""
    number, unit = cell.split()[:2]
    return float(number) * UNITS[unit]


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


@pytest.mark.campaign
def test_one_run_measures_all_that_are_installed_and_the_tables_are_made_of_it(tmp_path):
    """Really measured, with a tiny model; Orbax is not there."""
    chosen = ["SafeModelCheckpoint", "ModelCheckpoint", "PreemptionGuard", "OrbaxCheckpoint"]
    stored, image = tmp_path / "peers.json", tmp_path / "plots" / "peers.png"
    done = peers(
        *("--quick", "--parameters", "1e4", "--kills", "1", "--markdown"),
        *("--only", ",".join(chosen), "--json", stored, "--plot", image),
        *("--directory", tmp_path),
        program=("-c", WITHOUT_ORBAX),
    )
    assert done.returncode in (0, 1), done.stderr
    assert "OrbaxCheckpoint is left out: orbax-checkpoint is not installed" in done.stdout
    assert "ModelCheckpoint: fit" in done.stderr  # Progress, while it ran.
    measured = json.loads(stored.read_text())
    assert measured["left_out"].keys() == {"OrbaxCheckpoint"}

    rows = cells_of(done.stdout)
    costs = {(row[0], row[1]): row for row in rows if len(row) == 7 and parsed_or_none(row[2])}
    assert [name for _, name in costs] == ["SafeModelCheckpoint", "ModelCheckpoint"] * 2
    large, small = (cost for _, cost in sorted(measured["costs"].items()))
    for (_, name), row in costs.items():
        cost = large if row[0] == rows[2][0] else small
        for column, what in ((2, "blocked"), (3, "durable"), (6, "restore")):
            wanted = statistics.median(cost[what][name])
            assert parsed(row[column]) == pytest.approx(wanted, rel=0.06), (row, what)
        wanted = statistics.median(cost["fits"][name]) / statistics.median(cost["fits"]["none"])
        assert float(row[5]) == pytest.approx(wanted, abs=0.006)
    behaviour = {
        row[0]: row for row in rows if row[0] in chosen and row[1] in ("itself", "by hand")
    }
    assert behaviour.keys() == set(chosen) - {"OrbaxCheckpoint"}
    # The signal comes after 13 batches of the second epoch.
    assert behaviour["PreemptionGuard"][2:5] == ["0", "yes", "yes"]
    assert behaviour["ModelCheckpoint"][2:5] == ["13", "yes", "no"]
    assert behaviour["SafeModelCheckpoint"][5:] == ["1 of 1 times", "an error"]
    assert behaviour["ModelCheckpoint"][6] == "loaded in silence"

    assert done.returncode == (1 if any(row[-1] == "NO" for row in rows) else 0)
    assert peers("--from", stored, "--markdown").stdout == done.stdout
    head = image.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", head[16:24])) > 300
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ksc-")] == []


def parsed_or_none(cell: str) -> float | None:
    return parsed(cell) if re.match(r"[\d.]+ (s|ms|µs)\b", cell) else None


def test_readme_has_the_stored_measurements_and_nothing_else():
    readme = (PROJECT / "README.md").read_text()
    (shown,) = re.findall(
        r"^<!-- peers:begin -->\n(.*?)^<!-- peers:end -->$", readme, re.MULTILINE | re.DOTALL
    )
    done = peers("--from", STORED, "--markdown")
    assert "Traceback" not in done.stderr, done.stderr
    assert shown == done.stdout


def test_stored_measurements_are_of_all_peers(benchmarks):
    from peers_known import PEERS

    measured = json.loads(STORED.read_text())
    assert measured["left_out"] == {}
    assert measured["costs"]["large"]["bytes"] >= 1e9
    assert set(measured["lives"]) == {peer.name for peer in PEERS}
    saved = {peer.name for peer in PEERS if peer.kind != "guard"}
    assert set(measured["killed"]) == saved
    for cost in measured["costs"].values():
        for what in ("blocked", "durable", "restore"):
            assert set(cost[what]) - {"none"} == saved
    assert not re.search(r"/(root|home|tmp|work)\b", STORED.read_text())


@pytest.mark.parametrize(
    ("size", "what", "name", "factor", "goal"),
    [
        ("large", "blocked", "SafeModelCheckpoint", 0.02, "SafeModelCheckpoint / ModelCheckpoint"),
        ("small", "blocked", "PreemptionAwareCallback", 0.4, "BackupAndRestore"),
        ("large", "fits", "PreemptionAwareCallback", 1.2, "without a callback"),
        ("large", "restore", "SafeCheckpointManager", 1.3, "/ CheckpointManager"),
    ],
)
def test_a_missed_goal_is_said_and_is_the_exit_code(tmp_path, size, what, name, factor, goal):
    measured = json.loads(STORED.read_text())
    for cost in measured["costs"].values():
        for values in (cost["blocked"], cost["fits"], cost["restore"]):
            for peer in values:
                values[peer] = [0.001 if peer in OURS and values is cost["blocked"] else 1.0]
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(measured))
    assert peers("--from", path).returncode == 0
    measured["costs"][size][what][name] = [factor]
    path.write_text(json.dumps(measured))
    done = peers("--from", path)
    assert done.returncode == 1
    missed = [line for line in done.stdout.splitlines() if line.endswith("NO")]
    assert any(name in line and goal in line and f"{factor:g}" in line for line in missed), missed


OURS = ("SafeModelCheckpoint", "PreemptionAwareCallback")


def test_the_plot_of_the_readme_is_drawn_from_stored_measurements(tmp_path):
    path = tmp_path / "peers.svg"
    done = peers("--from", STORED, "--plot", path)
    assert "Traceback" not in done.stderr, done.stderr
    for image in (path, PROJECT / "docs" / "peers.svg"):
        assert ElementTree.parse(image).getroot().tag.endswith("svg")
        for name in ("SafeModelCheckpoint (ours)", "OrbaxCheckpoint", "1.2 GB of state"):
            assert f"<!-- {name} -->" in image.read_text()
        assert "fill: #ffffff" in image.read_text()  # A page may be dark.


def test_an_unknown_peer_is_refused():
    done = peers("--only", "ModelCheckpoint,Nobody")
    assert done.returncode == 2
    assert "unknown: Nobody" in done.stderr


def test_the_tables_are_put_between_the_marks(benchmarks, tmp_path):
    from peers import put_into

    document = tmp_path / "README.md"
    document.write_text("before\n<!-- peers:begin -->\nold\n<!-- peers:end -->\nafter\n")
    put_into(document, ["new", "lines"])
    wanted = "before\n<!-- peers:begin -->\nnew\nlines\n<!-- peers:end -->\nafter\n"
    assert document.read_text() == wanted
    document.write_text("nothing\n")
    with pytest.raises(SystemExit, match="no place"):
        put_into(document, ["new"])


@pytest.mark.parametrize(
    ("calls", "verdict"),
    [
        ([], "no"),
        (['rename("/run/.t", "/run/m") = 0'], "no"),
        (["fsync(3</elsewhere/m>) = 0"], "no"),
        (["fsync(3</run/.t>) = 0", 'rename("/run/.t", "/run/m") = 0'], "its files, not the rename"),
        (
            [
                "fsync(3</run/.t> <unfinished ...>",
                'rename("/run/.t", "/run/m") = 0',
                "fsync(4</run>) = 0",
            ],
            "yes",
        ),
    ],
)
def test_syncs_are_judged_by_the_calls_that_were_made(benchmarks, tmp_path, calls, verdict):
    from peers_synced import judged

    log = tmp_path / "calls"
    log.write_text("".join(f"123 {call}\n" for call in calls))
    assert judged(log, Path("/run")) == verdict


def _tells(tell: Any, number: int) -> None:
    tell(number=number, text="x" * 100_000)


def _fails(tell: Any) -> None:
    print("last words")
    raise ValueError("of a measurement")


def _hangs(tell: Any) -> None:
    tell(pid=os.getpid())
    signal.pause()


def test_processes_side_by_side_are_all_heard(benchmarks, tmp_path):
    from forked import side_by_side

    found = list(side_by_side([(_tells, (n,)) for n in range(5)], tmp_path, at_once=2))
    assert sorted(one["number"] for one in found) == [0, 1, 2, 3, 4]
    assert all(len(one["text"]) == 100_000 for one in found)


def test_a_process_that_fails_is_an_error_and_the_others_are_ended(benchmarks, tmp_path):
    from forked import side_by_side

    told = side_by_side([(_hangs, ()), (_fails, ())], tmp_path, at_once=2)
    pid = next(told)["pid"]
    with pytest.raises(RuntimeError, match="of a measurement"):
        list(told)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.campaign
def test_quick_mode_compares_everybody(tmp_path, benchmarks):
    """All peers that are installed; minutes."""
    from peers_known import PEERS, left_out

    done = peers("--quick", "--markdown", "--json", tmp_path / "p.json", "--directory", tmp_path)
    assert done.returncode in (0, 1), done.stderr
    rows = cells_of(done.stdout)
    for peer in PEERS:
        assert any(peer.name in row[:2] for row in rows) is (peer.name not in left_out())
    for name in left_out():
        assert f"{name} is left out: " in done.stdout
