"""Configuration: units, files, `-o`, precedence, and what is refused with what advice; memory limits from cgroups."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbofs import settings
from turbofs.errors import ConfigError, InvalidRequestError, TurboError
from turbofs.limits import default_memory_bytes, memory_limit
from turbofs.model import ByteRange
from turbofs.units import format_size, parse_duration, parse_range, parse_size

GIB = 1 << 30
PLACE: settings.Values = {("mount", "source"): "memory:", ("mount", "mountpoint"): Path("/mnt/x")}


def toml(folder: Path, text: str) -> settings.Values:
    file = folder / "turbofs.toml"
    file.write_text(text)
    return settings.load_file(file)


# --- units


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("4GiB", 4 * GIB), (" 512 MiB ", 512 << 20), ("1.5GiB", 3 << 29), ("64k", 65536), ("7B", 7)],
)
def test_sizes_take_binary_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 XiB", "-1", "1e3", "4GiB2", "9EiB", "9999999TiB", "١KiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidRequestError):
        parse_size(text)


def test_decimal_units_are_refused_with_the_binary_one():
    with pytest.raises(InvalidRequestError, match="write GiB"):
        parse_size("4GB")


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("30", 30), ("2m", 120), ("1h", 3600), ("0s", 0)])
def test_times_take_ms_s_m_h(text, seconds):
    assert parse_duration(text) == seconds


def test_ranges_are_offset_plus_length():
    assert parse_range("4KiB+64KiB") == ByteRange(4096, 4096 + 65536)
    for text in ("4096", "0+0", "1-2", f"{(1 << 63) - 2}+2"):
        with pytest.raises(InvalidRequestError):
            parse_range(text)


@given(st.text(max_size=80))
def test_any_text_is_a_quantity_or_a_clear_error(text):
    for parse in (parse_size, parse_duration, parse_range):
        with suppress(InvalidRequestError):
            parse(text)


@given(st.integers(0, (1 << 63) - 1))
def test_plain_byte_counts_are_exact(size):
    assert parse_size(str(size)) == size
    assert format_size(size)


# --- files and options


def test_a_file_sets_fields_by_room_without_their_units(tmp_path):
    values = toml(tmp_path, '[mount]\nmemory = "4GiB"\nread_ahead = "8MiB"\n[fs]\nattribute_timeout = "500ms"\n')
    config = settings.build_config(values, PLACE)
    assert config.read.memory_bytes == 4 * GIB
    assert config.mount.read_ahead_kib == 8192
    assert config.fs.attribute_timeout_s == 0.5


def test_flags_win_over_options_over_files_over_defaults(tmp_path):
    file = toml(tmp_path, '[mount]\nwait = "1s"\n[source]\nclient = "libhdfs"\nuser = "eve"\n[fs]\nowner_timeout = 7\n')
    options = settings.parse_options(["wait=2s,client=native"])
    flags = settings.flag_values(wait="3s", memory=None)
    config = settings.build_config(file, options, flags, PLACE)
    assert config.mount.wait_s == 3
    assert config.source.client == "native"
    assert config.source.user == "eve"
    assert config.fs.owner_timeout_s == 7
    assert config.fs.request_deadline_s == 60


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mont]\n", r"unknown table \[mont\]; did you mean 'mount'"),
        ("[mount]\nmemmory = 1\n", "unknown key 'memmory' in .mount.; did you mean 'memory'"),
        ("[mount]\nattribute_timeout = 1\n", r"belongs in \[fs\]"),
        ("mount = 3\n", "must be a table"),
        ("[mount]\nread_only = 3\n", "3 is not true or false"),
        ("[source]\nthreads = '64 of them'\n", "is not a whole number"),
        ("[source]\nthreads = true\n", "is not a whole number"),
        ("[source]\nthreads = 0\n", "must be above 0"),
        ("[source]\nclient = 'java'\n", "not one of native, libhdfs"),
        ("[read]\nmemory = '1MiB'\n", "too small"),
        ("[read]\nmemory = '4GB'\n", "write GiB"),
        ("[fs]\nattribute_timeout = -1\n", "is not a time"),
        ("[fs]\nattribute_timeout = inf\n", "is not a time"),
        ("[fs]\nstate_dir = 'relative'\n", "is not an absolute path"),
        ("[mount]\nmemory = '1GiB'\n[read]\nmemory = '2GiB'\n", "set twice"),
        ("[mount]\nstaging_dir = 'relative'\n", "is not an absolute path"),
        ("[mount]\nstaging_size = '1MiB'\n", "too small"),
        ("[mount]\nstaging_dirr = '/x'\n", "did you mean 'staging_dir'"),
        ("[write]\ndrain = -1\n", "is not a time"),
        ("[mount\n", "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_naming_what_would_be_right(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        toml(tmp_path, text)
    assert "turbofs.toml" in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        settings.load_file(tmp_path / "absent.toml")


def test_options_of_mount8_are_passed_over_and_ro_is_read_only():
    options = "defaults,rw,nodev,nosuid,noauto,user,_netdev,nofail,x-systemd.automount,noatime,ro,allow_other"
    assert settings.parse_options([options]) == {("mount", "read_only"): True, ("mount", "allow_other"): True}


def test_options_of_other_rooms_carry_the_room_and_dashes_are_underscores():
    values = settings.parse_options(["fs.attribute-timeout=0s", "read.window=64MiB,read-only=false"])
    assert values[("fs", "attribute_timeout")] == 0
    assert values[("read", "window")] == 64 << 20
    assert values[("mount", "read_only")] is False


@pytest.mark.parametrize(
    ("option", "message"), [("memory", "needs a value"), ("a.b=1", "unknown table"), ("q=1", "unknown key")]
)
def test_wrong_options_are_refused(option, message):
    with pytest.raises(ConfigError, match=message):
        settings.parse_options([option])


@pytest.mark.parametrize("missing", ["source", "mountpoint"])
def test_source_and_directory_must_be_named(missing):
    with pytest.raises(ConfigError, match="is named"):
        settings.build_config({place: value for place, value in PLACE.items() if place[1] != missing})


def test_a_config_survives_the_way_to_the_daemon(tmp_path):
    config = settings.build_config(settings.parse_options([f"memory=1GiB,log_dir={tmp_path},source.user=é"]), PLACE)
    assert settings.from_document(json.loads(json.dumps(settings.to_document(config)))) == config


def test_staging_is_set_by_flags_options_and_files_alike(tmp_path):
    file = toml(tmp_path, "[write]\nstaging_dir = '/dev/shm/a'\nstaging_size = '1GiB'\nuploads = 4\n")
    options = settings.parse_options(["staging_size=2GiB,write.drain=0s,write.staging_soft=1GiB"])
    flags = settings.flag_values(staging_dir="/dev/shm/b", staging_size=None, read_only=None)
    write = settings.build_config(file, options, flags, PLACE).write
    assert (write.staging_dir, write.staging_size_bytes, write.uploads) == (Path("/dev/shm/b"), 2 * GIB, 4)
    assert (write.drain_s, write.staging_soft_bytes) == (0, GIB)
    config = settings.build_config(file, PLACE)
    assert config.mount.read_only is False
    assert settings.from_document(json.loads(json.dumps(settings.to_document(config)))) == config


def test_a_staging_directory_must_be_named_from_the_root():
    with pytest.raises(ConfigError, match="--staging-dir: 'here' is not an absolute path"):
        settings.flag_values(staging_dir="here")


def test_writers_cannot_be_slowed_beyond_the_limit():
    with pytest.raises(ConfigError, match="above staging_size"):
        settings.build_config(settings.parse_options(["staging_size=1GiB,write.staging_soft=2GiB"]), PLACE)


@given(st.lists(st.text(max_size=30), max_size=4))
def test_any_options_are_settings_or_a_clear_error(options):
    with suppress(TurboError):
        settings.parse_options(options)


# --- memory limits


def machine(root: Path, memory_kib: int, cgroup: str, files: dict[str, str]) -> Path:
    for name, content in {"proc/meminfo": f"MemTotal: {memory_kib} kB\n", "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_without_a_cgroup_limit_the_machine_counts(tmp_path):
    root = machine(tmp_path, 16 << 20, "0::/a\n", {"sys/fs/cgroup/a/memory.max": "max\n"})
    assert default_memory_bytes(root) == 4 * GIB
    assert memory_limit(root).origin == "MemTotal"


def test_the_default_budget_has_a_ceiling(tmp_path):
    assert default_memory_bytes(machine(tmp_path, 1 << 30, "", {})) == 8 * GIB


def test_version_2_takes_the_tightest_limit_on_the_way_up(tmp_path):
    files = {"sys/fs/cgroup/job/memory.max": f"{4 * GIB}\n", "sys/fs/cgroup/job/step/memory.max": "max\n"}
    root = machine(tmp_path, 64 << 20, "0::/job/step\n", files)
    assert default_memory_bytes(root) == GIB
    assert memory_limit(root).origin == "/sys/fs/cgroup/job/memory.max"


def test_version_1_reads_the_memory_controller(tmp_path):
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/cpu/job/memory.limit_in_bytes": "1\n",
    }
    root = machine(tmp_path, 64 << 20, "5:cpu:/job\n4:memory:/job\n0::/\n", files)
    assert memory_limit(root).limit_bytes == 2 * GIB


def test_both_versions_at_once_both_count(tmp_path):
    files = {
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/unified/b/memory.max": f"{6 * GIB}\n",
    }
    assert memory_limit(machine(tmp_path, 64 << 20, "4:memory:/a\n0::/b\n", files)).limit_bytes == 6 * GIB


def test_in_a_container_whose_path_is_the_hosts_the_top_counts(tmp_path):
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n"}
    assert memory_limit(machine(tmp_path, 64 << 20, "4:memory:/docker/0123\n", files)).limit_bytes == GIB


def test_where_nothing_can_be_read_an_assumption_holds(tmp_path):
    assert memory_limit(tmp_path).origin == "an assumption"


def test_a_budget_below_four_extents_is_refused():
    with pytest.raises(ConfigError, match="does not hold 4 extents"):
        settings.build_config(settings.parse_options(["memory=32MiB,read.extent=16MiB"]), PLACE)
