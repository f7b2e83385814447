"""The checkpoints of a run of several workers: which one a restarted run goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest
from snapshots import make_snapshot

from keras_safe_ckpt.training.backups import Backups

WORKERS = 2


class Run:
    """Saves as the chief and worker 1 of a run do, part first; each save has its own name."""

    def __init__(self, folder: Path, max_to_keep: int = 2) -> None:
        self.backups = Backups(folder, locks=None, max_to_keep=max_to_keep)
        self.saves = 0

    def save(self, step: int, *, part: bool = True, chief: bool = True) -> None:
        """Without a ``part`` it is degraded; without the ``chief`` it is never completed."""
        self.saves += 1
        if part:
            self._publish(step, worker=1)
        if chief:
            self._publish(step, degraded=not part)

    def late_part(self, step: int) -> None:
        self._publish(step, worker=1)

    def save_in_place_of_the_chief(self, step: int, *, part: bool) -> None:
        """Worker 1, whose ``part`` may be there already when it hears that the chief is gone."""
        self.saves += 1
        if part:
            self._publish(step, worker=1)
        self._publish(step, degraded=True, writer=1)

    def _publish(
        self, step: int, *, worker: int | None = None, degraded: bool = False, writer: int = 0
    ) -> None:
        document = {"save": f"life-{self.saves}", "workers": WORKERS, "degraded": degraded}
        if worker is None:
            document["writer"] = writer
        self.backups.publish(
            make_snapshot(step, size=10),
            document,
            {},
            step=step,
            epoch=0,
            batch=step,
            metrics={},
            worker=worker,
        )

    def resumed(self, workers: int = WORKERS) -> tuple[int, bool]:
        """The step from which a run of so many workers goes on, and with worker 1's own values?"""
        found = self.backups.newest(workers)
        assert found is not None
        found.close()
        part = self.backups.part(1, found.document["save"])
        if part is not None:
            assert part.manifest.step == found.manifest.step
            part.close()
        return found.manifest.step, part is not None


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "state")


def test_a_checkpoint_of_all_workers_comes_before_a_newer_degraded_one(run, caplog):
    run.save(4)
    run.save(6, part=False)
    assert run.resumed() == (4, True)
    assert "it has not the parts of all workers, an older one has" in caplog.text


def test_without_one_of_all_workers_the_newest_degraded_one_has_to_do(run):
    run.save(3, part=False)
    run.save(6, part=False)
    assert run.resumed() == (6, False)
    run.save(7)
    run.save(9, part=False)
    assert run.resumed() == (7, True)


def test_a_run_with_backups_begins_anew_before_the_first_one_of_all_workers(run, caplog):
    """From the beginning it ends as if nothing had happened, and repeats little."""
    run.save(1, part=False)
    assert run.backups.newest(WORKERS, else_degraded=False) is None
    assert "it has not the parts of all workers: the run begins anew" in caplog.text
    run.save(2)
    run.save(3, part=False)
    found = run.backups.newest(WORKERS, else_degraded=False)
    assert found.manifest.step == 2
    found.close()
    # A part that is lost later is no reason to throw all of it away.
    for part in (run.backups.directory / "worker-1").glob("run-*"):
        part.unlink()
    found = Run(run.backups.directory).backups.newest(WORKERS, else_degraded=False)
    assert found.manifest.step == 3
    found.close()


def test_a_part_that_came_too_late_completes_its_checkpoint(run):
    run.save(4)
    run.save(6, part=False)
    run.late_part(6)
    assert run.resumed() == (6, True)


@pytest.mark.parametrize("part", [True, False])
def test_what_another_has_saved_in_place_of_the_chief_is_not_of_all_workers(run, part):
    run.save_in_place_of_the_chief(3, part=part)
    assert run.resumed() == (3, part), "there is no other"
    found = run.backups.newest(WORKERS)
    assert run.backups.missing_parts(found, WORKERS) == [0]
    found.close()
    run.save(4)
    run.save_in_place_of_the_chief(6, part=part)
    assert run.resumed() == (4, True)


def test_a_degraded_checkpoint_of_the_same_step_replaces_nothing(run):
    """Before and after a validation it is the same step."""
    run.save(4)
    run.save(4, part=False)
    assert run.resumed() == (4, True)
    run.save(4)
    assert run.resumed() == (4, True)


def test_the_newest_of_all_workers_outlives_any_number_of_degraded_ones(run):
    run.save(4)
    for step in range(5, 10):
        run.save(step, part=False)
    assert run.resumed() == (4, True)
    assert len(run.backups.store.checkpoints()) == 3, "the two newest, and the one of all"
    run.save(10)
    run.save(11)
    assert [c.manifest.step for c in run.backups.store.checkpoints()] == [10, 11]


def test_parts_whose_chief_was_killed_displace_none_that_is_needed(run):
    """Each life saves the part of a worker, and ends before the checkpoint to which it belongs."""
    run.save(4)
    for step in range(5, 12):
        run.save(step, chief=False)
        assert run.resumed() == (4, True)
    run.save(12)
    run.save(13)
    run.save(14)
    assert run.resumed() == (14, True)
    assert len(list((run.backups.directory / "worker-1").glob("run-*"))) == 3


def test_a_part_of_the_same_step_replaces_none_that_is_needed(run):
    """The chief was killed between the part of a worker and its own file, after a validation."""
    run.save(4)
    run.save(4, chief=False)
    assert run.resumed() == (4, True)


def test_a_damaged_part_leads_to_the_checkpoint_before(run):
    run.save(4)
    run.save(6)
    (newest,) = (run.backups.directory / "worker-1").glob("run-0000000006-*")
    data = bytearray(newest.read_bytes())
    data[data.index(b'"step":6') + 7] ^= 1
    newest.write_bytes(data)
    again = Run(run.backups.directory)
    assert again.resumed() == (4, True)


def test_on_fewer_workers_nobody_is_missed(run):
    run.save(4)
    run.save(6, part=False)
    assert run.resumed(workers=1) == (6, False)


def test_workers_that_were_not_there_are_not_missed(run):
    run.save(4)
    run.save(6)
    assert run.resumed(workers=5) == (6, True)


def test_whether_a_save_is_there(run):
    run.save(4)
    run.save(6, part=False)
    assert run.backups.holds("life-1")
    assert run.backups.holds("life-2"), "with or without all its parts"
    assert not run.backups.holds("life-3")
    damaged = run.backups.directory / "run-0000000004.weights.h5"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert not Run(run.backups.directory).backups.holds("life-1")
