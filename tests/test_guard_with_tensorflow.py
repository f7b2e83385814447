"""`PreemptionGuard` with checkpoints of TensorFlow and Keras models."""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_files import names_in
from keras_setup import keras, mirrored_strategy, tf
from processes import wait_until

from keras_safe_ckpt import (
    AgreementError,
    CheckpointWriteError,
    ClusterConfigError,
    CorruptCheckpointError,
    LockManager,
    PreemptionGuard,
    SafeCheckpointManager,
)
from keras_safe_ckpt.cluster import cohort as cohort_module
from keras_safe_ckpt.cluster.cohort import Cohort
from keras_safe_ckpt.cluster.coordination import LocalStore
from keras_safe_ckpt.cluster.roles import Role
from keras_safe_ckpt.interruption.ending import Ending
from keras_safe_ckpt.loops import guard_run
from keras_safe_ckpt.loops.guard_run import GuardRun
from keras_safe_ckpt.loops.guard_save import GuardSave
from keras_safe_ckpt.loops.guarded_state import CheckpointState, FunctionState, guarded_state
from keras_safe_ckpt.loops.trackables import HeldVariables, variables_in
from keras_safe_ckpt.loops.training_role import role_in_loop
from keras_safe_ckpt.preemption.choosing import choose
from keras_safe_ckpt.preemption.notices import Notice
from keras_safe_ckpt.preemption.pace import Pace
from keras_safe_ckpt.storage.events import EventLog

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")

Handler = tf.distribute.experimental.PreemptionCheckpointHandler


class Told:
    """A watcher that says what the test wants to be heard."""

    name = "test"

    def start(self, desk: Any) -> None:
        self._desk = desk

    def stop(self) -> None:
        pass

    def __call__(self, reason: str = "now", **facts: Any) -> None:
        self._desk.tell(Notice("test", reason, **facts))


def guarded(*args: Any, **options: Any) -> tuple[PreemptionGuard, Told]:
    told = Told()
    options = {"notices": told, "on_preempted": "stop", "verbose": 0, **options}
    return PreemptionGuard(None, *args, **options), told


def test_the_signature_is_that_of_tensorflow():
    for method in ("__init__", "run", "save_checkpoint_if_preempted", "watch_preemption_scope"):
        theirs = inspect.signature(getattr(Handler, method)).parameters
        ours = inspect.signature(getattr(PreemptionGuard, method)).parameters
        assert list(ours)[: len(theirs)] == list(theirs), method
    assert isinstance(PreemptionGuard.total_run_calls, property)


# What is saved and restored.


def model_with_dropout(*, compiled: bool = True) -> Any:
    keras.utils.set_random_seed(5)
    layers = keras.layers
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dropout(0.5)])
    if compiled:
        model.compile("adam", "mse")
    return model


def train(model: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(tf.ones((4, 3)), training=True) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)


def values(model: Any) -> list[Any]:
    return [v.numpy().tolist() for v in [*model.variables, *model.optimizer.variables]]


def test_a_keras_model_goes_on_exactly(tmp_path):
    undisturbed = model_with_dropout()
    for _ in range(6):
        train(undisturbed)
    model = model_with_dropout()
    guard, told = guarded(model, tmp_path)
    for _ in range(3):
        guard.run(train, model)
    told()
    guard.save_checkpoint_if_preempted()
    assert guard.preempted == "test: now"
    again = model_with_dropout()
    assert not again.optimizer.built or int(again.optimizer.iterations) == 0
    guard, _ = guarded(again, tmp_path)
    assert guard.total_run_calls == 4  # Three, and the call after the notice.
    for _ in range(3):
        guard.run(train, again)
    guard.close()
    assert values(again) == values(undisturbed)  # The masks of Dropout, too.


def seeds_of(model: Any) -> list[Any]:
    weights = {id(variable) for variable in model.weights}
    found = [v.numpy().tolist() for v in model.variables if id(v) not in weights]
    assert found
    return found


def test_the_seeds_of_a_model_in_a_checkpoint_are_kept(tmp_path):
    """TensorFlow alone forgets them, and Dropout begins anew."""
    model = model_with_dropout()
    checkpoint = tf.train.Checkpoint(net={"inner": [model]}, optimizer=model.optimizer)
    guard, told = guarded(checkpoint, tmp_path)
    model(tf.ones((1, 3)), training=True)
    seeds = seeds_of(model)
    told()
    guard.save_checkpoint_if_preempted()
    other = model_with_dropout()
    assert seeds_of(other) != seeds
    guarded(tf.train.Checkpoint(net={"inner": [other]}, optimizer=other.optimizer), tmp_path)
    assert seeds_of(other) == seeds


