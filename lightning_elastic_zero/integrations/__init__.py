"""Entry points for other training frameworks."""
