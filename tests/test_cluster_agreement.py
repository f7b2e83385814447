"""Agreement, barriers and failures of real workers in `fit`."""

from __future__ import annotations

import json
import time

import pytest
from clusters import WORKER, facts, launch, launch_ok

#: Short trainings with validation; `Stopping` notes after which step all were to stop.
TRAINING = (
    WORKER
    + """
import signal, threading
from keras_safe_ckpt import AgreementError
from keras_safe_ckpt.cluster.agreement import agreement_in
from keras_safe_ckpt.cluster.cohort import current_cohort
keras_safe_ckpt.enable_multi_worker_fit()
WORLD = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
STEPS, EPOCHS = 2, 2
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
X, Y = np.ones((6 * STEPS, 4), "float32"), np.ones((6 * STEPS, 1), "float32")
DATA = strategy.experimental_distribute_dataset(
    tf.data.Dataset.from_tensor_slices((X, Y)).batch(6))

class Stopping(keras.callbacks.Callback):
    '''Gets its notice when `where(hook, step)` says so, and notes where it stopped.'''

    def __init__(self, where, patience=60):
        super().__init__()
        self.where, self.patience = where, patience
        self.steps, self.stopped, self.asked, self.threads = 0, None, False, []

    def notice(self, hook):
        how = "" if self.asked else self.where(hook, self.steps)
        self.asked = self.asked or bool(how)
        if how == "thread":  # Some time during what comes now.
            thread = threading.Thread(target=self.agreement.request, args=("stop", hook))
            self.threads.append(thread)
            thread.start()
        elif how:
            self.agreement.request("stop", hook)

    def on_train_begin(self, logs=None):
        self.agreement = agreement_in(current_cohort(), "stop", patience_seconds=self.patience)

    def on_train_batch_begin(self, batch, logs=None):
        self.notice("batch begin")

    def on_test_batch_begin(self, batch, logs=None):
        self.notice("validation")

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        due = self.agreement.after_step()
        if due:
            # Noted, and on it goes: TensorFlow takes a minute now and then to throw the iterator
            # of an epoch away that was not finished.
            self.stopped = [self.steps, len(due), due[0].reason]
        self.notice("batch end")

    def on_train_end(self, logs=None):
        if self.stopped is None:
            due = self.agreement.at_end()
            self.stopped = ["end", len(due), due[0].reason if due else None]
        self.agreement.close()
        current_cohort().barrier("saved")

def fit(callback, validation=None):
    try:
        model.fit(DATA, validation_data=validation, epochs=EPOCHS, verbose=0,
                  callbacks=[callback])
    finally:
        for thread in callback.threads:
            thread.join()
"""
)

EVERYWHERE = (
    TRAINING
    + """
moments = [("batch begin", step) for step in range(STEPS * EPOCHS)]
moments += [("batch end", step + 1) for step in range(STEPS * EPOCHS)]
moments += [("validation", STEPS), ("validation", STEPS * EPOCHS)]
stops = {}
everyone, ways = [*range(WORLD), "all"], ("inline", "thread")
for number, moment in enumerate(moments[int(ARGUMENTS[2]) - 1::int(ARGUMENTS[2])]):
    for who in json.loads(ARGUMENTS[0]) or everyone:
        place = number + everyone.index(who)
        for how in ways if ARGUMENTS[1] == "both ways" else ways[place % 2:][:1]:
            def where(hook, step):
                return how if (hook, step) == moment and who in (INDEX, "all") else ""
            callback = Stopping(where)
            fit(callback, DATA if moment[0] == "validation" else None)
            stops[f"{moment[0]} {moment[1]} {who} {how}"] = callback.stopped
nobody = Stopping(lambda hook, step: "")
fit(nobody)
report(stops=stops, nobody=nobody.stopped, weights=float(np.sum(model.get_weights()[0])))
"""
)


@pytest.mark.parametrize(
    ("workers", "who", "ways", "every"),
    [
        (2, [1], "one way", 2),
        pytest.param(3, ["all"], "one way", 1, marks=pytest.mark.campaign),
        pytest.param(2, [], "both ways", 1, marks=pytest.mark.campaign),
        pytest.param(3, [], "both ways", 1, marks=pytest.mark.campaign),
    ],
)
def test_all_stop_after_the_same_step_wherever_the_notice_comes(
    tmp_path, record_property, workers, who, ways, every
):
    arguments = (json.dumps(who), ways, every)
    results = launch_ok(tmp_path, EVERYWHERE, *arguments, workers=workers, timeout=290)
    stops = results[0]["stops"]
    # Ten moments, or every other one; each worker alone, and all of them at once.
    assert len(stops) == 10 // every * len(who or range(workers + 1)) * (
        2 if ways == "both ways" else 1
    )
    record_property("campaign", f"{len(stops)} notices to {workers} workers, all stopped together")
    late = []
    for name, (step, count, reason) in stops.items():
        hook, position, who = name.rsplit(" ", 3)[:3]
        assert all(result["stops"][name][:2] == [step, count] for result in results), name
        assert reason == hook
        # Asked for at most once by each, and acted upon within two steps, or at the end.
        assert count == 1 or (who == "all" and count <= workers), name
        if step == "end":
            late.append(int(position))
        else:
            assert int(position) < step <= int(position) + 2, name
    assert late
    assert min(late) >= 2
    assert all(result["nobody"] == ["end", 0, None] for result in results)
    assert len({result["weights"] for result in results}) == 1