def test_each_goes_on_from_the_others_checkpoints(tmp_path):
    v = tf.Variable(1.0)
    theirs = Handler(None, tf.train.Checkpoint(v=v), str(tmp_path))
    for _ in range(3):
        theirs.run(v.assign_add, 1.0)
    theirs._save_checkpoint()
    w = tf.Variable(0.0)
    guard, told = guarded(tf.train.Checkpoint(v=w), tmp_path)
    assert (guard.total_run_calls, w.numpy()) == (3, 4)
    guard.run(w.assign_add, 1.0)
    told()
    guard.run(w.assign_add, 1.0)  # Before this one it is saved.
    assert guard.preempted
    x = tf.Variable(0.0)
    theirs = Handler(None, tf.train.Checkpoint(v=x), str(tmp_path))
    assert (theirs.total_run_calls, x.numpy()) == (4, 5)


@pytest.mark.parametrize("kind", [tf.train.CheckpointManager, SafeCheckpointManager])
def test_a_manager_of_the_users(tmp_path, kind):
    v = tf.Variable(1.0)
    manager = kind(tf.train.Checkpoint(v=v), str(tmp_path), max_to_keep=3)
    guard, told = guarded(manager)
    manager.save()  # A backup of the user's own.
    v.assign(2.0)
    told()
    guard.save_checkpoint_if_preempted(checkpoint_number=77)
    assert names_in(tmp_path) == ["ckpt-1", "ckpt-77"]
    w = tf.Variable(0.0)
    guarded(kind(tf.train.Checkpoint(v=w), str(tmp_path), max_to_keep=3))
    assert w.numpy() == 2


def test_a_save_in_the_background_is_waited_for(tmp_path):
    guard, told = guarded(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path)
    told()
    guard.save_checkpoint_if_preempted(options=tf.train.CheckpointOptions(enable_async=True))
    assert names_in(tmp_path) == ["ckpt-1"]


def test_a_function_that_saves_in_place_of_the_manager(tmp_path):
    saved = []
    config = tf.distribute.experimental.TerminationConfig(
        termination_watcher_fn=lambda: True, save_fn=lambda *a: saved.append(a), exit_fn=lambda: 0
    )
    v = tf.Variable(1.0)
    guard = PreemptionGuard(None, tf.train.Checkpoint(v=v), tmp_path, config, verbose=0)
    for _ in range(500):
        guard.save_checkpoint_if_preempted("as I like")
        if guard.preempted:
            break
        threading.Event().wait(0.01)
    assert saved == [("as I like",)]
    assert names_in(tmp_path) == []


def test_two_guards_of_one_checkpoint_count_on(tmp_path):
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    for number in (2, 4):
        guard, told = guarded(checkpoint, tmp_path)
        guard.run(checkpoint.v.assign_add, 1.0)
        told()
        guard.save_checkpoint_if_preempted()
        assert guard.total_run_calls == number


def test_a_guard_for_each_epoch_does_not_roll_back(tmp_path):
    checkpoint = tf.train.Checkpoint(w=tf.Variable(0.0))
    guard, told = guarded(checkpoint, tmp_path)
    guard.run(checkpoint.w.assign_add, 1.0)
    told()
    guard.save_checkpoint_if_preempted()
    again = tf.train.Checkpoint(w=tf.Variable(0.0))  # As a restarted program has it.
    for epoch in range(3):
        guard, _ = guarded(again, tmp_path)
        assert again.w.numpy() == 1 + 2 * epoch
        assert guard.total_run_calls == 2 + 2 * epoch
        for _ in range(2):
            guard.run(again.w.assign_add, 1.0)
        guard.close()


def test_a_guard_for_each_epoch_of_a_model_does_not_roll_back(tmp_path):
    undisturbed, model = model_with_dropout(), model_with_dropout()
    guard, told = guarded(model, tmp_path)
    told()
    guard.save_checkpoint_if_preempted()
    for _ in range(2):
        guard, _ = guarded(model, tmp_path)
        guard.run(train, model)
        guard.close()
    undisturbed.optimizer.build(undisturbed.trainable_variables)
    for _ in range(2):
        train(undisturbed)
    assert values(model) == values(undisturbed)


