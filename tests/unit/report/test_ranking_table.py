from nodeagent.model import RankKey, Refusal, RefusalCode
from nodeagent.report import ranking_table
from tests.support import reports
from tests.support.reports import MIB

QOS, PRIORITY = RankKey("qos", 0, "BestEffort"), RankKey("priority", 5, "priority 5")
MORE, LESS = RankKey("usage", -9, "uses 9Mi more than requested"), RankKey("usage", -2, "uses 2Mi more than requested")


def test_the_deciding_key_is_the_first_that_differs_from_the_next_pod() -> None:
    assert ranking_table.deciding_key((QOS, PRIORITY, MORE), (QOS, PRIORITY, LESS)) == (
        "usage: uses 9Mi more than requested, next uses 2Mi more than requested"
    )


def test_pods_with_the_same_keys_are_in_the_order_of_their_names() -> None:
    assert ranking_table.deciding_key((QOS,), (QOS,)) == ranking_table.BY_NAME


def test_a_pod_without_known_keys_has_no_deciding_one() -> None:
    assert ranking_table.deciding_key((), (QOS,)) == ""
    assert ranking_table.deciding_key((QOS,), ()) == ""


def test_the_order_of_a_record_has_the_victim_and_its_deciding_key() -> None:
    def pod(rank: int, name: str, key: RankKey) -> dict[str, object]:
        return {
            "rank": rank,
            "namespace": "shop",
            "name": name,
            "uid": name,
            "usage": 300 * MIB,
            "keys": [key._asdict()],
        }

    record = {
        "rankedFor": "memory.available",
        "victims": [{"uid": "web"}],
        "ranking": [pod(1, "web", MORE), {**pod(2, "db", LESS), "refusals": [{"message": "has a node-bound volume"}]}],
    }
    section = ranking_table.section_of_record(record)
    first, second = [[cell.text for cell in row] for row in section.rows]
    assert first[:3] == ["1", "shop/web (evicted)", "300Mi"]
    assert first[5].startswith("usage: uses 9Mi more")
    assert second[6] == "protected: has a node-bound volume"


def test_a_damaged_record_has_gaps_and_no_error() -> None:
    record = {
        "rankedFor": 7,
        "ranking": [{"rank": "x", "usage": [], "keys": [{"value": "y"}, {"name": "q", "value": 1}]}],
    }
    (row,) = ranking_table.section_of_record(record).rows
    assert [cell.text for cell in row[:3]] == ["?", "None/None", "?"]
    assert ranking_table.section_of_record({}).rows == ()


def test_the_order_of_a_plan_has_every_pod() -> None:
    first = reports.ranked(reports.pod_view("hog", working_set=212 * MIB), 1)
    refusal = Refusal(RefusalCode.UNKNOWN_POD, "not listed")
    second = reports.ranked(reports.pod_view("db", working_set=MIB), 2, refusals=(refusal,))
    section = ranking_table.section_of_plan(reports.report(pods=(first, second)).plan)
    assert [row[1].text for row in section.rows] == ["default/hog", "default/db"]
    assert section.rows[1][6].text == "protected: not listed"
