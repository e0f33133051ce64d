"""Telemetry of a running job: samples of ranks, step timings, metrics, process and GPU statistics."""
