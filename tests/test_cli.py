"""The commands that look at checkpoints, as processes and without TensorFlow."""

from __future__ import annotations

import os
import shutil
import socket

import ml_dtypes
import numpy as np
import pytest
from bundle_files import write_value
from command_line import cli, cli_json, cli_ok
from record_files import flip
from snapshots import make_snapshot

from keras_safe_ckpt import CheckpointStore
from keras_safe_ckpt.cli.main import main
from keras_safe_ckpt.storage.snapshot import Snapshot


@pytest.fixture(scope="module")
def bundle_folder(tmp_path_factory):
    """Checkpoints of TensorFlow with the numbers 1 to 3."""
    folder = tmp_path_factory.mktemp("bundles")
    for number in (1, 2, 3):
        write_value(folder / f"ckpt-{number}", float(number))
    return folder


@pytest.fixture
def run(tmp_path):
    """Two numbered checkpoints, and a best model."""
    store = CheckpointStore(tmp_path, worker="worker-1")
    for step in (1, 2):
        store.publish(
            make_snapshot(step),
            step=step,
            epoch=0,
            batch=step,
            metrics={"loss": 1 / step},
            monitor="loss",
            mode="min",
        )
    CheckpointStore(tmp_path, format="keras").publish(make_snapshot(3), step=3, name="best.keras")
    return tmp_path


def damage(path) -> None:
    """One bit in the middle of an array."""
    flip(path, path.read_bytes().index(make_snapshot(1).arrays["layers/dense/vars/1"].tobytes()))


# ls


def test_ls_shows_every_column(run):
    lines = cli_ok("ls", run).splitlines()
    assert lines[0].split() == [
        "file", "step", "epoch", "batch", "metrics", "size", "age", "valid", "written", "by",
    ]  # fmt: skip
    first = lines[1].split()
    assert first[:5] == ["ckpt-0000000001.weights.h5", "1", "0", "1", "loss=1"]
    assert f"worker-1 pid {os.getpid()} on {socket.gethostname()}" in lines[1]
    assert " kB " in lines[1]
    assert " s " in lines[1]
    assert [line.split()[0] for line in lines[1:4]] == [
        "ckpt-0000000001.weights.h5", "ckpt-0000000002.weights.h5", "best.keras",
    ]  # fmt: skip
    assert all(" yes " in line for line in lines[1:4])
    assert "--verify compares every byte" in lines[4]


def test_ls_for_programs(run):
    first, second, best = cli_json("ls", run)["checkpoints"]
    assert first["path"] == str(run / "ckpt-0000000001.weights.h5")
    assert (first["step"], first["epoch"], first["batch"]) == (1, 0, 1)
    assert first["metrics"] == {"loss": 1.0}
    assert first["bytes"] == (run / "ckpt-0000000001.weights.h5").stat().st_size
    assert (first["host"], first["pid"]) == (socket.gethostname(), os.getpid())
    assert second["worker"] == "worker-1"
    assert (best["kind"], best["valid"], best["verified"]) == ("keras", True, False)


def test_ls_changes_nothing(run):
    for lock in run.glob(".*"):
        lock.unlink()
    before = sorted(os.listdir(run))
    cli_ok("ls", run, "--verify")
    assert sorted(os.listdir(run)) == before


def test_a_flipped_bit_is_seen_by_ls_when_it_verifies(run):
    damage(run / "ckpt-0000000001.weights.h5")
    assert cli_json("ls", run)["checkpoints"][0]["valid"] is True
    (first, *others) = cli_json("ls", run, "--verify", code=1)["checkpoints"]
    assert first["valid"] is False
    assert "does not match its digest" in first["reason"]
    assert [other["valid"] for other in others] == [True, True]
    assert "NO: the data of 'layers/dense/vars/1'" in cli_ok("ls", run, "--verify", code=1)


def test_what_is_cut_off_is_seen_by_any_ls(run):
    path = run / "best.keras"
    os.truncate(path, path.stat().st_size - 100)
    assert "NO: " in cli_ok("ls", run, code=1).splitlines()[-2]


