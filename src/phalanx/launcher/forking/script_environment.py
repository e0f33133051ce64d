"""Finds the environment variables that a script sets before it imports torch, by reading its text.

    found = read("train.py", "/folder/of/the/script", environ)
    found.before   {"OMP_NUM_THREADS": "4"}: the fork server imports torch with these
    found.later    {"TORCH_LOGS"}: set somewhere else in the text

This is a guess: statements are followed in order, conditions are not evaluated. A worker checks it when its script
imports torch (forkserver/imports/preloaded.py), so a wrong guess only costs time.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_MENTIONS = re.compile(r"\b(environ|environb|putenv|dotenv|setenv)\b")
_IMPORTS = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)
# Packages that import torch: variables set after them have no effect, as in plain Python.
_IMPORT_TORCH = frozenset(
    """
    torch torchvision torchaudio torchtext torchdata torchmetrics lightning pytorch_lightning lightning_fabric
    transformers accelerate deepspeed diffusers peft trl timm fairscale phalanx
    """.split()  # noqa: SIM905
)
# Prefixes of variables that torch and its dependencies read on import.
_READ_BY_IMPORTS = tuple(
    """
    TORCH PYTORCH OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ BLIS_ ONEDNN_ DNNL_ MKLDNN_ ATEN_ NPY_ NUMPY_ KINETO_ TQDM_ SYMPY_
    AOT_ AOTINDUCTOR_ INDUCTOR_ CUDA_LAUNCH_BLOCKING CUBLASLT_ CUBLAS_LOG NVRTC_ PTXAS_ TRITON_
    """.split()  # noqa: SIM905
)
_MOST_FILES = 32
_MOST_BYTES = 1 << 20


@dataclass
class ScriptEnvironment:
    """Variables that a script sets."""

    before: dict[str, str | None] = field(default_factory=dict)  # before it imports torch; None: deleted
    later: set[str] = field(default_factory=set)  # anywhere else


def read(source: str, folder: str | None, environ: Mapping[str, str]) -> ScriptEnvironment:
    """Read a script, and the modules beside it that it imports before torch."""
    found = ScriptEnvironment()
    texts = _texts(source, folder)
    if any(_MENTIONS.search(text) for text in texts.values()):
        reader = _Reader(folder, environ, found.before)
        reader.file(source)
        found.before = {name: value for name, value in found.before.items() if name.startswith(_READ_BY_IMPORTS)}
        written = {name for path, text in texts.items() for name in _written(path, text)}
        found.later = {name for name in written if name.startswith(_READ_BY_IMPORTS)} - found.before.keys()
    return found


def _texts(source: str, folder: str | None) -> dict[str, str]:
    """Return the text of the script and of the modules that it imports from its folder."""
    texts: dict[str, str] = {}
    waiting = [source]
    while waiting and len(texts) < _MOST_FILES:
        path = waiting.pop(0)
        if path in texts:
            continue
        texts[path] = _text(path)
        for name in _IMPORTS.findall(texts[path]):
            waiting += _files(name, folder)
    return texts


def _files(name: str, folder: str | None) -> list[str]:
    """Return the files of a module and its packages in the folder, outermost first."""
    if folder is None:
        return []
    found = []
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        stem = os.path.join(folder, *parts[:length])
        found += [path for path in (os.path.join(stem, "__init__.py"), f"{stem}.py") if os.path.isfile(path)][:1]
    return found


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return ""


def _tree(path: str) -> ast.Module | None:
    try:
        return ast.parse(_text(path))
    except (SyntaxError, ValueError, RecursionError):
        return None


class _Reader:
    """Follows statements until one of them imports torch."""

    def __init__(self, folder: str | None, environ: Mapping[str, str], before: dict[str, str | None]) -> None:
        self._folder = folder
        self._environ = environ
        self._before = before
        self._read: set[str] = set()
        self._functions: dict[str, ast.FunctionDef] = {}

    def file(self, path: str) -> bool:
        """Read a file. Return False if it imports torch."""
        if path in self._read or len(self._read) > _MOST_FILES:
            return True
        self._read.add(path)
        tree = _tree(path)
        outer, self._functions = self._functions, {}
        try:
            return tree is None or self._statements(tree.body)
        finally:
            self._functions = outer

    def _statements(self, body: list[ast.stmt]) -> bool:
        return all(self._statement(statement) for statement in body)

    def _statement(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Import(names=names):
                return all(self._imports(alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                return self._imports(module)
            case ast.FunctionDef(name=name):
                self._functions[name] = statement
            case ast.Expr(value=ast.Call(func=ast.Name(id=name))) if name in self._functions:
                return self._statements(self._functions.pop(name).body)
            case ast.If(test=test, body=body) if _runs_always(test):
                return self._statements(body)
            case ast.If(test=test, body=body) if (asked := _asks_for(test)) is not None:
                return asked in self._environ or self._before.get(asked) is not None or self._statements(body)
            case ast.Try(body=body) | ast.With(body=body):
                return self._statements(body)
            case _:
                for name, value, only_if_unset in _writes(statement):
                    self._set(name, value, only_if_unset)
        return True

    def _imports(self, name: str) -> bool:
        if name.partition(".")[0] in _IMPORT_TORCH:
            return False
        return all(self.file(path) for path in _files(name, self._folder))

    def _set(self, name: str, value: object, only_if_unset: bool) -> None:
        if only_if_unset and self._before.get(name, self._environ.get(name)) is not None:
            return
        if value is None or isinstance(value, str):
            self._before[name] = value
        else:
            self._before.pop(name, None)  # unknown: the worker checks it


_UNKNOWN = object()

Write = tuple[str, object, bool]  # name, value (None: deleted), whether only if unset


def _written(path: str, text: str) -> Iterator[str]:
    tree = _tree(path) if _MENTIONS.search(text) else None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.stmt):
            yield from (name for name, _, _ in _writes(node))


def _writes(statement: ast.stmt) -> Iterator[Write]:
    match statement:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if (name := _variable(target)) is not None:
                    yield name, _constant(value), False
        case ast.AugAssign(target=target, op=ast.BitOr(), value=value) if _is_environ(target):
            yield from _items(value)
        case ast.Delete(targets=targets):
            yield from ((name, None, False) for target in targets if (name := _variable(target)) is not None)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr=method), args=args, keywords=keywords)):
            yield from _calls(owner, method, args, keywords)


def _calls(owner: ast.expr, method: str, args: list[ast.expr], keywords: list[ast.keyword]) -> Iterator[Write]:
    if _is_environ(owner):
        match method, args:
            case "setdefault", [ast.Constant(value=str(name)), value]:
                yield name, _constant(value), True
            case "update", _:
                for arg in args:
                    yield from _items(arg)
                yield from ((word.arg, _constant(word.value), False) for word in keywords if word.arg)
            case "pop", [ast.Constant(value=str(name)), *_]:
                yield name, None, False
    elif isinstance(owner, ast.Name) and owner.id == "os":
        match method, args:
            case "putenv", [ast.Constant(value=str(name)), value]:
                yield name, _constant(value), False
            case "unsetenv", [ast.Constant(value=str(name))]:
                yield name, None, False


def _items(value: ast.expr) -> Iterator[Write]:
    match value:
        case ast.Dict(keys=keys, values=values):
            for key, each in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, _constant(each), False
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            yield from ((word.arg, _constant(word.value), False) for word in keywords if word.arg)


def _constant(value: ast.expr) -> object:
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(func=ast.Name(id="str"), args=[ast.Constant(value=int(number))]):
            return str(number)
    return _UNKNOWN


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _variable(node: ast.expr) -> str | None:
    match node:
        case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))) if _is_environ(owner):
            return name
    return None


def _runs_always(test: ast.expr) -> bool:
    """Recognize `if __name__ == "__main__"`."""
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _asks_for(test: ast.expr) -> str | None:
    """Recognize `if "NAME" not in os.environ` and return the name."""
    match test:
        case ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.NotIn()], comparators=[owner]) if _is_environ(
            owner
        ):
            return name
    return None
