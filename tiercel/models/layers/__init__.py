"""What tiercel runs in place of transformers' own code in a decoder and in a tower."""
