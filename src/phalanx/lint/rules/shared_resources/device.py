"""All ranks use the first GPU."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model

NAME = "first-gpu"
_CHOOSES = ("set_device", "set_device_index", "set_device_idx")


def check(model: Model) -> Iterator[LintFinding]:
    """Yield findings for devices that all ranks of a node share."""
    if not model.many:
        return
    # If the group is joined elsewhere, the device may be chosen there.
    chosen = model.driven or _chooses(model) or not model.calls("init_process_group")
    found = [
        (call, where)
        for call in model.script.calls
        if (where := _where(model, call)) and (where != "cuda" or not chosen) and model.reach.everywhere(call)
    ]
    if not found:
        return
    call, where = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    yield LintFinding(
        call.lineno,
        NAME,
        "error",
        f'"{where}" is the first GPU on every rank{more}: they share it, and NCCL refuses to'
        if where != "cuda"
        else f'"cuda" is the first GPU on every rank{more}, for nothing chooses one by the local rank: they share it, '
        "and NCCL refuses to",
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything is put on a GPU'
        + ('; and "cuda" in place of "cuda:0"' if where != "cuda" else ""),
        call.end_lineno or 0,
    )


def _chooses(model: Model) -> bool:
    script = model.script
    if model.calls(*_CHOOSES):
        return True
    # With the environment, or with `with torch.cuda.device(local_rank)`.
    return any(
        (isinstance(node, ast.Constant) and node.value == "CUDA_VISIBLE_DEVICES")
        or (isinstance(node, ast.Call) and script.name(node.func) == "torch.cuda.device")
        for node in script.nodes
    )


def _where(model: Model, call: ast.Call) -> str:
    """Return `cuda` or `cuda:0` where a call moves something there."""
    last = model.script.last(call.func)
    if (
        last == "cuda"
        and isinstance(call.func, ast.Attribute)
        and not model.script.name(call.func).startswith("torch.")
    ):
        given = [*call.args, *(w.value for w in call.keywords if w.arg == "device")]
        if not given:
            return "cuda"
        return "cuda:0" if isinstance(given[0], ast.Constant) and given[0].value == 0 else ""
    if last == "to" or model.script.name(call.func) == "torch.device":
        if last != "to" and (len(call.args) > 1 or any(word.arg == "index" for word in call.keywords)):
            return ""
        places = list(call.args[:1])
    else:
        places = []
    places += [word.value for word in call.keywords if word.arg in ("device", "map_location")]
    for place in places:
        arms = [place.body, place.orelse] if isinstance(place, ast.IfExp) else [place]
        for arm in arms:
            if isinstance(arm, ast.Constant) and arm.value in ("cuda", "cuda:0"):
                return str(arm.value)
    return ""
