"""No symbolic link is followed that somebody has planted where a file is to be written.

What the user names is the user's: links on the way to a directory, and the directory itself, lead
where the user wants. What the library makes in there, folders included, is never a link.
"""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from crash_scenes import BUNDLES, prepare_bundles, steps_of
from planting import Outside, Written, check_links, plant, watch, written_in
from snapshots import make_snapshot, stored_seed
from written_scenes import WRITTEN

from keras_safe_ckpt import CentralH5Writer, CheckpointStore, WorkerH5Writer
from keras_safe_ckpt.datasets.feed import Feed
from keras_safe_ckpt.errors import UnsafePathError
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.recovery import Journal, reading
from keras_safe_ckpt.storage.temp_names import new_temp_name


@pytest.mark.parametrize("name", ["set aside", "append", "run"])
def test_a_link_at_each_path_that_is_written(tmp_path, name):
    tally = check_links(name, tmp_path, kinds=1)
    assert 0 < tally.refused < tally.links


def test_what_is_written_is_seen(tmp_path):
    """Else no link would be planted anywhere, and none be followed."""
    calls = watch("set aside", tmp_path / "watched", WRITTEN["set aside"].prepare)
    paths, _ = written_in(calls, tmp_path / "watched" / "place")
    visible = {str(one.path) for one in paths if not one.path.name.endswith(".kscktmp")}
    assert visible == {
        "m.weights.h5",
        "m~2.weights.h5",
        "events.jsonl",
        ".keras_safe_ckpt.lock",
        ".keras_safe_ckpt.gate",
    }
    assert len(paths) == 8  # Two probes and the file itself on its way.


@pytest.mark.parametrize(
    ("path", "kind"),
    [(".all.h5.feeds/closed.new", "file"), (".all.h5.feeds.past", "nothing")],
)
def test_a_link_among_what_a_central_writer_says(tmp_path, path, kind):
    written = Written(Path(path), False)
    outcome = plant("central", written, kind, tmp_path, WRITTEN["central"].prepare)
    assert outcome == (False, [])


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in BUNDLES])
def test_every_link_at_every_path_that_is_written(tmp_path, name, record_property):
    record_property("campaign", f"{name}: {check_links(name, tmp_path)}")


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BUNDLES)
def test_every_link_at_every_path_of_a_checkpoint_of_tensorflow(tmp_path, name, record_property):
    from bundle_files import write_value  # With TensorFlow, which the others do without.

    for value in (1, 2, 3):
        write_value(tmp_path / "made" / str(value), value)

    def prepare(folder: Path) -> None:
        prepare_bundles(name, tmp_path / "made", folder)

    tally = check_links(name, tmp_path / "trials", prepare=prepare)
    record_property("campaign", f"{name}: {tally}")


# Links that lead to something that is taken for what it is not.


def test_a_former_one_is_kept_although_a_link_to_it_has_the_name(tmp_path):
    """By the link it would be the new one at once, and the former be gone."""
    store = CheckpointStore(tmp_path)
    store.publish(make_snapshot(1), step=1, name="m.weights.h5")
    (tmp_path / "m~2.weights.h5").symlink_to("m.weights.h5")
    store.publish(make_snapshot(2), step=2, name="m.weights.h5", set_aside=lambda old, new: True)
    assert steps_of(tmp_path) == "1,2"
    assert stored_seed(store, tmp_path / "m~3.weights.h5") == 1


def test_a_link_to_a_larger_file_does_not_cost_what_was_interrupted(tmp_path):
    outside = tmp_path / "outside.h5"
    with h5py.File(outside, "w") as file:
        file["x"] = np.zeros(1000)
    before = outside.read_bytes()
    folder = tmp_path / "run"
    WRITTEN["worker file, set aside"].prepare(folder)
    aside = folder / ".worker-00000.h5.interrupted"
    aside.symlink_to(outside)
    writer = WorkerH5Writer(folder)
    assert not aside.is_symlink()
    with h5py.File(aside) as file:
        assert file["x"][:].tolist() == [1, 2]
    writer.close()
    assert outside.read_bytes() == before


def test_a_feeder_does_not_follow_a_link_to_a_folder(tmp_path):
    outside = Outside(tmp_path / "outside")
    (tmp_path / ".all.h5.feeds").symlink_to(tmp_path / "outside" / "directory")
    with pytest.raises(UnsafePathError, match=r"feeds.*symbolic link"):
        Feed(tmp_path / "all.h5").append("x", [1])
    with pytest.raises(UnsafePathError, match=r"feeds.*symbolic link"):
        CentralH5Writer(tmp_path / "all.h5")
    assert outside.changes() == []


def test_a_link_in_the_place_of_an_abandoned_checkpoint_is_nobodys(tmp_path):
    """Its journal would be followed, and removed."""
    place, outside = tmp_path / "place", tmp_path / "outside"
    place.mkdir()
    outside.mkdir()
    (outside / "abandoned").touch()
    journal = Journal("ckpt-1", [], "checkpoint", is_listed=False, for_ever=False)
    journal.write(outside, durably=False)
    (place / new_temp_name("ckpt-1")).symlink_to(outside)
    with reading(BundleDirectory(place)):
        pass
    assert sorted(os.listdir(outside)) == ["abandoned", "journal.json"]
