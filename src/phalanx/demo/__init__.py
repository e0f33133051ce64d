"""Scripts that `phalanx demo` runs: plain PyTorch, without a line that knows phalanx."""
