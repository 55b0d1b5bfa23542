"""What each step does: the scheduler, and what it asks to decide."""
