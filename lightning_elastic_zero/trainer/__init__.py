"""Lightning's trainer: the strategy, its data, its loops; the only user of Lightning."""
