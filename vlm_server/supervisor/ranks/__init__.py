"""The processes of a model that several machines compute together."""
