"""The metadata services of the clouds, over real sockets: what is noticed, and what is not."""

from __future__ import annotations

import contextlib
import email.utils
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from metadata_server import (
    FAULTS,
    AwsServer,
    AzureServer,
    Desk,
    GcpServer,
    MetadataServer,
    watching_threads,
)
from processes import wait_until

from keras_safe_ckpt.preemption.aws import aws_watchers
from keras_safe_ckpt.preemption.azure import azure_watchers
from keras_safe_ckpt.preemption.gcp import gcp_watchers
from keras_safe_ckpt.preemption.metadata import Answer, MetadataClient, MetadataError, deadline_at
from keras_safe_ckpt.preemption.notices import Watcher, watching
from keras_safe_ckpt.preemption.platforms import cloud_watchers, find_platforms

QUICK = {"interval_seconds": 0.005}
VARIABLES = (
    "GCE_METADATA_HOST",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT",
    "KERAS_SAFE_CKPT_AZURE_ENDPOINT",
)


class Cloud:
    """One service with one kind of event, for the tests that hold for all of them."""

    def __init__(
        self,
        source: str,
        server: Callable[[], Any],
        watchers: Callable[..., list[Watcher]],
        path: str,
        announce: Callable[[Any], object],
        cancel: Callable[[Any], object],
    ) -> None:
        self.source, self.server, self.watchers = source, server, watchers
        self.path, self.announce, self.cancel = path, announce, cancel
        self.service = source.split()[0]
        #: What the paths of all events of this service have in common.
        self.common_path = {"GCP": "/instance/", "AWS": "/meta-data/", "Azure": path}[self.service]


