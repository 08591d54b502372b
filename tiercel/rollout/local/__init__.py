"""The `local` engine: the trained model itself samples."""
