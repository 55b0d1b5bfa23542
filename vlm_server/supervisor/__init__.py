"""Engine processes: which models have one; starts, watches, restarts and drains them."""
