"""`SafeModelCheckpoint` in several real processes: racing, killed, in a cluster."""

from __future__ import annotations

import json
import shutil

import pytest
from clusters import WORKER, launch_ok
from driven import weight
from keras_setup import keras
from processes import run_ok, start

from keras_safe_ckpt import CheckpointStore, SafeModelCheckpoint

#: TensorFlow is imported once and used only in the forked children: a worker starts in
#: milliseconds instead of seconds.
FORKED = """
import random, signal, time, traceback
import keras
from keras_safe_ckpt import SafeModelCheckpoint

def model_with(value):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile("sgd", keras.losses.MeanSquaredError(), run_eagerly=True)
    model.set_weights([np.full((1, 1), value, "float32")])
    return model

class Score(keras.callbacks.Callback):
    '''Weight and score of each epoch are what `value` says.'''
    def __init__(self, value):
        super().__init__()
        self.value = value
    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = value = self.value(epoch)
        self.model.set_weights([np.full((1, 1), value, "float32")])

def fork(work, *arguments):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)

X, Y = np.ones((1, 1), "float32"), np.zeros((1, 1), "float32")
"""

RACE = """
folder, processes, saves = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def train(number):
    # In every round each process gets better than it was, and somebody is the best of the round.
    def value(epoch):
        order = random.Random(epoch).sample(range(processes), processes)
        return float(processes * (saves - epoch) + order[number])
    best = SafeModelCheckpoint(folder + "/best.keras", monitor="score", mode="min",
                               save_best_only=True)
    model_with(0.0).fit(X, Y, epochs=saves, verbose=0, callbacks=[Score(value), best])
    assert best.best <= value(saves - 1), (best.best, value(saves - 1))

children = [fork(train, number) for number in range(processes)]
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""


@pytest.mark.long
@pytest.mark.parametrize("saves", [10, pytest.param(40, marks=pytest.mark.campaign)])
def test_eight_processes_race_for_one_best_file(tmp_path, saves):
    """The true best is there at the end, and what is on the disk never got worse on the way."""
    processes = 8
    racing = start(FORKED + RACE, tmp_path, processes, saves)
    store = CheckpointStore(tmp_path, format="keras")
    seen = []
    while racing.poll() is None:
        for checkpoint in store.checkpoints():
            score = checkpoint.manifest.metrics["score"]
            if not seen or seen[-1] != score:
                seen.append(score)
    out, err = racing.communicate()
    assert out.strip() == str([0] * processes), err
    assert seen == sorted(seen, reverse=True)
    true_best = float(processes)  # Of the last round: 8 * 1 + the place of the best, which is 0.
    assert len(seen) > saves // 8
    best = tmp_path / "best.keras"
    assert store.verify(best).metrics["score"] == true_best
    assert weight(best) == true_best
    assert any(event["event"] == "skip" for event in store.events.read()), "nobody came too late"
    published = [
        event["metrics"]["score"] for event in store.events.read() if event["event"] == "save"
    ]
    assert published == sorted(published, reverse=True)


KILL = """
folder, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
path = folder + "/m.keras"
rng = random.Random(seed)

def train(first):
    callbacks = [Score(lambda epoch: epoch + 1.0), SafeModelCheckpoint(path)]
    model_with(0.0).fit(X, Y, initial_epoch=first, epochs=10**9, verbose=0, callbacks=callbacks)

from keras_safe_ckpt import CheckpointStore
store = CheckpointStore(folder, format="keras")
epoch = 0
for number in range(kills):
    pid = fork(train, epoch)
    # Let it save a few times, then kill it wherever it is.
    wanted = epoch + rng.randint(1, 3)
    while not os.path.exists(path) or store.checkpoints()[-1].manifest.epoch < wanted:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended by itself"
        time.sleep(0.001)
    time.sleep(rng.random() * 0.03)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (newest,) = store.checkpoints()
    store.verify(path)
    assert newest.manifest.epoch >= wanted
    epoch = newest.manifest.epoch
    os.link(path, f"{folder}/after-{number}")
print(epoch)
"""


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.campaign)])
def test_killed_at_random_moments_there_is_always_a_whole_model(tmp_path, kills):
    epoch = int(run_ok(FORKED + KILL, tmp_path, kills, 1, timeout=280))
    assert epoch >= kills
    weights = []
    for number in range(kills):
        # By Keras alone, each file as the killed process left it.
        copy = tmp_path / f"copy-{number}.keras"
        shutil.move(tmp_path / f"after-{number}", copy)
        weights.append(weight(copy))
    assert weights == sorted(weights)
    assert weights[-1] == epoch
    left = [path.name for path in tmp_path.iterdir() if path.name.endswith(".kscktmp")]
    assert len(left) <= 1  # Of the last one; each next save swept what was there.


CTRL_C = """
import threading
folder, times, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
background = sys.argv[4] == "True"
rng = random.Random(seed)
# Compiled: what runs Keras's Python at each batch also runs its bare excepts, and they swallow
# an interrupt now and then.
model = model_with(0.0)
model.compile("sgd", "mse")

