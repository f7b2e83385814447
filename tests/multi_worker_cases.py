"""Short trainings that must end the same on one process and on several workers.

Imported by the workers as well: everything here is the same on both sides.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np

#: The global batch can be shared by two and by three workers.
BATCH = 12


class Case(NamedTuple):
    optimizer: str = "sgd"
    normalization: str = ""
    dropout: bool = False
    steps_per_execution: int = 1
    data: str = "finite"
    epochs: int = 2


CASES = {
    "sgd": Case(),
    "adam": Case("adam"),
    "dropout": Case(dropout=True),
    "plain": Case(normalization="plain"),
    "synchronized": Case("adam", normalization="synchronized"),
    "four steps": Case(steps_per_execution=4),
    "four steps, repeated": Case("adam", steps_per_execution=4, data="repeated"),
    "repeated": Case("adam", data="repeated"),
    "arrays": Case(data="arrays"),
    "shuffled arrays": Case(data="shuffled arrays"),
    "python": Case(data="python"),
    # Several of the above at once, for the sample.
    "plain, dropout": Case(normalization="plain", dropout=True),
    "synchronized, four steps, repeated": Case(
        "adam", normalization="synchronized", steps_per_execution=4, data="repeated"
    ),
}


def numbers(count: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 4)).astype("float32"), rng.normal(size=(count, 1)).astype("f4")


TRAIN = numbers(6 * BATCH, 0)
VALIDATION = numbers(2 * BATCH, 1)


def build(keras: Any, case: Case, strategy: Any = None) -> Any:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        parts = [keras.Input((4,)), layers.Dense(8, activation="tanh")]
        if case.normalization:
            synchronized = case.normalization == "synchronized"
            parts.append(layers.BatchNormalization(momentum=0.9, synchronized=synchronized))
        if case.dropout:
            parts.append(layers.Dropout(0.3, seed=3))
        model = keras.Sequential([*parts, layers.Dense(1)])
        model.compile(
            case.optimizer,
            "mse",
            metrics=["mae", "mape"],
            steps_per_execution=case.steps_per_execution,
        )
    return model


def train(keras: Any, tf: Any, case: Case, model: Any) -> dict[str, Any]:
    """Everything that is to be equal afterwards, as numbers."""

    def batches(data: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(data).batch(BATCH)

    class Sequence(keras.utils.PyDataset):
        def __len__(self) -> int:
            return len(TRAIN[0]) // BATCH

        def __getitem__(self, number: int) -> Any:
            part = slice(number * BATCH, (number + 1) * BATCH)
            # Copies: under any strategy TensorFlow writes into arrays that Python hands over.
            return TRAIN[0][part].copy(), TRAIN[1][part].copy()

    options: dict[str, Any] = {"epochs": case.epochs, "verbose": 0}
    validation = batches(VALIDATION)
    if case.data == "repeated":
        # Epochs that do not begin where the data begins.
        data = [batches(TRAIN).repeat()]
        options["steps_per_epoch"] = 5
    elif case.data == "python":
        data = [Sequence()]
        options["shuffle"] = False
    elif "arrays" in case.data:
        data = list(TRAIN)
        options.update(shuffle="shuffled" in case.data, batch_size=BATCH)
    else:
        data = [batches(TRAIN)]
    history = model.fit(*data, validation_data=validation, **options).history
    return {
        "history": {name: [float(v) for v in values] for name, values in history.items()},
        "evaluated": model.evaluate(validation, verbose=0, return_dict=True),
        "predicted": model.predict(VALIDATION[0], batch_size=BATCH, verbose=0).tolist(),
        "weights": flat(model.trainable_variables),
        "statistics": flat(v for v in model.non_trainable_variables if "moving" in v.path),
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def flat(variables: Any) -> list[float]:
    return [float(number) for v in variables for number in np.ravel(v.numpy())]
