"""Reporting of a training: metrics, TensorBoard, the progress bar."""