def train(path):
    '''How often Ctrl-C had to be pressed.'''
    saver = SafeModelCheckpoint(path, background=background)
    callbacks = [Score(lambda epoch: epoch + 1.0), saver]
    begun, ended, pressed, seen = threading.Event(), threading.Event(), [], [0.0]
    class Begun(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen[0] = float(epoch)  # So many epochs have been captured.
            if epoch == 2:
                begun.set()
    def press():
        begun.wait()
        ended.wait(rng.random() * 0.05)  # Anywhere in an epoch, or in its save.
        while not ended.is_set():
            pressed.append(1)
            os.kill(os.getpid(), signal.SIGINT)
            ended.wait(5)  # Again, as anybody would.
    thread = threading.Thread(target=press)
    thread.start()
    try:
        model.fit(X, Y, epochs=10**9, verbose=0, callbacks=[*callbacks, Begun()])
    except KeyboardInterrupt:
        ended.set()
    thread.join()
    newest = SafeModelCheckpoint.load_latest(path)
    # What was captured is there; the epoch that was interrupted may be.
    assert newest.get_weights()[0][0, 0] in (seen[0], seen[0] + 1), (newest.get_weights(), seen)
    model.fit(X, Y, initial_epoch=5, epochs=7, verbose=0, callbacks=callbacks)
    assert SafeModelCheckpoint.load_latest(path).get_weights()[0][0, 0] == 7.0
    for one in threading.enumerate():
        if one.name.startswith("keras_safe_ckpt"):
            one.join(20)
            assert not one.is_alive()
    return len(pressed)

print(json.dumps([train(f"{folder}/{number}.keras") for number in range(times)]))
"""


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ctrl_c_at_random_moments_loses_nothing_that_was_captured(tmp_path, background, times):
    pressed = json.loads(run_ok(FORKED + CTRL_C, tmp_path, times, 1, background, timeout=200))
    assert len(pressed) == times
    assert min(pressed) == 1


INTERRUPTED = """
import threading
from keras_safe_ckpt import LockManager
from keras_safe_ckpt.storage.publishing import LOCK_NAME
os.chdir(sys.argv[1])
callback = SafeModelCheckpoint("m.keras", save_best_only=True, background=False)
callback.set_model(model_with(1.0))
callback.on_train_begin()
lock = LockManager().exclusive(LOCK_NAME)
lock.__enter__()
def press():
    while not any(name.endswith(".kscktmp") for name in os.listdir(".")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
thread = threading.Thread(target=press)
thread.start()
try:
    callback.on_epoch_end(0, {"val_loss": 0.5})
except KeyboardInterrupt:
    print(os.path.exists("m.keras"))
thread.join()
threading.Timer(0.2, lock.__exit__, (None, None, None)).start()
callback.on_train_begin()
print(callback.best)
"""


def test_next_fit_waits_for_the_foreground_save_that_was_interrupted(tmp_path):
    assert run_ok(FORKED + INTERRUPTED, tmp_path).split() == ["False", "0.5"]


CLUSTER = (
    WORKER
    + """
from keras_safe_ckpt import SafeModelCheckpoint
from keras_safe_ckpt.storage.formats import weights_h5

captured = []
real = weights_h5.capture
weights_h5.capture = lambda *a, **k: captured.append(1) or real(*a, **k)

with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile("sgd", "mse")
model.set_weights([np.full((1, 1), 3.0, "float32")])
model.optimizer.build(model.trainable_variables)
callback = SafeModelCheckpoint(FOLDER + "/m.weights.h5", save_best_only=True,
                               save_weights_only=True)
callback.set_model(model)
callback.on_train_begin()
part = str(callback._run)
for epoch, loss in enumerate([0.5, 0.9, 0.1]):
    callback.on_epoch_begin(epoch)
    callback.on_epoch_end(epoch, {"val_loss": loss})
callback.on_train_end()
try:
    late = SafeModelCheckpoint(FOLDER + "/t.keras", save_every_seconds=5)
    late.set_model(model)
    late.on_train_begin()
    refused = ""
except ValueError as error:
    refused = str(error)
report(results=[part, len(captured), callback.best, refused])
"""
)


def test_workers_of_a_synchronous_cluster_all_capture_and_the_chief_writes(tmp_path):
    results = [facts["results"] for facts in launch_ok(tmp_path, CLUSTER)]
    chief, other = results
    assert "this process writes" in chief[0]
    assert "this process does not write; it is worker 1, number 1 of 2 synchronous" in other[0]
    assert (chief[1], other[1]) == (3, 3)
    assert (chief[2], other[2]) == (0.1, None)
    assert all("save_every_seconds=5" in result[3] for result in results)
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    ours = {"worker.py", "facts-0.json", "facts-1.json"}  # Of this test.
    assert names - ours == {"events.jsonl", "m.weights.h5"}
    assert weight(tmp_path / "m.weights.h5") == 3.0


PENDING_AT_EXIT = """
import keras
from keras_safe_ckpt import SafeModelCheckpoint

class Break(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise RuntimeError("broken")

model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2000), keras.layers.Dense(1000)])
model.compile("adam", "mse")
callbacks = [SafeModelCheckpoint(sys.argv[1] + "/m.keras"), Break()]
model.fit(np.ones((2, 1)), np.ones((2, 1000)), verbose=0, callbacks=callbacks)
"""


def test_program_that_ends_by_an_exception_finishes_its_save(tmp_path):
    process = start(PENDING_AT_EXIT, tmp_path)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "broken" in err
    assert keras.models.load_model(tmp_path / "m.keras").count_params() == 2_005_000
    assert SafeModelCheckpoint.load_latest(tmp_path / "m.keras") is not None
