"""Events of any kind with anything in them, for hypothesis."""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args, get_origin

import msgspec
from hypothesis import strategies as st

from phalanx.contract import events

_PLAIN = {
    float: st.one_of(st.floats(0, 200), st.floats(-1e6, 1e10)),  # JSON has neither inf nor nan
    int: st.one_of(st.integers(0, 4), st.integers(-(2**31), 2**40)),
    bool: st.booleans(),
    str: st.one_of(st.text(st.sampled_from("wdfbokjin.WDFO"), max_size=30), st.text(max_size=8)),
    type(None): st.none(),
}
_NAMED: dict[str, st.SearchStrategy[Any]] = {
    "rank": st.integers(0, 5),
    "previous_rank": st.integers(0, 5),
    "world_size": st.integers(0, 9),
    "time": st.one_of(st.floats(0, 200), st.floats(1000, 1010), st.floats(-1e6, 1e10)),
    "state": st.sampled_from(["S", "R", "X", "E", "Z"]),
    "recovery": st.sampled_from(["regroup", "restart", "stop"]),
}


def _of(kind: Any) -> st.SearchStrategy[Any]:
    if kind in _PLAIN:
        return _PLAIN[kind]
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return st.sampled_from(inner)
    if get_origin(kind) is tuple:
        return st.lists(_of(inner[0]), max_size=4).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(_of(inner[0]), _of(inner[1]), max_size=3)
    if inner:  # a union
        return st.one_of(*map(_of, inner))
    return struct(kind)


@functools.cache
def struct(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    fields = msgspec.structs.fields(kind)
    parts = {field.name: _NAMED[field.name] if field.name in _NAMED else _of(field.type) for field in fields}
    return st.builds(kind, **parts)


EVENTS = st.lists(st.one_of(*map(struct, get_args(events.AnyEvent))), max_size=20)