def test_after_an_error_a_guard_restores(tmp_path):
    checkpoint = tf.train.Checkpoint(w=tf.Variable(3.0))
    SafeCheckpointManager(checkpoint, tmp_path, 2).save()
    guard, _ = guarded(checkpoint, tmp_path)

    def half() -> None:
        checkpoint.w.assign(99.0)
        raise KeyError

    with pytest.raises(KeyError), guard:
        guard.run(half)
    guarded(checkpoint, tmp_path)
    assert checkpoint.w.numpy() == 3


def test_a_manager_with_an_interval_saves_at_a_notice(tmp_path):
    for kind in (tf.train.CheckpointManager, SafeCheckpointManager):
        step = tf.Variable(0)
        folder = str(tmp_path / kind.__name__)
        manager = kind(
            tf.train.Checkpoint(step=step), folder, 3, step_counter=step, checkpoint_interval=10
        )
        guard, told = guarded(manager)
        manager.save()
        step.assign_add(1)
        told()
        guard.save_checkpoint_if_preempted()
        assert len(manager.checkpoints) == 2


def test_the_users_own_saves_know_how_many_runs_there_were(tmp_path):
    def made() -> tuple[Any, Any]:
        checkpoint = tf.train.Checkpoint(w=tf.Variable(0.0))
        return checkpoint, SafeCheckpointManager(checkpoint, tmp_path, 3)

    checkpoint, manager = made()
    guard, _ = guarded(manager)
    for _ in range(4):
        guard.run(checkpoint.w.assign_add, 1.0)
    manager.save()
    _, manager = made()
    guard, _ = guarded(manager)
    assert guard.total_run_calls == 4


def test_seeds_of_layers_that_are_built_late(tmp_path):
    class Late(keras.Model):
        def build(self, shape: Any) -> None:
            self.drop = keras.layers.Dropout(0.5)
            self.dense = keras.layers.Dense(2)
            self.dense.build(shape)
            super().build(shape)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.drop(self.dense(x), training=training)

    keras.utils.set_random_seed(3)
    model = Late()
    guard, told = guarded(tf.train.Checkpoint(model=model), tmp_path)
    for _ in range(3):
        guard.run(model, tf.ones((1, 3)), training=True)
    told()
    guard.save_checkpoint_if_preempted()
    keras.utils.set_random_seed(3)
    again = Late()
    guard, _ = guarded(tf.train.Checkpoint(model=again), tmp_path)
    guard.run(again, tf.ones((1, 3)))  # Without training: no number is drawn.
    assert seeds_of(again) == seeds_of(model)


def test_under_a_mirrored_strategy(tmp_path):
    strategy = mirrored_strategy()
    with strategy.scope():
        model = model_with_dropout()
    with model.distribute_strategy.scope():
        guard, told = guarded(model, tmp_path)
    told()
    guard.run(lambda: None)
    with strategy.scope():
        again = model_with_dropout()
        guarded(again, tmp_path)
    for one, other in zip(model.variables, again.variables, strict=True):
        assert np.array_equal(one.numpy(), other.numpy())


def test_events_are_in_the_directory(tmp_path):
    guard, told = guarded(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path)
    told("the end")
    guard.run(lambda: None)
    # That it was waited for the save is told if it took long enough to be worth a line.
    kinds = [e["event"] for e in EventLog(tmp_path).read() if e["event"] != "wait"]
    assert kinds == ["begin", "notice", "agreement", "save", "preempted"]
    guarded(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path)
    kinds = [e["event"] for e in EventLog(tmp_path).read() if e["event"] != "wait"]
    assert kinds[5:7] == ["restore", "begin"]


def test_damaged_checkpoints_are_not_taken_for_none(tmp_path):
    guard, told = guarded(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path)
    told()
    guard.run(lambda: None)
    (tmp_path / "ckpt-1.index").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError):
        guarded(tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path)


def test_a_directory_that_cannot_be_written_is_known_at_once(tmp_path, small_disk):
    folder = small_disk("ro")
    with pytest.raises(CheckpointWriteError, match="read-only"):
        guarded(tf.train.Checkpoint(v=tf.Variable(1.0)), folder)


@pytest.mark.parametrize(
    ("given", "directory", "message"),
    [
        (lambda: tf.train.Checkpoint(), None, "checkpoint_dir must be passed"),
        (lambda: tf.train.Checkpoint(), "", "checkpoint_dir must be passed"),
        (lambda: object(), "d", "a tf.train.Checkpoint, a SafeCheckpointManager or a Keras model"),
        (lambda: keras.Sequential([keras.layers.Dense(1)]), "d", "a model that is built"),
        (
            lambda: tf.train.CheckpointManager(tf.train.Checkpoint(), "e", 1),
            "d",
            "no checkpoint_dir with a manager",
        ),
    ],
)
def test_bad_arguments_are_named_at_once(given, directory, message):
    with pytest.raises(ValueError, match=message):
        guarded(given(), directory)
    assert not Path("d").exists()


