"""PyTorch: `attngen.attention`, its operators and gradients."""
