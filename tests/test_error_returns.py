"""Each system call fails in turn: the right error, or none, and what was there before is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from crash_scenes import BUNDLES, SCENES
from failing import Fault, check_faults, enumerate_faults, of_what_changes_the_disk, watch
from warm import warm_process

from keras_safe_ckpt.storage.events import EventLog

#: One does not hear of its error, one has a witness that fails, and some need TensorFlow.
NAMES = [n for n in SCENES if n not in ("background", "witnessed lock", *BUNDLES)]


def of_a_sick_disk(faults: list[Fault]) -> list[Fault]:
    """What each look at a file and each close of one can say: most of what is easily forgotten."""
    return [
        fault
        for fault in faults
        if fault.call.name in ("newfstatat", "close", "getdents64") and fault.error == "EIO"
    ]


def test_every_look_and_every_close_fails(tmp_path):
    faults = of_a_sick_disk(enumerate_faults("replacing", tmp_path))
    assert len(faults) > 20
    tally = check_faults("replacing", faults, tmp_path)
    assert 0 < tally.failed < tally.tried


def test_every_close_of_what_is_merged_fails(tmp_path):
    """HDF5 says so with an error of its own kind."""
    faults = [
        fault
        for fault in of_a_sick_disk(enumerate_faults("merge", tmp_path))
        if fault.call.name == "close"
    ]
    tally = check_faults("merge", faults, tmp_path)
    assert 0 < tally.failed < tally.tried


@pytest.mark.parametrize("name", ["replacing", "keras", "set aside", "shard", "append", "merge"])
def test_each_call_that_changes_the_disk_fails(tmp_path, name):
    faults = of_what_changes_the_disk(enumerate_faults(name, tmp_path))
    assert check_faults(name, faults, tmp_path).failed > 0


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_every_call_fails_in_every_way(tmp_path, name, record_property):
    faults = enumerate_faults(name, tmp_path)
    record_property("campaign", f"{name}: {check_faults(name, faults, tmp_path)}")


# Writes that take less than they were asked to.


def check_short(name: str, every: int, folder: Path) -> int:
    """As if nothing had happened; how many writes were shortened."""
    require_short_writes()
    done = watch(name, folder, short=every)
    assert done.code == 0, done.err
    told, again = (json.loads(line) for line in done.out.splitlines())
    assert told["error"] is None
    assert (told["seen"], told["left"]) == (SCENES[name].new, [])
    assert again["seen"] in (SCENES[name].new, SCENES[name].new_again)
    return int(told["shortened"])


def require_short_writes() -> None:
    if not warm_process().shortens:
        pytest.skip("gcc is not installed (apt-get install gcc)")


WRITING = [name for name in NAMES if name not in ("open", "prune")]


@pytest.mark.parametrize("name", WRITING)
def test_writes_that_take_a_part_are_continued(tmp_path, name):
    assert check_short(name, 1, tmp_path / "all") > 0


@pytest.mark.campaign
@pytest.mark.parametrize("name", WRITING)
def test_some_writes_that_take_a_part_are_continued(tmp_path, name, record_property):
    shortened = [check_short(name, every, tmp_path / str(every)) for every in range(1, 20)]
    record_property("campaign", f"{name}: {sum(shortened)} writes took a part, none was lost")


def test_an_event_that_is_written_in_parts_is_whole(tmp_path):
    assert check_short("replacing", 1, tmp_path / "all") > 0
    saved = [
        event["step"] for event in EventLog(tmp_path / "all").read() if event["event"] == "save"
    ]
    assert saved == [1, 2, 2]
