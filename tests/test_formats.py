"""What Keras can save, we save the same: dataset by dataset, member by member."""

from __future__ import annotations

import io
import json
import zipfile

import h5py
import model_zoo
import numpy as np
import pytest
from keras_setup import keras, mirrored_strategy
from model_zoo import variables_of

from keras_safe_ckpt import CheckpointStore
from keras_safe_ckpt.storage import snapshot as snapshot_module


def h5_content(source) -> dict[str, object]:
    """Every group with its attributes and every dataset with type, attributes and bytes."""
    content: dict[str, object] = {}

    def visit(name: str, node: object) -> None:
        if name.split("/")[0] == "keras_safe_ckpt":
            return
        attributes = {key: str(value) for key, value in node.attrs.items()}
        if isinstance(node, h5py.Group):
            content[name] = attributes
        else:
            content[name] = (str(node.dtype), node.shape, attributes, node[()].tobytes())

    with h5py.File(source, "r") as file:
        file.visititems(visit)
    return content


def scramble(model) -> None:
    """Change every variable, so that a load has something to do."""
    for variable in variables_of(model):
        if "float" in str(variable.dtype):
            variable.assign(keras.ops.ones_like(variable) * 0.25)


def values(model) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables_of(model)]


def assert_same(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


@pytest.fixture(params=model_zoo.ZOO, ids=lambda build: build.__name__)
def model(request):
    return model_zoo.made_once(request.param)


def test_weights_file_is_the_one_that_keras_writes(model, tmp_path):
    model.save_weights(tmp_path / "keras.weights.h5")
    ours = CheckpointStore(tmp_path / "ours").publish(model, step=1)
    assert h5_content(ours.path) == h5_content(tmp_path / "keras.weights.h5")


def restored(model, load) -> list[np.ndarray]:
    """What the model holds after a load into scrambled variables."""
    scramble(model)
    keras.utils.set_random_seed(1)
    load()
    return values(model)


def test_our_weights_restore_what_those_of_keras_do(model, tmp_path):
    model.save_weights(tmp_path / "keras.weights.h5")
    store = CheckpointStore(tmp_path)
    ours = store.publish(model, step=1)
    expected = restored(model, lambda: model.load_weights(tmp_path / "keras.weights.h5"))
    assert_same(restored(model, lambda: model.load_weights(ours.path)), expected)
    assert_same(restored(model, lambda: store.load(model)), expected)


def test_keras_file_is_the_one_that_keras_writes(model, tmp_path):
    model.save(tmp_path / "keras.keras")
    ours = CheckpointStore(tmp_path / "ours", format="keras").publish(model, step=1)
    with zipfile.ZipFile(tmp_path / "keras.keras") as theirs, zipfile.ZipFile(ours.path) as mine:
        assert mine.testzip() is None
        assert sorted(mine.namelist()) == sorted(theirs.namelist())
        for name in theirs.namelist():
            if name == "model.weights.h5":
                expected = h5_content(io.BytesIO(theirs.read(name)))
                assert h5_content(io.BytesIO(mine.read(name))) == expected
            elif name == "metadata.json":
                metadata = json.loads(mine.read(name))
                assert metadata.keys() - json.loads(theirs.read(name)).keys() == {"keras_safe_ckpt"}
            else:
                assert mine.read(name) == theirs.read(name)


def unless_keras_fails(action):
    """What plain Keras does with its own means; an older version may not be able to."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001  # the reason is shown
        pytest.skip(f"Keras {keras.__version__} cannot do this itself: {error}")


def made(load) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    return values(load())


def test_our_file_makes_the_model_that_the_one_of_keras_does(model, tmp_path):
    model.save(tmp_path / "keras.keras")
    store = CheckpointStore(tmp_path / "ours", format="keras")
    ours = store.publish(model, step=3)
    expected = unless_keras_fails(
        lambda: made(lambda: keras.models.load_model(tmp_path / "keras.keras"))
    )
    assert_same(made(lambda: keras.models.load_model(ours.path)), expected)
    assert_same(made(lambda: store.load()[0]), expected)


@pytest.mark.parametrize("name", model_zoo.OPTIMIZERS)
def test_every_optimizer_is_saved_as_keras_does(name, tmp_path):
    model = unless_keras_fails(lambda: model_zoo.with_optimizer(name))
    model.save_weights(tmp_path / "keras.weights.h5")
    store = CheckpointStore(tmp_path / "ours")
    ours = store.publish(model, step=1)
    assert h5_content(ours.path) == h5_content(tmp_path / "keras.weights.h5")
    before = values(model)
    scramble(model)
    store.load(model)
    assert_same(values(model), before)


@pytest.mark.parametrize("whole_model", [False, True], ids=["weights_h5", "keras"])
def test_mirrored_variables_are_saved_and_restored(whole_model, tmp_path):
    with mirrored_strategy().scope():
        model = model_zoo.functional()
    store = CheckpointStore(tmp_path, format="keras" if whole_model else "weights_h5")
    ours = store.publish(model, step=1)
    model.save_weights(tmp_path / "keras.weights.h5")
    if not whole_model:
        assert h5_content(ours.path) == h5_content(tmp_path / "keras.weights.h5")
    before = values(model)
    scramble(model)
    store.load(model)
    assert_same(values(model), before)
    with mirrored_strategy().scope():
        new = model_zoo.functional(train=False)
    store.load(new)  # Whose optimizer is not built yet, outside the scope.
    assert_same(new.get_weights(), model.get_weights())
    slots = [[v.numpy() for v in one.optimizer.variables] for one in (new, model)]
    assert_same(*slots)


@pytest.mark.parametrize("whole_model", [False, True], ids=["weights_h5", "keras"])
@pytest.mark.parametrize(
    "build", [model_zoo.functional, model_zoo.vocabulary, model_zoo.bfloat16, model_zoo.own_format]
)
def test_without_private_names_the_public_save_gives_the_same(
    build, whole_model, tmp_path, monkeypatch, caplog
):
    model = model_zoo.made_once(build)
    fast = snapshot_module.capture(model, whole_model=whole_model)
    for module in ("snapshot", "restore"):
        monkeypatch.setattr(
            f"keras_safe_ckpt.storage.{module}.walker", lambda: (None, "a test took it away")
        )
    monkeypatch.setattr(snapshot_module, "_said_slow", False)
    store = CheckpointStore(tmp_path, format="keras" if whole_model else "weights_h5")
    ours = store.publish(model, step=1)
    store.publish(model, step=2)
    said = [record for record in caplog.records if "a test took it away" in record.message]
    assert len(said) == 1
    slow = snapshot_module.capture(model, whole_model=whole_model)
    assert slow.groups.items() >= {k: dict(v) for k, v in fast.groups.items()}.items()
    assert slow.assets == fast.assets
    assert slow.arrays.keys() == fast.arrays.keys()
    for name, array in fast.host_arrays().items():
        assert slow.arrays[name].tobytes() == array.tobytes()
    before = values(model)
    scramble(model)
    store.load(model, ours.path)
    assert_same(values(model), before)
    leftovers = [p.name for p in tmp_path.iterdir() if p.name.endswith(".kscktmp")]
    assert leftovers == []
