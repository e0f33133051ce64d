"""The process group that torch.distributed sees, on top of an engine."""
