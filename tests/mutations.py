"""Lines on which guarantees rest, what they are replaced by, and the test that has to notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """``line`` occurs once in ``module`` (of keras_safe_ckpt); ``test`` is of the normal suite."""

    guarantee: str
    module: str
    line: str
    instead: str
    test: str


MUTATIONS = (
    # A run of several workers.
    Mutation(
        "A restarted run goes on from a checkpoint of all workers",
        "training/backups.py",
        "if not self.missing_parts(backup, workers):",
        "if True:",
        "tests/test_backups.py::test_a_checkpoint_of_all_workers_comes_before_a_newer_degraded_one",
    ),
    Mutation(
        "Degraded checkpoints do not displace one of all workers",
        "training/backups.py",
        "KeepAny((KeepNewest(self._keep), _KeepNewestOfAll()))",
        "KeepNewest(self._keep)",
        "tests/test_backups.py::test_the_newest_of_all_workers_outlives_any_number_of_degraded_ones",
    ),
    Mutation(
        "Nor do they replace one of the same step",
        "training/backups.py",
        '("-degraded" if document.get("degraded") else "")',
        '""',
        "tests/test_backups.py::test_a_degraded_checkpoint_of_the_same_step_replaces_nothing",
    ),
    Mutation(
        "A worker's part stays as long as its checkpoint",
        "training/backups.py",
        "KeepAny((KeepNewest(self._keep + 1), _KeepSaves(saves)))",
        "KeepNewest(self._keep + 1)",
        "tests/test_backups.py::test_parts_whose_chief_was_killed_displace_none_that_is_needed",
    ),
    Mutation(
        "A part replaces none of another save",
        "training/backups.py",
        "name += f\"-{document['save']}\"",
        "pass",
        "tests/test_backups.py::test_a_part_of_the_same_step_replaces_none_that_is_needed",
    ),
)
