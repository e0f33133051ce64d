"""Function calls that are sent to ranks in another interpreter."""

from __future__ import annotations

import sys
import types

import pytest

from phalanx.contract.messages import function_call
from phalanx.errors import UsageError


def test_a_call_is_unpacked_as_it_was_packed() -> None:
    function, args, kwargs = function_call.unpack(function_call.pack(divmod, [7, 2], {"base": 8}))
    assert (function, tuple(args), dict(kwargs)) == (divmod, (7, 2), {"base": 8})


def test_what_was_typed_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cloudpickle, in a notebook: its main module is not a file."""
    main = types.ModuleType("__main__")
    exec("def typed(): pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match="which is not a file here") as caught:
        function_call.pack(main.typed, [], {}, details=["a detail"])
    assert "a detail" in str(caught.value)
    assert "pip install cloudpickle" in str(caught.value)


def test_a_script_that_a_rank_imports_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    function_call.check_caller("spawn")
    monkeypatch.setattr(function_call, "_importing_main", True)
    with pytest.raises(UsageError, match="launch was called while a rank was importing this script"):
        function_call.check_caller("launch")
