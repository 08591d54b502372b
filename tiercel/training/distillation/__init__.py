"""A teacher of the policy: opened, asked by a server or held by every rank, and its term of the loss."""
