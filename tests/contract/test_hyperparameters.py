"""Hyperparameters that are read from the arguments of a script."""

from __future__ import annotations

import pytest

from phalanx.contract import hyperparameters
from phalanx.contract.run_metadata import Hyperparameter


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--lr 0.1 --epochs=3", {"lr": 0.1, "epochs": 3}),
        ("--lr 1e-3 --wd .5 --seed 007", {"lr": 0.001, "wd": 0.5, "seed": "007"}),
        ("--amp --compile --no-cache", {"amp": True, "compile": True, "no_cache": True}),
        ("--amp=false --limit None", {"amp": False, "limit": None}),
        ("--offset -5 -b 8 --", {"offset": -5, "b": 8}),
        ("--betas 0.9 0.999 --name x", {"betas": "0.9 0.999", "name": "x"}),
        ("train data/ model.depth=3 +opt=adam", {"model.depth": 3, "opt": "adam"}),
        ("--set a=1 b=2", {"set": "a=1", "b": 2}),
        ("--lr 0.1 -- --lr 9", {"lr": 0.1}),
        ("--batch-size 8 --batch-size 9", {"batch_size": 9}),
        ("--url=http://a?b=c", {"url": "http://a?b=c"}),
        ("data/ -", {}),
    ],
)
def test_what_arguments_look_like(words: str, found: dict[str, Hyperparameter]) -> None:
    assert hyperparameters.from_arguments(words.split()) == found


@pytest.mark.parametrize("given", [1, -2.5, True, False, None, "", "text", "3", "true", 'a "b"', '"q"', "1e5", "a=b"])
def test_a_value_survives_the_command_line(given: Hyperparameter) -> None:
    again = hyperparameters.value(hyperparameters.as_text(given))
    assert (again, type(again)) == (given, type(given))


def test_anything_is_recorded_within_limits() -> None:
    given = {"x" * 1000: "y" * 1000, "list": [1, 2], "nan": float("nan"), "huge": 1 << 80, 3: 4}
    found = hyperparameters.recordable({**given, **{f"n{i}": i for i in range(1000)}})
    assert len(found) == hyperparameters.MOST
    assert (len(found["x" * 100]), found["list"], found["nan"]) == (500, "[1, 2]", "nan")  # type: ignore[arg-type]
    assert (found["huge"], found["3"]) == (str(1 << 80), 4)
