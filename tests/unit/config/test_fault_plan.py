"""What a fault plan may say, and when it is listened to."""

import json
from typing import Any

import pytest

from config import PlannedFault, SettingsError, load_fault_plan
from config.fault_plan import FAULT_POINTS, GivenFaults


def load(plan: object, allow: str | None = "1") -> GivenFaults:
    text = plan if isinstance(plan, str) else json.dumps(plan)
    environ = {"SLIPSTREAM_FAULT_PLAN": text}
    if allow is not None:
        environ["SLIPSTREAM_ALLOW_FAULTS"] = allow
    return load_fault_plan(environ)


def test_every_field_and_the_defaults() -> None:
    whole: dict[str, Any] = {"point": "forward_sleep", "at": 3, "count": -1, "every": 2, "request": 4}
    plan = load([{**whole, "seconds": 0.5}, {"point": "logits_nan"}])
    assert plan == GivenFaults(
        (PlannedFault("forward_sleep", 3, -1, 2, 4, 0.5), PlannedFault("logits_nan", 1, 1, 1, None, 1.0)),
        False,
    )


@pytest.mark.parametrize("point", FAULT_POINTS)
def test_every_point_may_be_named(point: str) -> None:
    assert load([{"point": point}]).faults[0].point == point


def test_no_plan_is_no_plan() -> None:
    assert load_fault_plan({"SLIPSTREAM_ALLOW_FAULTS": "1"}) == GivenFaults((), False)
    assert load("") == load("[]") == load("  ", None) == GivenFaults((), False)


@pytest.mark.parametrize("allow", [None, "", "0", "true", "yes"])
def test_without_the_opt_in_a_plan_is_not_even_read(allow: str | None) -> None:
    assert load([{"point": "forward_raise"}], allow) == GivenFaults((), True)
    assert load("not JSON", allow) == GivenFaults((), True)


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        ("{", "'{' is not JSON; expected a list of objects"),
        ("[" * 100_000, "is not JSON; expected a list of objects"),
        ({"point": "forward_raise"}, "is not allowed; expected a list of objects"),
        (["forward_raise"], "entry 1: 'forward_raise' is not allowed; expected an object"),
        ([{}], "entry 1: point is missing; expected one of forward_raise, "),
        ([{"point": "forward_rise"}], "entry 1: point = 'forward_rise' is not allowed; expected one of "),
        ([{"point": ["logits_nan"]}], "entry 1: point = "),
        ([{"point": "logits_nan", "att": 1}], "entry 1: unknown key att; did you mean at?"),
        ([{"point": "logits_nan", "a\nb": 1}], r"entry 1: unknown key a\nb"),
        ([{"point": "logits_nan"}, {"point": "logits_nan", "at": 0}], "entry 2: at = '0' is not allowed; "),
        ([{"point": "logits_nan", "at": True}], "at = 'True' is not allowed; expected a whole number, 1 or "),
        ([{"point": "logits_nan", "at": "1"}], "at = '1' is not allowed"),
        ([{"point": "logits_nan", "at": 1.0}], "at = '1.0' is not allowed"),
        ([{"point": "logits_nan", "at": None}], "at = 'None' is not allowed"),
        (
            [{"point": "logits_nan", "count": 0}],
            "count = '0' is not allowed; expected a whole number, 1 or more",
        ),
        ([{"point": "logits_nan", "count": -2}], "count = '-2' is not allowed"),
        ([{"point": "logits_nan", "every": 0}], "every = '0' is not allowed"),
        ([{"point": "logits_nan", "request": 0}], "request = '0' is not allowed"),
        (
            [{"point": "forward_sleep", "seconds": -1}],
            "seconds = '-1' is not allowed; expected a number of sec",
        ),
        ('[{"point": "forward_sleep", "seconds": NaN}]', "seconds = 'nan' is not allowed"),
        ('[{"point": "forward_sleep", "seconds": Infinity}]', "seconds = 'inf' is not allowed"),
    ],
)
def test_a_wrong_plan_is_one_line(plan: object, line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(plan)
    message = str(caught.value)
    assert message.startswith("env SLIPSTREAM_FAULT_PLAN: ")
    assert line in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("fields", "hits"),
    [
        ({}, [1]),
        ({"at": 3}, [3]),
        ({"at": 3, "count": 2}, [3, 4]),
        ({"at": 3, "count": -1}, [3, 4, 5, 6, 7, 8, 9, 10]),
        ({"every": 4}, [1, 5, 9]),
        ({"at": 2, "every": 3, "count": 2}, [2, 5]),
        ({"at": 2, "every": 3, "count": 1}, [2]),
    ],
)
def test_the_hits_it_comes_at(fields: dict[str, int], hits: list[int]) -> None:
    (fault,) = load([{"point": "forward_raise", **fields}]).faults
    assert [hit for hit in range(1, 11) if fault.comes_at(hit)] == hits
