"""What is measured while training, and where it is written: console, TensorBoard, JSON lines."""
