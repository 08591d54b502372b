"""Share the weights, gradients and moments of what is trained among the ranks."""
