"""The user's function for another number of ranks: `run.group.on_resize(hook)`."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.errors import UsageError


class ResizeHook:
    """Holds the function, and calls it once if the number of ranks has changed."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._hook: Callable[[int, int], object] | None = None
        self._settled = False  # the hook was called, if necessary

    def set(self, hook: Callable[[int, int], object]) -> None:
        """Set the function. Raises UsageError if it is none, or comes too late."""
        if self._settled:
            raise UsageError(
                "on_resize() was called after keep(), which calls the hook",
                fix="run.group.on_resize(…) before run.keep(…)",
            )
        if not callable(hook):
            raise UsageError(
                f"on_resize() was given a {type(hook).__name__}, expected a function of two numbers of ranks",
                fix="run.group.on_resize(lambda before, now: …)",
            )
        self._hook = hook

    def settle(self, before: int | None) -> None:
        """Call the function if there were `before` ranks, and now there are more or fewer. None: it is not known."""
        self._settled = True
        if self._hook is not None and before is not None and before != self._world_size:
            self._hook(before, self._world_size)
