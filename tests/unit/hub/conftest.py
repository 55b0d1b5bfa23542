from tests.hub.fixtures import hub

__all__ = ["hub"]
