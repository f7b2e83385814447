"""Google Compute Engine: a preempted machine has 30 seconds."""

from __future__ import annotations

import time

from keras_safe_ckpt.preemption.metadata import (
    MetadataClient,
    MetadataError,
    choose_endpoint,
    short,
)
from keras_safe_ckpt.preemption.notices import Notice, Poller, Watcher

#: Another metadata service, as host[:port]; Google's own libraries read it, too.
ENDPOINT_VARIABLE = "GCE_METADATA_HOST"

_INSTANCE = "/computeMetadata/v1/instance/"
_FLAVOR = {"Metadata-Flavor": "Google"}
_PREEMPTION_SECONDS = 30.0
#: Machines with accelerators are told up to an hour ahead, others a minute.
_MAINTENANCE_SECONDS = 60.0


def gcp_watchers(
    *, endpoint: str | None = None, interval_seconds: float = 1.0, timeout_seconds: float = 1.0
) -> list[Watcher]:
    """Watchers for preemption, and for maintenance that ends the machine.

    A machine that is moved while it runs (MIGRATE_ON_HOST_MAINTENANCE) is no reason to stop.
    """
    client = MetadataClient(
        choose_endpoint(endpoint, ENDPOINT_VARIABLE), timeout_seconds=timeout_seconds
    )

    def ask_preempted() -> Notice | None:
        if _value(client, "preempted", ("TRUE", "FALSE")) == "FALSE":
            return None
        return _notice("GCP", "the machine is being preempted", _PREEMPTION_SECONDS)

    def ask_maintenance() -> Notice | None:
        values = ("TERMINATE_ON_HOST_MAINTENANCE", "MIGRATE_ON_HOST_MAINTENANCE", "NONE")
        if _value(client, "maintenance-event", values) != values[0]:
            return None
        reason = "the machine is ended for maintenance of its host"
        return _notice("GCP maintenance", reason, _MAINTENANCE_SECONDS)

    return [
        Poller("GCP", ask_preempted, interval_seconds=interval_seconds),
        Poller("GCP maintenance", ask_maintenance, interval_seconds=interval_seconds),
    ]


def _notice(source: str, reason: str, seconds: float) -> Notice:
    return Notice(source, reason, deadline=time.monotonic() + seconds)


def _value(client: MetadataClient, name: str, expected: tuple[str, ...]) -> str:
    answer = client.request("GET", _INSTANCE + name, _FLAVOR)
    if answer.headers.get("metadata-flavor") != "Google":
        # The login page of a network answers for any host.
        raise MetadataError("the answer is not from the metadata service of Google")
    value = answer.expect_ok(name).text.strip()
    if value not in expected:
        raise MetadataError(f"expected {name} to be one of {expected}, received {short(value)}")
    return value