KILLED = (
    TRAINING
    + """
from keras_safe_ckpt.cluster import agreement as agreement_module
moment = ARGUMENTS[0]
def die(*arguments):
    report(died=time.time())
    os.kill(os.getpid(), signal.SIGKILL)
if INDEX == WORLD - 1:
    if moment == "before it answers":
        agreement_module.ClusterAgreement._settle = die
    elif moment == "after it answered":
        real = agreement_module.ClusterAgreement._settle
        agreement_module.ClusterAgreement._settle = lambda *a: (real(*a), die())
class Doomed(Stopping):
    def on_train_end(self, logs=None):
        if INDEX == WORLD - 1:
            die()
        super().on_train_end(logs)
kind = Doomed if moment == "at the barrier" else Stopping
callback = kind(lambda hook, step: INDEX == 0 and (hook, step) == ("batch begin", 1), patience=20)
try:
    fit(callback)
except AgreementError as error:
    report(caught=time.time(), error=str(error), missing=error.missing)
    # As a program that saves what it has: reading the weights is still possible.
    report(weights=float(np.sum(model.get_weights()[0])))
"""
)


@pytest.mark.parametrize(
    "moment",
    [
        "before it answers",
        pytest.param("after it answered", marks=pytest.mark.long),
        pytest.param("at the barrier", marks=pytest.mark.long),
    ],
)
def test_a_worker_killed_during_the_agreement_is_named_by_the_others(tmp_path, moment):
    done = launch(tmp_path, KILLED, moment, workers=3)
    assert done.returncode == 137, done.stderr
    assert "[launch] worker 2 failed with code 137 (SIGKILL)" in done.stderr
    *others, dead = facts(tmp_path, 3)
    for other in others:
        assert "worker 2" in other["missing"], other
        assert "weights" in other
        assert other["caught"] - dead["died"] < 60


FAILING = (
    TRAINING
    + """
failing = ARGUMENTS[0].split(",")
class Failing(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and str(INDEX) in failing:
            report(failed=time.time())
            raise ValueError(f"bad batch on {INDEX}")

began = time.time()
try:
    model.fit(DATA, epochs=1, verbose=0, callbacks=[Failing()])
except (ValueError, AgreementError) as error:
    report(ended=time.time(), error=f"{type(error).__name__}: {error}")
    if len(failing) < WORLD:
        raise
# All failed together, so that all can go on together.
report(loss=model.fit(DATA, epochs=1, verbose=0).history["loss"])
"""
)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_worker_ends_the_others_within_seconds(tmp_path, failing):
    began = time.monotonic()
    done = launch(tmp_path, FAILING, failing)
    assert done.returncode == 1
    assert f"[launch] worker {failing} failed with code 1" in done.stderr
    assert time.monotonic() - began < 60
    results = facts(tmp_path)
    other = results[1 - failing]
    assert results[failing]["error"] == f"ValueError: bad batch on {failing}"
    assert other["error"] == (
        "AgreementError: The workers cannot go on together: "
        f"worker {failing} failed with ValueError: bad batch on {failing}."
    )
    assert other["ended"] - results[failing]["failed"] < 10


def test_an_error_in_all_workers_leaves_the_cluster_usable(tmp_path):
    results = launch_ok(tmp_path, FAILING, "0,1")
    for index, result in enumerate(results):
        assert result["error"] == f"ValueError: bad batch on {index}"
    assert results[0]["loss"] == results[1]["loss"]


STORE = (
    WORKER
    + """
from keras_safe_ckpt.cluster.coordination import coordination_store, is_coordinated
assert is_coordinated()
store, _ = coordination_store([("worker", 2)])
assert store.put(f"mine {INDEX}", "a/b \\u00fc")
assert not store.put(f"mine {INDEX}", "c")
theirs = store.get(f"mine {1 - INDEX}", 30)
began = time.time()
nothing = store.get("nothing", 0.2)
waited = time.time() - began
report(theirs=theirs, nothing=nothing, waited=waited, lost=store.lost())
store.put(f"done {INDEX}", "")
store.get(f"done {1 - INDEX}", 30)
"""
)


def test_the_coordination_service_keeps_the_contract_of_the_store(tmp_path):
    for result in launch_ok(tmp_path, STORE):
        assert result["theirs"] == "a/b ü"
        assert result["nothing"] is None
        assert 0.15 < result["waited"] < 10
        assert result["lost"] == []
