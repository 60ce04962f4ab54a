"""Full state dicts in one file: Lightning's, consolidated ones, plain ones."""
