"""Which checkpoints stay: one of every period, and the keywords of a callback."""

from __future__ import annotations

import datetime

import pytest

from keras_safe_ckpt import KeepEvery
from keras_safe_ckpt.storage.manifest import Manifest
from keras_safe_ckpt.storage.path_template import PathTemplate
from keras_safe_ckpt.storage.retention import Checkpoint
from keras_safe_ckpt.training.keeping import Keeping

HOUR = datetime.timedelta(hours=1)


def checkpoint(number: int, **facts) -> Checkpoint:
    return Checkpoint(f"{number}.keras", Manifest(**{"epoch": number, "batch": None, **facts}))


def kept(policy, checkpoints) -> list[str]:
    chosen = {c.path for c in policy.keep(checkpoints)}
    return [c.path.removesuffix(".keras") for c in checkpoints if c.path in chosen]


def test_every_n_epochs_the_last_of_each_period_stays():
    checkpoints = [checkpoint(number) for number in range(1, 13)]
    assert kept(KeepEvery(epochs=5), checkpoints) == ["5", "10", "12"]
    assert kept(KeepEvery(epochs=1), checkpoints) == [str(n) for n in range(1, 13)]


def test_every_n_epochs_also_when_pruned_after_each_save():
    present: list[Checkpoint] = []
    for number in range(1, 13):
        present = list(KeepEvery(epochs=5).keep([*present, checkpoint(number)]))
    assert [c.manifest.epoch for c in present] == [5, 10, 12]


def test_a_batch_belongs_to_the_epoch_that_it_is_in():
    """Epoch counts finished ones: one batch after the fifth is the first of the next period."""
    end_of_fifth = checkpoint(5)
    first_of_sixth = Checkpoint("6.keras", Manifest(epoch=5, batch=1))
    assert kept(KeepEvery(epochs=5), [end_of_fifth, first_of_sixth]) == ["5", "6"]


def test_every_n_hours_one_stays():
    hours = [0.1, 0.9, 1.5, 4.2, 5.9, 6.1]
    checkpoints = [checkpoint(n, wall_time=hour * 3600) for n, hour in enumerate(hours)]
    assert kept(KeepEvery(hours=2), checkpoints) == ["2", "4", "5"]
    assert kept(KeepEvery(hours=0.5), checkpoints) == ["0", "1", "2", "3", "4", "5"]


def test_without_an_epoch_nothing_is_kept_by_epochs():
    assert kept(KeepEvery(epochs=1), [checkpoint(1, epoch=None)]) == []


@pytest.mark.parametrize(
    "settings",
    [{}, {"epochs": 1, "hours": 1}, {"epochs": 0}, {"epochs": 1.5}, {"hours": 0}, {"hours": -1}],
)
def test_wrong_periods_are_refused(settings):
    with pytest.raises(ValueError, match="Expected"):
        KeepEvery(**settings)


# The keywords of a callback


def judged(number: int, loss: float) -> Checkpoint:
    return checkpoint(number, metrics={"loss": loss}, wall_time=number * 3600.0)


LOSSES = [0.9, 0.1, 0.8, 0.7, 0.6, 0.5]
RUN = [judged(number, loss) for number, loss in enumerate(LOSSES, 1)]


@pytest.mark.parametrize(
    ("keeping", "expected"),
    [
        (Keeping(max_to_keep=2), ["2", "5", "6"]),  # The best stays, whatever is asked for.
        (Keeping(keep_best=2), ["2", "6"]),
        (Keeping(keep_every=3), ["2", "3", "6"]),
        (Keeping(keep_every=2 * HOUR), ["1", "2", "3", "5", "6"]),
        (Keeping(max_to_keep=1, keep_best=3, keep_every=4), ["2", "4", "5", "6"]),
    ],
)
def test_what_the_keywords_keep(keeping, expected):
    assert kept(keeping.policy("loss", "min"), RUN) == expected


def test_without_keywords_nothing_is_deleted():
    assert Keeping().policy("loss", "min") is None
    assert not Keeping().deletes


def test_without_a_direction_there_is_no_best():
    assert kept(Keeping(max_to_keep=2).policy("loss", None), RUN) == ["5", "6"]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_to_keep": 0},
        {"max_to_keep": -1},
        {"max_to_keep": 2.0},
        {"max_to_keep": True},
        {"keep_best": 0},
        {"keep_every": 0},
        {"keep_every": "2h"},
        {"keep_every": datetime.timedelta(0)},
        {"keep_every": -HOUR},
    ],
)
def test_wrong_keywords_are_named(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match="Expected") as caught:
        Keeping(**settings)
    assert f"{name}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("keeping", "path"),
    [
        (Keeping(max_to_keep=2), "model.keras"),
        (Keeping(keep_best=1), "model.keras"),
        (Keeping(keep_every=1), "{val_loss:.2f}.keras"),
        (Keeping(max_to_keep=2), "{batch}.keras"),
        (Keeping(max_to_keep=2), "{worker}.keras"),
        (Keeping(max_to_keep=2), "{epoch}/{epoch}.keras"),
        (Keeping(max_to_keep=1), "{epoch}/m.keras"),
        (Keeping(max_to_keep=1), "{val_loss}.keras"),
        (Keeping(max_to_keep=2), "{epoch!s:.1}.keras"),
    ],
)
def test_files_that_would_overwrite_each_other_are_noticed(keeping, path):
    with pytest.raises(ValueError, match="xpected") as caught:
        keeping.ensure_fits(PathTemplate(path), by_batch=False)
    assert repr(path) in str(caught.value)
    assert str(keeping) in str(caught.value)


@pytest.mark.parametrize(
    ("keeping", "path"),
    [
        (Keeping(), "model.keras"),
        (Keeping(max_to_keep=1), "model.keras"),
        (Keeping(max_to_keep=2), "{epoch}.keras"),
        (Keeping(keep_best=2), "{worker}/{epoch}-{val_loss}.keras"),
    ],
)
def test_files_with_names_of_their_own_are_fine(keeping, path):
    keeping.ensure_fits(PathTemplate(path), by_batch=False)  # Raises nothing, and rightly so:
    names = {path.format(epoch=epoch, worker=0, val_loss=0.5) for epoch in range(1, 200)}
    assert len(names) == (199 if "{epoch}" in path else 1)
