"""The harness: contestants take turns, rows are medians of ratios, and every row is reported whatever fails."""

import json

import pytest

from turbofs.bench import command, harness
from turbofs.bench.harness import BenchmarkError, Report, Row, Samples, Scene, Settings, interleave
from turbofs.errors import InvalidRequestError

FAST = Row("fast", "our speed / theirs", "ratio", 0.9, "higher")
SMALL = Row("small", "memory [MiB]", "MiB", 900, "lower")


def quiet(_message: str) -> None:
    pass


def report() -> Report:
    return Report("example", (FAST, SMALL), {"cpus": 2}, progress=quiet)


def last_line(text: str) -> dict:
    return json.loads(text.splitlines()[-1])


def test_contestants_take_turns():
    order = []

    def step(name):
        return lambda number: order.append((name, number)) or float(number)

    samples = interleave("s", 3, {"a": step("a"), "b": step("b")}, quiet)
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert samples.values == {"a": [0, 1, 2], "b": [0, 1, 2]}


def test_ratio_is_the_median_over_rounds_so_a_disturbed_round_does_not_count():
    # In the second round something slowed everything to a tenth: the ratio of that round still holds.
    samples = Samples("MiB/s", {"ours": [90, 9, 80], "theirs": [100, 10, 100]})
    assert samples.ratio("ours", "theirs") == pytest.approx(0.9)
    assert samples.median("ours") == 80


def test_the_better_baseline_counts_in_each_round():
    samples = Samples("MiB/s", {"off": [1, 5, 3], "full": [4, 2, 3]}).highest("best", ["off", "full"])
    assert samples.values["best"] == [4, 5, 3]


@pytest.mark.parametrize(
    ("row", "value", "ok"), [(FAST, 0.9, True), (FAST, 0.89, False), (SMALL, 900, True), (SMALL, 901, False)]
)
def test_bars_hold_in_their_direction(row, value, ok):
    assert row.met_by(value) is ok


def test_json_is_the_last_line_and_has_all_keys(capsys):
    result = report()
    result.set("fast", 0.95123456)
    result.set("small", 512.0)
    result.baselines["group"] = Samples("MiB/s", {"ours": [1.0], "theirs": [2.0]}).document()
    result.print()
    document = last_line(capsys.readouterr().out)
    assert list(document) == ["scene", "rows", "baselines", "machine"]
    assert document["rows"] == [
        {"row": "fast", "value": 0.9512, "unit": "ratio", "bar": 0.9, "better": "higher", "ok": True},
        {"row": "small", "value": 512.0, "unit": "MiB", "bar": 900, "better": "lower", "ok": True},
    ]
    assert document["baselines"]["group"]["theirs"] == {"median": 2.0, "values": [2.0]}
    assert result.passed()


def test_a_group_that_fails_leaves_its_rows_without_a_value_and_the_others_go_on(capsys):
    result = report()

    def broken(_report):
        raise BenchmarkError("rclone [x] is not there")

    result.measure("first", ["fast"], broken)
    result.measure("second", ["small"], lambda one: one.set("small", 100.0))
    result.print()
    output = capsys.readouterr().out
    rows = {row["row"]: row for row in last_line(output)["rows"]}
    assert rows["fast"]["value"] is None
    assert not rows["fast"]["ok"]
    assert rows["small"]["ok"]
    assert "not measured" in output
    assert "rclone [x] is not there" in output
    assert not result.passed()


def test_a_group_keeps_the_rows_that_it_had_measured_before_it_failed():
    result = report()

    def half(one):
        one.set("fast", 1.0)
        raise TimeoutError("the second part")

    result.measure("both", ["fast", "small"], half)
    assert result.values == {"fast": 1.0}
    assert list(result.notes) == ["small"]


def test_a_row_that_the_scene_does_not_declare_is_a_defect():
    with pytest.raises(KeyError, match="no row"):
        report().set("other", 1.0)


def test_defects_are_not_mistaken_for_measurement_errors():
    def defect(_report):
        raise AttributeError("defect")

    with pytest.raises(AttributeError):
        report().measure("first", ["fast"], defect)


def test_services_that_do_not_come_up_leave_every_row_unmeasured(monkeypatch):
    def no_hdfs(_report, _settings):
        raise RuntimeError("no Hadoop jars")

    monkeypatch.setattr(command, "report_progress", quiet)
    monkeypatch.setattr(harness, "report_progress", quiet)
    result = command.measure(Scene("example", (FAST, SMALL), no_hdfs), Settings())
    assert set(result.notes) == {"fast", "small"}
    assert [row["value"] for row in result.document()["rows"]] == [None, None]


def test_an_unknown_scene_is_refused_with_the_list_of_scenes():
    with pytest.raises(InvalidRequestError) as caught:
        command.run("fly")
    assert "read" in caught.value.advice


def test_the_read_scene_has_the_rows_and_bars_of_its_contract():
    rows = {row.name: (row.bar, row.better) for row in command.SCENES["read"].rows}
    assert rows == {
        "cold_seq_vs_native": (0.9, "higher"),
        "cold_seq_vs_rclone": (1.5, "higher"),
        "warm_seq_vs_tmpfs": (0.9, "higher"),
        "cached_direct_vs_limit": (0.8, "higher"),
        "rand4k_p50_vs_native": (2.5, "lower"),
        "list_100k_vs_native": (4, "lower"),
        "rss_64_readers_mib": (900, "lower"),
    }


def test_the_write_scene_has_the_rows_and_bars_of_its_contract():
    rows = {row.name: (row.bar, row.better) for row in command.SCENES["write"].rows}
    assert rows == {
        "staged_vs_tmpfs": (0.6, "higher"),
        "staged_direct_vs_tmpfs": (0.8, "higher"),
        "persisted_vs_native": (0.9, "higher"),
        "persisted_vs_rclone": (1.2, "higher"),
        "create_500_vs_native": (0.9, "higher"),
        "append_fsync_p50_vs_native": (2, "lower"),
        "recover_1gib_s": (2, "lower"),
        "rss_16_writers_mib": (500, "lower"),
    }