def test_locks_are_handed_on(tmp_path):
    locks = LockManager(timeout=3)
    state = guarded_state(tf.train.Checkpoint(), tmp_path, None, resolver=None, locks=locks)
    assert state._manager.locks is locks


# Who this process is.


class Resolver:
    """As a cluster resolver of TensorFlow."""

    def __init__(self, cluster: dict[str, list[str]], task: str, index: int) -> None:
        self._cluster, self.task_type, self.task_id = cluster, task, index

    def cluster_spec(self) -> Any:
        return tf.train.ClusterSpec(self._cluster)


def test_roles_by_resolver_and_environment(monkeypatch):
    assert role_in_loop(None, None).alone
    assert role_in_loop(tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({})), None).alone  # fmt: skip
    two = {"worker": ["a:1", "b:1"]}
    role = role_in_loop(Resolver(two, "worker", 1), None)
    assert (role.number, role.world, role.chief) == (1, 2, False)
    assert not role.trains_together  # No MultiWorkerMirroredStrategy was made here.
    monkeypatch.setattr("keras_safe_ckpt.loops.training_role.is_coordinated", lambda: True)
    assert role_in_loop(Resolver(two, "worker", 1), None).trains_together
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}',
    )
    assert role_in_loop(None, None).members == ("worker 0", "worker 1")
    with pytest.raises(ClusterConfigError, match="parameter servers"):
        role_in_loop(Resolver({"ps": ["a:1"], **two}, "worker", 0), None)


def test_workers_that_cannot_talk_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("keras_safe_ckpt.loops.training_role.is_coordinated", lambda: True)
    resolver = Resolver({"worker": ["a:1", "b:1"]}, "worker", 0)
    with pytest.raises(ClusterConfigError, match="no way to agree"):
        PreemptionGuard(resolver, tf.train.Checkpoint(v=tf.Variable(1.0)), tmp_path)


# Workers of a cluster, as threads over a store in memory.

MEMBERS = ("worker 0", "worker 1")
_generations = itertools.count(9000)


class Store(LocalStore):
    def __init__(self) -> None:
        super().__init__()
        self.dead: list[str] = []

    def lost(self) -> list[str]:
        return list(self.dead)