CLOUDS = {
    cloud.source: cloud
    for cloud in (
        Cloud(
            "GCP",
            GcpServer,
            gcp_watchers,
            "preempted",
            lambda server: server.values.update({"preempted": "TRUE"}),
            lambda server: server.values.update({"preempted": "FALSE"}),
        ),
        Cloud(
            "GCP maintenance",
            GcpServer,
            gcp_watchers,
            "maintenance-event",
            lambda server: server.values.update(
                {"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
            ),
            lambda server: server.values.update({"maintenance-event": "NONE"}),
        ),
        Cloud(
            "AWS spot",
            AwsServer,
            aws_watchers,
            "instance-action",
            lambda server: server.spot(action="terminate", time=iso(60)),
            lambda server: server.events.clear(),
        ),
        Cloud(
            "AWS rebalance",
            AwsServer,
            aws_watchers,
            "rebalance",
            lambda server: server.rebalance(noticeTime=iso(0)),
            lambda server: server.events.clear(),
        ),
        Cloud(
            "Azure",
            AzureServer,
            azure_watchers,
            "scheduledevents",
            lambda server: server.schedule("Preempt"),
            lambda server: setattr(server, "events", []),
        ),
    )
}
each_service = pytest.mark.parametrize("service", ["GCP", "AWS", "Azure"])
each_cloud = pytest.mark.parametrize("cloud", CLOUDS.values(), ids=CLOUDS.keys())


def iso(seconds_from_now: float) -> str:
    moment = datetime.fromtimestamp(time.time() + seconds_from_now, timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def mail_date(seconds_from_now: float) -> str:
    return email.utils.formatdate(time.time() + seconds_from_now, usegmt=True)


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = watching_threads()
    yield
    wait_until(lambda: watching_threads() <= before, "the watching threads have ended", 20)


@contextlib.contextmanager
def watched(watchers: list[Watcher]) -> Iterator[Desk]:
    desk = Desk()
    with watching(watchers, desk):
        yield desk


def asked_again(server: MetadataServer, path: str = "", times: int = 3) -> None:
    """Wait for questions that were begun after now."""
    before = server.count(path)
    wait_until(lambda: server.count(path) >= before + times, f"{path} is asked for again")


def faulted_again(server: MetadataServer, times: int = 3) -> None:
    before = server.faulted
    wait_until(lambda: server.faulted >= before + times, "the fault is seen again")


def expect_notice(server: MetadataServer, watchers: list[Watcher]) -> Any:
    """The only one, however often it is asked for."""
    with watched(watchers) as desk:
        wait_until(lambda: bool(desk.told), "the notice is seen")
        asked_again(server, times=6)
        assert len(desk.told) == 1
        assert desk.withdrawn == []
        return desk.told[0]


def expect_no_notice(server: MetadataServer, watchers: list[Watcher]) -> None:
    with watched(watchers) as desk:
        asked_again(server, times=8)
        assert desk.told == []


@each_cloud
def test_notice_is_seen_once_and_withdrawn_when_it_is_cancelled(cloud):
    with cloud.server() as server, watched(cloud.watchers(endpoint=server.url, **QUICK)) as desk:
        asked_again(server, cloud.path)
        assert desk.told == []
        for times in (1, 2):
            cloud.announce(server)
            wait_until(lambda: len(desk.told) == times, "the notice is seen")  # noqa: B023
            asked_again(server, cloud.path)
            assert desk.sources() == [cloud.source] * times
            cloud.cancel(server)
            wait_until(lambda: len(desk.withdrawn) == times, "it is withdrawn")  # noqa: B023
            asked_again(server, cloud.path)
            assert desk.withdrawn == [cloud.source] * times


@each_service
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_brings_no_notice_takes_none_back_and_hides_none_for_ever(service, fault):
    clouds = [cloud for cloud in CLOUDS.values() if cloud.service == service]
    sources = sorted(cloud.source for cloud in clouds)
    slow = fault in ("hang", "drip")

    def all_asked_again(times: int) -> None:
        goals = {cloud.path: server.count(cloud.path) + times for cloud in clouds}
        wait_until(
            lambda: all(server.count(path) >= goal for path, goal in goals.items()),
            "all events are asked for again",
        )

    with MetadataServer() as elsewhere, clouds[0].server() as server:
        server.fault, server.fault_path = fault, clouds[0].common_path
        server.redirect_to = elsewhere.url
        watchers = clouds[0].watchers(
            endpoint=server.url, timeout_seconds=0.1 if slow else 5.0, **QUICK
        )
        with watched(watchers) as desk:
            all_asked_again(2 if slow else 4)
            assert server.faulted
            assert desk.told == []
            for cloud in clouds:
                cloud.announce(server)
            server.fault = ""
            wait_until(lambda: len(desk.told) >= len(sources), "it is seen after the fault")
            if (service, fault) != ("AWS", "404"):  # There it means "no event".
                server.fault = fault
                all_asked_again(2 if slow else 4)
                server.fault = ""
                all_asked_again(2)
                assert desk.withdrawn == []
                assert desk.sources() == sources
            for cloud in clouds:
                cloud.cancel(server)
            wait_until(lambda: sorted(desk.withdrawn) == sources, "it is withdrawn")
        assert elsewhere.requests == []


@each_cloud
def test_service_that_comes_up_late_is_found(cloud):
    with contextlib.ExitStack() as cleanup:
        server = cloud.server()
        cleanup.push(server)  # Bound but not listening: connections are refused.
        cloud.announce(server)
        with watched(cloud.watchers(endpoint=server.url, **QUICK)) as desk:
            with pytest.raises(MetadataError, match="refused"):
                MetadataClient(server.url).request("GET", "/")
            assert desk.told == []
            server.listen()
            wait_until(lambda: desk.sources() == [cloud.source], "the notice is seen")


@each_cloud
def test_proxy_of_the_environment_is_not_used(cloud, monkeypatch):
    with MetadataServer() as proxy, cloud.server() as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        cloud.announce(server)
        expect_notice(server, cloud.watchers(endpoint=server.url, **QUICK))
        assert proxy.requests == []


@each_service
@pytest.mark.parametrize("way", ["hang", "refuse"])
def test_starting_and_stopping_wait_for_nobody(service, way):
    cloud = next(cloud for cloud in CLOUDS.values() if cloud.service == service)
    with contextlib.ExitStack() as cleanup:
        server = cloud.server()
        server.fault = "hang"
        cleanup.push(server)
        if way == "hang":
            server.listen()
        desk = Desk()
        watchers = cloud.watchers(endpoint=server.url, interval_seconds=60, timeout_seconds=20)
        begun = time.monotonic()
        for watcher in watchers:
            watcher.start(desk)
        assert time.monotonic() - begun < 10
        if way == "hang":
            wait_until(lambda: server.faulted > 0, "the watcher hangs")
        begun = time.monotonic()
        for watcher in watchers:
            watcher.stop()
        assert time.monotonic() - begun < 10
    wait_until(lambda: not list(watching_threads()), "the threads have ended")
    assert desk.told == []


@each_cloud
def test_nothing_is_told_after_stop(cloud):
    with cloud.server() as server:
        with watched(cloud.watchers(endpoint=server.url, **QUICK)) as desk:
            asked_again(server, cloud.path)
        cloud.announce(server)
        wait_until(lambda: not list(watching_threads()), "the threads have ended")
        assert desk.told == []


# Google


def test_gcp_preemption_leaves_30_seconds():
    with GcpServer() as server:
        server.values["preempted"] = "TRUE"
        notice = expect_notice(server, gcp_watchers(endpoint=server.url, **QUICK))
    assert notice.source == "GCP"
    assert notice.deadline == pytest.approx(notice.received + 30, abs=1)
    assert not notice.advisory


def test_gcp_maintenance_leaves_a_minute():
    with GcpServer() as server:
        server.values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        notice = expect_notice(server, gcp_watchers(endpoint=server.url, **QUICK))
    assert notice.source == "GCP maintenance"
    assert notice.deadline == pytest.approx(notice.received + 60, abs=1)


def test_gcp_machine_that_is_moved_goes_on():
    with GcpServer() as server:
        server.values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
        expect_no_notice(server, gcp_watchers(endpoint=server.url, **QUICK))


@pytest.mark.parametrize("flavor", [{}, {"Metadata-Flavor": "Other"}])
def test_gcp_answer_of_somebody_else_does_not_count(flavor):
    with GcpServer() as server:
        server.values.update(
            {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
        )
        server.signature = flavor
        expect_no_notice(server, gcp_watchers(endpoint=server.url, **QUICK))


def test_gcp_value_may_end_in_a_newline():
    with GcpServer() as server:
        server.values["preempted"] = "TRUE\n"
        assert expect_notice(server, gcp_watchers(endpoint=server.url, **QUICK)).source == "GCP"


# Amazon


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_aws_interruption_has_the_time_of_the_event(action):
    with AwsServer() as server:
        server.spot(action=action, time=iso(90))
        notice = expect_notice(server, aws_watchers(endpoint=server.url, **QUICK))
    assert notice.source == "AWS spot"
    assert action in notice.reason
    assert notice.deadline == pytest.approx(notice.received + 90, abs=2)
    assert not notice.advisory


@pytest.mark.parametrize(
    ("moment", "seconds"),
    [
        ("2017-09-18T08:22:00Z", 0),
        ("2017-09-18T08:22:00", 0),
        ("9999-12-31T23:59:59Z", 120),  # The clock here is wrong: it is never so far away.
        ("soon", 120),
        ("", 120),
        (None, 120),
        (17, 120),
        ("\ud800\n", 120),
        (["\ud800\n"], 120),
    ],
)
def test_aws_odd_time_leaves_two_minutes_at_most_and_never_a_deadline_in_the_past(moment, seconds):
    with AwsServer() as server:
        server.spot(action="stop", time=moment)
        notice = expect_notice(server, aws_watchers(endpoint=server.url, **QUICK))
    assert notice.deadline == pytest.approx(notice.received + seconds, abs=1)
    assert notice.reason.isprintable()


def test_aws_new_time_is_told_again():
    with AwsServer() as server, watched(aws_watchers(endpoint=server.url, **QUICK)) as desk:
        for seconds in (100, 40):
            server.spot(action="stop", time=iso(seconds))
            wait_until(
                lambda: bool(desk.told) and desk.told[-1].seconds_left() < seconds + 2,  # noqa: B023
                "the new time is seen",
            )
        assert len(desk.told) == 2


def test_aws_unknown_action_does_not_count():
    with AwsServer() as server:
        server.spot(action="dance", time=iso(90))
        expect_no_notice(server, aws_watchers(endpoint=server.url, **QUICK))


def test_aws_rebalance_is_an_advice():
    with AwsServer() as server:
        server.rebalance(noticeTime=iso(0))
        notice = expect_notice(server, aws_watchers(endpoint=server.url, **QUICK))
    assert notice.source == "AWS rebalance"
    assert notice.advisory
    assert notice.deadline is None


def test_aws_both_watchers_share_one_token():
    with AwsServer() as server:
        server.rebalance(noticeTime=iso(0))
        server.spot(action="stop", time=iso(90))
        with watched(aws_watchers(endpoint=server.url, **QUICK)) as desk:
            wait_until(lambda: len(desk.told) == 2, "both are seen")
            asked_again(server, times=10)
        assert len(server.issued) == 1
        assert server.refused == 0


def test_aws_token_is_renewed_before_it_expires():
    with AwsServer() as server:
        watchers = aws_watchers(endpoint=server.url, token_seconds=1, **QUICK)
        with watched(watchers) as desk:
            wait_until(lambda: len(server.issued) >= 3, "the token is renewed twice")
            server.spot(action="stop", time=iso(90))
            wait_until(lambda: bool(desk.told), "the notice is seen")
        assert server.refused == 0


def test_aws_refused_token_is_replaced_in_the_same_question():
    with AwsServer() as server, watched(aws_watchers(endpoint=server.url, **QUICK)):
        asked_again(server, times=4)
        for token in server.issued:
            server.issued[token] = 0.0
        wait_until(lambda: len(server.issued) == 2, "there is a new token")
        asked_again(server, times=10)
        assert len(server.issued) == 2
        assert server.refused <= 2  # Each watcher may have sent the old one once.


def test_aws_service_that_refuses_every_token_is_asked_twice_at_most():
    with AwsServer() as server:
        server.fault, server.fault_path = "401", "instance-action"
        with watched(aws_watchers(endpoint=server.url, interval_seconds=60)):
            wait_until(lambda: server.count("instance-action") == 2, "it has tried again")
            wait_until(lambda: server.count("rebalance") >= 1, "the other asks")
            assert server.count("instance-action") == 2


@pytest.mark.parametrize("refusal", ["403", "404", "405"])
def test_aws_service_without_tokens_is_asked_without(refusal):
    with AwsServer("absent") as server:
        server.fault, server.fault_path = refusal, "token"
        server.spot(action="stop", time=iso(90))
        watchers = aws_watchers(endpoint=server.url, **QUICK)
        assert expect_notice(server, watchers).source == "AWS spot"
        assert server.count("token") == 1


def test_aws_tokens_are_asked_for_again_when_they_are_demanded():
    with AwsServer("absent") as server, watched(aws_watchers(endpoint=server.url, **QUICK)) as desk:
        asked_again(server, "instance-action")
        server.tokens = "required"
        server.spot(action="stop", time=iso(90))
        wait_until(lambda: bool(desk.told), "the notice is seen")


@pytest.mark.parametrize("fault", ["500", "hang", "binary", "huge", "portal", "redirect", "deep"])
def test_aws_bad_token_answer_is_gone_when_the_fault_is(fault):
    with MetadataServer() as elsewhere, AwsServer() as server:
        server.fault, server.fault_path = fault, "token"
        server.redirect_to = elsewhere.url
        server.spot(action="stop", time=iso(90))
        limit = 0.1 if fault == "hang" else 5.0
        watchers = aws_watchers(endpoint=server.url, timeout_seconds=limit, **QUICK)
        with watched(watchers) as desk:
            faulted_again(server, 2)
            assert desk.told == []
            server.fault = ""
            wait_until(lambda: bool(desk.told), "the notice is seen")
        assert server.refused == 0  # Nothing else was sent as a token.
        assert elsewhere.requests == []


# Microsoft


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_event_has_the_time_of_the_event(kind):
    with AzureServer() as server:
        server.schedule(kind, NotBefore=mail_date(90))
        notice = expect_notice(server, azure_watchers(endpoint=server.url, **QUICK))
    assert notice.source == "Azure"
    assert kind in notice.reason
    assert notice.deadline == pytest.approx(notice.received + 90, abs=2)
    assert not notice.advisory


@pytest.mark.parametrize("kind", ["Freeze", "Party", None, 3, ["Preempt"]])
def test_azure_event_that_the_machine_survives_does_not_count(kind):
    with AzureServer() as server:
        server.schedule(kind)
        expect_no_notice(server, azure_watchers(endpoint=server.url, **QUICK))


@pytest.mark.parametrize(
    ("not_before", "seconds"),
    [
        ("", 30),
        (None, 30),
        ("soon", 30),
        (" ", 30),
        ("\ud800\n", 30),
        (["\ud800\n"], 30),
        ("Mon, 19 Sep 2016 18:29:47 GMT", 0),
        ("Mon, 19 Sep 9016 18:29:47 GMT", 900),  # The clock here is wrong.
        ("Mon, 19 Sep 2016 18:29:47 +9999999999999999", 30),
    ],
)
def test_azure_odd_time_leaves_a_short_while(not_before, seconds):
    with AzureServer() as server:
        server.schedule("Preempt", NotBefore=not_before)
        notice = expect_notice(server, azure_watchers(endpoint=server.url, **QUICK))
    assert notice.deadline == pytest.approx(notice.received + seconds, abs=1)
    assert notice.reason.isprintable()


def test_azure_new_time_is_told_again():
    with AzureServer() as server, watched(azure_watchers(endpoint=server.url, **QUICK)) as desk:
        event = server.schedule("Preempt", NotBefore=mail_date(300))
        wait_until(lambda: len(desk.told) == 1, "the notice is seen")
        event.update(NotBefore=mail_date(40))
        wait_until(lambda: len(desk.told) == 2, "the new time is seen")
        assert desk.told[1].seconds_left() < 42


def test_azure_event_that_starts_is_told_again_and_leaves_no_time():
    with AzureServer() as server, watched(azure_watchers(endpoint=server.url, **QUICK)) as desk:
        event = server.schedule("Preempt", NotBefore=mail_date(90))
        wait_until(lambda: len(desk.told) == 1, "the notice is seen")
        event.update(EventStatus="Started", NotBefore="")
        wait_until(lambda: len(desk.told) == 2, "the start is seen")
        assert desk.told[1].seconds_left() == 0
        assert desk.withdrawn == []


def test_azure_events_of_other_machines_do_not_count():
    with AzureServer() as server:
        server.schedule("Preempt", Resources=["trainer_1", "trainer_00"])
        expect_no_notice(server, azure_watchers(endpoint=server.url, **QUICK))
        assert server.count("compute/name") == 1  # asked once


def test_azure_names_differ_by_more_than_case():
    with AzureServer("Trainer_0") as server:
        server.schedule("Preempt", Resources=["trainer_1", "tRAINER_0"])
        expect_notice(server, azure_watchers(endpoint=server.url, **QUICK))


@pytest.mark.parametrize("resources", [None, [], "trainer_1", {}])
def test_azure_event_that_names_no_machine_counts(resources):
    with AzureServer() as server:
        server.schedule("Preempt", Resources=resources)
        expect_notice(server, azure_watchers(endpoint=server.url, **QUICK))


@pytest.mark.parametrize("fault", ["404", "500", "hang", "portal", "binary", "deep"])
def test_azure_machine_that_does_not_know_its_name_takes_each_event_for_its_own(fault):
    with AzureServer() as server:
        server.fault, server.fault_path = fault, "compute/name"
        server.tempting = server.name  # The text of an error is not a name.
        server.schedule("Preempt", Resources=["trainer_1"])
        watchers = azure_watchers(endpoint=server.url, timeout_seconds=0.2, **QUICK)
        with watched(watchers) as desk:
            wait_until(lambda: bool(desk.told), "the notice is seen")
            server.fault = ""
            wait_until(lambda: bool(desk.withdrawn), "it knows that it is another's")


def test_azure_first_of_several_events_counts_and_the_next_when_it_is_cancelled():
    with AzureServer() as server, watched(azure_watchers(endpoint=server.url, **QUICK)) as desk:
        late = server.schedule("Reboot", NotBefore=mail_date(600))
        wait_until(lambda: len(desk.told) == 1, "the late one is seen")
        early = server.schedule("Preempt", NotBefore=mail_date(60))
        wait_until(lambda: len(desk.told) == 2, "the early one is seen")
        server.events = [early, late]  # The order says nothing.
        asked_again(server, "scheduledevents")
        server.events = [late]
        wait_until(lambda: len(desk.told) == 3, "the late one is told again")
        assert [notice.reason.split()[0] for notice in desk.told] == ["Reboot", "Preempt", "Reboot"]
        assert desk.withdrawn == []


def test_azure_order_of_events_that_do_not_say_when_does_not_matter():
    with AzureServer() as server, watched(azure_watchers(endpoint=server.url, **QUICK)) as desk:
        one, other = server.schedule("Preempt"), server.schedule("Preempt")
        wait_until(lambda: bool(desk.told), "a notice is seen")
        before = len(desk.told)  # The first may have been seen alone.
        for _ in range(4):
            server.events = server.events[::-1]
            asked_again(server, "scheduledevents")
        assert len(desk.told) == before
        assert {one["EventId"], other["EventId"]} == {e["EventId"] for e in server.events}


def test_azure_is_only_asked_never_acknowledged():
    with AzureServer() as server:
        server.schedule("Preempt")
        expect_notice(server, azure_watchers(endpoint=server.url, **QUICK))
        assert {method for method, _ in server.requests} == {"GET"}


# The client


@pytest.mark.parametrize("fault", ["hang", "drip"])
def test_time_limit_is_for_the_whole_request(fault):
    with MetadataServer() as server:
        server.fault = fault
        begun = time.monotonic()
        with pytest.raises(MetadataError, match=r"no whole answer within 0\.3 s"):
            MetadataClient(server.url, timeout_seconds=0.3).request("GET", "/")
        assert 0.25 < time.monotonic() - begun < 3


def test_time_limit_holds_for_a_dripping_body_too():
    with dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b"x") as url:
        begun = time.monotonic()
        with pytest.raises(MetadataError, match="no whole answer"):
            MetadataClient(url, timeout_seconds=0.3).request("GET", "/")
        assert time.monotonic() - begun < 3


@pytest.mark.parametrize("size", [64 * 1024, 64 * 1024 + 1])
def test_answer_of_64_kib_is_read_and_no_more(size):
    with raw_server(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * size) as url:
        client = MetadataClient(url, timeout_seconds=20)
        if size == 64 * 1024:
            assert len(client.request("GET", "/").text) == size
        else:
            with pytest.raises(MetadataError, match="longer than 65536 bytes"):
                client.request("GET", "/")


def test_answer_without_end_is_not_read_for_ever():
    endless = dripping(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536, pause=0)
    with endless as url, pytest.raises(MetadataError, match="longer than"):
        MetadataClient(url, timeout_seconds=20).request("GET", "/")


def test_connection_that_stays_open_after_the_answer_is_not_waited_for():
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nTRUE"
    with raw_server(answer, stays_open=True) as url:
        assert MetadataClient(url, timeout_seconds=20).request("GET", "/").text == "TRUE"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_an_answer(status):
    with MetadataServer() as elsewhere:
        answer = f"HTTP/1.1 {status} Gone\r\nLocation: {elsewhere.url}\r\n\r\n"
        with raw_server(answer.encode()) as url:
            reply = MetadataClient(url).request("GET", "/")
        assert reply.status == status
        assert reply.headers["location"] == elsewhere.url
        assert elsewhere.requests == []


def test_answer_that_is_not_text_is_refused():
    binary = raw_server(b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe")
    with binary as url, pytest.raises(MetadataError, match="not text"):
        MetadataClient(url, timeout_seconds=20).request("GET", "/")


def test_error_does_not_bring_garbage_into_the_log():
    garbage = raw_server(b"\x00\xff\x1b[31m" + b"x" * 5000 + b"\r\n\r\n")
    with garbage as url, pytest.raises(MetadataError, match="BadStatusLine") as raised:
        MetadataClient(url, timeout_seconds=20).request("GET", "/")
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("text", ["", "{", "[" * 60_000, "TRUE", "9" * 60_000 + "x"])
def test_answer_that_is_not_json_is_refused(text):
    with pytest.raises(MetadataError, match="not JSON"):
        Answer(200, text, {}).json()


@pytest.fixture
def _far_east(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "XYZ-10")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("_far_east")
def test_moment_without_a_zone_is_utc_wherever_the_machine_is():
    moment = datetime.now(timezone.utc).replace(tzinfo=None)
    left = deadline_at(moment + timedelta(seconds=50), at_most_seconds=100) - time.monotonic()
    assert left == pytest.approx(50, abs=1)


def test_garbage_raises_nothing_but_a_metadata_error():
    good = (
        b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nMetadata-Flavor: Google\r\n\r\n{'a': 'TRUE'}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nTRUE\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 404 None\r\n\r\n" + "Ä€".encode(),
    )
    dice = random.Random(7)
    errors = 0
    for round_ in range(300):
        data = bytearray(good[round_ % 3])
        for _ in range(dice.randrange(1, 6)):
            at = dice.randrange(len(data))
            data[at : at + dice.choice((0, 1, 4))] = dice.randbytes(dice.randrange(4))
        with raw_server(bytes(data)) as url:
            try:
                MetadataClient(url, timeout_seconds=20).request("GET", "/")
            except MetadataError:
                errors += 1
    assert errors > 50


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/a b", {}), ("/a\r\nb", {}), ("/", {"X-A": "a\r\nb: c"}), ("/", {"X-A": "\u20ac"})],
)
def test_question_that_cannot_be_sent_is_a_metadata_error(path, headers):
    with MetadataServer() as server:
        with pytest.raises(MetadataError):
            MetadataClient(server.url).request("GET", path, headers)
        assert server.requests == []


def test_name_that_is_not_known_is_a_metadata_error():
    with pytest.raises(MetadataError):
        MetadataClient("http://metadata.invalid").request("GET", "/")


def test_host_with_several_addresses_is_found_at_the_one_that_answers(monkeypatch):
    def two_addresses(_host: str, port: int, **_: object) -> list[Any]:
        # As for localhost where it is ::1 and 127.0.0.1.
        return [(*stream, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

    stream = (socket.AF_INET, socket.SOCK_STREAM, 0)
    with MetadataServer() as server:
        monkeypatch.setattr(socket, "getaddrinfo", two_addresses)
        url = server.url.replace("127.0.0.1", "localhost")
        assert MetadataClient(url).request("GET", "/").status == 404


def test_path_of_the_address_comes_before_each_path():
    with MetadataServer() as server:
        MetadataClient(server.url + "/proxied/").request("GET", "/latest")
        assert server.requests == [("GET", "/proxied/latest")]


@pytest.mark.parametrize(
    "url",
    [
        "https://169.254.169.254",
        "ftp://host",
        "file:///etc/passwd",
        "169.254.169.254",
        "",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://[::1",
        "http://user:word@host",
        "http://host/?a=b",
    ],
)
def test_only_plain_http_to_a_host_is_accepted(url):
    with pytest.raises(ValueError, match=r"Expected the address .* Received"):
        MetadataClient(url)


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_time_limit_must_be_positive(seconds):
    with pytest.raises(ValueError, match="Received: timeout_seconds"):
        MetadataClient("http://host", timeout_seconds=seconds)


@contextlib.contextmanager
def raw_server(answer: bytes, *, stays_open: bool = False) -> Iterator[str]:
    """Says ``answer`` to one client, whatever it asks."""
    done = threading.Event()

    def serve(client: socket.socket) -> None:
        client.sendall(answer)
        if stays_open:
            done.wait(30)

    with _serving(serve) as url:
        yield url
        done.set()


@contextlib.contextmanager
def dripping(start: bytes, piece: bytes, *, pause: float = 0.01) -> Iterator[str]:
    """Never comes to an end; each piece is sent well within any time limit."""
    done = threading.Event()

    def serve(client: socket.socket) -> None:
        client.sendall(start)
        while not done.wait(pause):
            client.sendall(piece)

    with _serving(serve) as url:
        yield url
        done.set()


@contextlib.contextmanager
def _serving(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                client.recv(65536)
                serve(client)
                # Without this, what was sent is lost if something of the question is unread.
                client.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            thread.join(30)


# Which platform


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"sys/class/dmi/id/product_name": "Google Compute Engine\n"}, ["gcp"]),
        ({"sys/class/dmi/id/product_name": "Google\n"}, ["gcp"]),
        ({"sys/class/dmi/id/product_name": "Google Pixelbook\n"}, []),
        ({"sys/class/dmi/id/sys_vendor": "Amazon EC2\n"}, ["aws"]),
        ({"sys/hypervisor/uuid": "ec2e1916-9099-7caf-fd21-012345abcdef\n"}, ["aws"]),
        ({"sys/hypervisor/uuid": "EC2E1916-9099-7CAF-FD21-012345ABCDEF\n"}, ["aws"]),
        ({"sys/hypervisor/uuid": "00000000-ec2e-0000-0000-000000000000\n"}, []),
        (
            {
                "sys/class/dmi/id/sys_vendor": "Microsoft Corporation\n",
                "sys/class/dmi/id/chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n",
            },
            ["azure"],
        ),
        ({"sys/class/dmi/id/sys_vendor": "Microsoft Corporation\n"}, []),
        ({"sys/class/dmi/id/chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n"}, []),
        ({"sys/class/dmi/id/sys_vendor": b"\xff\x00\xfe"}, []),
    ],
)
def test_firmware_names_the_cloud(tmp_path, files, expected):
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert find_platforms(tmp_path, {}) == expected
    assert find_platforms(str(tmp_path), {"SLURM_JOB_ID": "17"}) == [*expected, "slurm"]


def test_unreadable_firmware_is_no_cloud(tmp_path):
    for name in ("sys_vendor", "product_name", "chassis_asset_tag"):
        (tmp_path / "sys/class/dmi/id" / name).mkdir(parents=True)
    assert find_platforms(tmp_path, {}) == []


def test_variables_name_the_cloud(tmp_path, monkeypatch):
    values = dict.fromkeys(VARIABLES, "127.0.0.1:1")
    assert find_platforms(tmp_path, values) == ["gcp", "aws", "azure"]
    assert find_platforms(tmp_path, dict.fromkeys(values, " ")) == []
    assert find_platforms(tmp_path, {VARIABLES[2]: "http://127.0.0.1:1"}) == ["azure"]
    monkeypatch.setenv(VARIABLES[1], "http://127.0.0.1:1")
    assert "aws" in find_platforms(tmp_path)


def test_watchers_go_where_the_variables_say(monkeypatch):
    with GcpServer() as google, AwsServer() as amazon, AzureServer() as microsoft:
        monkeypatch.setenv(VARIABLES[0], google.url.removeprefix("http://"))
        monkeypatch.setenv(VARIABLES[1], amazon.url + "/")
        monkeypatch.setenv(VARIABLES[2], microsoft.url)
        for cloud, server in (("GCP", google), ("AWS spot", amazon), ("Azure", microsoft)):
            CLOUDS[cloud].announce(server)
        with watched(cloud_watchers(["gcp", "aws", "azure", "slurm"], **QUICK)) as desk:
            wait_until(lambda: len(desk.told) == 3, "all clouds are heard")
        assert desk.sources() == ["AWS spot", "Azure", "GCP"]


def test_variable_that_names_no_host_is_explained(monkeypatch):
    monkeypatch.setenv(VARIABLES[1], "https://example.com")
    with pytest.raises(ValueError, match=r"Received: base_url='https://example\.com'"):
        cloud_watchers(["aws"])


def test_unknown_platform_is_explained():
    with pytest.raises(ValueError, match=r"\['gcp', 'aws', 'azure', 'slurm'\].*Received: 'ibm'"):
        cloud_watchers(["gcp", "ibm"])


def test_no_platform_needs_no_watcher():
    assert cloud_watchers([]) == cloud_watchers(["slurm"]) == []
