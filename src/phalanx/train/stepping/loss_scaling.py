"""The scale of the loss with fp16, in which small gradients would vanish."""

from __future__ import annotations

from typing import Any


class LossScaling:
    """torch's gradient scaler, if a model of the script computes in fp16. Its state can be loaded before it exists."""

    def __init__(self) -> None:
        self.scaler: Any = None
        self.outdated = False  # the scale was not updated since the last step
        self._loaded: dict[str, Any] = {}  # the state for a scaler that does not exist yet

    def begin(self, precision: Any) -> None:
        """Create the scaler for a model of this precision, unless there is one."""
        if self.scaler is None:
            self.scaler = precision.scaler()
            self.load_state_dict(self._loaded)

    def step(self, opt: Any) -> bool:
        """Update the parameters from gradients that are unscaled; return False if they have overflowed."""
        scaler = self.scaler
        # Query the scaler: it always calls a fused optimizer, which then does nothing.
        done = not any(found.item() for found in scaler._found_inf_per_device(opt).values())
        scaler.step(opt)
        self.outdated = True
        return done

    def update(self) -> None:
        """Update the scale. No optimizer may have gradients with the old scale."""
        self.scaler.update()
        self.outdated = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler."""
        return self._loaded if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a scaler, now or when there is one."""
        self._loaded = state
        self.outdated = False
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
