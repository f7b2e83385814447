"""One process of a random schedule: three threads that take a lock when they are told to.

What it does with the lock is written down by itself, with times of the clock that all processes
share, in a file to which everybody appends: who was in when. That is judged elsewhere, and does
not depend on what the lock believes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import pickle
import queue
import random
import signal
import socket
import sys
import threading
import time
from typing import Any

from keras_safe_ckpt.errors import LockLostError, LockTimeoutError

SLOTS = 3
LARGEST_MESSAGE = 1 << 16


class PlannedError(Exception):
    pass


class Witness:
    """Writes down who is in; one short append is one step for the kernel."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._value = path + ".value"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._log = os.open(path, flags, 0o600)

    def note(self, what: str, name: str, mode: str = "-") -> None:
        line = f"{time.monotonic_ns()} {os.getpid()} {what} {name} {mode}\n"
        os.write(self._log, line.encode())

    def began(self, name: str, mode: str) -> str:
        """What a holder sees at first, and must see at last: its own name, or what was there."""
        if mode == "exclusive":
            with open(self._value, "w") as file:
                file.write(name)
        return self.seen()

    def seen(self) -> str:
        with contextlib.suppress(FileNotFoundError), open(self._value) as file:
            return file.read()
        return ""

    def close(self) -> None:
        os.close(self._log)


class Slot:
    """One thread. ``hold`` is there while it holds, for a child that meddles with it."""

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.leave = threading.Event()
        self.hold: Any = None
        self.held: Any = None


class Actor:
    def __init__(self, address: str, locks: Any) -> None:
        self.address = address
        self.locks = locks
        self.slots = [Slot() for _ in range(SLOTS)]
        self.draining = False
        self.armed = False
        self.numbers = itertools.count()
        self.line = self.connect({"hello": "actor"})

    def connect(self, greeting: dict[str, Any]) -> socket.socket:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.connect("\0" + self.address)
        line.send(json.dumps({**greeting, "pid": os.getpid()}).encode())
        return line

    def say(self, **words: Any) -> None:
        self.line.send(json.dumps(words).encode())

    # What a thread does

    def obey(self, slot: Slot, order: dict[str, Any], witness: Witness) -> str:
        try:
            return self.take(slot, order, witness)
        except LockTimeoutError:
            return "timeout"
        except PlannedError:
            return "raised"
        finally:
            slot.hold = slot.held = None

    def take(self, slot: Slot, order: dict[str, Any], witness: Witness) -> str:
        mode, name = order["mode"], f"{os.getpid()}-{next(self.numbers)}"
        hold = getattr(self.locks, mode)(order["path"], timeout=order["timeout"])
        with hold as held:
            witness.note("enter", name, mode)
            try:
                slot.hold, slot.held = hold, held
                first = witness.began(name, mode)
                while not (slot.leave.wait(0.02) or self.draining):
                    pass
                held.ensure_held()
                last = witness.seen()
                if first != last:
                    return f"somebody wrote: {first} became {last}"
                if order["ending"] == "raise":
                    raise PlannedError
            finally:
                # So that neither keeps it alive: who drops a hold gives it back.
                slot.hold = slot.held = None
                witness.note("leave", name)
        return "held"

    def work(self, number: int) -> None:
        slot = self.slots[number]
        while True:
            order = slot.orders.get()
            witness = Witness(order["witness"])  # Not ours to leak, so not while it is armed.
            try:
                self.armed = number == 0 or self.armed
                outcome = self.obey(slot, order, witness)
                if number == 0:
                    self.armed = False
            except KeyboardInterrupt:
                outcome = "interrupted"
            except Exception as error:  # noqa: BLE001  (told, and judged there)
                outcome = f"error {error!r}"
            witness.close()
            slot.leave.clear()
            self.say(done=order["order"], outcome=outcome)

    def interrupted(self, *_: object) -> None:
        # Once for each order: what follows it is ours, and not what is tested.
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    # What it is told

    def listen(self) -> None:
        while True:
            message = self.line.recv(LARGEST_MESSAGE)
            if not message:
                os._exit(0)
            order = json.loads(message)
            getattr(self, "do_" + order["do"])(order)

    def do_acquire(self, order: dict[str, Any]) -> None:
        slot = self.slots[order["slot"]]
        slot.leave.clear()
        slot.orders.put(order)

    def do_release(self, order: dict[str, Any]) -> None:
        self.slots[order["slot"]].leave.set()

    def do_exit(self, order: dict[str, Any]) -> None:
        witness = Witness(order["witness"])
        witness.note("exit", "all")
        os._exit(0)

    def do_drain(self, order: dict[str, Any]) -> None:
        self.draining = order["on"]

    def do_status(self, order: dict[str, Any]) -> None:
        gc.collect()
        files = len(os.listdir("/proc/self/fd"))
        self.say(status=order["order"], files=files, threads=threading.active_count())

    def do_fork(self, order: dict[str, Any]) -> None:
        if not os.fork():
            try:
                self.live_as_child(order)
            finally:
                os._exit(1)

    def live_as_child(self, order: dict[str, Any]) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parents = [slot.held for slot in self.slots if slot.held is not None]
        holds = [slot.hold for slot in self.slots if slot.hold is not None]
        self.line.close()
        self.line = self.connect({"hello": "child"})
        self.slots = [Slot()]
        self.draining = order["kind"] != "lives"
        outcome = "held"
        for held in parents:
            try:
                held.ensure_held()
                outcome = "the child holds the lock of its parent"
            except LockLostError:
                pass
        if order["kind"] == "releases":
            for hold in holds:
                hold.__exit__(None, None, None)
        if order["kind"] == "uses":
            try:
                outcome = self.obey(self.slots[0], order, Witness(order["witness"]))
            except Exception as error:  # noqa: BLE001  (told, and judged there)
                outcome = f"error {error!r}"
        files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        if any(file.endswith((".lock", ".gate")) for file in files):
            outcome = "the child has a lock file open"
        self.say(done=order["order"], outcome=outcome)
        self.line.recv(1)  # Lives on until nobody listens any more.
        os._exit(0)


def main() -> None:
    actor = Actor(sys.argv[1], pickle.loads(bytes.fromhex(sys.argv[2])))
    random.seed()
    signal.signal(signal.SIGINT, actor.interrupted)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for target, arguments in ((actor.listen, ()), (actor.work, (1,)), (actor.work, (2,))):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    actor.work(0)


if __name__ == "__main__":
    main()
