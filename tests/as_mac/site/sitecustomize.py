"""Imported by every Python process that has this folder in PYTHONPATH: see `tests.as_mac.macos`."""

from tests.as_mac import macos

macos.install()
