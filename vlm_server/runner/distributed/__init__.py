"""One model on several processes: rank 0 schedules, and followers execute its plans."""
