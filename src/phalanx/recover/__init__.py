"""Decides what to do about a fault. Pure: no process, no clock."""
