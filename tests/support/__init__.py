"""What tests of several folders share: daemons, images, videos, the selection of a run."""
