"""A crash in C."""

import ctypes
import faulthandler

print("begins", faulthandler.is_enabled())
ctypes.string_at(0)
