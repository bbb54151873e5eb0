"""Fragments: what their headers say, found by looking into the templates."""
