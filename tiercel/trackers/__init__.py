"""Trackers that get the rows of metrics.jsonl: TensorBoard, Weights & Biases, trackio, SwanLab. Imports no torch."""
