"""How ranks share the weights, gradients and moments of what is trained."""
