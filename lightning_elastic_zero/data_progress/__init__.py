"""Progress in the data, counted in samples, independent of the device count."""
