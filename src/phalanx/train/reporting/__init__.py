"""What a training reports: metrics, TensorBoard, the progress bar."""
