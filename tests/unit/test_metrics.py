"""Every metric is specified once, has a unit and a meaning, and is rendered per mount."""

from __future__ import annotations

import errno

from turbofs.metrics import SPECIFICATIONS, Metrics


def test_every_specification_is_a_live_metric_and_the_other_way_round():
    metrics = Metrics()
    names = {spec.name.removeprefix("turbofs_") for spec in SPECIFICATIONS}
    assert len(names) == len(SPECIFICATIONS)
    assert {name for name in vars(metrics) if not name.startswith("_")} - {"registry"} == names
    assert {family.name for family in metrics.registry.collect()} == {spec.name for spec in SPECIFICATIONS}


def test_specifications_say_what_they_count():
    for spec in SPECIFICATIONS:
        assert spec.meaning.endswith(".")
        assert spec.unit
        assert spec.kind != "histogram" or spec.name.endswith("_seconds")


def test_what_happened_is_rendered():
    metrics = Metrics()
    metrics.request_done("read", 0, 0.002)
    metrics.request_done("read", errno.EIO, 0.2)
    metrics.bytes_read("cache", 4096)
    metrics.source_act("stat", errno.ENOENT)
    metrics.hint_given("prefetch", "refused")
    text = metrics.render().decode()
    assert 'turbofs_requests_total{errno="OK",op="read"} 1.0' in text
    assert 'turbofs_requests_total{errno="EIO",op="read"} 1.0' in text
    assert 'turbofs_request_seconds_bucket{le="0.0025",op="read"} 1.0' in text
    assert 'turbofs_read_bytes_total{origin="cache"} 4096.0' in text
    assert 'turbofs_source_acts_total{act="stat",outcome="ENOENT"} 1.0' in text
    assert 'turbofs_hints_total{name="prefetch",outcome="refused"} 1.0' in text


def test_mounts_of_one_process_do_not_share_metrics():
    first, second = Metrics(), Metrics()
    first.evictions.inc()
    assert b"turbofs_evictions_total 1.0" in first.render()
    assert b"turbofs_evictions_total 0.0" in second.render()
