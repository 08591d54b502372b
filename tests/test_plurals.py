from tiercel.wording import counted


def test_one_has_no_plural():
    assert (counted(1, "row"), counted(0, "row"), counted(1024, "row")) == ("1 row", "0 rows", "1,024 rows")
    assert (counted(1, "process", "processes"), counted(2, "process", "processes")) == ("1 process", "2 processes")
