"""Log to TensorBoard, Weights & Biases, MLflow and Trackio. Each has a module here."""
