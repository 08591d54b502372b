"""The code that tiercel runs in place of transformers' own in a decoder and in a tower."""
