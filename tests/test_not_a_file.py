"""What has the name of a checkpoint and is no file is named by whoever passes it over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import cli, cli_json
from driven import tiny_model, weight
from keras_setup import keras
from preempted_fit import DATA, At, Bell, build, callback, events

from keras_safe_ckpt import CheckpointStore, SafeModelCheckpoint
from keras_safe_ckpt.errors import CorruptCheckpointError

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")

REASONS = {
    "link": "symbolic link",
    "dangling link": "symbolic link",
    "loop": "symbolic link",
    "pipe": "not a regular file",
    "directory": "a directory",
}
each_kind = pytest.mark.parametrize("kind", REASONS)


def replace(path: Path, kind: str) -> None:
    """The file is elsewhere, or gone, and this is in its place."""
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    os.replace(path, elsewhere / path.name)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        goals = {"link": elsewhere / path.name, "loop": path}
        path.symlink_to(goals.get(kind, elsewhere / "nothing"))


@pytest.fixture
def two(tmp_path):
    """A store with two checkpoints, and the newest of them."""
    store = CheckpointStore("run")
    paths = [store.publish(tiny_model(float(step)), step=step).path for step in (1, 2)]
    return store, paths[1]


@each_kind
def test_a_store_names_it_and_takes_the_one_before(two, kind):
    store, newest = two
    replace(newest, kind)
    model = tiny_model()
    _, manifest = store.load(model)
    assert (manifest.step, weight(model)) == (1, 1.0)
    (passed,) = [event for event in store.events.read() if event["event"] == "pass_over"]
    assert passed["file"] == newest.name
    assert REASONS[kind] in passed["reason"]


@each_kind
def test_the_commands_name_it(two, kind):
    _, newest = two
    replace(newest, kind)
    for name in ("verify", "ls"):
        told = cli_json(name, "run", code=1)
        listed = [one for one in told["checkpoints"] if newest.name in str(one)]
        assert len(listed) == 1, name
        assert REASONS[kind] in str(listed[0]), name


def test_a_second_name_beside_a_checkpoint_is_nobodys_business(two):
    """As people make it: latest, which leads to the newest."""
    store, newest = two
    link = newest.with_name("latest.weights.h5")
    link.symlink_to(newest.name)
    assert store.latest(lambda path, reason: pytest.fail(reason)).path == newest
    assert cli_json("verify", "run")["whole"] == 2
    assert cli_json("verify", link)["whole"] == 1


def test_whoever_names_a_link_means_what_it_leads_to(two):
    _, newest = two
    replace(newest, "link")
    assert cli_json("verify", newest)["whole"] == 1
    assert cli("show", newest).returncode == 0


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_a_run_does_not_begin_anew_in_silence(kind):
    bell = Bell()
    model = build()
    model.fit(epochs=3, callbacks=[callback(bell), At("batch", 1, 2, bell.ring)], **DATA)
    paths = list(Path("state").glob("run-*"))
    assert paths
    for path in paths:
        replace(path, kind)
    with pytest.raises(CorruptCheckpointError, match=REASONS[kind]):
        build().fit(epochs=3, callbacks=[callback(Bell())], **DATA)
    assert {event["file"] for event in events("pass_over")} == {path.name for path in paths}


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_the_newest_of_a_template_is_named(tmp_path, kind, caplog):
    template = "run/{epoch}.keras"
    x = keras.ops.zeros((1, 1))
    tiny_model().fit(x, x, epochs=2, verbose=0, callbacks=[SafeModelCheckpoint(template)])
    replace(Path("run/2.keras").absolute(), kind)
    assert SafeModelCheckpoint.load_latest(template) is not None
    assert f"Passed over {tmp_path}/run/2.keras" in caplog.text
    assert REASONS[kind] in caplog.text
