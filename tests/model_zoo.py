"""Models of every kind that Keras can save, small and built, each with some training behind it."""

from __future__ import annotations

import functools

import numpy as np
from keras_setup import keras

layers = keras.layers
register = keras.saving.register_keras_serializable(package="zoo")


def _fit(model, x, y):
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    return model


def _numbers(width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((8, width), "float32"), rng.random((8, 1), "float32")


def functional(train=True):
    inputs = keras.Input((6,))
    x = layers.Dense(5, activation="relu")(inputs)
    x = layers.Dropout(0.3, seed=1)(layers.BatchNormalization()(x))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("adam", "mse", metrics=["mae"])
    return _fit(model, *_numbers(6)) if train else model


def convolutional():
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(3, 3), layers.Flatten(), layers.Dense(1)]
    )
    model.compile("rmsprop", "mse")
    return _fit(model, np.ones((8, 8, 8, 1), "float32"), np.ones((8, 1), "float32"))


def recurrent():
    model = keras.Sequential(
        [keras.Input((5, 3)), layers.Bidirectional(layers.LSTM(4)), layers.Dense(1)]
    )
    model.compile("adam", "mse")
    return _fit(model, np.ones((8, 5, 3), "float32"), np.ones((8, 1), "float32"))


def attention():
    inputs = keras.Input((4, 6))
    x = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.LayerNormalization()(x)))
    model.compile("adam", "mse")
    return _fit(model, np.ones((8, 4, 6), "float32"), np.ones((8, 4, 1), "float32"))


@register
class SubClassed(keras.Model):
    """Layers in attributes, lists, dictionaries and lists of lists."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [layers.Dense(4), layers.Dense(4)]
        self.named = {"a": layers.Dense(4), "b": layers.Dense(4)}
        self.deep = [[layers.Dense(4)], [layers.Dense(4)]]
        self.head = layers.Dense(1)

    def call(self, inputs):
        x = inputs
        for layer in [*self.blocks, *self.named.values(), *(d for row in self.deep for d in row)]:
            x = layer(x)
        return self.head(x)

    def get_config(self):
        return super().get_config()


def sub_classed():
    model = SubClassed()
    model.compile("adam", "mse")
    return _fit(model, *_numbers(6))


def nested():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(4)], name="inner")
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(1)(inner(inner(layers.Dense(4)(inputs)))))
    model.compile("adam", "mse")
    return _fit(model, *_numbers(6))


def shared_layers():
    shared = layers.Dense(6)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(1)(shared(shared(inputs))))
    model.compile("adam", "mse")
    return _fit(model, *_numbers(6))


@register
class OwnFormat(layers.Layer):
    """Writes what it likes: a number, a NumPy array and a variable, and reads them back."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), name="scale")
        self.seen = np.arange(3, dtype="int64")

    def call(self, inputs):
        return inputs * self.scale

    def save_own_variables(self, store):
        store["scale"] = self.scale
        store["seen"] = self.seen
        store["count"] = 7
        assert "seen" in store
        assert set(store.keys()) == {"scale", "seen", "count"}

    def load_own_variables(self, store):
        self.scale.assign(store["scale"])
        self.seen = np.array(store["seen"])
        assert int(store["count"]) == 7


def own_format():
    model = keras.Sequential([keras.Input((6,)), OwnFormat(), layers.Dense(1)])
    model.compile("adam", "mse")
    return _fit(model, *_numbers(6))


def vocabulary():
    text = layers.TextVectorization(max_tokens=20, output_sequence_length=4)
    text.adapt(np.array(["one two three", "two three", "drei zwei eins ä"]))
    model = keras.Sequential(
        [keras.Input((1,), dtype="string"), text, layers.Embedding(20, 3), layers.Flatten()]
    )
    model.add(layers.Dense(1))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def tf_idf():
    text = layers.TextVectorization(max_tokens=20, output_mode="tf_idf")
    text.adapt(np.array(["one two three", "two three", "three"]))
    model = keras.Sequential([keras.Input((1,), dtype="string"), text])
    model(np.array([["one two"]]))
    return model


def normalization():
    layer = layers.Normalization()
    layer.adapt(np.random.default_rng(0).random((20, 6)))
    model = keras.Sequential([keras.Input((6,)), layer, layers.Dense(1)])
    model.compile("adam", "mse")
    return _fit(model, *_numbers(6))


def _dense(dtype: str):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(4, dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.Dense(1, dtype=dtype),
        ]
    )
    model.compile("adam", "mse")
    return _fit(model, *_numbers(6))


def bfloat16():
    return _dense("bfloat16")


def float16():
    return _dense("float16")


def mixed_float16_with_loss_scaling():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1, dtype="mixed_float16")])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    return _fit(model, *_numbers(6))


def ema():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(use_ema=True), "mse")
    return _fit(model, *_numbers(6))


def learning_rate_schedule():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), "mse")
    return _fit(model, *_numbers(6))


def several_optimizers():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(1)])
    optimizers = keras.optimizers.OptimizerMap(keras.optimizers.Adam())
    optimizers[f"{model.layers[0].path}/.*"] = keras.optimizers.SGD(momentum=0.9)
    model.compile(keras.optimizers.MultiOptimizer(optimizers), "mse")
    return _fit(model, *_numbers(6))


def lora():
    model = keras.Sequential(
        [keras.Input((3,)), layers.Embedding(10, 4), layers.Flatten(), layers.Dense(4)]
    )
    model.add(layers.Dense(1))
    model.layers[0].enable_lora(2)
    model.layers[2].enable_lora(2)
    model.compile("adam", "mse")
    return _fit(model, np.ones((8, 3), "int32"), np.ones((8, 1), "float32"))


def _quantized(mode: str):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(2)])
    model.quantize(mode)
    return model


def int8():
    return _quantized("int8")


def int4():
    return _quantized("int4")


def float8():
    model = _quantized("float8")
    model.compile("adam", "mse")
    return _fit(model, np.ones((16, 6), "float32"), np.ones((16, 2), "float32"))


def not_compiled():
    return keras.Sequential([keras.Input((6,)), layers.Dense(1)])


def without_variables():
    return keras.Sequential([keras.Input((6,)), layers.Rescaling(2.0)])


ZOO = [
    functional, convolutional, recurrent, attention, sub_classed, nested, shared_layers,
    own_format, vocabulary, tf_idf, normalization, bfloat16, float16,
    mixed_float16_with_loss_scaling, ema, learning_rate_schedule, lora, int8, int4, float8,
    not_compiled, without_variables,
]  # fmt: skip
if hasattr(keras.optimizers, "MultiOptimizer"):
    ZOO.append(several_optimizers)

OPTIMIZERS = sorted(
    name
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type)
    and issubclass(kind, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
)


def variables_of(model) -> list:
    optimizer = getattr(model, "optimizer", None)
    return [*model.variables, *(optimizer.variables if optimizer is not None else [])]


@functools.cache
def _made(build):
    keras.utils.set_random_seed(0)
    model = build()
    return model, [np.array(keras.ops.convert_to_numpy(one)) for one in variables_of(model)]


def made_once(build):
    """One for all tests of this process, each time with the values that it was trained to have."""
    model, trained = _made(build)
    variables = variables_of(model)
    assert len(variables) == len(trained)
    for variable, value in zip(variables, trained, strict=True):
        variable.assign(value)
        assert np.array(keras.ops.convert_to_numpy(variable)).tobytes() == value.tobytes()
    keras.utils.set_random_seed(0)
    return model


def with_optimizer(name: str):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(1)])
    model.compile(getattr(keras.optimizers, name)(), "mse")
    return _fit(model, *_numbers(6))
