"""A load that fails leaves the model as it was; one that succeeds restores all of it."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from keras_setup import keras
from test_formats import assert_same, values

from keras_safe_ckpt import (
    CheckpointStore,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UnreadableCheckpointError,
)
from keras_safe_ckpt.storage.tensor_array import empty_tensor_array

layers = keras.layers


def dense(width: int = 4, *, compiled: bool = True, depth: int = 2, dtype: str = "float32"):
    model = keras.Sequential(
        [keras.Input((6,))] + [layers.Dense(width, dtype=dtype) for _ in range(depth)]
    )
    if compiled:
        model.compile("adam", "mse")
    return model


def trained(model):
    model.fit(np.ones((8, 6)), np.ones((8, model.output_shape[-1])), verbose=0)
    return model


def assert_refused(store: CheckpointStore, model, *texts: str) -> None:
    before = values(model)
    with pytest.raises(IncompatibleCheckpointError) as caught:
        store.load(model)
    for text in texts:
        assert text in str(caught.value)
    assert_same(values(model), before)


def test_other_width_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    store.publish(trained(dense(4)), step=1)
    assert_refused(
        store,
        trained(dense(5)),
        "layers/dense/vars/0: the model has float32[6, 5], the file float32[6, 4]",
    )


def test_other_depth_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    store.publish(trained(dense(depth=2)), step=1)
    assert_refused(store, trained(dense(depth=3)), "layers/dense_2/vars/0", "the file nothing")


def test_other_dtype_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    store.publish(trained(dense()), step=1)
    assert_refused(
        store, trained(dense(dtype="float16")), "the model has float16", "the file float32"
    )


def test_other_optimizer_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    store.publish(trained(dense()), step=1)
    model = dense()
    model.compile("sgd", "mse")
    assert_refused(store, trained(model), "optimizer: the model has SGD, the file Adam")


def test_optimizer_of_the_same_shape_is_told_apart(tmp_path):
    store = CheckpointStore(tmp_path)
    store.publish(trained(dense()), step=1)
    model = dense()
    model.compile("adamw", "mse")
    assert_refused(store, trained(model), "the model has AdamW, the file Adam")


def test_layer_too_many_in_the_file_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    store.publish(dense(depth=3, compiled=False), step=1)
    assert_refused(
        store, dense(depth=2, compiled=False), "layers/dense_2/vars/0: the model has nothing"
    )


def test_optimizer_that_is_not_built_is_built_first(tmp_path):
    store = CheckpointStore(tmp_path)
    model = trained(dense())
    store.publish(model, step=1)
    fresh = dense()
    assert not fresh.optimizer.built
    store.load(fresh)
    assert_same(values(fresh), values(model))


def test_optimizer_saved_before_its_first_step(tmp_path):
    store = CheckpointStore(tmp_path)
    model = dense()
    model.optimizer.learning_rate = 0.5
    store.publish(model, step=0)
    fresh = dense()
    store.load(fresh)
    assert float(fresh.optimizer.learning_rate) == 0.5
    assert not fresh.optimizer.built
    assert_refused(store, trained(dense()), "the weights fit, the optimizer does not")


def test_weights_of_a_model_without_optimizer_load_and_say_so(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    model = dense(compiled=False)
    store.publish(model, step=1)
    fresh = trained(dense())
    with pytest.warns(UserWarning, match="optimizer"):
        store.load(fresh)
    assert "no optimizer state" in caplog.text
    assert_same(
        [np.array(w) for w in fresh.get_weights()], [np.array(w) for w in model.get_weights()]
    )


def test_model_without_optimizer_takes_the_weights(tmp_path):
    store = CheckpointStore(tmp_path)
    model = trained(dense())
    store.publish(model, step=1)
    fresh = dense(compiled=False)
    store.load(fresh)
    assert_same(
        [np.array(w) for w in fresh.get_weights()], [np.array(w) for w in model.get_weights()]
    )


def test_unbuilt_model_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    store.publish(dense(), step=1)
    with pytest.raises(ValueError, match="no weights yet"):
        store.load(keras.Sequential([layers.Dense(4)]))


def test_flipped_bit_leaves_the_model_as_it_was(tmp_path):
    model = trained(dense())
    store = CheckpointStore(tmp_path)
    path = store.publish(model, step=1).path
    needle = np.array(model.layers[-1].kernel).tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(needle) + 5] ^= 4
    path.write_bytes(data)
    other = trained(dense())
    before = values(other)
    with pytest.raises(CorruptCheckpointError, match="layers/dense_1/vars/0"):
        CheckpointStore(tmp_path).load(other, path)
    assert_same(values(other), before)
    other.load_weights(path)  # Plain Keras takes the damaged file without a word.


@keras.saving.register_keras_serializable(package="test_load")
class Picky(layers.Layer):
    """Takes its first variable, then raises if it is the one that it refuses."""

    refused: np.ndarray | None = None
    error: BaseException = RuntimeError()

    def build(self, shape):
        self.first = self.add_weight(shape=(shape[-1],))
        self.second = self.add_weight(shape=(shape[-1],))

    def call(self, inputs):
        return inputs * self.first + self.second

    def load_own_variables(self, store):
        self.first.assign(store["0"])
        if Picky.refused is not None and np.array_equal(store["0"], Picky.refused):
            raise Picky.error
        self.second.assign(store["1"])


@pytest.mark.parametrize("error", [RuntimeError("not today"), KeyboardInterrupt()])
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "public"])
def test_layer_that_fails_half_way_is_undone(tmp_path, monkeypatch, error, fast):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3), Picky(), layers.Dense(1)])
    model.compile("adam", "mse")
    store = CheckpointStore(tmp_path)
    store.publish(trained(model), step=1)
    published = np.array(model.layers[1].first)
    trained(model)
    if not fast:
        for module in ("snapshot", "restore"):
            monkeypatch.setattr(
                f"keras_safe_ckpt.storage.{module}.walker", lambda: (None, "taken away")
            )
    before = values(model)
    monkeypatch.setattr(Picky, "refused", published)
    monkeypatch.setattr(Picky, "error", error)
    expected = (
        KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else IncompatibleCheckpointError
    )
    with pytest.raises(expected):
        store.load(model)
    assert_same(values(model), before)


def test_interrupt_during_a_load_leaves_a_whole_model(tmp_path, monkeypatch):
    """Without classes of the user's own the load is finished before the interrupt goes on."""
    store = CheckpointStore(tmp_path)
    model = trained(dense())
    store.publish(model, step=1)
    expected = values(model)
    trained(model)
    fail_reads(monkeypatch, KeyboardInterrupt(), at=[3])
    with pytest.raises(KeyboardInterrupt):
        store.load(model)
    assert_same(values(model), expected)


