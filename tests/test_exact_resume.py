"""Interrupted by real signals in real processes, a run ends as if it had not been."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from forking import shared_forking
from processes import environment

PROGRAM = Path(__file__).with_name("interrupted.py")

#: What must be the same to the last bit; `hooks` counts what a callback of the user's was told.
EQUAL = ("history", "epochs", "weights", "optimizer", "csv", "best", "hooks")


def live(folder: Path, cases: dict[str, tuple[str, ...]], **options: Any) -> list[list[Any]]:
    """For each case the undisturbed run, then one for each plan; all in one process."""
    plans = [(case, plan) for case in cases for plan in ("", *cases[case])]
    folder.mkdir(exist_ok=True)
    words = [json.dumps(options), *(word for pair in plans for word in pair)]
    process = shared_forking().start(
        environment(), PROGRAM, folder, *words, prints_to=folder / "program"
    )
    try:
        out, err = process.communicate(60 + 30 * len(plans))
    finally:
        process.kill()
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(run["case"], run["plan"]) for run in found] == plans, out + err
    for run in found:
        assert run["codes"][-1] == 0, (run["case"], run["plan"], run["codes"], err)
    return [[run for run in found if run["case"] == case] for case in cases]


def lives(case: str, folder: Path, *plans: str, **options: Any) -> list[dict[str, Any]]:
    """The undisturbed run, then one for each plan."""
    (found,) = live(folder, {case: plans}, **options)
    return found


def assert_as_undisturbed(undisturbed: dict[str, Any], *runs: dict[str, Any]) -> None:
    for run in runs:
        differing = [name for name in EQUAL if run[name] != undisturbed[name]]
        assert differing == [], (run["case"], run["plan"], run["codes"])
        if not set("kw") & set(run["plan"]):
            assert batches(run["seen"]) == batches(undisturbed["seen"]), run["plan"]
        # Nobody would go on from a run that is finished.
        assert run["left"] == []
        # A fresh start would end in the same way: it must have come from the newest checkpoint.
        resumed = [event["file"] for event in run["resumes"]]
        assert set(resumed) <= set(run["newest"])
        if run["newest"]:
            assert run["newest"][-1] is None or resumed[-1] == run["newest"][-1], run["plan"]
        if run["codes"][-2:] == [42, 0]:
            assert run["resumes"][-1]["repeated"] == 0
        if "w" in run["plan"]:
            assert resumed, "it had a backup"


def batches(seen: str) -> list[str]:
    """What a callback was told, without the beginning of an epoch, which comes again."""
    return [
        line for line in seen.splitlines() if not line.startswith(("epoch 0", "epoch 1", "epoch 2"))
    ]


#: Hooks of a run: 1 is the beginning of an epoch, then two for each batch, the validation, ...
ARRAYS = {
    "arrays": ("13,17k,20w",),
    "random": ("20,27w",),
    "stopping": ("20,30",),
}
DATASETS = {
    "dataset": ("18,30,35w",),
    "repeated": ("14,22w",),
    "drawn on the way": ("20,34w",),
}
PYTHON = {
    "generator": ("15,26w",),
    "python, two threads": ("20",),
}
MODELS = {"several steps": ("5,17w",)}
MIRRORED = {"mirrored": ("14",)}
GROUPS = {
    "arrays": ARRAYS,
    "datasets": DATASETS,
    "python data": PYTHON,
    "models": MODELS,
    "mirrored": MIRRORED,
}
_HOOKS_31 = ("9,16", "13", "20w", "30,31")
MORE_CASES = {
    "arrays": ("9", "20w"),
    "stopping": ("9", "31"),
    "python, two threads": ("20", "24w"),
    "python, two threads, in order": ("20", "24w"),
    "split": ("9,27", "17w"),
    "weighted": ("20", "27w"),
    "eager": ("20", "27w"),
    "compiled": ("20", "27w"),
    "several steps": ("5,8", "7", "13w", "22,23"),
    **dict.fromkeys((*DATASETS, "global seed", "unknown size"), _HOOKS_31),
    **dict.fromkeys(("generator", "python", "averages", "own step"), _HOOKS_31),
    **dict.fromkeys(("random", "mirrored", "mirrored, distributed"), _HOOKS_31),
}


def assert_end_as_undisturbed(
    folder: Path, cases: dict[str, tuple[str, ...]], **options: Any
) -> int:
    count = 0
    for undisturbed, *runs in live(folder, cases, **options):
        assert_as_undisturbed(undisturbed, *runs)
        for run in runs:
            ended = [-9 if part.endswith(("k", "w")) else 42 for part in run["plan"].split(",")]
            assert len(run["codes"]) > 1
            assert run["codes"][:-1] == ended[: len(run["codes"]) - 1]
            count += 1
    return count


@pytest.mark.parametrize(
    "group",
    [pytest.param(n, marks=pytest.mark.long) if n == "mirrored" else n for n in GROUPS],
)
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path, group):
    # What a model keeps, the other groups show; with the same data, the campaign.
    options = {"light": True} if group in ("datasets", "python data") else {}
    assert assert_end_as_undisturbed(tmp_path, GROUPS[group], **options)


@pytest.mark.campaign
@pytest.mark.parametrize("case", MORE_CASES)
def test_more_interrupted_runs(tmp_path, case, record_property):
    count = assert_end_as_undisturbed(tmp_path, {case: MORE_CASES[case]})
    record_property("campaign", f"interrupted runs ({case}): {count} of {count} equal")


@pytest.mark.long
def test_a_notice_during_a_save_is_not_lost(tmp_path):
    """Saved after every batch, some save is going on nearly always."""
    undisturbed, *runs = lives("arrays", tmp_path, "9", "20k,32", save_freq=1)
    assert_as_undisturbed(undisturbed, *runs)
    assert [run["codes"] for run in runs] == [[42, 0], [-9, 42, 0]]


def test_a_second_signal_ends_the_process_at_once_and_an_echo_does_not(tmp_path):
    undisturbed, run, echo = lives("arrays", tmp_path, "20t", "20e")
    # The first one has not been answered when the second comes: the last backup stands.
    assert run["codes"] == [-15, 0]
    assert_as_undisturbed(undisturbed, {**run, "plan": "k"})
    assert echo["codes"] == [42, 0]
    assert_as_undisturbed(undisturbed, echo)


@pytest.mark.campaign
def test_backups_by_seconds(tmp_path):
    undisturbed, run = lives("arrays", tmp_path, "24w", save_freq=None, save_every_seconds=1e-6)
    assert run["codes"] == [-9, 0]
    assert_as_undisturbed(undisturbed, run)
    # Each batch is in a backup, and the last one may have been on its way.
    assert run["resumes"][-1]["batch"]
    assert run["resumes"][-1]["repeated"] <= 2


@pytest.mark.campaign
@pytest.mark.parametrize("case", ["arrays", "dataset", "several steps"])
def test_sigterm_at_every_hook(tmp_path, case, record_property):
    (undisturbed,) = lives(case, tmp_path / "first")
    plans = [str(number) for number in range(1, undisturbed["hooks"] + 1)]
    tried = 0
    for part in (plans[start : start + 16] for start in range(0, len(plans), 16)):
        undisturbed, *runs = lives(case, tmp_path / part[0], *part)
        assert_as_undisturbed(undisturbed, *runs)
        tried += sum(run["codes"] == [42, 0] for run in runs)
    assert tried == len(plans)
    record_property("campaign", f"SIGTERM at every hook ({case}): {tried} of {len(plans)} equal")


@pytest.mark.campaign
def test_random_kills(tmp_path, record_property):
    rng = random.Random(11)
    plans = [f"{rng.randint(1, 46)}k" for _ in range(20)]
    plans += [",".join(f"{n}k" for n in sorted(rng.sample(range(1, 46), 3))) for _ in range(5)]
    undisturbed, *runs = lives("arrays", tmp_path, *plans, save_freq=3)
    assert_as_undisturbed(undisturbed, *runs)
    kills = sum(code == -9 for run in runs for code in run["codes"])
    assert kills >= 20
    resumed = sum(bool(run["resumes"]) for run in runs)
    assert resumed >= 15, "most of them come after the first backup"
    record_property(
        "campaign",
        f"random kill -9: {kills} kills, {len(runs)} of {len(runs)} equal, {resumed} resumed",
    )
