"""WebHDFS where what answers is not it, or not the active one: plain web servers of Python's stand there."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trio

from turbofs.errors import SourceUnavailableError
from turbofs.model import ByteRange
from turbofs.source.hdfs.web import WebHdfs

STATUS = {
    "type": "FILE",
    "length": 4,
    "modificationTime": 1,
    "accessTime": 1,
    "fileId": 16386,
    "permission": "644",
    "owner": "o",
    "group": "g",
    "replication": 1,
    "blockSize": 1 << 20,
}


@contextmanager
def web_server(folder):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            """Keep the test's output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def publish(folder, document):
    (folder / "webhdfs/v1").mkdir(parents=True)
    (folder / "webhdfs/v1/f").write_text(json.dumps(document))
    (folder / "jmx").write_text(json.dumps(document))


@pytest.mark.parametrize("document", [{}, {"FileStatus": {}, "beans": [{}], "BlockLocations": 7, "LocatedBlocks": []}])
async def test_a_document_of_something_else_is_no_answer(tmp_path, document):
    publish(tmp_path, document)
    with web_server(tmp_path) as address:
        for act in (
            lambda web: web.status("/f", "/f"),
            lambda web: web.space(),
            lambda web: web.under_construction("/f", "/f"),
            lambda web: web.block_locations("/f", "/f", ByteRange(0, 1)),
            lambda web: web.read_into("/f", "/f", 0, memoryview(bytearray(1)), set(), 1.0),
        ):
            web = WebHdfs([address], "u", 5.0)
            with pytest.raises(SourceUnavailableError, match="does not answer as WebHDFS"):
                await act(web)
            assert web.down_reason
            await web.aclose()


async def test_questions_that_meet_the_other_namenode_together_all_find_the_active_one(tmp_path):
    (tmp_path / "standby").mkdir()
    publish(tmp_path / "active", {"FileStatus": STATUS})
    with web_server(tmp_path / "standby") as standby, web_server(tmp_path / "active") as active:
        web = WebHdfs([standby, active], "u", 10.0)
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(web.status, "/f", "/f")
        assert web.address == active
        assert not web.down_reason
        await web.aclose()
