"""The grammar of hints: what is accepted, what is refused and with which words, and that text and hint agree."""

from __future__ import annotations

import errno
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbofs.errors import InvalidRequestError, NoSuchAttributeError, NotSupportedError
from turbofs.fs.hint_catalogue import (
    CATALOGUE,
    DERIVED_LIMIT_BYTES,
    VALUE_LIMIT_BYTES,
    Attribute,
    attribute_to_read,
    attribute_to_remove,
    attribute_to_set,
    format_status,
    parse_hint,
)
from turbofs.fs.hint_grammar import (
    LARGEST_OFFSET,
    duration_s,
    format_duration,
    format_fraction,
    format_size,
    fraction,
    size_bytes,
)
from turbofs.fs.hints import (
    AckHint,
    DatasetHint,
    GroupHint,
    PrefetchHint,
    PriorityHint,
    ReplicasHint,
    ReplicateHint,
    TensorsHint,
)
from turbofs.model import ByteRange

PREFETCH = CATALOGUE[Attribute.PREFETCH]
MIB = 1 << 20

# --- strategies: every hint that can be written down

words = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,30}", fullmatch=True)
globs = st.text(st.sampled_from("abcXYZ019._-*?[]/"), min_size=1, max_size=40)
counts = st.integers(1, 512)
fractions = st.integers(0, 10**9).map(lambda billionths: billionths / 10**9)
durations = st.integers(1, 366 * 24 * 3_600_000).map(lambda ms: ms / 1000)


@st.composite
def ranges(draw: st.DrawFn) -> ByteRange:
    start = draw(st.integers(0, LARGEST_OFFSET - 1))
    return ByteRange(start, draw(st.integers(start + 1, LARGEST_OFFSET)))


hints = st.one_of(
    st.just(PrefetchHint(all=True)),
    st.builds(PrefetchHint, ranges=st.lists(ranges(), min_size=1, max_size=5).map(tuple)),
    st.builds(PrefetchHint, tensors=globs),
    st.builds(TensorsHint, globs),
    st.builds(ReplicasHint, durations, copies=counts),
    st.builds(ReplicasHint, durations, readers=counts),
    st.builds(ReplicateHint, words, counts, st.none() | globs, st.none() | counts),
    st.builds(PriorityHint, fractions, fractions, fractions),
    st.builds(
        GroupHint,
        id=words,
        members=counts,
        mode=st.sampled_from(["read", "write"]),
        ack=st.sampled_from([None, "persisted", "replicated", "staged"]),
        copies=st.none() | counts,
        layout=st.sampled_from(["plain", "packed"]),
        persist_every=st.integers(0, 100),
    ),
    st.builds(AckHint, st.sampled_from(["persisted", "replicated", "staged"])),
    st.builds(DatasetHint, words, words, counts, counts, st.sampled_from(["client", "mount"])),
)


@given(hints)
def test_a_hint_survives_being_written_and_read(hint):
    assert type(hint).parse(hint.format()) == hint


@given(st.integers(0, LARGEST_OFFSET))
def test_a_size_survives_being_written_and_read(size):
    assert size_bytes(format_size(size)) == size


@given(durations)
def test_a_time_survives_being_written_and_read(seconds):
    assert duration_s(format_duration(seconds)) == seconds


@given(fractions)
def test_a_fraction_survives_being_written_and_read(number):
    assert fraction(format_fraction(number)) == number


@given(st.binary(max_size=200), st.sampled_from(list(CATALOGUE.values())), st.none() | st.integers(0, 1 << 40))
def test_any_value_is_read_or_refused_with_advice(value, spec, size):
    refused = refusal_of(spec, value, size)
    if refused is not None:
        assert spec.attribute in str(refused)
        assert refused.advice


def refusal_of(spec, value, size):
    try:
        parse_hint(spec, value, size_bytes=size)
    except (InvalidRequestError, NotSupportedError) as error:
        return error
    return None


# --- prefetch


def test_prefetch_takes_all():
    assert parse_hint(PREFETCH, b" all\n", size_bytes=0) == PrefetchHint(all=True)


