"""A short real run: train, save in the background, lose the model, restore it, compare."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from keras_safe_ckpt.storage.keras_internals import import_keras
from keras_safe_ckpt.storage.store import CheckpointStore


def run_demo(keep: Path | None) -> int:
    """Return 0 if the restored model is the trained one, bit by bit."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if keep is not None:
        return _demonstrate(keep)
    with tempfile.TemporaryDirectory(prefix="keras_safe_ckpt-demo-") as directory:
        return _demonstrate(Path(directory))


def _demonstrate(directory: Path) -> int:
    from rich.console import Console

    console = Console()
    store = CheckpointStore(directory)
    keras = import_keras()
    from keras_safe_ckpt.callbacks.model_checkpoint import SafeModelCheckpoint

    console.print(f"Training a small model, saving after each epoch into {store.directory}")
    model, x, y = _model_and_data(keras)
    path = store.directory / "{epoch:02d}.weights.h5"
    callback = SafeModelCheckpoint(path, monitor="loss", save_weights_only=True, max_to_keep=3)
    model.fit(x, y, epochs=5, batch_size=32, verbose=2, callbacks=[callback])
    console.print(_saves(store))

    console.print("Forgetting the model, and restoring the newest checkpoint into a new one")
    trained = _values(model)
    restored, _, _ = _model_and_data(keras)
    SafeModelCheckpoint.load_latest(path, restored)
    same = all(
        np.array_equal(one, other) for one, other in zip(trained, _values(restored), strict=True)
    )
    verdict = "yes" if same else "NO"
    console.print(f"Weights and optimizer equal bit by bit: [bold]{verdict}[/bold]")
    return 0 if same else 1


def _model_and_data(keras: Any) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(640, 32)).astype("float32")
    y = x @ rng.normal(size=(32, 1)).astype("float32")
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((32,)), layers.Dense(256, activation="relu"), layers.BatchNormalization()]
    )
    model.add(layers.Dense(1))
    model.compile("adam", "mse")
    return model, x, y


def _values(model: Any) -> list[Any]:
    return [np.array(v.numpy()) for v in [*model.variables, *model.optimizer.variables]]


def _saves(store: CheckpointStore) -> Any:
    from rich.table import Table

    table = Table(title="Saves (the newest three and the best are kept)")
    for column in ("file", "epoch", "loss", "size", "fit blocked", "durable after"):
        table.add_column(column, justify="left" if column == "file" else "right", no_wrap=True)
    for event in store.events.read():
        if event["event"] == "save":
            table.add_row(
                event["file"],
                str(event["epoch"]),
                f"{event['metrics']['loss']:.4f}",
                f"{event['bytes'] / 1024:.0f} KiB",
                f"{event['blocked_seconds'] * 1e3:.1f} ms",
                f"{event['seconds'] * 1e3:.1f} ms",
            )
    return table
