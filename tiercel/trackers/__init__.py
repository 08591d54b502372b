"""Who else gets the rows of metrics.jsonl: TensorBoard, Weights & Biases, trackio, SwanLab. Imports no torch."""