def test_prefetch_takes_ranges_with_units():
    hint = parse_hint(PREFETCH, b"ranges=0+4KiB; 1MiB+512", size_bytes=2 * MIB)
    assert hint == PrefetchHint(ranges=(ByteRange(0, 4096), ByteRange(MIB, MIB + 512)))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"", "the value is empty"),
        (b"everything", "neither `all` nor ranges"),
        (b"All", "neither `all` nor ranges"),
        (b"range=0+1", "unknown key 'range' at character 0; known: ranges, tensors"),
        (b"ranges=", "range 1, '', is not offset+length"),
        (b"ranges=0-5", "is not offset+length"),
        (b"ranges=0+0", "range 1, '0+0', is empty"),
        (b"ranges=0+5;", "range 2, '', is not offset+length"),
        (b"ranges=-1+5", "'-1' is negative"),
        (b"ranges=0+-5", "'-5' is negative"),
        (b"ranges=0+5KB", "the units are KiB, MiB, GiB"),
        (b"ranges=0+1.5MiB", "is not a size"),
        (b"ranges=0+99999999999999999999", "too large"),
        (b"ranges=0+9223372036854775808", "more than the largest file offset"),
        (b"ranges=9223372036854775807+1", "ends after the largest file offset"),
        (b"ranges=0+" + b"9" * 5000, "too large"),
        (b"ranges=0+1,ranges=2+1", "'ranges' is given twice, again at character 11"),
        (b"ranges=0+1,all", "expected key=value at character 11, found 'all'"),
        (b"ranges=0+1,", "found nothing"),
        (b"ranges=0+1,tensors=*", "exclude each other"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b"all\0", "neither"),
        (b"ranges=\xd9\xa1+\xd9\xa1", "is not a size"),  # digits, but not ours
        (b"ranges=0+" + b"1;0+" * (VALUE_LIMIT_BYTES // 4) + b"1", "at most 65536 are allowed"),
    ],
)
def test_prefetch_refuses_and_says_why(value, says):
    with pytest.raises(InvalidRequestError) as refused:
        parse_hint(PREFETCH, value, size_bytes=None)
    assert says in str(refused.value)
    assert refused.value.errno == errno.EINVAL


def test_refusal_shows_an_accepted_value():
    with pytest.raises(InvalidRequestError) as refused:
        parse_hint(PREFETCH, b"ranges=x", size_bytes=None)
    assert "ranges=0+4MiB;64MiB+512KiB" in refused.value.advice


def test_range_past_the_end_of_the_file_is_refused():
    with pytest.raises(InvalidRequestError, match="ends at byte 101, but the file has 100"):
        parse_hint(PREFETCH, b"ranges=0+100;100+1", size_bytes=100)


def test_ranges_on_a_directory_are_clipped_to_each_file():
    hint = parse_hint(PREFETCH, b"ranges=0+100;150+10", size_bytes=None)
    assert isinstance(hint, PrefetchHint)
    assert hint.ranges_in(50) == (ByteRange(0, 50),)
    assert hint.ranges_in(155) == (ByteRange(0, 100), ByteRange(150, 155))
    assert hint.ranges_in(0) == ()
    assert PrefetchHint(all=True).ranges_in(7) == (ByteRange(0, 7),)
    assert PrefetchHint(all=True).ranges_in(0) == ()


def test_prefetch_of_tensors_comes_later():
    with pytest.raises(NotSupportedError, match="later version"):
        parse_hint(PREFETCH, b"tensors=model.*", size_bytes=100)


def test_a_prefetch_of_nothing_or_of_two_things_cannot_be_made():
    with pytest.raises(ValueError, match="exactly one"):
        PrefetchHint()
    with pytest.raises(ValueError, match="exactly one"):
        PrefetchHint(all=True, tensors="*")


# --- the others


def test_examples_are_accepted_in_each_of_their_forms():
    for spec in CATALOGUE.values():
        if spec.hint:
            first, _, rest = spec.hint.example.partition("  (or: ")
            for form in [first, *([rest.rstrip(")")] if rest and spec.attribute != Attribute.ACK else [])]:
                assert spec.hint.parse(form)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (ReplicasHint, "copies=64", "'ttl' is missing"),
        (ReplicasHint, "copies=0,ttl=1s", "0 is not between 1 and 512"),
        (ReplicasHint, "copies=2,readers=3,ttl=1s", "exactly one of copies and readers"),
        (ReplicasHint, "ttl=1s", "exactly one of copies and readers"),
        (ReplicasHint, "copies=2,ttl=10", "the units are ms, s, m, h"),
        (ReplicasHint, "copies=2,ttl=0s", "not between 1ms and"),
        (ReplicasHint, "copies=2,ttl=9000h", "not between 1ms and"),
        (ReplicateHint, "every=5", "'to' is missing"),
        (ReplicateHint, "to=.hidden,every=5", "is not a name"),
        (ReplicateHint, "to=a,every=5,select=", "the pattern is empty"),
        (PriorityHint, "scale=1.01,importance=0,severity=0", "not a decimal number between 0 and 1"),
        (PriorityHint, "scale=-0.5,importance=0,severity=0", "not a decimal number"),
        (PriorityHint, "scale=nan,importance=0,severity=0", "not a decimal number"),
        (GroupHint, "id=a,members=8,persist=every", "none of: always, never, every=N"),
        (GroupHint, "id=a,members=8,persist=every=0", "0 is not between"),
        (GroupHint, "id=a,members=8,mode=append", "none of: write, read"),
        (GroupHint, "id=a", "'members' is missing"),
        (AckHint, "durable", "none of: persisted, replicated, staged"),
        (DatasetHint, "name=a,recipe=b,consumers=1,depth=0", "0 is not between 1 and 1024"),
        (TensorsHint, "a,b", "write `?` in its place"),
        (TensorsHint, "a\nb", "cannot be shown"),
    ],
)
def test_other_hints_refuse_and_say_why(kind, text, says):
    with pytest.raises(InvalidRequestError) as refused:
        kind.parse(text)
    assert says in str(refused.value)
    assert kind.attribute in str(refused.value)


