"""Each threshold stays above the kubelet's own, at every capacity, unless the kubelet's is disabled or absurd."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config import above_kubelet, amount, kubelet, load, resolve
from nodeagent.config.schema import Config, RankingConfig
from nodeagent.model import CONTAINERFS_SIGNALS, Amount, Signal, Threshold, Unit
from nodeagent.policy import effective_thresholds
from tests.support.config_files import read

MIB, GIB = 2**20, 2**30
CONFIGURABLE = [signal for signal in Signal if signal not in CONTAINERFS_SIGNALS]


def values(config: Config, signal: Signal, *, capacity: int) -> tuple[int | None, int | None]:
    """(hard, soft)"""
    own = [each for each in config.thresholds if each.signal is signal]
    hard, soft = (next(each for each in own if each.hard is tier) for tier in (True, False))
    return resolve.resolve_threshold(hard, capacity=capacity), resolve.resolve_threshold(soft, capacity=capacity)


def above(text: str, *, config: Config | None = None) -> Config:
    return above_kubelet.keep_above(config or load.defaults().config, kubelet.read_settings(text).thresholds)


LADDER = (
    # capacity, AKS's soft and hard, ours hard and soft
    (8 * GIB, "500Mi", "250Mi", 375, 750),
    (32 * GIB, "750Mi", "375Mi", 655, 1125),
    (64 * GIB, "1024Mi", "512Mi", 1024, 1536),
)


@pytest.mark.parametrize(("capacity", "soft", "hard", "our_hard", "our_soft"), LADDER)
def test_memory_is_half_of_the_kubelets_value_above_it(
    capacity: int, soft: str, hard: str, our_hard: int, our_soft: int
) -> None:
    config = above(
        f"evictionHard: {{memory.available: {hard}}}\nevictionSoft: {{memory.available: {soft}}}\n"
        "evictionSoftGracePeriod: {memory.available: 1m30s}"
    )
    found = values(config, Signal.MEMORY, capacity=capacity)
    assert tuple((each or 0) // MIB for each in found) == (our_hard, our_soft)


def test_a_value_that_the_user_wrote_is_raised_too() -> None:
    config = above(
        "evictionHard: {memory.available: 500Mi}", config=read("evictionHard: {memory.available: 50Mi}").config
    )
    (threshold,) = config.thresholds
    assert resolve.resolve_threshold(threshold, capacity=16 * GIB) == 750 * MIB
    text = above_kubelet.describe_value(threshold, capacity=16 * GIB, unit=Unit.BYTES)
    assert text == "750Mi (kubelet 500Mi + margin 250Mi; configured 50Mi)"


def test_a_soft_threshold_stays_above_a_hard_one_of_the_kubelet_and_above_our_own_raised_one() -> None:
    hard, soft = values(above("evictionHard: {memory.available: 500Mi}"), Signal.MEMORY, capacity=16 * GIB)
    assert (hard, soft) == (750 * MIB, 1000 * MIB)


def test_a_kubelet_with_its_defaults_raises_no_built_in_threshold() -> None:
    config = above("")
    for threshold in config.thresholds:
        assert above_kubelet.leading_level(threshold, capacity=16 * GIB) is None
        assert resolve.resolve_threshold(threshold, capacity=16 * GIB) == resolve.resolve_amount(
            threshold.value, capacity=16 * GIB
        )


def test_percentages_add_up_without_a_second_rounding() -> None:
    config = above("evictionHard: {nodefs.available: 10%}", config=read("evictionHard: {nodefs.available: 12%}").config)
    (threshold,) = config.thresholds
    for capacity in (999, 1000, 12345, 10**12 + 7):
        assert above_kubelet.leading_level(threshold, capacity=capacity) is None


def test_a_quantity_of_a_disk_gets_a_share_of_the_capacity() -> None:
    config = above("evictionHard: {nodefs.available: 20Gi}")
    hard, soft = values(config, Signal.NODEFS, capacity=100 * GIB)
    # The kubelet's percentages are 32 bit fractions.
    assert hard == pytest.approx(22 * GIB)
    assert soft == pytest.approx(25 * GIB)


@pytest.mark.parametrize("off", ["0%", "100%"])
def test_a_disabled_threshold_of_the_kubelet_raises_nothing(off: str) -> None:
    config = above(f"evictionHard: {{memory.available: {off}, nodefs.available: {off}}}")
    assert config == load.defaults().config


@pytest.mark.parametrize("slip", ["90%", "50%", "14Gi"])
def test_a_threshold_of_half_the_capacity_is_not_followed_and_reported(slip: str) -> None:
    config = above(f"evictionHard: {{memory.available: {slip}}}")
    plain = values(load.defaults().config, Signal.MEMORY, capacity=16 * GIB)
    assert values(config, Signal.MEMORY, capacity=16 * GIB) == plain
    refused = above_kubelet.not_followed(config.thresholds[0], capacity=16 * GIB)
    assert refused is not None
    assert refused.text == slip


def test_a_raise_never_exceeds_half_of_the_capacity() -> None:
    hard, soft = values(above("evictionHard: {memory.available: 45%}"), Signal.MEMORY, capacity=GIB)
    assert (hard, soft) == (GIB // 2, GIB // 2)


def test_switched_off_or_in_the_kubelets_order_nothing_is_raised() -> None:
    text = "evictionHard: {memory.available: 500Mi}"
    defaults = load.defaults().config
    for config in (defaults._replace(above_kubelet=False), defaults._replace(ranking=RankingConfig(kubelet=True))):
        assert above(text, config=config) == config
    assert read("aboveKubelet: false").config.above_kubelet is False


def test_another_kubelet_configuration_replaces_the_levels_of_the_earlier_one() -> None:
    raised = above("evictionHard: {memory.available: 2Gi}")
    assert above("evictionHard: {memory.available: 500Mi}", config=raised) == above(
        "evictionHard: {memory.available: 500Mi}"
    )
    assert above_kubelet.keep_above(raised, ()) == load.defaults().config


def test_a_raise_does_not_change_the_identity_of_a_threshold() -> None:
    plain = load.defaults().config.thresholds
    raised = above("evictionHard: {memory.available: 2Gi}").thresholds
    assert raised != plain
    assert [effective_thresholds.identity(each) for each in raised] == [
        effective_thresholds.identity(each) for each in plain
    ]


def amounts() -> st.SearchStrategy[Amount]:
    shares = st.floats(0.1, 49.0).map(lambda share: Amount(None, share, f"{share}%"))
    return st.one_of(st.integers(1, 2**44).map(lambda count: Amount(count, None, str(count))), shares)


@given(
    signal=st.sampled_from(CONFIGURABLE),
    theirs=st.lists(st.tuples(amounts(), st.sampled_from([0.0, 10.0, 90.0])), min_size=1, max_size=4),
    configured=amounts(),
    grace_s=st.sampled_from([0.0, 30.0]),
    capacity=st.integers(1000, 2**46),
)
def test_no_threshold_of_the_kubelet_is_met_before_ours(
    signal: Signal, theirs: list[tuple[Amount, float]], configured: Amount, grace_s: float, capacity: int
) -> None:
    kubelets = [Threshold(signal, value, grace_period_s=theirs_grace_s) for value, theirs_grace_s in theirs]
    config = Config(thresholds=(Threshold(signal, configured, grace_period_s=grace_s),))
    (ours,) = above_kubelet.keep_above(config, kubelets).thresholds
    value = resolve.resolve_threshold(ours, capacity=capacity)
    assert value is not None
    plain = resolve.resolve_amount(configured, capacity=capacity) or 0
    assert value >= plain
    assert value <= max(plain, capacity // 2)
    for each in kubelets:
        level = resolve.resolve_amount(each.value, capacity=capacity)
        assert level is not None
        followed = 0 < level < capacity // 2 and (grace_s > 0.0 or each.hard)
        # Met is `value > available`: ours is met at every level at which theirs is, and at one more.
        assert value > level or not followed
        assert each.hard or ours.grace_period_s < each.grace_period_s
    assert ours.hard == (grace_s == 0.0)


@pytest.mark.parametrize(
    ("kubelets", "ours", "long", "short"),
    [
        ("0%", "200Mi", "200Mi", "200Mi"),
        ("0%", "12%", "12% = 1.92Gi", "12%"),
        ("0%", "2%, at least 200Mi, at most 1Gi", "2% = 328Mi", "328Mi"),
        ("0%", "2%, at least 1Gi", "2%, at least 1Gi", "1Gi"),
        ("0%", "50%, at most 1Gi", "50%, at most 1Gi", "1Gi"),
        ("500Mi", "200Mi", "750Mi (kubelet 500Mi + margin 250Mi; configured 200Mi)", "750Mi"),
        ("500Mi", "2%, at least 200Mi, at most 1Gi", "750Mi (kubelet 500Mi + margin 250Mi; configured 328Mi)", "750Mi"),
    ],
)
def test_a_threshold_is_described_with_its_origin(kubelets: str, ours: str, long: str, short: str) -> None:
    config = Config(thresholds=(Threshold(Signal.MEMORY, amount.parse_threshold(ours)),))
    (threshold,) = above(f"evictionHard: {{memory.available: {kubelets}}}", config=config).thresholds
    assert above_kubelet.describe_value(threshold, capacity=16 * GIB, unit=Unit.BYTES) == long
    assert above_kubelet.short_value(threshold, capacity=16 * GIB) == short


def graces(config: Config) -> dict[Signal, float]:
    return {each.signal: each.grace_period_s for each in config.thresholds if not each.hard}


@pytest.mark.parametrize(
    ("kubelets", "ours"),
    [("10m", 120.0), ("2m10s", 120.0), ("1m30s", 80.0), ("30s", 20.0), ("15s", 10.0), ("3s", 2.0)],
)
def test_a_soft_grace_period_ends_before_the_kubelets(kubelets: str, ours: float) -> None:
    text = f"evictionSoft: {{nodefs.available: 15%}}\nevictionSoftGracePeriod: {{nodefs.available: {kubelets}}}"
    found = graces(above(text))
    assert found == {**graces(load.defaults().config), Signal.NODEFS: ours}
    user = read("evictionSoft: {nodefs.available: 15%}\nevictionSoftGracePeriod: {nodefs.available: 1h}").config
    assert graces(above(text, config=user))[Signal.NODEFS] <= {"10m": 590.0}.get(kubelets, ours)


@pytest.mark.parametrize("off", ["0%", "100%", "0"])
def test_a_soft_threshold_that_the_kubelet_never_meets_shortens_no_grace_period(off: str) -> None:
    text = f"evictionSoft: {{nodefs.available: {off}}}\nevictionSoftGracePeriod: {{nodefs.available: 10s}}"
    assert graces(above(text)) == graces(load.defaults().config)


def test_a_hard_threshold_stays_hard_beside_a_soft_one_of_the_kubelet_without_grace() -> None:
    text = "evictionSoft: {memory.available: 1Gi}\nevictionSoftGracePeriod: {memory.available: 0s}"
    found = above(text)
    assert [each.hard for each in found.thresholds] == [each.hard for each in load.defaults().config.thresholds]
    assert graces(found) == graces(load.defaults().config), "without grace it is hard, as for the kubelet"


def test_a_shortened_grace_period_returns_to_the_configured_one_and_keeps_the_identity() -> None:
    plain = load.defaults().config
    text = "evictionSoft: {memory.available: 1Gi}\nevictionSoftGracePeriod: {memory.available: 15s}"
    shortened = above(text)
    assert graces(shortened)[Signal.MEMORY] == 10.0
    assert [effective_thresholds.identity(each) for each in shortened.thresholds] == [
        effective_thresholds.identity(each) for each in plain.thresholds
    ]
    assert above(text, config=shortened) == shortened
    assert above_kubelet.keep_above(shortened, ()) == plain


def test_a_shortened_grace_period_is_described_with_the_configured_one() -> None:
    text = "evictionSoft: {nodefs.available: 15%}\nevictionSoftGracePeriod: {nodefs.available: 1m30s}"
    described = {above_kubelet.describe_grace(each) for each in above(text).thresholds if each.signal is Signal.NODEFS}
    assert described == {"0s", "1m 20s (before the kubelet's; configured 2m)"}
