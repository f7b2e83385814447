"""A `fit` that is told by the metadata service of a cloud, on a loopback port, that it ends."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from metadata_server import AwsServer, AzureServer, GcpServer
from preempted_fit import DATA, At, Told, build, callback, events, run_files
from processes import wait_until

from keras_safe_ckpt import PreemptionAwareCallback
from keras_safe_ckpt.preemption.metadata import MetadataClient

pytestmark = pytest.mark.usefixtures("alone_in_a_folder")


def soon(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


def gcp(server: Any) -> None:
    server.values["preempted"] = "TRUE"


def aws(server: Any) -> None:
    server.spot(action="terminate", time=soon(20).strftime("%Y-%m-%dT%H:%M:%SZ"))


def azure(server: Any) -> None:
    server.schedule("Preempt", NotBefore=soon(20).strftime("%a, %d %b %Y %H:%M:%S GMT"))


@pytest.mark.parametrize(
    ("make", "variable", "tell", "source", "code"),
    [
        (GcpServer, "GCE_METADATA_HOST", gcp, "GCP", 143),
        (AwsServer, "AWS_EC2_METADATA_SERVICE_ENDPOINT", aws, "AWS spot", 42),
        (AzureServer, "KERAS_SAFE_CKPT_AZURE_ENDPOINT", azure, "Azure", 42),
    ],
)
def test_a_notice_of_the_cloud_ends_in_a_checkpoint_and_its_exit_code(
    monkeypatch, make, variable, tell, source, code
):
    with make() as server:
        monkeypatch.setenv(variable, server.url)

        def told() -> None:
            tell(server)
            wait_until(lambda: bool(events("notice")), "the service was asked", 30)

        mine = callback("auto", on_preempted="exit")
        with pytest.raises(SystemExit) as exit:
            build().fit(epochs=3, callbacks=[mine, At("batch", 0, 1, told)], **DATA)
    assert exit.value.code == code
    assert events("notice")[0]["source"] == source
    assert run_files()


def test_advice_of_aws_saves_and_training_goes_on(monkeypatch):
    with AwsServer() as server:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)

        def told() -> None:
            server.rebalance(noticeTime=soon(0).strftime("%Y-%m-%dT%H:%M:%SZ"))
            wait_until(lambda: bool(events("notice")), "the service was asked", 30)

        log: list[Any] = []
        mine = callback("aws", save_freq=None)
        build().fit(epochs=2, callbacks=[mine, At("batch", 0, 1, told), Told(log)], **DATA)
    assert mine.preempted is None
    assert log[-1] == "end of 1"
    assert [event["batch"] for event in events("backup")] == [2]


def test_training_begins_at_once_where_no_service_answers(monkeypatch):
    """Three clouds at a time, and an address from which no answer ever comes."""
    # So that no machine is too slow to tell "at once" from "after the time limit of a request".
    patient = property(lambda self: 20.0, lambda self, seconds: None)
    monkeypatch.setattr(MetadataClient, "_timeout", patient, raising=False)
    with GcpServer() as server:
        server.fault = "hang"
        monkeypatch.setenv("GCE_METADATA_HOST", server.url.removeprefix("http://"))
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)
        monkeypatch.setenv("KERAS_SAFE_CKPT_AZURE_ENDPOINT", server.url)
        began: list[float] = []
        model = build()
        model.fit(epochs=1, callbacks=[callback(None, directory="warm")], **DATA)
        mine = PreemptionAwareCallback("state", notices="auto", verbose=0)
        start = time.monotonic()
        at = At("batch", 0, 0, lambda: began.append(time.monotonic() - start))
        model.fit(epochs=1, callbacks=[at, mine], **DATA)
        assert began[0] < 10.0
        assert server.faulted
        assert os.path.exists("state/events.jsonl")
