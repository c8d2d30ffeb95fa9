"""Which pods are near a memory limit of their own, by the trend, by stalls and by what is left."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.own_limit import OwnLimitConfig
from nodeagent.config.schema import Config, ProtectionConfig
from nodeagent.model import ContainerUsage, OwnLimit, PodSource, PodView
from nodeagent.policy import own_limits
from nodeagent.policy.own_limits import NearLimit
from tests.support.nodes import GI, MI, NOW, config, pod, usage

LIMIT = 512 * MI
ON = OwnLimitConfig(enabled=True, namespaces=("shop",))
SETTINGS = config(own_limit=ON)


def steps(*used: int, every_s: float = 0.5) -> tuple[tuple[float, int], ...]:
    """The history of these usages in MiB, the last one at NOW."""
    first = NOW - every_s * (len(used) - 1)
    return tuple([(first + every_s * index, LIMIT - each * MI) for index, each in enumerate(used)])


def limited(*used: int, every_s: float = 0.5, grace_s: float = 30.0, pod_more: Any = None, **more: Any) -> PodView:
    """A pod whose container has used so many MiB of its limit of 512 MiB."""
    settings = {
        "headroom": LIMIT - used[-1] * MI,
        "history": steps(*used, every_s=every_s),
        "watched_since": 0.0,
        **more,
    }
    own = OwnLimit("c" * 64, LIMIT, used[-1] * MI, read_at=NOW, **settings)
    of = pod("web", termination_grace_s=grace_s, **(pod_more or {}))
    containers = (ContainerUsage("c" * 64, "app", None, 1),)
    return PodView(of, usage(of, used[-1] * MI, own_limits=(own,), containers=containers))


def near(view: PodView, settings: Config = SETTINGS) -> NearLimit | None:
    found = own_limits.near_limits((view,), at=NOW, config=settings)
    return found[0] if found else None


@pytest.mark.parametrize(
    ("per_s", "first_mib"),
    [
        (1, 478),  # 34 s before its limit: the grace period and the margin
        (10, 359),  # from 70% on
        (50, 359),
    ],
)
def test_a_ramp_is_near_its_limit_a_grace_period_before_it_and_from_the_share_on(per_s: int, first_mib: int) -> None:
    def at(mib: int) -> PodView:
        return limited(*[mib - per_s * back for back in range(5, -1, -1)], every_s=1.0)

    found = near(at(first_mib))
    assert found is not None
    assert found.left_s == pytest.approx((512 - first_mib) / per_s)
    assert near(at(first_mib - 2)) is None


def test_the_message_has_the_container_the_usage_the_limit_and_the_time() -> None:
    found = near(limited(400, 410, 420, 430))
    assert found is not None
    assert found.facts == (
        "Container app was using 430Mi of its memory limit 512Mi, grows 20Mi a second and reaches it in 4.1s"
    )
    [own] = found.view.usage.own_limits if found.view.usage else ()
    of_pod = near(PodView(found.view.pod, usage(found.view.pod, own_limits=(own._replace(container_id=""),))))
    assert of_pod is not None
    assert of_pod.facts.startswith("Pod web was using 430Mi of its memory limit 512Mi")


@pytest.mark.parametrize(
    "history",
    [
        (480, 480, 480, 480, 480, 480),  # full and calm: a cache of its own, a heap of fixed size
        (400, 420, 440, 460, 460, 460),  # it has stopped
        (490, 480, 470, 460, 450, 440),
        (420, 480, 425, 478, 430, 482),  # a heap that a garbage collector empties
        (400, 420, 440),  # too few to tell
    ],
)
def test_what_does_not_grow_towards_the_limit_is_not_near_it(history: tuple[int, ...]) -> None:
    assert near(limited(*history)) is None


def test_a_growth_to_what_the_pod_has_used_before_is_no_news() -> None:
    assert near(limited(400, 420, 440, 460)) is not None
    assert near(limited(400, 420, 440, 460, peak=470 * MI)) is None
    assert near(limited(450, 460, 470, 480, peak=470 * MI)) is not None


def test_the_warm_up_of_a_container_that_was_restarted_in_an_old_pod_is_no_trend() -> None:
    ramp = (400, 420, 440, 460)
    assert near(limited(*ramp, watched_since=NOW - 60.0)) is not None
    assert near(limited(*ramp, watched_since=NOW - 59.0)) is None
    assert near(limited(*ramp, watched_since=None)) is None
    assert near(limited(502, watched_since=None)) is not None, "what is nearly full is, however young"


def test_hardly_anything_left_is_near_without_a_trend() -> None:
    found = near(limited(502))
    assert found is not None
    assert "has 10Mi left" in found.facts
    assert near(limited(501)) is None


def test_stalls_count_only_close_to_the_limit_and_if_the_kernel_reclaims_for_it() -> None:
    stalled = {"stall_some_avg10": 40.0, "reclaimed_lately": True}
    found = near(limited(470, **stalled))
    assert found is not None
    assert "stalls on memory 40% of the time" in found.facts
    assert near(limited(450, **stalled)) is None
    assert near(limited(470, stall_some_avg10=40.0)) is None
    assert near(limited(470, stall_some_avg10=20.0, reclaimed_lately=True)) is None
    assert near(limited(470, stall_some_avg10=None, reclaimed_lately=True)) is None


def test_what_may_be_swapped_out_is_left_too() -> None:
    """The kernel swaps before it kills."""
    assert near(limited(510, headroom=2 * MI)) is not None
    assert near(limited(510, headroom=GI)) is None
    growing = steps(450, 460, 470, 480)
    assert near(limited(480, history=growing)) is not None
    assert (
        near(limited(480, headroom=32 * MI + GI, history=tuple([(at, headroom + GI) for at, headroom in growing])))
        is None
    )


@pytest.mark.parametrize("age_s", [31.0, -5.0])
def test_an_old_reading_or_one_of_another_boot_is_unknown(age_s: float) -> None:
    view = limited(510)
    assert view.usage is not None
    [own] = view.usage.own_limits
    moved = view.usage._replace(own_limits=(own._replace(read_at=NOW - age_s),))
    assert near(PodView(view.pod, moved)) is None


@given(used=st.integers(-GI, 4 * GI), limit=st.integers(-1, GI), headroom=st.integers(-GI, 4 * GI))
def test_numbers_that_cannot_be_true_are_never_near(used: int, limit: int, headroom: int) -> None:
    view = limited(510)
    assert view.usage is not None
    [own] = view.usage.own_limits
    odd = own._replace(used=used, limit=limit, headroom=headroom, history=())
    found = near(PodView(view.pod, view.usage._replace(own_limits=(odd,))))
    assert found is None or (limit > 0 and used >= 0.98 * limit and headroom >= limit - used)


def test_a_pod_opts_in_by_its_namespace_and_out_by_its_annotation() -> None:
    def opted(namespaces: tuple[str, ...] = (), trusted: tuple[str, ...] = (), **more: Any) -> bool:
        settings = config(
            own_limit=OwnLimitConfig(enabled=True, namespaces=namespaces),
            protection=ProtectionConfig(trusted_namespaces=trusted),
        )
        return own_limits.opted_in(pod("web", **more), settings)

    annotated: dict[str, Any] = {"annotations": {"nodeagent.io/own-limit": "evict"}}
    never: dict[str, Any] = {"annotations": {"nodeagent.io/own-limit": "never"}}
    assert not opted()
    assert opted(("shop",))
    assert opted(("*",))
    assert not opted(("other",))
    assert not opted(("shop",), **never)
    assert not opted(**annotated), "a writer of pods must not be able to spend evictions"
    assert opted(trusted=("shop",), **annotated)
    assert not opted(("shop",), source=PodSource.HOST)
    assert not own_limits.opted_in(pod("web"), config(own_limit=ON._replace(enabled=False)))


def test_a_pod_that_did_not_opt_in_is_never_near() -> None:
    assert near(limited(510, pod_more={"namespace": "other"})) is None
    assert near(limited(510), config()) is None


def test_a_second_reading_right_after_the_first_does_not_hide_the_growth() -> None:
    """Before an eviction the limits are read again within milliseconds, and a ramp grows in steps."""
    view = limited(*range(350, 410, 10))
    assert view.usage is not None
    [own] = view.usage.own_limits
    again = own._replace(history=(*own.history[1:], (NOW + 0.001, own.headroom)), read_at=NOW + 0.001)
    twice = view._replace(usage=view.usage._replace(own_limits=(again,)))
    assert near(view) is not None
    [found] = own_limits.near_limits((twice,), at=NOW + 0.001, config=SETTINGS)
    assert found.left_s is not None
