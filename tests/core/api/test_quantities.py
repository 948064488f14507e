"""Sizes and durations with units, against plain arithmetic."""

from __future__ import annotations

import math
import re
import threading
from decimal import Decimal
from typing import Annotated, Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from offload_core.api.options import MAX_BYTES, MAX_SECONDS, Bytes, Seconds

SIZE: TypeAdapter[int] = TypeAdapter(Bytes)
DURATION: TypeAdapter[float] = TypeAdapter(Seconds)
SIZE_UNITS = {"b": 1} | {
    f"{letter}{end}": base ** (power + 1)
    for power, letter in enumerate("kmgtpe")
    for end, base in (("", 1000), ("b", 1000), ("ib", 1024))
}
SECONDS = {"us": "0.000001", "ms": "0.001", "s": "1", "m": "60", "h": "3600", "d": "86400", "w": "604800"}
DIGITS = st.tuples(st.integers(0, 10**6), st.none() | st.text("0123456789", min_size=1, max_size=4)).map(
    lambda parts: str(parts[0]) if parts[1] is None else f"{parts[0]}.{parts[1]}"
)


@given(number=DIGITS, space=st.sampled_from(["", " "]), unit=st.sampled_from(sorted(SIZE_UNITS)), data=st.data())
def test_a_size_is_the_number_times_its_unit(number: str, space: str, unit: str, data: st.DataObject) -> None:
    written = number + space + "".join(data.draw(st.sampled_from([c, c.upper()])) for c in unit)
    exact = Decimal(number) * SIZE_UNITS[unit]
    assume(exact <= MAX_BYTES)
    # To the byte, or where that takes more digits than a float has, to its precision.
    assert abs(SIZE.validate_python(written) - exact) <= max(Decimal(1), exact / 10**15)


@given(parts=st.lists(st.tuples(DIGITS, st.sampled_from(sorted(SECONDS))), min_size=1, max_size=4))
def test_a_duration_is_the_sum_of_its_parts(parts: list[tuple[str, str]]) -> None:
    written = "".join(number + unit for number, unit in parts)
    exact = sum(Decimal(number) * Decimal(SECONDS[unit]) for number, unit in parts)
    assume(exact <= MAX_SECONDS)
    assert DURATION.validate_python(written) == pytest.approx(float(exact), rel=1e-9, abs=1e-6)


@given(number=st.integers(0, MAX_BYTES) | st.floats(0, 1e18))
def test_a_number_is_taken_as_it_is(number: float) -> None:
    if number <= MAX_SECONDS:
        assert DURATION.validate_python(number) == float(number)
    if number == int(number):
        assert SIZE.validate_python(number) == number


@pytest.mark.parametrize("size", [MAX_BYTES + 1, 9 * 10**18, 10**400, 1e308, "2EiB", "9" * 400 + "B"], ids=repr)
def test_a_size_that_no_medium_has_is_refused(size: object) -> None:
    assert SIZE.validate_python("1EiB") == MAX_BYTES
    with pytest.raises(ValidationError, match="too large; write a size of at most 1EiB"):
        SIZE.validate_python(size)


@pytest.mark.parametrize("seconds", [MAX_SECONDS + 1, 9e18, 10**400, 1e308, "522w", "9" * 400 + "s"], ids=repr)
def test_a_duration_that_no_clock_waits_for_is_refused(seconds: object) -> None:
    assert DURATION.validate_python("3650d") == MAX_SECONDS < threading.TIMEOUT_MAX / 2
    with pytest.raises(ValidationError, match="too long; write a duration of at most 3650d"):
        DURATION.validate_python(seconds)


def numbers_in_words(adapter: TypeAdapter[Any], text: str) -> bool:
    try:
        value = adapter.validate_python(text)
    except ValidationError as error:
        (detail,) = error.errors()
        assert detail["type"] in ("size_form", "duration_form")
        return detail["msg"].startswith("too ")  # a number of the right form, beyond the limit
    assert math.isfinite(value)
    assert value >= 0
    return True


@given(text=st.text("0159.,-+ eE_smhdwuyKMGiBb\n\u0661\u00b5", max_size=8))
def test_other_text_is_refused(text: str) -> None:
    part = r"\d+(?:\.\d+)?"
    one_size = re.compile(rf"{part} ?(?:b|[kmgtpe](?:i?b)?)", re.ASCII | re.IGNORECASE)
    durations = re.compile(rf"(?:{part}(?:{'|'.join(sorted(SECONDS, reverse=True))}))+", re.ASCII)
    assert numbers_in_words(SIZE, text) == bool(one_size.fullmatch(text))
    assert numbers_in_words(DURATION, text) == bool(durations.fullmatch(text))


BAD_FOR_BOTH = [
    "", " ", "5", "-5s", "-5MiB", "inf", "nan", "infinity", " 30s", "30s ", "30s\n", "1h 30m", "30 parsecs", "1e3s",
    "1,5GiB", "1,5s", "1.5.5s", "1.5.5GiB", "1_0s", "1_0B", "s", "GiB", "1h-30m",
    "1s!!2s", "1h30", "512MiB or so", "5ns", "5mm", "1y", "\u0663s", True, False, None, -1, -0.5, math.nan, math.inf,
    -math.inf, [], [1], {}, b"5s", 1j,
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_FOR_BOTH, ids=lambda bad: repr(bad)[:20])
def test_what_is_no_quantity_is_refused_with_the_good_forms(bad: object) -> None:
    with pytest.raises(ValidationError, match="not a size; write a number of bytes or a size such as 20GiB or 512MiB"):
        SIZE.validate_python(bad)
    with pytest.raises(ValidationError, match="not a duration; write a number of seconds, 0 or more, or a duration"):
        DURATION.validate_python(bad)


def test_a_part_of_a_byte_is_refused_as_a_number() -> None:
    with pytest.raises(ValidationError, match="not a size"):
        SIZE.validate_python(1.5)
    assert SIZE.validate_python("1.5KiB") == 1536


def test_limits_and_defaults_are_plain_numbers() -> None:
    class Options(BaseModel):
        capacity: Annotated[Bytes, Field(ge=1024)] = 2048
        pause: Annotated[Seconds, Field(gt=0, le=60)] = 0.5
        longest: Annotated[Seconds | None, Field(gt=0)] = None

    assert Options() == Options(capacity=2048, pause=0.5)
    assert Options.model_validate({"capacity": "1KiB", "pause": "1m", "longest": "2m"}).longest == 120.0
    for bad in ({"capacity": "1kB"}, {"pause": "0s"}, {"pause": "61s"}, {"longest": "0ms"}):
        with pytest.raises(ValidationError, match=r"greater than|less than"):
            Options.model_validate(bad)


def test_the_json_schema_tells_both_forms() -> None:
    for adapter, number in ((SIZE, "integer"), (DURATION, "number")):
        schema = adapter.json_schema()
        assert [form["type"] for form in schema["anyOf"]] == [number, "string"]
        assert {type(example) for example in schema["examples"]} >= {str}
        for example in schema["examples"]:
            adapter.validate_python(example)
