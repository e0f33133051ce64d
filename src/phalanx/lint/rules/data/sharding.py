"""Every rank trains on the same data."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from phalanx.lint.finding import LintFinding
from phalanx.lint.model import Model

NAME = "unsharded-data"
_SHARDS = [
    "shard",
    "split_dataset_by_node",
    "DistributedSampler",
    "StatefulDistributedSampler",
    "ShardingFilter",
    "sharding_filter",
    "get_worker_info",
    "split_by_node",
]
_ELSEWISE = (  # parallelism in which all ranks of a stage see the same data
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.rpc",
    "deepspeed",
    "megatron",
    "torchdata",
    "webdataset",
)
_PLAIN = ("RandomSampler", "SequentialSampler", "BatchSampler", "SubsetRandomSampler")


def check(model: Model) -> Iterator[LintFinding]:
    """Yield a finding if all ranks train on the same data."""
    script = model.script
    if not model.joins or model.driven or script.uses(*_ELSEWISE) or not model.calls("backward"):
        return
    if any(isinstance(n, ast.Name | ast.Attribute) and script.last(n) in _SHARDS for n in script.nodes):
        return
    if any(
        script.last(call.func) in ("manual_seed", "seed", "set_seed") and _of_rank(model, call) for call in script.calls
    ):
        return  # each rank draws its own samples
    for call in model.calls("DataLoader"):
        if _own_order(model, call) or _for_tests(model, call) or not model.reach.everywhere(call):
            continue
        data = call.args[0] if call.args else next((w.value for w in call.keywords if w.arg == "dataset"), None)
        if data is None or model.ranks.mentions(data) or _shards_itself(model, data):
            continue
        yield LintFinding(
            call.lineno,
            NAME,
            "warning",
            "every rank reads all of the data: no DistributedSampler, and nothing else here divides it among the ranks",
            "DataLoader(dataset, sampler=DistributedSampler(dataset), …), without shuffle=True",
            call.end_lineno or 0,
        )


def _of_rank(model: Model, call: ast.Call) -> bool:
    return any(map(model.ranks.mentions, call.args))


def _own_order(model: Model, call: ast.Call) -> bool:
    """Return whether the loader has a sampler that may shard the data."""
    for word in call.keywords:
        if word.arg in ("sampler", "batch_sampler") and not (isinstance(word.value, ast.Constant)):
            made = word.value
            if isinstance(made, ast.Name) and (found := model.script.lookup(made)) and found[-1].value is not None:
                made = found[-1].value
            return not (isinstance(made, ast.Call) and model.script.last(made.func) in _PLAIN)
        if word.arg is None:
            return True  # **options
    return False


def _for_tests(model: Model, call: ast.Call) -> bool:
    """Return whether the loader is for validation: every rank may read all of that data."""
    words = ast.unparse(call.args[0]) if call.args else ""
    for above in model.script.above(call):
        if isinstance(above, ast.Assign):
            words += " ".join(map(ast.unparse, above.targets))
        elif isinstance(above, ast.FunctionDef):
            words += f" {above.name}"
            break
    return any(word in words.lower() for word in ("val", "test", "eval", "dev_", "infer"))


def _shards_itself(model: Model, data: ast.expr) -> bool:
    """Return whether the dataset may shard itself: it is iterable, uses the rank, or is not made in this file."""
    if isinstance(data, ast.Name):
        found = [one for one in model.script.lookup(data) if one.kind == "value"]
        return not found or any(one.value is not None and _shards_itself(model, one.value) for one in found)
    if isinstance(data, ast.Call):
        name = model.script.last(data.func)
        for node in model.script.nodes:
            if isinstance(node, ast.ClassDef) and node.name == name:
                bases = [model.script.last(base) for base in node.bases]
                return any("Iter" in base for base in bases) or any(
                    model.ranks.depends(n) for n in ast.walk(node) if isinstance(n, ast.expr)
                )
        return "Iter" in name or any(word.arg == "streaming" for word in data.keywords)
    return False
