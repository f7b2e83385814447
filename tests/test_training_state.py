"""What is kept of a run, piece by piece."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from keras_setup import keras, mirrored_strategy, tf

from keras_safe_ckpt.training import state
from keras_safe_ckpt.training.codec import UnknownValueError, decode, encode
from keras_safe_ckpt.training.keras_fit import build_for, drop
from keras_safe_ckpt.training.position import FastForward, Position
from keras_safe_ckpt.training.random_states import capture_random, restore_random


def there_and_back(value: Any) -> Any:
    arrays: dict[str, Any] = {}
    text = json.dumps(encode(value, arrays, "a/b"))
    return decode(json.loads(text), arrays)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1 + 0.2,
        float("inf"),
        "text",
        [1, (2, [3.5, None])],
        {"a": {"b": [1]}, "": 2},
        {1: "one", ("a", 2): {"x": (1,)}},
        {"<array>": 3},
        [],
        {},
        (),
    ],
)
def test_plain_values_come_back_as_they_were(value):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_arrays_and_numbers_of_numpy_come_back_with_their_types():
    value = {
        "array": np.arange(6, dtype="int16").reshape(2, 3),
        "number": np.float32(0.1),
        "tensor": tf.constant([1.0, 2.0]),
        "empty": np.zeros((0, 3)),
        "half": [np.ones(2, "float16"), np.bool_(True)],
    }
    found = there_and_back(value)
    np.testing.assert_array_equal(found["array"], value["array"])
    assert found["array"].dtype == "int16"
    assert (type(found["number"]), found["number"]) == (np.float32, np.float32(0.1))
    np.testing.assert_array_equal(found["tensor"], [1.0, 2.0])
    assert found["empty"].shape == (0, 3)
    assert found["half"][0].dtype == "float16"
    assert found["half"][1] == np.bool_(True)


def test_nan_is_kept():
    assert np.isnan(there_and_back(float("nan")))


def test_what_cannot_be_kept_is_named():
    with pytest.raises(UnknownValueError, match=r"a/b\.list\[1\]\.x is a builtins\.object"):
        there_and_back({"list": [1, {"x": object()}]})
    with pytest.raises(UnknownValueError, match="ndarray"):
        there_and_back(np.array([object()]))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnknownValueError):
        there_and_back(endless)


def test_all_generators_go_on_where_they_were():
    keras.utils.set_random_seed(3)
    generator = tf.random.Generator.from_seed(1)
    tf.random.set_global_generator(generator)
    keras.random.normal((2,))  # Makes Keras's own.

    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            float(tf.random.uniform(())),
            float(tf.random.get_global_generator().uniform(())),
            float(keras.random.uniform(())),
        ]

    draw()
    arrays: dict[str, Any] = {}
    kept = json.loads(json.dumps(encode(capture_random(), arrays)))
    wanted = [draw(), draw()]
    draw()
    # As in a new process: TensorFlow keeps the kernels of seeds that were used before.
    tf.random.set_seed(3)
    restore_random(decode(kept, arrays))
    assert [draw(), draw()] == wanted


def test_another_seed_is_another_program():
    tf.random.set_seed(1)
    kept = capture_random()
    tf.random.set_seed(2)
    wanted = float(tf.random.uniform(()))
    tf.random.set_seed(2)
    restore_random(kept)
    assert float(tf.random.uniform(())) == wanted


def model(strategy: Any = None) -> Any:
    import contextlib

    with strategy.scope() if strategy else contextlib.nullcontext():
        made = keras.Sequential(
            [
                keras.Input((2,)),
                keras.layers.Dense(2),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        made.compile("sgd", "mse", metrics=["mae"])
    return made


X = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")


def test_seeds_and_metrics_are_what_keras_leaves_out():
    one = model()
    one.fit(X, X[:, :1], verbose=0)
    found = state.capture_variables(one)
    kinds = {name.partition("/")[0] for name in found}
    assert kinds == {"seeds", "metrics"}
    before = {name: np.array(value) for name, value in found.items()}
    one.fit(X, X[:, :1], verbose=0)
    one.reset_metrics()
    assert any((np.asarray(state.capture_variables(one)[n]) != before[n]).any() for n in before)
    state.restore_variables(one, before, ("seeds", "metrics"))
    for name, value in state.capture_variables(one).items():
        np.testing.assert_array_equal(value, before[name])


def test_each_replica_keeps_its_own_statistics():
    strategy = mirrored_strategy()
    one = model(strategy)
    data = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(4)
    one.fit(data, verbose=0)
    found = {name: np.array(v) for name, v in state.capture_variables(one).items()}
    own = [name for name in found if name.startswith("weights/")]
    assert own, "the moving statistics differ"
    assert any((found[n] != found[n[:-1] + "0"]).any() for n in own if n.endswith("/1"))
    other = model(strategy)
    other.fit(data, verbose=0)
    state.restore_variables(other, found, (state.SEEDS, state.METRICS, state.WEIGHTS))
    for name, value in state.capture_variables(other).items():
        np.testing.assert_array_equal(value, found[name])
    # A replica that had nothing of its own gets the first one's; a sum is not counted twice.
    first = {name: value for name, value in found.items() if name.endswith("/0")}
    state.restore_variables(other, first, (state.SEEDS, state.METRICS, state.WEIGHTS))
    again = state.capture_variables(other, own_weights=True)
    for name in again:
        if name.endswith("/1") and not name.startswith("metrics"):
            np.testing.assert_array_equal(again[name], first.get(name[:-1] + "0", again[name]))
        elif name.endswith("/1"):
            assert not np.any(again[name])


def test_differences_are_named():
    one = model()
    found = {"seeds/0/0": np.zeros((3,), "uint32"), "seeds/7/0": np.zeros(2)}
    said = state.differences(one, found, ("seeds",))
    dtype = one.layers[2].seed_generator.state.value.dtype.name
    assert f"seeds/0: the model has {dtype}[2], the checkpoint uint32[3]" in said
    assert "seeds/7: the model has nothing, the checkpoint float64[2]" in said
    assert state.differences(one, {}, ("seeds",)) == [
        f"seeds/0: the model has {dtype}[2], the checkpoint nothing"
    ]


def test_a_position_says_where_it_is():
    assert str(Position()) == "the beginning of training"
    assert str(Position(2)) == "the end of epoch 2"
    assert str(Position(2, 3, 6)) == "epoch 3, batch 6"
    assert str(Position(ended=True)) == "the end of training"
    assert Position(stopping=True).after_epoch(0).ended
    after = Position(2, 3, 6, finished=(5, 5)).after_epoch(2)
    assert after == Position(3, finished=(5, 5, 3))
    assert Position(1, 2).same_place(Position(1, 2, logs={"a": 1}))
    assert not Position(1, 2).same_place(Position(1, 2, ended=True))
    assert not Position(1, 2).same_place(None)


class Model:
    def __init__(self) -> None:
        self.trained: list[int] = []

    def train_function(self, iterator: Any) -> dict[str, float]:
        self.trained.append(next(iterator))
        return {"loss": 0.0}


def forward_to(one: Model, position: Position, **functions: Any) -> FastForward:
    """Two batches are an execution; what is not given must not be called."""
    needed = dict.fromkeys(("arrive", "cut_short", "end"))
    drop_two = {"drop": lambda iterator: drop(iterator, 2)}
    return FastForward(one, position, **{**drop_two, **needed, **functions})


def test_a_fast_forward_drops_and_arrives_and_goes_away():
    one = Model()
    arrived: list[Any] = []
    forward = forward_to(one, Position(executions=2, logs={"loss": 7.0}), arrive=arrived.append)
    data = iter(range(9))
    for expected in ({"loss": 7.0}, {"loss": 7.0}, {"loss": 0.0}):
        forward.is_wanted = True
        assert one.train_function(data) == expected
    assert arrived == [3]
    assert one.trained == [4]
    assert forward.dropped == 4
    assert one.train_function.__func__ is Model.train_function


def test_a_fast_forward_that_nobody_wants_drops_nothing():
    one = Model()
    forward_to(one, Position(executions=2), drop=None)
    assert one.train_function(iter([5])) == {"loss": 0.0}
    assert one.trained == [5]


def test_a_fast_forward_over_too_little_data_ends_the_epoch():
    one = Model()
    cut: list[int] = []
    forward = forward_to(one, Position(executions=3), cut_short=cut.append)
    data = iter(range(3))
    for _ in range(2):
        forward.is_wanted = True
        one.train_function(data)
    forward.is_wanted = True
    with pytest.raises(StopIteration):
        one.train_function(data)
    assert cut == [2]


def test_a_fast_forward_to_the_end_of_an_epoch_ends_it_without_a_step():
    one = Model()
    heard: list[Any] = []
    position = Position(executions=1, trained=True)
    forward = forward_to(one, position, arrive=heard.append, end=lambda: heard.append("end"))
    data = iter(range(9))
    forward.is_wanted = True
    one.train_function(data)
    forward.is_wanted = True
    with pytest.raises(StopIteration):
        one.train_function(data)
    assert heard == [1, "end"]
    assert one.trained == []
    assert one.train_function.__func__ is Model.train_function


def test_a_model_that_cannot_be_built_is_explained():
    assert build_for(object(), None) == "this version of Keras has no _symbolic_build"
    one = keras.Sequential([keras.layers.Dense(2)])
    one.compile("sgd", "mse")
    spec = (tf.TensorSpec((None, None)), tf.TensorSpec((None, 1)))
    assert "Keras says: " in build_for(one, spec)
    one = keras.Sequential([keras.layers.Dense(2)])
    one.compile("sgd", "mse")
    spec = (tf.TensorSpec((None, 3)), tf.TensorSpec((None, 2)))
    assert build_for(one, spec) is None
    assert one.built