@pytest.mark.parametrize(
    ("error", "at"),
    [
        (TimeoutError("signal handler"), [3]),
        (TimeoutError("signal handler"), [1, 2, 3, 4]),
        (MemoryError(), [1]),
        (SystemExit(3), [1]),
        (SystemExit(3), [3]),
    ],
    ids=str,
)
def test_any_interruption_of_a_load_leaves_a_whole_model(tmp_path, monkeypatch, error, at):
    """Keras takes an Exception for an object that failed, and may try that one again itself."""
    store = CheckpointStore(tmp_path)
    model = trained(dense())
    store.publish(model, step=1)
    expected = values(model)
    trained(model)
    fail_reads(monkeypatch, error, at=at)
    stopped = isinstance(error, SystemExit)
    with pytest.raises(SystemExit) if stopped else contextlib.suppress(type(error)):
        store.load(model)
    assert_same(values(model), expected)


def fail_reads(monkeypatch, error, at) -> None:
    from keras_safe_ckpt.storage.formats.format import OpenCheckpoint

    real, calls = OpenCheckpoint.read_array, []

    def failing(self, name):
        calls.append(name)
        if len(calls) in at:
            raise error
        return real(self, name)

    monkeypatch.setattr(OpenCheckpoint, "read_array", failing)


def test_disk_that_fails_once_is_asked_again(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    model = trained(dense())
    store.publish(model, step=1)
    expected = values(model)
    trained(model)
    fail_reads(monkeypatch, UnreadableCheckpointError("x", OSError(5, "EIO")), at=[3])
    store.load(model)
    assert_same(values(model), expected)


def test_disk_that_fails_for_good_leads_to_the_next_older(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    model = trained(dense())
    store.publish(model, step=1)
    expected = values(model)
    store.publish(trained(model), step=2)
    trained(model)
    reads = len(store.latest().manifest.arrays)
    fail_reads(
        monkeypatch,
        UnreadableCheckpointError("x", OSError(5, "EIO")),
        at=range(2, 2 * reads + 1, 2),
    )
    _, manifest = store.load(model)
    assert manifest.step == 1
    assert_same(values(model), expected)


@keras.saving.register_keras_serializable(package="test_load")
class Vars(layers.Dense):
    """A name that Keras uses for itself in the file."""


@keras.saving.register_keras_serializable(package="test_load")
class HasVars(keras.Model):
    def __init__(self):
        super().__init__()
        self.vars = layers.Dense(3)
        self.other = [Vars(2)]

    def call(self, inputs):
        return self.other[0](self.vars(inputs))


def test_objects_named_as_the_groups_of_keras(tmp_path):
    store = CheckpointStore(tmp_path)
    model = HasVars()
    model.compile("adam", "mse")
    model.fit(np.ones((8, 6)), np.ones((8, 2)), verbose=0)
    store.publish(model, step=1)
    expected = values(model)
    model.fit(np.ones((8, 6)), np.ones((8, 2)), verbose=0)
    store.load(model)
    assert_same(values(model), expected)


def test_array_given_to_two_variables_is_shared_by_none(tmp_path):
    array = empty_tensor_array((4,), np.dtype("float32"))
    array[:] = 1
    one, other, part = (keras.Variable(np.zeros(n, "float32")) for n in (4, 4, 2))
    one.assign(array)
    other.assign(array)
    part.assign(array[:2])
    other.assign_add(np.ones(4))
    part.assign_add(np.ones(2))
    one.assign_add(np.full(4, 5.0))
    assert np.array(one).tolist() == [6] * 4
    assert np.array(other).tolist() == [2] * 4
    assert np.array(part).tolist() == [2] * 2


def test_pruned_or_replaced_while_a_new_model_is_made(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, format="keras")
    model = trained(dense())
    store.publish(model, step=1, name="a.keras")
    newest = store.publish(trained(model), step=2, name="b.keras").path
    real = keras.models.load_model

    def prune_first(path, **options):
        newest.unlink(missing_ok=True)
        return real(path, **options)

    monkeypatch.setattr(keras.models, "load_model", prune_first)
    assert store.load()[1].step == 1

    def replace_first(path, **options):
        monkeypatch.setattr(keras.models, "load_model", real)
        store.publish(trained(model), step=3, name="a.keras")
        return real(path, **options)

    monkeypatch.setattr(keras.models, "load_model", replace_first)
    loaded, manifest = store.load()
    assert manifest.step == 3
    assert_same(values(loaded), values(model))


def test_loaded_model_trains_on_exactly(tmp_path):
    """The memory handed to the variables is theirs: training and snapshots work on it."""
    keras.utils.set_random_seed(0)
    x, y = np.random.default_rng(0).random((32, 6), "float32"), np.ones((32, 4), "float32")
    model = dense()
    model.fit(x, y, verbose=0)
    store = CheckpointStore(tmp_path)
    store.publish(model, step=1)
    model.fit(x, y, shuffle=False, verbose=0)
    expected = values(model)
    fresh = dense()
    store.load(fresh)
    store.publish(fresh, step=2)
    fresh.fit(x, y, shuffle=False, verbose=0)
    assert_same(values(fresh), expected)
    store.load(fresh, store.checkpoints()[1].path)
    fresh.fit(x, y, shuffle=False, verbose=0)
    assert_same(values(fresh), expected)


def test_lambda_layers_are_never_executed(tmp_path):
    model = keras.Sequential([keras.Input((6,)), layers.Lambda(lambda x: x * 2), layers.Dense(1)])
    store = CheckpointStore(tmp_path, format="keras")
    store.publish(model, step=1)
    with pytest.raises(ValueError, match=r"unsafe|lambda"):
        store.load()


def test_custom_objects_are_passed_on(tmp_path):
    class Doubled(layers.Layer):
        def call(self, inputs):
            return inputs * 2

    model = keras.Sequential([keras.Input((6,)), Doubled(), layers.Dense(1)])
    store = CheckpointStore(tmp_path, format="keras")
    store.publish(model, step=1)
    loaded, _ = store.load(custom_objects={"Doubled": Doubled})
    x = np.ones((2, 6), "float32")
    assert np.array_equal(loaded(x), model(x))


def test_restore_is_an_event(tmp_path):
    store = CheckpointStore(tmp_path)
    model = trained(dense())
    store.publish(model, step=5, epoch=1, batch=2)
    store.load(model)
    (event,) = [event for event in store.events.read() if event["event"] == "restore"]
    assert (event["step"], event["epoch"], event["batch"]) == (5, 1, 2)
    assert event["seconds"] > 0
