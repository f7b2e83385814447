"""From what a user passes as ``notices`` to those who watch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keras_safe_ckpt.preemption.notices import Notice, Poller, Watcher
from keras_safe_ckpt.preemption.platforms import cloud_watchers, find_platforms
from keras_safe_ckpt.preemption.signals import DEFAULT_GRACE_SECONDS
from keras_safe_ckpt.preemption.slurm import slurm_deadline, slurm_signals

_CLOUDS = ("gcp", "aws", "azure")
_EXPECTED = (
    "Expected notices to be 'auto', 'gcp', 'aws', 'azure', 'slurm', a signal, a function, an "
    "object with start(desk) and stop(), a tf.distribute.experimental.TerminationConfig, or a "
    "list of these"
)
#: On Google's machines this one means "start me again"; elsewhere 42, as TensorFlow has it.
GCP_EXIT_CODE, EXIT_CODE = 143, 42


@dataclass
class Choice:
    """Who watches, and what a `TerminationConfig` of TensorFlow asks for beside that."""

    signals: list[signal.Signals] = field(default_factory=list)
    clouds: list[str] = field(default_factory=list)
    watchers: list[Watcher] = field(default_factory=list)
    exit_fn: Callable[[], object] | None = None
    save_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    #: Of the job of SLURM that this is part of, if it is.
    job: Mapping[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return GCP_EXIT_CODE if "gcp" in self.clouds else EXIT_CODE

    def pollers(self) -> list[Watcher]:
        """All that watch beside the signals, made anew for each run."""
        return [*cloud_watchers(self.clouds), *self.watchers]

    def seconds_after(self, number: signal.Signals) -> float:
        """How long the machine has after this signal."""
        known = slurm_deadline(self.job, number)
        return DEFAULT_GRACE_SECONDS if known is None else known

    def __str__(self) -> str:
        names = [number.name for number in self.signals]
        return ", ".join([*names, *self.clouds, *(w.name for w in self.watchers)]) or "nothing"


def choose(notices: Any, environment: Mapping[str, str] | None = None) -> Choice:
    """Raises ValueError for what is not understood."""
    environment = os.environ if environment is None else environment
    job = {name: value for name, value in environment.items() if name.startswith("SLURM_")}
    choice = Choice(job=job)
    if notices is not None:
        _add(choice, notices, environment)
    return choice


def _add(choice: Choice, item: Any, environment: Mapping[str, str]) -> None:
    if isinstance(item, str):
        _add_name(choice, item, environment)
    elif isinstance(item, int) and not isinstance(item, bool):
        _add_signal(choice, item)
    elif _is_termination_config(item):
        _add_termination_config(choice, item, environment)
    elif callable(getattr(item, "start", None)) and callable(getattr(item, "stop", None)):
        choice.watchers.append(item)
    elif callable(item):
        choice.watchers.append(Poller(getattr(item, "__name__", "function"), _asking(item)))
    elif isinstance(item, Iterable) and not isinstance(item, (bytes, Mapping)):
        for part in item:
            _add(choice, part, environment)
    else:
        raise ValueError(f"{_EXPECTED}. Received: notices={item!r}")


def _add_name(choice: Choice, name: str, environment: Mapping[str, str]) -> None:
    if name == "auto":
        _add_signal(choice, signal.SIGTERM)
        for platform in find_platforms(environment=environment):
            _add_name(choice, platform, environment)
    elif name == "slurm":
        for number in slurm_signals({"SLURM_JOB_ID": "asked for", **environment}):
            _add_signal(choice, number)
    elif name in _CLOUDS:
        if name not in choice.clouds:
            choice.clouds.append(name)
    elif name.upper() in signal.Signals.__members__:
        _add_signal(choice, signal.Signals[name.upper()])
    else:
        raise ValueError(f"{_EXPECTED}. Received: notices={name!r}")


def _add_signal(choice: Choice, number: int) -> None:
    try:
        which = signal.Signals(number)
    except ValueError:
        raise ValueError(f"{_EXPECTED}. Received: notices={number!r}, no signal") from None
    if which in (getattr(signal, "SIGKILL", None), getattr(signal, "SIGSTOP", None)):
        raise ValueError(f"{which.name} cannot be handled by any program. Received: {number!r}")
    if which not in choice.signals:
        choice.signals.append(which)


def _is_termination_config(item: Any) -> bool:
    names = ("termination_watcher_fn", "exit_fn", "grace_period", "save_fn")
    return all(hasattr(item, name) for name in names)


def _add_termination_config(choice: Choice, config: Any, environment: Mapping[str, str]) -> None:
    if config.termination_watcher_fn is None:
        _add_name(choice, "auto", environment)
    else:
        _add(choice, config.termination_watcher_fn, environment)
    choice.exit_fn, choice.save_fn = config.exit_fn, config.save_fn
    choice.grace_period = config.grace_period


def _asking(function: Callable[[], Any]) -> Callable[[], Notice | None]:
    name = getattr(function, "__name__", type(function).__name__)

    def ask() -> Notice | None:
        answer = function()
        if isinstance(answer, Notice) or answer is None:
            return answer
        if isinstance(answer, str) and answer:
            return Notice(name, answer)
        return Notice(name, "says so") if answer else None

    return ask
