"""Which acts wait for which: by path, and behind an early acknowledgement of their job.

That acts which do not wait for one another may be carried out in any order is tested on whole trees, in test_write_view.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbofs.model import ROOT, AttributeChange
from turbofs.write.acts import (
    Act,
    Delete,
    DeleteDirectory,
    Early,
    MakeDirectory,
    MakeLink,
    Publish,
    Rename,
    SetAttributes,
    is_below,
    paths_of,
    touch,
    waits_for,
)

_paths = st.lists(st.sampled_from(["a", "ab", "b", "\udcff"]), max_size=4).map(lambda names: "/" + "/".join(names))
_CHECKPOINT = Publish("/job/step2/weights", 1, Early("/job/step2", "/job"))


@given(_paths, _paths)
def test_below_is_a_matter_of_whole_names(path: str, top: str) -> None:
    names, above = ([name for name in each.split("/") if name] for each in (path, top))
    assert is_below(path, top) == (names[: len(above)] == above)
    assert touch(path, top) == touch(top, path) == (is_below(path, top) or is_below(top, path))


def test_the_names_that_an_act_changes() -> None:
    assert paths_of(Rename("/a", "/b", replace=False)) == ("/a", "/b")
    assert paths_of(Delete("/a")) == ("/a",)
    assert paths_of(_CHECKPOINT) == ("/job/step2/weights",)


def _every_act(path: str) -> list[Act]:
    return [
        Publish(path, 1),
        Publish(path, 1, Early("/elsewhere/group", "/elsewhere")),
        Rename(path, "/free", replace=False),
        Rename("/free", path, replace=True),
        Delete(path),
        DeleteDirectory(path),
        MakeDirectory(path, 0o755),
        MakeLink(path, "target"),
        SetAttributes(path, AttributeChange(mode=0o600)),
    ]


@pytest.mark.parametrize("earlier", _every_act("/d/x"), ids=repr)
@pytest.mark.parametrize("path", ["/d/x", "/d", "/d/x/below", ROOT])
def test_acts_whose_paths_touch_keep_their_order(earlier: Act, path: str) -> None:
    assert all(waits_for(later, earlier) for later in _every_act(path))


@pytest.mark.parametrize("earlier", _every_act("/d/x"), ids=repr)
@pytest.mark.parametrize("path", ["/d/xx", "/d/y", "/e"])
def test_others_do_not_wait(earlier: Act, path: str) -> None:
    touching = {"/free"} & set(paths_of(earlier))  # both renames of `_every_act` have one name in common
    assert not any(waits_for(later, earlier) for later in _every_act(path) if not touching & set(paths_of(later)))


@pytest.mark.parametrize(
    "later",
    [
        Publish("/job/latest", 2),  # the tracker file
        Publish("/job/step3/weights", 2, Early("/job/step3", "/job")),
        Rename("/job/tmp", "/job/latest", replace=True),
        Rename("/outside", "/job/latest", replace=True),
        Rename("/job/step1", "/outside", replace=False),
        Delete("/job/step1/weights"),
        DeleteDirectory("/job/step1"),
        MakeLink("/job/current", "step2"),
        Delete("/job"),
    ],
    ids=repr,
)
def test_what_a_job_does_after_an_early_acknowledgement_is_held_back(later: Act) -> None:
    assert waits_for(later, _CHECKPOINT)


@pytest.mark.parametrize(
    "later",
    [
        MakeDirectory("/job/step3", 0o755),
        SetAttributes("/job/step1", AttributeChange(mode=0o600)),
        Publish("/jobs/latest", 2),
        Delete("/other/step1"),
    ],
    ids=repr,
)
def test_what_vouches_for_nothing_or_belongs_to_another_job_is_not(later: Act) -> None:
    assert not waits_for(later, _CHECKPOINT)


def test_only_an_early_acknowledgement_holds_a_job_back() -> None:
    assert not waits_for(Publish("/job/latest", 2), Publish("/job/step2/weights", 1))
    assert not waits_for(Delete("/job/step1"), Rename("/job/step2.tmp", "/job/step2", replace=False))


def test_a_job_at_the_root_holds_back_everything() -> None:
    assert waits_for(Delete("/anything"), Publish("/step/weights", 1, Early("/step", ROOT)))
