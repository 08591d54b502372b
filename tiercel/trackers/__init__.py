"""Trackers that get the rows of metrics.jsonl, such as TensorBoard, Weights & Biases and MLflow. Imports no torch."""
