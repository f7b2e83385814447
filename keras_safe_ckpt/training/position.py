"""Where in a `fit` a model is, and the way back to there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Position:
    """After so many executions of the training step in ``epoch``, which is counted from zero.

    An execution is one batch, or ``steps_per_execution`` of them; ``batch`` counts the batches as
    Keras reports them. ``logs`` are the last that the step returned. ``finished`` has the number
    of executions of each epoch before. ``trained``: the epoch has no more batches, what is left
    is its validation. ``stopping``: a callback has set ``model.stop_training``. ``ended``: no epoch
    comes any more.
    """

    epoch: int = 0
    executions: int = 0
    batch: int = 0
    logs: Mapping[str, Any] = field(default_factory=dict)
    finished: tuple[int, ...] = ()
    trained: bool = False
    stopping: bool = False
    ended: bool = False

    @property
    def total(self) -> int:
        """Executions from the beginning of the run."""
        return sum(self.finished) + self.executions

    def after_epoch(self, epoch: int) -> Position:
        return Position(
            epoch + 1,
            finished=(*self.finished, self.executions),
            stopping=self.stopping,
            ended=self.stopping,
        )

    @property
    def name(self) -> str:
        """The same for the same place."""
        return f"{self.epoch}-{self.executions}" + ("-end" if self.ended else "")

    def same_place(self, other: Position | None) -> bool:
        return other is not None and self.name == other.name

    def __str__(self) -> str:
        if self.ended:
            return "the end of training"
        if not self.executions:
            return f"the end of epoch {self.epoch}" if self.epoch else "the beginning of training"
        return f"epoch {self.epoch + 1}, batch {self.batch}"


class Progress:
    """Follows a `fit` of ``model`` from one position to the next."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._at = Position()
        self._before = 0
        # Of the epoch that runs, kept apart since they change with each batch.
        self._executions, self._batch = 0, 0
        self._logs: Mapping[str, Any] = {}

    def now(self) -> Position:
        return replace(
            self._at,
            executions=self._executions,
            batch=self._batch,
            logs=dict(self._logs),
            stopping=bool(self._model.stop_training),
        )

    @property
    def total(self) -> int:
        """`Position.total` of now, at less cost."""
        return self._before + self._executions

    def begin(self, at: Position) -> None:
        """``trained`` is for those who save it: this one is on its way."""
        self._at = replace(at, trained=False)
        self._executions, self._batch, self._logs = at.executions, at.batch, at.logs
        self._before = sum(at.finished)

    def epoch_begins(self, epoch: int, *, anew: bool) -> None:
        """Not ``anew``: it goes on where it was interrupted."""
        if epoch != self._at.epoch:  # As `initial_epoch` of `fit` says.
            self._at = Position(epoch, finished=self._at.finished)
        if anew:
            self._clear()

    def batch_ends(self, batch: int, logs: Mapping[str, Any]) -> None:
        """``batch`` is the number (from zero) of the last one that was executed."""
        self._executions += 1
        self._batch, self._logs = batch + 1, logs

    def epoch_ends(self, epoch: int) -> None:
        self._at = self.now().after_epoch(epoch)
        self._before = sum(self._at.finished)
        self._clear()

    def training_ends(self) -> None:
        self._at = Position(self._at.epoch, finished=self._at.finished, ended=True)
        self._clear()

    def _clear(self) -> None:
        self._executions, self._batch, self._logs = 0, 0, {}


class FastForward:
    """Stands in for ``model.train_function``, and drops batches until the place is reached.

    `fit` looks the function up at each step, so that this works for every kind of data. The last
    call arrives: ``arrive(batch)`` puts back what `fit` has reset when the epoch began, with a
    batch of the data at hand. From then on the function is the model's own again; but of data of
    unknown length Keras asks for one batch too many, which counts as a step of the optimizer: if
    all was trained on before, that has happened, too, and is not done again: ``end()`` is called
    instead.
    """

    def __init__(
        self,
        model: Any,
        position: Position,
        *,
        drop: Callable[[Any], tuple[int, Any]],
        arrive: Callable[[Any], None],
        cut_short: Callable[[int], None],
        end: Callable[[], None],
    ) -> None:
        self._model = model
        self._own = model.train_function
        self._position = position
        self._drop = drop
        self._arrive = arrive
        self._cut_short = cut_short
        self._end = end
        self.left = position.executions
        self.dropped = 0
        #: Set before each batch. A `fit` that has failed leaves this function in the model, and
        #: the next one, which may know nothing of it, must not lose batches to it.
        self.is_wanted = False
        model.train_function = self

    def __call__(self, iterator: Any) -> Any:
        wanted, self.is_wanted = self.is_wanted, False
        if not wanted:
            self.give_back()
            return self._own(iterator)
        if not self.left:
            self.give_back()
            self._end()
            raise StopIteration
        try:
            count, batch = self._drop(iterator)
        except StopIteration:
            done = self._position.executions - self.left
            self.left = 0
            self.give_back()
            self._cut_short(done)
            raise
        self.dropped += count
        self.left -= 1
        if not self.left:
            if not self._position.trained:
                self.give_back()
            self._arrive(batch)
        return dict(self._position.logs)

    def give_back(self) -> None:
        """The model has its own function again."""
        if self._model.train_function is self:
            self._model.train_function = self._own
