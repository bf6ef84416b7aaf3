"""A real S3 protocol server for the tests of `s3`."""

import collections
import re
import subprocess
import sys
import threading

import pytest


class S3Server:
    """moto's server in a process of its own, on a port that it chose."""

    def __init__(self):
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        output = []
        for line in self._process.stderr:
            output.append(line)
            if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
                self.endpoint = found[1]
                # It logs each request; a full pipe would stop it.
                self._drain = threading.Thread(target=collections.deque, args=(self._process.stderr, 0))
                self._drain.start()
                return
        self._process.wait()
        raise RuntimeError("moto's server did not start: " + "".join(output))

    def stop(self):
        self._process.kill()
        self._process.wait()
        self._drain.join()
        self._process.stderr.close()


@pytest.fixture(scope="session")
def _s3_process():
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3_server(_s3_process, monkeypatch):
    """The server, and credentials for it in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return _s3_process
