"""One model over several processes: rank 0 schedules, and the others do what its plans say."""
