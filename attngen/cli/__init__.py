"""The `attngen` command."""
