"""Interfaces by which frameworks call attngen."""
