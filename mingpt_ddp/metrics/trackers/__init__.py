"""TensorBoard, Weights & Biases, MLflow and Trackio: a module for each, over its own library."""
