"""Verified files, and directories that are published in one step."""
