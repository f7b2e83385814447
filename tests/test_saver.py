"""`SafeSaver`: the Saver of TensorFlow 1, in graph mode with a session."""

from __future__ import annotations

import inspect
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bundle_files import leftovers, names_in
from keras_setup import tf

from keras_safe_ckpt import CheckpointWriteError, CorruptCheckpointError, LockManager, SafeSaver

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


@pytest.fixture
def session():
    """With a variable ``v`` that says what was saved, and a step."""
    with tf.Graph().as_default():
        v1.get_variable("v", initializer=tf.zeros(100))
        v1.train.get_or_create_global_step()
        with v1.Session() as open_session:
            open_session.run(v1.global_variables_initializer())
            yield open_session


def variable() -> tf.Variable:
    return v1.global_variables()[0]


def set_to(session, value: float) -> None:
    variable().load([value] * 100, session)


def value(session) -> float:
    values = set(session.run(variable()).tolist())
    assert len(values) == 1
    return values.pop()


def test_the_signature_is_that_of_tensorflow():
    for method in ("__init__", "save", "restore"):
        theirs = inspect.signature(getattr(v1.train.Saver, method)).parameters
        ours = inspect.signature(getattr(SafeSaver, method)).parameters
        assert list(ours)[: len(theirs)] == list(theirs)
        for name, parameter in theirs.items():
            assert ours[name].default == parameter.default, name


def test_save_and_restore(session):
    saver = SafeSaver(max_to_keep=2)
    for step in (1, 2, 3):
        set_to(session, step)
        assert saver.save(session, "run/model", global_step=step) == f"run/model-{step}"
    assert saver.last_checkpoints == ["run/model-2", "run/model-3"]
    assert saver.latest("run") == "run/model-3" == v1.train.latest_checkpoint("run")
    assert sorted(os.listdir("run")) == sorted(
        [
            *(f".keras_safe_ckpt{kind}" for kind in (".lock", ".gate")),
            *(f".keras_safe_ckpt-readers{kind}" for kind in (".lock", ".gate")),
            *(f"model-{n}.{k}" for n in (2, 3) for k in ("data-00000-of-00001", "index", "meta")),
            *("checkpoint", "events.jsonl"),
        ]
    )
    set_to(session, 9)
    saver.restore(session, saver.latest("run"))
    assert value(session) == 3
    # TensorFlow's own reads it, and the graph that goes with it.
    v1.train.Saver().restore(session, "run/model-2")
    assert value(session) == 2
    with tf.Graph().as_default(), v1.Session() as other:
        imported = v1.train.import_meta_graph("run/model-3.meta")
        imported.restore(other, "run/model-3")
        assert value(other) == 3


def test_names_of_steps(session):
    step = v1.train.get_global_step()
    session.run(step.assign(7))
    assert SafeSaver().save(session, "m", global_step=step) == "m-7"
    assert SafeSaver(pad_step_number=True).save(session, "m", global_step=12) == "m-00000012"
    named = tf.identity(step, name="named")
    assert SafeSaver().save(session, "m", global_step=named.name) == "m-7"


def test_a_path_without_a_step_is_replaced(session):
    saver = SafeSaver()
    for number in (1, 2, 3):
        set_to(session, number)
        assert saver.save(session, "run/model") == "run/model"
    set_to(session, 9)
    saver.restore(session, "run/model")
    assert value(session) == 3
    assert names_in_folder("run") == ["model"]


def names_in_folder(folder: str) -> list[str]:
    assert leftovers(Path(folder)) == []
    return names_in(Path(folder))


def test_savers_of_other_paths_do_not_delete_each_other(session):
    one, two = SafeSaver(max_to_keep=1), SafeSaver(max_to_keep=1)
    for step in (1, 2):
        one.save(session, "run/one", global_step=step)
        two.save(session, "run/two", global_step=step)
    assert names_in_folder("run") == ["one-2", "two-2"]


def test_two_of_one_path_count_together(session):
    """Also after a restart, which TensorFlow forgets."""
    for step in range(1, 6):
        SafeSaver(max_to_keep=2).save(session, "run/m", global_step=step)
    assert names_in_folder("run") == ["m-4", "m-5"]


def test_one_that_keeps_all_and_one_that_does_not(session):
    """An archive beside the newest ones: nobody deletes from it."""
    archive, recent = SafeSaver(max_to_keep=None), SafeSaver(max_to_keep=1)
    for step in range(6):
        (recent if step % 2 else archive).save(session, "run/m", global_step=step)
    assert names_in_folder("run") == ["m-0", "m-2", "m-4", "m-5"]


def test_names_of_the_users_own_count_for_the_saver(session):
    saver = SafeSaver(max_to_keep=2)
    for number in range(4):
        saver.save(session, f"run/model_{number}.ckpt")
    assert names_in_folder("run") == ["model_2.ckpt", "model_3.ckpt"]
    assert saver.last_checkpoints == ["run/model_2.ckpt", "run/model_3.ckpt"]


