"""`enable_multi_worker_fit` itself: what it finds, changes, leaves alone and gives back."""

from __future__ import annotations

import logging
import warnings

import pytest
from keras_setup import keras, mirrored_strategy, tf
from multi_worker_cases import CASES, build, train
from processes import run_ok

import keras_safe_ckpt
from keras_safe_ckpt import enable_multi_worker_fit
from keras_safe_ckpt.cluster import keras_trainer, multi_worker

trainer = keras_trainer.trainer_module()
NAMES = ("fit", "evaluate", "predict", "_maybe_symbolic_build", "_make_function")


def functions():
    return [vars(trainer.TensorFlowTrainer)[name] for name in NAMES] + [trainer.reduce_per_replica]


@pytest.fixture(autouse=True)
def as_it_was():
    before = functions()
    yield
    multi_worker.MultiWorkerFit("", False).disable()
    assert functions() == before


def test_it_is_found_that_this_keras_needs_help():
    broken = keras_trainer.broken_places(trainer)
    assert [place.name for place in broken] == [
        "_maybe_symbolic_build",
        "reduce_per_replica",
        "_make_function",
    ]


def test_twice_is_once_and_disable_gives_all_back():
    before = functions()
    first = enable_multi_worker_fit()
    enabled = functions()
    assert not any(one is other for one, other in zip(before, enabled, strict=True))
    second = enable_multi_worker_fit()
    assert functions() == enabled
    assert first.enabled
    assert second.enabled
    second.disable()
    assert functions() == before
    assert not first.enabled
    first.disable()
    assert functions() == before


def test_a_with_block_leaves_what_was_before():
    before = functions()
    with enable_multi_worker_fit() as outer:
        assert outer.enabled
        with enable_multi_worker_fit():
            pass
        assert outer.enabled
    assert functions() == before


@pytest.mark.parametrize(
    ("name", "mirrored"),
    # Not four steps mirrored: there Keras fails, with and without us.
    [
        ("four steps", False),
        ("arrays", True),
        *(
            pytest.param(name, mirrored, marks=pytest.mark.campaign)
            for name, mirrored in (("sgd", False), ("arrays", False), ("sgd", True))
        ),
    ],
)
def test_other_models_train_as_before(name, mirrored):
    strategy = mirrored_strategy() if mirrored else None
    case = CASES[name]
    wanted = train(keras, tf, case, build(keras, case, strategy))
    with enable_multi_worker_fit():
        received = train(keras, tf, case, build(keras, case, strategy))
    assert received == wanted


def test_signatures_and_docs_stay():
    import inspect

    wanted = inspect.signature(keras.Model.fit)
    with enable_multi_worker_fit():
        assert inspect.signature(keras.Model.fit) == wanted
        assert keras.Model.evaluate.__name__ == "evaluate"


# A Keras of another kind


def good_build(self, iterator=None, data_batch=None):
    self._symbolic_build(data_batch=1)


def good_reduce(values, strategy, reduction):
    return strategy.reduce("MEAN", values["loss"], axis=None)


def good_make(self, step_function):
    return self._autoconvert_optionals(step_function)


@pytest.fixture
def better_keras(monkeypatch):
    monkeypatch.setattr(trainer.TensorFlowTrainer, "_maybe_symbolic_build", good_build)
    monkeypatch.setattr(trainer, "reduce_per_replica", good_reduce)
    monkeypatch.setattr(trainer.TensorFlowTrainer, "_make_function", good_make)


def test_a_keras_that_needs_nothing_is_left_alone(better_keras, caplog):
    before = functions()
    with caplog.at_level(logging.INFO), warnings.catch_warnings():
        warnings.simplefilter("error")
        result = enable_multi_worker_fit()
    assert functions() == before
    assert not result.enabled
    assert "needs no help" in result.message
    assert "needs no help" in caplog.text


def test_only_what_is_broken_is_replaced(better_keras, monkeypatch):
    monkeypatch.setattr(
        trainer, "reduce_per_replica", lambda v, s, r: s.reduce("MEAN", v["loss"], axis=0)
    )
    before = functions()
    with enable_multi_worker_fit():
        changed = [one is not other for one, other in zip(before, functions(), strict=True)]
        assert changed == [True, True, True, False, False, True]


def does_nothing(*arguments, **options):
    return None


def raises(*arguments, **options):
    raise KeyError("moved")


@pytest.mark.parametrize("strange", [does_nothing, raises, None])
@pytest.mark.parametrize("place", ["_maybe_symbolic_build", "reduce_per_replica", "_make_function"])
def test_an_unknown_keras_is_said_and_nothing_is_changed(monkeypatch, place, strange):
    owner = trainer if place == "reduce_per_replica" else trainer.TensorFlowTrainer
    if strange is None:
        monkeypatch.delattr(owner, place)
    else:
        monkeypatch.setattr(owner, place, strange)
    present = [vars(owner).get(place), *(vars(trainer.TensorFlowTrainer)[n] for n in NAMES[:3])]
    version = keras.__version__
    with pytest.warns(UserWarning, match=f"Keras {version} is not known .*{place}"):
        result = enable_multi_worker_fit()
    assert not result.enabled
    assert "nothing was changed" in repr(result)
    after = [vars(owner).get(place), *(vars(trainer.TensorFlowTrainer)[n] for n in NAMES[:3])]
    assert after == present


def test_another_backend_is_not_known(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.warns(UserWarning, match="its backend is not TensorFlow"):
        assert not enable_multi_worker_fit().enabled


def test_the_line_of_the_warning_works():
    line = multi_worker.LINE_TO_ADD
    assert eval(line, {"keras_safe_ckpt": keras_safe_ckpt}).enabled


BEFORE = """
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["127.0.0.1:0"]},
                                      "task": {"type": "worker", "index": 0}})
import keras_safe_ckpt, tensorflow as tf
keras_safe_ckpt.enable_multi_worker_fit()
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=2)
x = np.ones((8, 1), "float32")
loss = model.fit(x, x, batch_size=2, verbose=0).history["loss"]
from keras_safe_ckpt.cluster.roles import role_of
print(len(loss), model.predict(x, verbose=0).shape, role_of(model).alone)
"""


@pytest.mark.long
def test_it_may_come_before_the_strategy_and_one_worker_is_enough():
    assert run_ok(BEFORE).splitlines()[-1] == "1 (8, 1) True"
