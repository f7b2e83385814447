"""What is better, in memory and under the lock."""

from __future__ import annotations

import math

import pytest

from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.training.best import Best


def manifest(value: float | None = None, **facts) -> Manifest:
    metrics = {} if value is None else {"val_loss": value}
    return Manifest(metrics=metrics, **{"monitor": "val_loss", "mode": "min", **facts})


@pytest.mark.parametrize(("mode", "better", "worse"), [("min", 0.1, 0.3), ("max", 0.3, 0.1)])
def test_better_is_strict_and_has_a_direction(mode, better, worse):
    best = Best("val_loss", mode, 0.2)
    assert best.beaten_by(better)
    assert not best.beaten_by(worse)
    assert not best.beaten_by(0.2)


def test_anything_but_nan_beats_nothing():
    best = Best("val_loss", "min")
    assert best.beaten_by(math.inf)
    assert not best.beaten_by(math.nan)
    assert best.is_better(1.0, math.nan)


def test_it_only_ever_gets_better():
    best = Best("val_loss", "min")
    for value in (0.5, 0.7, None, math.nan, 0.3, 0.4):
        best.learn(value)
    assert best.value == 0.3


def test_direction_must_be_known_first():
    with pytest.raises(RuntimeError, match="val_loss"):
        Best("val_loss").beaten_by(1.0)


@pytest.mark.parametrize(
    ("in_place", "candidate", "kept"),
    [
        (None, 0.5, False),
        (0.6, 0.5, False),
        (0.5, 0.5, True),
        (0.4, 0.5, True),
        (math.nan, 0.5, False),
        (0.9, None, True),  # What was judged is not replaced by what was not.
        (math.nan, None, False),
    ],
)
def test_what_is_in_place_stays_unless_the_new_one_is_better(in_place, candidate, kept):
    best = Best("val_loss", "min")
    incumbent = None if in_place is None else manifest(in_place)
    reason = best.veto(candidate)(incumbent, manifest(candidate))
    assert (reason is not None) == kept
    if kept:
        assert f"val_loss={in_place:.5f}" in reason


def test_the_veto_remembers_what_it_kept():
    veto = Best("val_loss", "min", 0.8).veto(0.7)
    veto(manifest(0.2), manifest(0.7))
    assert veto.kept == 0.2
    veto(None, manifest(0.7))
    assert veto.kept is None


def test_without_values_the_newer_one_stays():
    veto = Best("val_loss", "min").veto(None)
    assert veto(manifest(sequence=5), manifest(sequence=4)) is not None
    assert veto(manifest(sequence=4), manifest(sequence=5)) is None


def test_same_standard_is_not_mentioned():
    best = Best("val_loss", "min")
    assert best.other_standard(manifest(0.1), "f") is None
    assert best.other_standard(Manifest(), "f") is None


@pytest.mark.parametrize("facts", [{"monitor": "val_acc"}, {"mode": "max"}])
def test_another_standard_is_named_with_its_consequence(facts):
    text = Best("val_loss", "min").other_standard(manifest(0.25, **facts), "best.keras")
    for part in ("best.keras", *facts.values(), "'val_loss'", "'min'", "0.25000"):
        assert part in text
    text = Best("val_loss", "min").other_standard(manifest(None, **facts), "best.keras")
    assert "replaces it" in text
    assert "another filepath" in text
