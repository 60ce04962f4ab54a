"""This library's own format: a directory with a manifest (docs/format.md)."""
