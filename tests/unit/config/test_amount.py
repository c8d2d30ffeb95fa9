"""Threshold values follow the kubelet's rules, 32 bit percentages included."""

import pytest

from nodeagent.config.amount import parse_amount, parse_threshold
from nodeagent.config.bounds import AmountRule
from nodeagent.model import Amount


@pytest.mark.parametrize(
    ("text", "quantity", "percentage"),
    [
        ("100Mi", 100 * 2**20, None),
        ("1m", 1, None),
        ("10%", None, 10.0),
        ("12.5%", None, 12.5),
        (".5%", None, 0.5),
        ("5.%", None, 5.0),
        ("1e1%", None, 10.0),
        ("+10%", None, 10.0),
        ("15%%", None, 15.0),
        ("9223372036854775806", 2**63 - 2, None),
        ("0%", None, 0.0),
        ("-0%", None, 0.0),
        ("100.0%", None, 100.0),
        ("100.000001%", None, 100.000001),
    ],
)
def test_a_threshold_is_a_quantity_or_a_percentage(text: str, quantity: int | None, percentage: float | None) -> None:
    assert parse_amount(text) == Amount(quantity, percentage, text)


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "-1%", "100.1%", "nan%", "inf%", "1e99%", "0x1%", "1_0%", " 1%", "1% %", "%", "%%", "", "\uff11%"],
)
def test_a_threshold_that_a_kubelet_refuses_or_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_amount(text)


@pytest.mark.parametrize("text", ["8Ei", "10E", "9223372036854775807", "1e30", "nan%", "0x8p0%"])
@pytest.mark.parametrize("rule", [AmountRule.THRESHOLD, AmountRule.RECLAIM])
def test_what_a_kubelet_takes_although_no_node_can_have_it_is_refused(text: str, rule: AmountRule) -> None:
    with pytest.raises(ValueError, match=r"no node has as much|not a plain number"):
        parse_amount(text, rule=rule)


def test_minimum_reclaim_may_be_zero_and_more_than_all_but_not_zero_percent() -> None:
    assert parse_amount("0", rule=AmountRule.RECLAIM).quantity == 0
    assert parse_amount("150%", rule=AmountRule.RECLAIM).percentage == 150.0
    with pytest.raises(ValueError, match="above 0%"):
        parse_amount("0%", rule=AmountRule.RECLAIM)


def test_a_threshold_may_be_a_percentage_with_bounds() -> None:
    mib = 2**20
    text = "2%, at least 200Mi, at most 1Gi"
    assert parse_threshold(text) == Amount(None, 2.0, text, at_least=200 * mib, at_most=1024 * mib)
    assert parse_threshold("2%, at most 1Gi").at_least is None
    assert parse_threshold("200Mi") == Amount(200 * mib, None, "200Mi")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("200Mi, at most 1Gi", "only a percentage has bounds"),
        ("2%, at least 2Gi, at most 1Gi", "is above that of"),
        ("2%, at least 1Gi, at least 2Gi", "is there twice"),
        ("2%, at least 1%", "is not a quantity"),
        ("2%, 200Mi", "is not .at least. or .at most. with a quantity"),
        ("2%,at least 200Mi", "plain number|empty|suffix|quantity"),
        ("2%, at least", "is not .at least. or .at most. with a quantity"),
        ("2%, at least ", r".+"),
    ],
)
def test_bounds_without_a_meaning_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_threshold(text)


def test_a_kubelets_threshold_has_no_bounds() -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_amount("2%, at least 200Mi")