@pytest.fixture
def opened(monkeypatch) -> Any:
    """Makes cohorts, and closes them."""
    monkeypatch.setattr(cohort_module, "_SLICE_SECONDS", 0.05)
    monkeypatch.setattr(cohort_module, "_SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(cohort_module, "_DEPARTURE_SECONDS", 0.2)
    made: list[Cohort] = []

    def make(*arguments: Any) -> Cohort:
        made.append(Cohort(*arguments))
        return made[-1]

    yield make
    for cohort in made:
        cohort.close()


@pytest.fixture
def two(monkeypatch, opened) -> Callable[..., tuple[GuardRun, Told, Cohort, Store]]:
    """Worker 0 with a guard, and the cohort of worker 1, which is what the test makes of it."""

    def make(state: Any, **options: Any) -> tuple[GuardRun, Told, Cohort, Store]:
        store, generation, told = Store(), next(_generations), Told()
        cohorts = [opened(store, task, MEMBERS, generation) for task in MEMBERS]
        monkeypatch.setattr(guard_run, "open_cohort", lambda role: cohorts[0])
        ending = Ending(
            choice=choose(told), on_preempted="stop", verbose=0, locks=None, grace_period=None,
            exit_code=42, exit_fn=None, save_fn=None, **options,
        )  # fmt: skip
        role = Role(0, 2, True, True, MEMBERS[0], "test", MEMBERS)
        return GuardRun(ending, role, state), told, cohorts[1], store

    return make


def checkpoint_state(folder: Path) -> tuple[CheckpointState, tf.Variable]:
    variable = tf.Variable([1.0, 1.0])
    manager = SafeCheckpointManager(tf.train.Checkpoint(v=variable), folder, 2)
    return CheckpointState(manager, None), variable


def until_over(run: GuardRun) -> None:
    """As a loop does, until it is stopped."""
    for _ in range(1000):
        if run.is_over:
            return
        run.boundary()
        threading.Event().wait(0.01)


def as_worker_1(cohort: Cohort, state: Any) -> Callable[[], str]:
    """Takes part in the save, on a thread; what is returned tells what it said of that."""
    outcomes: list[str] = []

    def save() -> None:
        answer(cohort, 0)
        role = Role(1, 2, False, True, MEMBERS[1], "test", MEMBERS)
        outcomes.append(GuardSave(state, role, cohort, Pace()).together(1, (), {}, None))

    thread = threading.Thread(target=save)
    thread.start()

    def outcome() -> str:
        thread.join(30)
        return outcomes[0]

    return outcome


def answer(cohort: Cohort, steps: int, number: int = 0) -> None:
    """What worker 1 says when it is asked: how many steps it has made."""
    assert cohort.get(f"guard/log/{number}", 30)
    cohort.put(f"guard/round/{number}/worker 1", steps)


def test_a_step_that_fails_on_the_way_to_the_last_save_is_undone(two, tmp_path):
    """Worker 1 dies in the step before the one that was agreed on: nothing half done is saved."""
    state, variable = checkpoint_state(tmp_path)
    run, told, other, _ = two(state)
    run.boundary()
    run.step(variable.assign_add, ([1.0, 1.0],), {})
    told()
    answer(other, 2)  # All are to stop after the third boundary.
    wait_until(lambda: run._lookout.expects, "worker 0 has heard of it, too")

    def dies() -> None:
        variable.assign([7.0, 2.0])  # Half an update.
        other.fail(RuntimeError("killed"))
        wait_until(lambda: run._cohort._failure is not None, "it is known")
        raise tf.errors.UnavailableError(None, None, "Collective ops is aborted")

    run.boundary()
    with pytest.raises(AgreementError, match="killed"):
        run.step(dies, (), {})
    assert run.preempted is not None
    (ended,) = [e for e in EventLog(tmp_path).read() if e["event"] == "preempted"]
    assert ended["degraded"]
    assert ended["outcome"].startswith("saved, degraded: worker 1 failed")
    restored = tf.Variable([0.0, 0.0])
    SafeCheckpointManager(tf.train.Checkpoint(v=restored), tmp_path, 2).restore_or_initialize()
    assert restored.numpy().tolist() == [2.0, 2.0]


def test_a_peer_that_does_not_answer_is_not_waited_for(two, tmp_path):
    state, _ = checkpoint_state(tmp_path)
    run, told, _, store = two(state)
    run.boundary()
    store.dead.append("worker 1")
    told()
    with pytest.raises(AgreementError, match="worker 1"):
        until_over(run)
    assert names_in(tmp_path) == ["ckpt-1"]


def test_only_the_first_of_those_who_are_left_saves(opened):
    saved: list[int] = []
    state = FunctionState(lambda: saved.append(1))
    members = ("worker 0", "worker 1", "worker 2")
    gone = AgreementError(["worker 0"], "worker 0 is gone")
    for number, expected in ((1, "saved, degraded"), (2, "left to worker 1")):
        role = Role(number, 3, False, True, f"worker {number}", "test", members)
        cohort = opened(Store(), f"worker {number}", members, next(_generations))
        outcome = GuardSave(state, role, cohort, Pace()).alone(3, gone, None)
        assert outcome.startswith(expected)
    assert saved == [1]


def test_a_save_that_waits_for_the_dead_is_not_waited_for(two):
    forever = threading.Event()
    run, told, _, store = two(FunctionState(forever.wait))
    store.dead.append("worker 1")
    told(deadline=Notice("", "").received + 0.3)
    with pytest.raises(AgreementError):
        until_over(run)
    assert run.preempted
    forever.set()


def test_what_keeps_the_chief_from_saving_is_known_before_anybody_begins(two):
    """Whoever begins may read together with the others, and would wait for the chief."""
    saved: list[int] = []

    class Full(FunctionState):
        def ensure_ready(self) -> None:
            raise OSError(28, "No space left on device")

    run, told, other, _ = two(Full(lambda: saved.append(0)))
    outcomes = as_worker_1(other, FunctionState(lambda: saved.append(1)))
    told()
    until_over(run)
    assert outcomes().startswith("not saved")
    assert saved == []


def test_nobody_waits_beyond_the_deadline(two):
    run, told, other, _ = two(FunctionState(lambda: None))
    threading.Thread(target=answer, args=(other, 0), daemon=True).start()
    began = time.monotonic()
    told(deadline=began + 2)
    until_over(run)  # Worker 1 does not come to the meeting.
    assert run.preempted
    assert time.monotonic() - began < 20


def test_a_notice_when_the_others_have_ended_is_acted_on_at_the_end(two):
    saved: list[int] = []
    run, told, other, _ = two(FunctionState(lambda: saved.append(0)))
    other.put("guard/log/0", [])  # Worker 1 has ended its loop.
    told()
    assert run.preempted is None
    run.end()
    assert run.preempted
    assert saved == [0]


def test_a_peer_that_dies_in_the_step_with_the_notice(two):
    """Nothing can be saved, and the program is to be started again."""
    saved: list[int] = []
    run, told, other, _ = two(FunctionState(lambda: saved.append(0)))
    run.boundary()

    def dies() -> None:
        told()
        other.fail(RuntimeError("killed"))
        wait_until(lambda: run._cohort._failure is not None, "it is known")
        raise tf.errors.UnavailableError(None, None, "Collective ops is aborted")

    with pytest.raises(AgreementError):
        run.step(dies, (), {})
    assert run.preempted
    assert saved == []


def test_who_is_alone_is_not_counted_as_a_common_stretch(opened):
    before = opened(Store(), "worker 0", MEMBERS)
    opened(Store(), "this process", ("this process",))
    after = opened(Store(), "worker 0", MEMBERS)
    numbers = [int(cohort._prefix.rpartition("/")[2]) for cohort in (before, after)]
    assert numbers[1] == numbers[0] + 1


def test_a_directory_that_is_not_shared_is_named(tmp_path, monkeypatch, opened):
    monkeypatch.setattr("keras_safe_ckpt.loops.guarded_state._SHARED_SECONDS", 0.1)
    role = Role(1, 2, False, True, MEMBERS[1], "test", MEMBERS)
    state, _ = checkpoint_state(tmp_path)

    def told_by_chief(name: str) -> Cohort:
        store, generation = Store(), next(_generations)
        opened(store, MEMBERS[0], MEMBERS, generation).put("guard/restored", name)
        return opened(store, MEMBERS[1], MEMBERS, generation)

    with pytest.raises(ValueError, match="that the chief sees, and this worker does not"):
        state.restore(told_by_chief("ckpt-5"), role)
    state.save_alone(3)
    with pytest.raises(ValueError, match="'ckpt-1' that the chief has not found"):
        state.restore(told_by_chief(""), role)


def test_a_save_that_cannot_be_finished_in_time_is_not_begun():
    saved: list[int] = []
    role, pace = Role(), Pace()
    cohort = Cohort(Store(), "this process", ("this process",), next(_generations))
    save = GuardSave(FunctionState(lambda: saved.append(1)), role, cohort, pace)
    assert save.together(1, (), {}, 0.5) == "saved"  # Nobody knows yet how long it takes.
    pace.save_took(4.0)
    assert save.together(1, (), {}, 3.9).startswith("not saved: 3.9 s are left")
    assert save.together(1, (), {}, 4.1) == "saved"
    assert saved == [1, 1]


def test_the_chief_decides_whether_there_is_time(two):
    saved: list[int] = []
    run, told, other, _ = two(FunctionState(lambda: saved.append(0)))
    run._pace.save_took(1000.0)

    outcome = as_worker_1(other, FunctionState(lambda: saved.append(1)))
    told(deadline=Notice("", "").received + 20)
    until_over(run)
    assert outcome().startswith("not saved")
    assert saved == []


def test_all_hear_of_a_save_that_failed(two):
    def full() -> None:
        raise OSError(28, "No space left on device")

    run, told, other, _ = two(FunctionState(full))
    outcome = as_worker_1(other, FunctionState(lambda: None))
    told()
    until_over(run)
    assert run.preempted
    assert "worker 0 failed with OSError" in outcome()


def test_variables_are_held_without_copying_and_put_back():
    model = model_with_dropout()
    model.optimizer.build(model.trainable_variables)
    with mirrored_strategy().scope():
        mirrored = tf.Variable([1.0])
    plain = tf.Variable(["text"])
    checkpoint = tf.train.Checkpoint(model=model, mirrored=mirrored, plain=plain)
    before = values(model)
    held = HeldVariables(checkpoint)
    assert len(list(variables_in(checkpoint))) >= 6
    train(model)
    mirrored.assign([5.0])
    plain.assign(["other"])
    held.put_back()
    assert mirrored.numpy().tolist() == [1.0]
    assert plain.numpy().tolist() == [b"text"]
    weights = len(model.weights)
    assert values(model)[:weights] == before[:weights]
