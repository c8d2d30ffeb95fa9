"""A packed record is equal to what was packed."""

from nodeagent.records.packed_record import PackedRecord


def test_every_field_is_as_packed() -> None:
    records = [{"id": str(number), "wallTime": 1.5, "pods": [{"usage": number, "none": None}]} for number in range(3)]
    packed = [PackedRecord(each) for each in records]
    for _ in range(2):  # from one record to the next and back
        for record, found in zip(records, packed, strict=True):
            assert dict(found) == record
            assert found.get("pods") == record["pods"]
            assert (found.get("absent"), "absent" in found, len(found)) == (None, False, 3)
        records.reverse()
        packed.reverse()


def test_a_number_that_no_machine_has_is_as_packed() -> None:
    record = {"wallTime": 10**400, "signals": [{"value": -(10**400)}]}
    assert PackedRecord(record) == record