def test_hint_for_directories_is_refused_on_a_file():
    with pytest.raises(InvalidRequestError, match="holds for directories"):
        parse_hint(CATALOGUE[Attribute.GROUP], b"id=auto,members=8", size_bytes=10)


def test_persist_is_read_in_all_three_forms():
    assert GroupHint.parse("id=a,members=2").persist_every == 1
    assert GroupHint.parse("id=a,members=2,persist=always").persist_every == 1
    assert GroupHint.parse("id=a,members=2,persist=never").persist_every == 0
    assert GroupHint.parse("id=a,members=2,persist=every=4").persist_every == 4


# --- the catalogue


def test_every_documented_name_is_in_the_catalogue():
    assert set(CATALOGUE) == set(Attribute)
    assert all(spec.hint is None or spec.hint.attribute == spec.attribute for spec in CATALOGUE.values())


def test_what_works_now():
    assert {spec.attribute for spec in CATALOGUE.values() if spec.works} == {
        Attribute.PREFETCH,
        Attribute.SERVED_FROM,
        Attribute.BLAKE3,
        Attribute.STATUS,
        Attribute.LAST_ERROR,
        Attribute.ACK,
        Attribute.DURABILITY,
    }


@pytest.mark.parametrize("name", ["user.turbofs.group", "user.turbofs.priority"])
def test_planned_names_are_not_supported_yet(name):
    for ask in (attribute_to_read, attribute_to_set, attribute_to_remove):
        with pytest.raises(NotSupportedError, match="later version"):
            ask(name)


@pytest.mark.parametrize("name", ["user.other", "user.turbofs.", "user.turbofs.prefetc", "user.turbofs.Prefetch"])
def test_other_user_names_are_never_supported(name):
    for ask in (attribute_to_read, attribute_to_set, attribute_to_remove):
        with pytest.raises(NotSupportedError, match="not an attribute of TurboFS"):
            ask(name)


@pytest.mark.parametrize("name", ["security.capability", "system.posix_acl_access", "trusted.x", "", "user"])
def test_names_outside_user_are_absent_and_cannot_be_set(name):
    for ask in (attribute_to_read, attribute_to_remove):
        with pytest.raises(NoSuchAttributeError):
            ask(name)
    with pytest.raises(NotSupportedError):
        attribute_to_set(name)


def test_derived_names_cannot_be_set():
    with pytest.raises(InvalidRequestError, match="derived"):
        attribute_to_set("user.turbofs.status")
    assert attribute_to_read("user.turbofs.status").attribute is Attribute.STATUS
    assert attribute_to_set("user.turbofs.prefetch").settable


# --- documents of bounded size


@given(st.integers(0, 300), st.integers(80, 600))
def test_status_document_fits_and_says_what_it_left_out(count, limit):
    document = {"path": "/a", "cached": [[i * 1000, i * 1000 + 7] for i in range(count)], "z": 1}
    encoded = format_status(document, "cached", limit)
    assert len(encoded) <= limit
    read = json.loads(encoded)
    assert len(read["cached"]) + read.get("cached_omitted", 0) == count
    assert read["cached"] == document["cached"][: len(read["cached"])]


def test_status_document_below_the_limit_is_whole():
    assert json.loads(format_status({"cached": [1, 2]}, "cached")) == {"cached": [1, 2]}
    assert len(format_status({"cached": list(range(100_000))}, "cached")) <= DERIVED_LIMIT_BYTES


def test_status_document_that_cannot_fit_is_an_error():
    with pytest.raises(ValueError, match="too long even without"):
        format_status({"cached": [1], "x": "y" * 100}, "cached", 50)
