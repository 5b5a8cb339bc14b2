"""Names of the copies of a target that may pay."""

from foretoken.loading.draft import kinds


def test_kinds_are_smaller_than_the_target() -> None:
    assert kinds("float32", 5) == ["self:int8", "self:int4", "self:0,2,4"]
    assert kinds("int8", 4) == ["self:int4", "self:0,2,3"]
    assert kinds("int4", 2) == [] and kinds("auto", 1) == ["self:int8", "self:int4"]
