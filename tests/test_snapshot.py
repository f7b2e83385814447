"""A capture copies nothing and is not changed by the training that goes on."""

from __future__ import annotations

import threading

import model_zoo
import numpy as np
import pytest
from keras_setup import keras, mirrored_strategy

from keras_safe_ckpt import CheckpointStore
from keras_safe_ckpt.storage.keras_internals import walker
from keras_safe_ckpt.storage.snapshot import capture


def test_fast_path_is_there_with_the_installed_keras():
    fast, reason = walker()
    assert fast is not None, reason


def pointers(snapshot) -> dict[str, int]:
    return {name: array.ctypes.data for name, array in snapshot.host_arrays().items()}


def test_capture_shares_the_memory_of_the_variables():
    model = model_zoo.made_once(model_zoo.functional)
    first, second = pointers(capture(model)), pointers(capture(model))
    assert first == second
    kernel = model.layers[1].kernel
    assert pointers(capture(model))["layers/dense/vars/0"] == (
        np.asarray(kernel.value.read_value()).ctypes.data
    )


def test_optimizer_state_is_not_copied_either():
    model = model_zoo.made_once(model_zoo.ema)
    names = [name for name in capture(model).arrays if name.startswith("optimizer/")]
    assert len(names) == len(model.optimizer.variables)
    for number, variable in enumerate(model.optimizer.variables):
        memory = np.asarray(variable.value.read_value()).ctypes.data
        assert pointers(capture(model))[f"optimizer/vars/{number}"] == memory
    assert "save_own_variables" not in vars(model.optimizer)


@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "jit"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_training_does_not_change_a_snapshot(optimizer, jit_compile):
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(50), keras.layers.BatchNormalization()]
    )
    model.add(keras.layers.Dense(1))
    kind = {"sgd": keras.optimizers.SGD(momentum=0.9), "adam": keras.optimizers.Adam(use_ema=True)}
    model.compile(kind.get(optimizer, optimizer), "mse", jit_compile=jit_compile)
    x, y = np.random.default_rng(0).random((32, 6)), np.ones((32, 1))
    model.fit(x, y, verbose=0)
    snapshot = capture(model)
    before = {name: array.copy() for name, array in snapshot.host_arrays().items()}
    model.fit(x, y, epochs=2, verbose=0)
    after = capture(model).host_arrays()
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    for name, array in snapshot.host_arrays().items():
        assert np.array_equal(array, before[name]), name


def test_snapshot_under_a_mirrored_strategy_is_not_changed_by_training():
    with mirrored_strategy().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x, y = np.ones((32, 6)), np.ones((32, 1))
    model.fit(x, y, verbose=0)
    snapshot = capture(model)
    before = {name: array.copy() for name, array in snapshot.host_arrays().items()}
    model.fit(x, y, verbose=0)
    for name, array in snapshot.host_arrays().items():
        assert np.array_equal(array, before[name]), name


def test_saves_in_the_background_of_training_hold_what_was_captured(tmp_path):
    model = model_zoo.functional()
    store = CheckpointStore(tmp_path)
    x, y = np.random.default_rng(0).random((64, 6), "float32"), np.ones((64, 1), "float32")
    expected = []
    for step in range(5):
        expected.append([np.array(v) for v in model.get_weights()])
        store.publish(model, step=step, background=True)
        model.fit(x, y, batch_size=4, verbose=0)
    store.wait()
    for checkpoint, weights in zip(store.checkpoints(), expected, strict=True):
        store.load(model, checkpoint.path)
        for one, other in zip(model.get_weights(), weights, strict=True):
            assert np.array_equal(one, other)


def test_memory_that_a_layer_may_change_is_copied():
    model = model_zoo.own_format()
    layer = model.layers[0]
    snapshot = capture(model)
    layer.seen[:] = 99
    (name,) = [name for name in snapshot.arrays if name.endswith("/seen")]
    assert snapshot.host_arrays()[name].tolist() == [0, 1, 2]


def test_two_threads_may_capture_at_once():
    model = model_zoo.made_once(model_zoo.functional)
    expected = capture(model).arrays.keys()
    failures: list[object] = []

    def work() -> None:
        for _ in range(20):
            if capture(model).arrays.keys() != expected:
                failures.append("differs")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert "save_own_variables" not in vars(model.optimizer)


def test_unbuilt_model_is_refused_with_advice():
    with pytest.raises(ValueError, match=r"model\.build\(input_shape\)"):
        capture(keras.Sequential([keras.layers.Dense(1)]))


def test_capture_leaves_the_names_of_later_layers_alone():
    """Keras builds a layer to compare with for each one that it visits; we do so once."""
    model = model_zoo.made_once(model_zoo.functional)
    capture(model)
    before = keras.layers.Layer().name
    capture(model)
    number = int(keras.layers.Layer().name.rpartition("_")[2])
    assert number == int(before.rpartition("_")[2]) + 1


def test_changed_keras_is_noticed(monkeypatch):
    from keras.src.saving import saving_lib

    for change in (
        lambda: monkeypatch.delattr(saving_lib, "_save_state"),
        lambda: monkeypatch.setattr(saving_lib, "_load_state", lambda model, store: None),
        lambda: monkeypatch.delattr(saving_lib, "H5IOStore"),
        lambda: monkeypatch.delattr(saving_lib, "_serialize_model_as_json"),
    ):
        with monkeypatch.context():
            change()
            walker.cache_clear()
            fast, reason = walker()
            assert fast is None
            assert "Keras" in reason
        monkeypatch.undo()
    walker.cache_clear()
    assert walker()[0] is not None
