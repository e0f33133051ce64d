"""Wrapping a model for many ranks: DDP, FSDP, HSDP, precision, compression."""
