"""TensorBoard and the terminal."""
