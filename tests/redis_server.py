"""A real Redis server on a free loopback port, for the tests of RedisLocks."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time

import pytest

BINARY = shutil.which("redis-server")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    def __init__(self, directory, *options):
        self.directory = directory
        self.options = options
        self.port = free_port()
        self.process = None
        self.served = False

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self):
        if BINARY is None:
            pytest.skip("redis-server is not installed")
        # Somebody may take a free port before the server does: then try another one. A server
        # that was restarted stays where its clients know it.
        for _ in range(5):
            if self._listens():
                self.served = True
                return self
            assert not self.served, "redis-server did not start again"
            self.port = free_port()
        raise AssertionError("redis-server did not start")

    def _listens(self):
        command = [BINARY, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self.process = subprocess.Popen(
            [*command, "--dir", str(self.directory), *self.options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
                return self.process.poll() is None
            except OSError:
                if self.process.poll() is not None:
                    return False
                assert time.monotonic() < deadline, "redis-server does not listen"
                time.sleep(0.01)

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory):
    """One server for all tests that leave it alone: their paths differ."""
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture
def own_redis(tmp_path):
    """Makes servers that the test may kill, empty or close to others."""
    servers = []

    def start(*options):
        directory = tmp_path / f"redis-{len(servers)}"
        directory.mkdir()
        servers.append(RedisServer(directory, *options).start())
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
