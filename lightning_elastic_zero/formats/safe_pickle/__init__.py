"""Unpickling that builds plain data and named classes only, without running other code."""
