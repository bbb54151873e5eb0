"""The gradients of Q, K, V, of sinks and of biases."""
