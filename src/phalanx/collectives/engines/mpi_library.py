"""mpi4py's MPI in this process: imports it, translates its errors, and aborts it at exit after a failure."""

from __future__ import annotations

import atexit
import sys
from typing import Any

from phalanx.collectives.errors import CallRefused, CollectiveMismatch, PeerLost

_leaked: list[Any] = []  # memory that MPI may still read or write
_failed = False  # the script or an MPI call has failed: waiting for the others at exit would hang
_hooked = False


class ErrorTranslation:
    """Translates errors of MPI. Not a generator, because every call uses it."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        from mpi4py import MPI

        if not isinstance(error, MPI.Exception):
            return
        mark_failed()
        if error.Get_error_class() == MPI.ERR_TRUNCATE:
            raise CollectiveMismatch(
                f"{self._what}: ranks called different things: a message is larger than the receive buffer"
            ) from None
        raise PeerLost(f"{self._what}: MPI lost a peer, or failed: {error.Get_error_string()}") from None


def import_mpi() -> Any:
    """Return the module `mpi4py.MPI`; raise CallRefused if it cannot be used."""
    try:
        import mpi4py
    except ImportError:
        raise CallRefused(
            "the backend mpi needs mpi4py, which is not installed", "pip install 'phalanx[mpi]'"
        ) from None
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CallRefused(
            f"mpi4py {mpi4py.__version__} finds no MPI library here: {str(error).splitlines()[0]}",
            "install one (apt install openmpi-bin libopenmpi-dev, module load …), and start ranks with its own mpirun",
        ) from None
    if MPI.Is_finalized():
        raise CallRefused("MPI is finalized in this process and cannot be started again")
    _abort_at_exit(MPI)
    return MPI


def _abort_at_exit(mpi: Any) -> None:
    """Abort the job at exit if this process failed: mpi4py finalizes MPI there, which waits for all ranks and would
    hang.
    """
    global _hooked
    if _hooked:
        return
    _hooked = True
    before = sys.excepthook

    def failed(*error: Any) -> None:
        before(*error)
        mark_failed()

    sys.excepthook = failed

    def end() -> None:
        if _failed and not mpi.Is_finalized():
            sys.stdout.flush()
            sys.stderr.flush()
            mpi.COMM_WORLD.Abort(1)

    atexit.register(end)


def mark_failed(*in_use: Any) -> None:
    """Abort the job when this process exits. `in_use`: memory that MPI may still read or write until then."""
    global _failed
    _failed = True
    _leaked.append(in_use)


def has_failed() -> bool:
    """Return whether the job is aborted when this process exits."""
    return _failed
