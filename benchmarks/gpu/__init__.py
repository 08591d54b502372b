"""What tiercel does on one CUDA GPU: exactness, whole runs, time and memory (python -m benchmarks.gpu)."""
