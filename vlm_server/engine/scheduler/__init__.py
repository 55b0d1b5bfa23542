"""Decides what each step does: the scheduler, its planner, and the queues that they ask."""
