"""The control socket's messages: exact round trips, strict types, and no input that does anything but raise."""

from __future__ import annotations

import errno
from contextlib import suppress

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbofs.errors import InvalidRequestError, ProtocolError, SourceUnavailableError, TurboError
from turbofs.wire import control_codec as codec

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
messages = st.dictionaries(st.text(max_size=8), values, max_size=5)


def payload(data: bytes) -> bytes:
    assert codec.frame_length(data[:4], limit_bytes=codec.REPLY_LIMIT_BYTES) == len(data) - 4
    return data[4:]


@given(messages)
def test_every_message_comes_back_as_it_was(message):
    assert codec.decode(payload(codec.encode(message))) == message


@given(st.binary(min_size=1, max_size=40).filter(lambda name: b"\0" not in name))
def test_names_of_any_bytes_travel_as_they_are(name):
    path = "/" + name.decode("utf-8", "surrogateescape")
    assert codec.decode(payload(codec.encode({"path": path})))["path"] == path


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_a_map_or_a_protocol_error(data):
    with suppress(ProtocolError):
        codec.parse_request(codec.decode(data))


@given(messages)
def test_any_map_is_a_request_or_a_protocol_error(message):
    try:
        request = codec.parse_request(message)
    except ProtocolError:
        return
    assert request.id == message["id"]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"id": 1},
        {"id": True, "op": "ping"},
        {"id": -1, "op": "ping"},
        {"id": 1 << 63, "op": "ping"},
        {"id": "1", "op": "ping"},
        {"id": 1, "op": ""},
        {"id": 1, "op": b"ping"},
        {"id": 1, "op": "p" * 65},
        {"id": 1, "op": "ping", "args": []},
        {"id": 1, "op": "ping", "extra": 1},
    ],
)
def test_a_request_of_the_wrong_shape_is_refused(message):
    with pytest.raises(ProtocolError):
        codec.parse_request(message)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81\xa1a",
        b"\x80\x80",
        msgpack.packb([1, 2]),
        msgpack.packb({1: 2}),
        msgpack.packb({"t": msgpack.Timestamp(1)}),
        msgpack.packb({"e": msgpack.ExtType(5, b"x")}),
        b"\x81\xa1a" + b"\x91" * 40 + b"\xc0",
        b"\x81\xa1a" + b"\x91" * 4000 + b"\xc0",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
    ],
)
def test_what_is_not_one_plain_map_is_refused(data):
    with pytest.raises(ProtocolError):
        codec.decode(data)


def test_an_over_long_message_is_refused_by_its_header_alone():
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        codec.frame_length(b"\xff\xff\xff\xff", limit_bytes=codec.REQUEST_LIMIT_BYTES)
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        codec.encode({"value": b"x" * 100}, limit_bytes=64)


@pytest.mark.parametrize("value", [object(), 1 << 64, {"set": {1, 2}}])
def test_what_msgpack_cannot_carry_is_refused(value):
    with pytest.raises(ProtocolError, match="cannot encode"):
        codec.encode({"value": value})


def test_errors_keep_their_class_errno_and_advice():
    sent = codec.failure(7, InvalidRequestError("no such range", advice="look"))
    assert sent["id"] == 7
    received = codec.raised_by_reply(sent["error"])
    assert type(received) is InvalidRequestError
    assert (str(received), received.advice, received.errno) == ("no such range", "look", errno.EINVAL)
    assert isinstance(
        codec.raised_by_reply(codec.failure(1, SourceUnavailableError("down"))["error"]), SourceUnavailableError
    )


@pytest.mark.parametrize("body", [None, "x", {}, {"kind": "os"}, {"kind": "annotations", "code": "EPERM"}, {"code": 5}])
def test_errors_of_unknown_daemons_are_still_errors(body):
    assert isinstance(codec.raised_by_reply(body), TurboError)
