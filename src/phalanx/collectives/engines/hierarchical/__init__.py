"""The engine for groups on several hosts."""
