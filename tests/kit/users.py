"""Tests with processes of another user."""

from __future__ import annotations

import os

import pytest

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
