"""A real S3 protocol server for tests: moto's, in a process of its own, on a port that it chose."""

from __future__ import annotations

import collections
import itertools
import re
import subprocess
import sys
import threading
import urllib.request
from types import TracebackType
from typing import Self

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""What a client of it has in its environment."""
REGION = "us-east-1"
_numbers = itertools.count(1)


class S3Server:
    """Started by its constructor, which raises RuntimeError with the server's output where that fails."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        self._output = self._process.stderr
        lines = []
        for line in self._output:
            lines.append(line)
            if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
                self.endpoint = found[1]
                # It logs each request; a full pipe would stop it.
                self._drain = threading.Thread(target=collections.deque, args=(self._output, 0))
                self._drain.start()
                return
        self._process.wait()
        raise RuntimeError("moto's server did not start: " + "".join(lines))

    def make_bucket(self) -> str:
        """A new empty bucket."""
        name = f"bucket-{next(_numbers)}"
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")).close()
        return name

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._drain.join()
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