def test_a_file_of_keras_is_not_called_damaged(tmp_path, capsys):
    import h5py

    with h5py.File(tmp_path / "plain.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.zeros(10)
    assert main(["ls", str(tmp_path)]) == 0
    assert "?: Keras wrote it: it has no manifest" in capsys.readouterr().out
    os.truncate(tmp_path / "plain.weights.h5", 100)
    assert main(["ls", str(tmp_path)]) == 1


def test_a_model_of_keras_is_not_called_damaged(tmp_path, capsys):
    import zipfile

    with zipfile.ZipFile(tmp_path / "plain.keras", "w") as archive:
        for name in ("config.json", "metadata.json", "model.weights.h5"):
            archive.writestr(name, "{}")
    assert main(["ls", str(tmp_path)]) == 0
    assert "Keras wrote it" in capsys.readouterr().out


def test_ls_lists_checkpoints_of_tensorflow(bundle_folder):
    found = cli_json("ls", bundle_folder)["checkpoints"]
    assert [one["step"] for one in found] == [1, 2, 3]
    assert {one["kind"] for one in found} == {"tf_checkpoint"}
    files = list(bundle_folder.glob("ckpt-1.*"))
    assert found[0]["bytes"] == sum(path.stat().st_size for path in files)
    assert all(one["valid"] for one in found)


def test_ls_says_where_more_is(run, tmp_path):
    below = CheckpointStore(tmp_path / "workers" / "worker-0")
    below.publish(make_snapshot(), step=9)
    (tmp_path / "workers" / "again").symlink_to(tmp_path)
    assert "workers/worker-0: --recursive lists them" in cli_ok("ls", run, cwd=run)
    deep = cli_json("ls", run, "--recursive")["checkpoints"]
    assert [one["step"] for one in deep] == [1, 2, 3, 9]


def test_ls_of_the_newest(run):
    assert [one["step"] for one in cli_json("ls", run, "-n", 1)["checkpoints"]] == [3]
    assert "--newest: expected a number of at least 1" in cli("ls", run, "-n", 0).stderr


def test_data_files_are_not_listed(run):
    import h5py

    with h5py.File(run / "data.h5", "w") as file:
        file["x"] = np.zeros(3)
    assert len(cli_json("ls", run)["checkpoints"]) == 3


def test_names_cannot_move_the_cursor(tmp_path, capsys):
    store = CheckpointStore(tmp_path, worker="\x1b[2J")
    store.publish(make_snapshot(), step=1, name="a\x1b[31m[red]\n.weights.h5")
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"a\x1b[31m[red]" in shown


# show


def test_show_tells_the_manifest_and_the_arrays(run):
    shown = cli_ok("show", run / "ckpt-0000000002.weights.h5")
    assert "loss=0.5" in shown
    assert "loss (min)" in shown
    assert "worker-1" in shown
    assert "layers/dense/vars/0" in shown
    assert "[1000]" in shown
    assert "5 arrays, 12.0 kB." in shown
    document = cli_json("show", run / "best.keras")
    assert document["manifest"]["step"] == 3
    array = document["arrays"]["layers/dense/vars/0"]
    assert (array["shape"], array["dtype"], array["bytes"]) == ([1000], "float32", 4000)
    store = CheckpointStore(run)
    assert array["digest"] == store.verify("best.keras").arrays["layers/dense/vars/0"].digest


@pytest.mark.parametrize("name", ["ckpt-2", "ckpt-2.index", "ckpt-2.data-00000-of-00001"])
def test_show_takes_any_part_of_a_checkpoint_of_tensorflow(bundle_folder, name, capsys):
    assert main(["show", str(bundle_folder / name)]) == 0
    shown = capsys.readouterr().out
    assert "v0/.ATTRIBUTES/VARIABLE_VALUE" in shown
    assert "[8]" in shown
    assert "float32" in shown


# verify


def test_verify_reads_every_byte(run):
    done = cli_ok("verify", run)
    assert "3 whole, 0 damaged." in done
    damage(run / "ckpt-0000000001.weights.h5")
    shown = cli_ok("verify", run, code=1)
    assert "2 whole, 1 damaged." in shown
    (line,) = [line for line in shown.splitlines() if "DAMAGED" in line]
    assert "layers/dense/vars/1" in line
    found = cli_json("verify", run / "ckpt-0000000001.weights.h5", run / "best.keras", code=1)
    assert [one["condition"] for one in found["checkpoints"]] == ["damaged", "whole"]
    assert (found["whole"], found["damaged"]) == (1, 1)


def test_verify_of_checkpoints_of_tensorflow(bundle_folder, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(bundle_folder, copy)
    assert main(["verify", str(copy / "ckpt-1"), str(copy / "ckpt-2")]) == 0
    flip(copy / "ckpt-2.data-00000-of-00001", 3)
    assert main(["verify", str(copy)]) == 1
    assert "2 whole, 1 damaged." in capsys.readouterr().out.splitlines()[-1]


def test_what_cannot_be_judged_is_neither_whole_nor_damaged(tmp_path, capsys):
    import h5py

    with h5py.File(tmp_path / "plain.weights.h5", "w") as file:
        file["layers/dense/vars/0"] = np.zeros(10)
    assert main(["verify", str(tmp_path)]) == 2
    assert "0 whole, 0 damaged, 1 cannot be judged." in capsys.readouterr().out


# diff


def test_diff_tells_which_arrays_differ_and_by_how_much(tmp_path):
    store = CheckpointStore(tmp_path)
    one = {"same": np.arange(5.0), "moved": np.zeros((2, 3), "float32"), "gone": np.ones(2)}
    moved = np.zeros((2, 3), "float32")
    moved[0, 1], moved[1, 2] = 0.25, -0.75
    other = {"same": np.arange(5.0), "moved": moved, "shape": np.ones(2)}
    for name, arrays in (("a", one), ("b", other)):
        store.publish(Snapshot({}, arrays), step=1, name=f"{name}.weights.h5")
    paths = tmp_path / "a.weights.h5", tmp_path / "b.weights.h5"
    found = cli_json("diff", *paths, code=1)
    assert found["same"] == 1
    gone, shape, moved_facts = found["different"]
    assert (gone["name"], gone["what"]) == ("gone", "only in A")
    assert (shape["name"], shape["what"]) == ("shape", "only in B")
    assert (moved_facts["name"], moved_facts["largest"]) == ("moved", 0.75)
    assert moved_facts["mean"] == pytest.approx(1 / 6)
    assert (moved_facts["elements"], moved_facts["elements_different"]) == (6, 2)
    shown = cli_ok("diff", *paths, code=1)
    assert "1 arrays are the same bit by bit, 3 different." in shown
    assert "2 of 6" in shown


def test_diff_of_the_same(run):
    copy = run / "copy.weights.h5"
    shutil.copy(run / "ckpt-0000000001.weights.h5", copy)
    shown = cli_ok("diff", run / "ckpt-0000000001.weights.h5", copy)
    assert "5 arrays are the same bit by bit, nothing differs." in shown


@pytest.mark.parametrize(
    ("one", "other", "largest", "count"),
    [
        (np.array([np.nan, 1.0]), np.array([np.nan, 2.0]), 1.0, 1),
        (np.array([np.nan, 1.0]), np.array([1.0, 1.0]), "inf", 1),
        (np.array([np.inf, 1.0]), np.array([np.inf, 1.5]), 0.5, 1),
        (np.array([0.0]), np.array([-0.0]), 0.0, 1),
        (np.array([True, False]), np.array([True, True]), 1.0, 1),
        (np.array([2**63 + 5], "uint64"), np.array([5], "uint64"), 2.0**63, 1),
        (np.array([2**53 + 1]), np.array([2**53]), 1.0, 1),
        (np.array([1 + 1j]), np.array([1 - 1j]), 2.0, 1),
        (np.array([1, 2], ml_dtypes.bfloat16), np.array([1, 4], ml_dtypes.bfloat16), 2.0, 1),
        (np.array([b"ab"]), np.array([b"cd"]), None, 0),
        (np.zeros(1 << 20), np.r_[np.zeros((1 << 20) - 1), 3.0], 3.0, 1),
        (np.zeros((1 << 20) + 5), np.r_[np.zeros((1 << 20) + 4), 3.0], 3.0, 1),
    ],
    ids=[
        "nan in both",
        "nan in one",
        "inf in both",
        "zeros",
        "booleans",
        "large",
        "beyond float64",
        "complex",
        "bfloat16",
        "texts",
        "end of a block",
        "after a block",
    ],
)
def test_diff_of_odd_numbers(tmp_path, capsys, one, other, largest, count):
    import json

    store = CheckpointStore(tmp_path)
    for name, array in (("a", one), ("b", other)):
        store.publish(Snapshot({}, {"x": array}), step=1, name=f"{name}.weights.h5")
    paths = str(tmp_path / "a.weights.h5"), str(tmp_path / "b.weights.h5")
    assert main(["diff", *paths, "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["different"]
    assert (found["largest"], found["elements_different"]) == (largest, count)


def test_diff_of_checkpoints_of_tensorflow(bundle_folder, capsys):
    assert main(["diff", str(bundle_folder / "ckpt-1"), str(bundle_folder / "ckpt-3")]) == 1
    shown = capsys.readouterr().out
    assert "v0/.ATTRIBUTES/VARIABLE_VALUE" in shown
    assert " 2 " in shown
    assert "8 of 8" in shown
    assert main(["diff", str(bundle_folder / "ckpt-1"), str(bundle_folder / "ckpt-1")]) == 0


def test_diff_does_not_trust_a_damaged_file(run, capsys):
    damage(run / "ckpt-0000000001.weights.h5")
    paths = [str(run / f"ckpt-000000000{n}.weights.h5") for n in (1, 2)]
    assert main(["diff", *paths]) == 2
    assert "does not match its digest" in capsys.readouterr().err


def test_files_of_keras_2_are_looked_at_as_a_whole(tmp_path, capsys):
    """Their arrays are not listed: two of them are the same, or not."""
    store = CheckpointStore(tmp_path, format="legacy_h5")
    for name, content in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        store.publish(Snapshot({}, {}, assets={"model.h5": content}), step=1, name=f"{name}.h5")
    paths = {name: str(tmp_path / f"{name}.h5") for name in "abc"}
    assert main(["ls", "--verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(" yes ") == 3
    assert main(["diff", paths["a"], paths["c"]]) == 0
    assert main(["diff", paths["a"], paths["b"]]) == 1
    assert "(the whole file)" in capsys.readouterr().out


# What may go wrong meanwhile, and what only looks like a checkpoint.


def test_what_is_deleted_meanwhile_is_not_called_damaged(run, bundle_folder, tmp_path):
    from keras_safe_ckpt.cli.looking import look_at_all
    from keras_safe_ckpt.storage.survey import find_checkpoints

    copy = tmp_path / "bundles"
    shutil.copytree(bundle_folder, copy)
    paths = [*find_checkpoints(run), *find_checkpoints(copy)]
    assert len(paths) == 6
    (run / "best.keras").unlink()
    for part in copy.glob("ckpt-2.*"):
        part.unlink()
    for verify in (False, True):
        left = look_at_all(paths, verify=verify)
        assert [one.path.name for one in left] == [
            "ckpt-0000000001.weights.h5", "ckpt-0000000002.weights.h5", "ckpt-1", "ckpt-3",
        ]  # fmt: skip
        assert {one.condition.value for one in left} == {"whole"}


def test_data_without_its_index_is_not_passed_over(bundle_folder, tmp_path, capsys):
    copy = tmp_path / "bundles"
    shutil.copytree(bundle_folder, copy)
    (copy / "ckpt-2.index").unlink()
    assert main(["verify", str(copy)]) == 2
    shown = capsys.readouterr().out
    assert "its index is missing" in shown
    assert "2 whole, 0 damaged, 1 cannot be judged." in shown


def test_an_index_of_something_else_is_no_checkpoint(run, capsys):
    (run / "vectors.index").write_bytes(b"FAISS")
    (run / "folder.index").mkdir()
    assert main(["ls", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "vectors" not in shown
    assert "folder" not in shown


def test_an_index_whose_data_is_lost_is_damaged_if_tensorflow_lists_it(tmp_path, capsys):
    from keras_setup import tf

    path = tf.train.CheckpointManager(
        tf.train.Checkpoint(v=tf.Variable(1.0)), str(tmp_path), max_to_keep=None
    ).save()
    os.unlink(f"{path}.data-00000-of-00001")
    assert main(["verify", str(tmp_path)]) == 1
    assert "is missing" in capsys.readouterr().out


def test_a_file_of_keras_2_that_was_cut_off_is_damaged(tmp_path, capsys):
    store = CheckpointStore(tmp_path, format="legacy_h5")
    content = bytes(1000)
    store.publish(Snapshot({}, {}, assets={"model.h5": content}), step=1, name="a.h5")
    os.truncate(tmp_path / "a.h5", 800)
    assert main(["verify", str(tmp_path)]) == 1
    assert "0 whole, 1 damaged." in capsys.readouterr().out


def test_slices_of_a_tensor_are_told_apart(tmp_path, capsys):
    from keras_setup import tf

    v1 = tf.compat.v1
    for name, value in (("a", 0.0), ("b", 1.0)):
        with tf.Graph().as_default(), v1.Session() as session:
            parts = v1.get_variable(
                "w",
                initializer=tf.zeros((8, 2)),
                partitioner=v1.fixed_size_partitioner(4),
                use_resource=False,
            )
            session.run(v1.global_variables_initializer())
            session.run(list(parts)[1].assign(tf.fill((2, 2), value)))
            v1.train.Saver().save(session, str(tmp_path / name), write_meta_graph=False)
    assert main(["show", str(tmp_path / "a"), "--json"]) == 0
    import json

    assert len(json.loads(capsys.readouterr().out)["arrays"]) == 5
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "1 different" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fact",
    [
        {"metrics": {"loss": 10**400}},
        {"wall_time": float("inf")},
        {"wall_time": 1e300},
        {"wall_time": -1.0},
        {"sequence": 10**400},
        {"step": 1 << 63},
    ],
    ids=str,
)
def test_numbers_that_no_honest_file_has(tmp_path, capsys, fact):
    import dataclasses

    from keras_safe_ckpt.storage.manifest import Manifest

    manifest = dataclasses.replace(Manifest(arrays={}, structure="", size=3), **fact)
    data = manifest.to_json()
    (tmp_path / "a.weights.h5").write_bytes(
        b"abc" + data + len(data).to_bytes(8, "little") + b"keras_safe_ckpt1"
    )
    assert main(["ls", str(tmp_path)]) == 1
    assert "its manifest is malformed" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "a.weights.h5")]) == 2


@pytest.mark.parametrize("content", [b"3", b"null", b"[" * 100_000, b"\xff"], ids=len)
def test_an_archive_with_odd_metadata_does_not_stop_the_list(run, capsys, content):
    import zipfile

    with zipfile.ZipFile(run / "odd.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("metadata.json", content)
    torn = run / "torn.keras"
    torn.write_bytes((run / "odd.keras").read_bytes().replace(b"metadata", b"metadatb", 1))
    assert main(["ls", str(run)]) == 1
    assert capsys.readouterr().out.count(" yes ") == 3


def test_a_log_that_is_no_file_is_not_waited_for(bundle_folder, tmp_path):
    copy = tmp_path / "bundles"
    shutil.copytree(bundle_folder, copy)
    os.mkfifo(copy / "events.jsonl")
    assert len(cli_json("ls", copy, timeout=60)["checkpoints"]) == 3
    (copy / "events.jsonl").unlink()
    (copy / "events.jsonl").mkdir()
    assert len(cli_json("ls", copy, timeout=60)["checkpoints"]) == 3


def test_names_that_are_no_text_can_stand_in_json(tmp_path, capsys):
    import json

    store = CheckpointStore(tmp_path, worker="\ud800")
    store.publish(make_snapshot(), step=1, name="\udcff.weights.h5")
    assert main(["ls", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert found["worker"] == r"\ud800"