def test_a_graph_of_the_users_stays(session):
    saver = SafeSaver()
    saver.export_meta_graph("run/m.meta")
    saver.save(session, "run/m", write_meta_graph=False)
    saver.save(session, "run/m", write_meta_graph=False)
    assert os.path.exists("run/m.meta")


def test_a_saver_of_a_graph_is_safe_too(session):
    saver = SafeSaver.from_proto(SafeSaver(max_to_keep=1).to_proto())
    assert isinstance(saver, SafeSaver)
    for step in (1, 2):
        saver.save(session, "run/m", global_step=step)
    assert names_in_folder("run") == ["m-2"]


@pytest.mark.parametrize("most", [0, None])
def test_all_stay(session, most):
    saver = SafeSaver(max_to_keep=most)
    for step in range(7):
        saver.save(session, "run/m", global_step=step)
    assert len(names_in_folder("run")) == 7


def test_files_beside_the_tensors(session):
    saver = SafeSaver()
    saver.save(session, "a/m", write_meta_graph=False)
    assert not os.path.exists("a/m.meta")
    saver.save(session, "b/m", meta_graph_suffix="graph", latest_filename="newest")
    assert os.path.exists("b/m.graph")
    assert os.path.exists("b/newest")
    assert not os.path.exists("b/checkpoint")
    saver.save(session, "c/m", write_state=False)
    saver.save(session, "c/m", write_state=False)
    assert not os.path.exists("c/checkpoint")
    assert saver.latest("c") == "c/m"
    assert names_in_folder("c") == ["m"]


def test_a_state_file_that_lies(session):
    saver = SafeSaver()
    for step in (1, 2):
        saver.save(session, "run/m", global_step=step)
    with open("run/checkpoint", "w") as file:
        file.write('model_checkpoint_path: "m-1"\nall_model_checkpoint_paths: "m-1"\n')
    assert saver.latest("run") == "run/m-2"
    with open("run/checkpoint", "w") as file:
        file.write("mod")
    assert saver.latest("run") == "run/m-2"
    os.unlink("run/m-2.data-00000-of-00001")
    assert saver.latest("run") == "run/m-1"
    assert saver.latest("nowhere") is None


def test_damage_is_seen_before_anything_changes(session):
    saver = SafeSaver()
    set_to(session, 1)
    saver.save(session, "run/m")
    with open("run/m.data-00000-of-00001", "r+b") as file:
        file.seek(17)
        file.write(b"\x55")
    set_to(session, 5)
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        saver.restore(session, "run/m")
    assert value(session) == 5
    for missing in ("run/other", None):
        with pytest.raises(ValueError, match="save_path"):
            saver.restore(session, missing)


def test_sharded_and_empty(session):
    sharded = SafeSaver(sharded=True)
    set_to(session, 4)
    sharded.save(session, "run/m", global_step=1)
    set_to(session, 9)
    sharded.restore(session, "run/m-1")
    assert value(session) == 4
    with tf.Graph().as_default(), v1.Session() as other:
        assert SafeSaver(allow_empty=True).save(other, "empty/m") is None
        assert names_in_folder("empty") == []


def test_variables_without_a_graph():
    kept = tf.Variable([1.0, 2.0])
    saver = SafeSaver([kept])
    path = saver.save(None, "run/m", global_step=1)
    kept.assign([0.0, 0.0])
    saver.restore(None, path)
    assert kept.numpy().tolist() == [1.0, 2.0]


def test_threads(session):
    saver = SafeSaver(max_to_keep=3)
    graph = session.graph

    def save(step: int) -> str:
        with graph.as_default():
            return saver.save(session, "run/m", global_step=step, write_meta_graph=False)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(save, range(18)))
    assert len(names_in_folder("run")) == 3
    saver.restore(session, saver.latest("run"))


def test_a_failed_save_leaves_the_one_before(session, monkeypatch):
    saver = SafeSaver()
    set_to(session, 1)
    saver.save(session, "run/m")
    set_to(session, 2)
    replace = os.replace

    def broken(source, target):
        if str(target).endswith(".index"):
            raise OSError(28, "No space left on device")
        return replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", broken)
        with pytest.raises(CheckpointWriteError, match="ENOSPC"):
            saver.save(session, "run/m")
    saver.restore(session, "run/m")
    assert value(session) == 1
    assert names_in_folder("run") == ["m"]


def test_bad_arguments_are_named(session):
    with pytest.raises(ValueError, match="no checksums"):
        SafeSaver(write_version=v1.train.SaverDef.V1)
    saver = SafeSaver(locks=LockManager(timeout=1))
    with pytest.raises(ValueError, match="latest_filename"):
        saver.save(session, "run/m", latest_filename="a/b")
    with pytest.raises(ValueError, match="collides"):
        saver.save(session, "run/checkpoint")
    with pytest.raises(ValueError, match="without any directory"):
        saver.save(session, "run/")
    assert not os.path.exists("run")
